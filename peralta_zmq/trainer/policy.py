"""The policy of the trainer: model, tokenizer, learner and the engine of its own evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peralta_zmq import build, models, registry
from peralta_zmq.config import Config
from peralta_zmq.environments.dataset import check_tokens
from peralta_zmq.learning.learner import Learner
from peralta_zmq.models import lora
from peralta_zmq.rollout import Problem
from peralta_zmq.trainer import adapter_files
from peralta_zmq.trainer.adapter_files import CompanionFiles
from peralta_zmq.trainer.ranks import Leader, TrainerRanks, leader
from peralta_zmq.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class Policy:
    """The trained model and everything that was built from it."""

    base_folder: Path
    model: models.Model
    tokenizer: models.Tokenizer
    companions: CompanionFiles
    learner: Learner | Leader
    engine: registry.Engine
    worker_info: Mapping[str, str]

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""
        return int(self.model.config.vocab_size)


def open_policy(config: Config, problems: Sequence[Problem], ranks: TrainerRanks) -> Policy:
    """Load the model, check that its tokenizer fits the problems, build learner and engine.

    Raises ConfigError or TaskError.
    """
    folder = models.model_folder(config.model.name)
    tokenizer = models.load_tokenizer(folder)
    model = build.load_policy(config, folder)
    companions = adapter_files.companion_files(config, folder, model)
    check_tokens(problems, len(tokenizer))
    dtype, _ = models.training_dtype(model, config.train.dtype)
    return Policy(
        base_folder=folder,
        model=model,
        tokenizer=tokenizer,
        companions=companions,
        learner=leader(build.make_learner(config, model, ranks), ranks, model),
        engine=registry.resolve("engine", config.engine.name).open_live(
            model, tokenizer,
            slots=config.engine.slots, max_model_len=config.engine.max_model_len,
        ),
        worker_info=models.worker_info(model.device, dtype),
    )  # fmt: skip


def final_weights(config: Config, policy: Policy, store: WeightStore) -> Path:
    """A folder with the last weights that transformers can load; adapters are exported to one."""
    if lora.has_adapters(policy.model):
        return adapter_files.export_adapter(
            config, config.run_folder, policy.base_folder, policy.model
        )
    newest = store.newest()
    return newest.folder if newest else store.folder
