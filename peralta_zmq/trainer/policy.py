"""The trained model: loading, companion files of its versions, and exports of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peralta_zmq import atomic_files, build, models, registry
from peralta_zmq.config import Config
from peralta_zmq.environments.dataset import check_tokens
from peralta_zmq.learning.distributed import Ranks
from peralta_zmq.learning.learner import Learner
from peralta_zmq.models import lora
from peralta_zmq.rollout import Problem
from peralta_zmq.trainer.ranks import Leader
from peralta_zmq.weights import tensors as sets
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import WEIGHTS


@dataclass(frozen=True, slots=True)
class Policy:
    """The trained model and everything that was built from it."""

    base_folder: Path
    model: models.Model
    tokenizer: models.Tokenizer
    companions: dict[str, bytes]  # files published with every version: content by name
    manifest_fields: dict[str, str]  # additional fields of each version's manifest
    learner: Learner  # of this rank
    leader: Leader  # steps and restores the learners of all ranks
    engine: registry.Engine  # of the trainer's own evaluations
    worker_info: Mapping[str, str]

    @property
    def vocab_size(self) -> int:
        """Token ids below this are valid."""
        return int(self.model.config.vocab_size)


def open_policy(config: Config, problems: Sequence[Problem], ranks: Ranks) -> Policy:
    """Load the model, check that its tokenizer fits the problems, build learner and engine.

    Raises ConfigError or TaskError.
    """
    folder = models.model_folder(config.model.name)
    tokenizer = models.load_tokenizer(folder)
    model = build.load_policy(config, folder)
    companions, manifest_fields = companion_files(config, folder, model)
    check_tokens(problems, len(tokenizer))
    dtype, _ = models.training_dtype(model, config.train.dtype)
    learner = build.make_learner(config, model, ranks)
    engine = registry.resolve("engine", config.engine.name).open_live(
        model, tokenizer, slots=config.engine.slots, max_model_len=config.engine.max_model_len
    )
    return Policy(
        base_folder=folder,
        model=model,
        tokenizer=tokenizer,
        companions=companions,
        manifest_fields=manifest_fields,
        learner=learner,
        leader=Leader(learner, ranks, model),
        engine=engine,
        worker_info=models.worker_info(model.device, dtype),
    )


def companion_files(
    config: Config, folder: Path, model: models.Model
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Files (content by name) and manifest fields to publish with every version.

    A whole model has its config and tokenizer; adapters have their config and the base's digest.
    """
    if not lora.has_adapters(model):
        return models.companion_files(folder), {}
    name = config.model.name
    content = lora.config_file(model, base=str(folder) if name == "embedded" else name)
    return {lora.CONFIG_FILE: content}, {
        "adapts": lora.weights_digest(folder),
        "adapts_name": name,
    }


def final_weights(config: Config, policy: Policy, store: WeightStore) -> Path:
    """A folder with the last weights that transformers can load; adapters are exported to one."""
    if lora.has_adapters(policy.model):
        return export_adapter(config, config.run_folder, policy.base_folder, policy.model)
    newest = store.newest()
    return newest.folder if newest else store.folder


def export_adapter(config: Config, folder: Path, model_folder: Path, model: models.Model) -> Path:
    """Write `adapter` for peft and `merged` for transformers; return the folder of the latter.

    Replaces the files of an earlier export. Raises OSError.
    """
    dtype = models.DTYPES[config.weights.dtype]
    adapter = sets.copy_set(lora.published_weights(model), dtype)
    companions, manifest_fields = companion_files(config, model_folder, model)
    files = {lora.WEIGHTS_FILE: sets.file_of(adapter, {}), **companions}
    atomic_files.remove_folder(folder / "adapter")
    atomic_files.write_folder(folder / "adapter", files, manifest_fields)
    return write_merged(
        folder / "merged", lora.base_weights(model), adapter, model_folder=model_folder, dtype=dtype
    )


def write_merged(
    target: Path,
    base: Mapping[str, torch.Tensor],
    adapter: Mapping[str, torch.Tensor],
    *,
    model_folder: Path,
    dtype: torch.dtype,
) -> Path:
    """Write a folder for `from_pretrained` with the adapter merged into the base; return it.

    Copies config and tokenizer from `model_folder`. Raises OSError.
    """
    merged = sets.copy_set(lora.MergedWeights(base, adapter), dtype)
    files = {WEIGHTS: sets.file_of(merged, {}), **models.companion_files(model_folder)}
    atomic_files.remove_folder(target)
    atomic_files.write_folder(target, files, {})
    return target
