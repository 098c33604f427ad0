"""Engine and sampling of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from peralta_zmq import models, registry
from peralta_zmq.config import Config
from peralta_zmq.config.training_sections import EnvSection
from peralta_zmq.engines import choice
from peralta_zmq.engines.engine_models import loading_errors
from peralta_zmq.environments.turns import turns_of
from peralta_zmq.errors import ConfigError
from peralta_zmq.models import frozen_base, lora
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import GroupSampling, Problem, Sampling
from peralta_zmq.weights.store import Version
from peralta_zmq.weights.subscriber import PendingWeights

logger = logging.getLogger(__name__)


def make_engine(
    config: Config, weights: PendingWeights
) -> tuple[registry.Engine, models.Tokenizer]:
    """The engine of [engine] with the weights of a version, and the tokenizer.

    Raises ConfigError for adapters of another model and for untrusted code; StoreError if the files
    of the model cannot be loaded.
    """
    version = weights.version
    update = weight_update(weights)
    folder = base_folder(config, version) if update.is_adapter else weights.folder
    trust = {"trust_remote_code": config.model.trust_remote_code}
    models.check_code(folder, **trust)
    with loading_errors(folder):
        tokenizer = models.load_tokenizer(folder, **trust)
    identity = models.tokenizer_identity(folder, tokenizer)
    if changes := models.tokenizer_changes(version.field("tokenizer"), identity):
        remedy = (
            "copy all files of the trainer's model.name to this machine" if update.is_adapter
            else "install the trainer's versions of transformers and tokenizers on this machine"
        )  # fmt: skip
        raise ConfigError(
            f"generator {config.generator.full_name} has another tokenizer in {folder} than the "
            f"trainer ({changes}); {remedy}"
        )
    engine = open_engine(config, folder, step=version.step)
    if update.is_adapter:
        try:
            engine.apply(update)
        except ValueError as error:
            raise ConfigError(f"version {version.number} cannot be used: {error}") from None
    return engine, tokenizer


def open_engine(config: Config, folder: Path, *, step: int = 0) -> registry.Engine:
    """The engine of [engine] with the model in `folder`, whose weights are those of `step`."""
    name, reason = engine_name(config, folder)
    device = models.choose_device(config.model.device)
    dtype = str(models.choose_dtype(device, config.model.dtype)[0]).removeprefix("torch.")
    logger.info("engine=%s device=%s dtype=%s (%s)", name, device, dtype, reason)
    factory = registry.resolve("engine", name)
    return factory.open(folder, settings_with_turns(config), step=step)


def make_live_engine(
    config: Config, model: models.Model, tokenizer: models.Tokenizer
) -> registry.Engine:
    """The engine for evaluations of the trainer's model, without a copy of its weights."""
    factory = choice.live_engine(config.engine.name)
    settings = settings_with_turns(config)
    settings = replace(settings, gpu_memory_utilization=config.train.memory_fraction)
    models.release_memory()  # memory of the last step would count as used
    return factory.open_live(model, tokenizer, settings)


def engine_name(config: Config, folder: Path | None = None) -> tuple[str, str]:
    """The engine of this machine for the model in `folder`, if that is known, and the reason."""
    return choice.choose_engine(
        config.engine.name,
        engine_settings(config),
        samplings=all_samplings(config),
        folder=folder,
        merges_adapters=config.lora.rank is not None,
    )


def engine_settings(config: Config) -> EngineSettings:
    model = config.model.model_dump(include={"device", "dtype", "trust_remote_code"})
    return EngineSettings(**model, **config.engine.model_dump(exclude={"name"}))


def settings_with_turns(config: Config) -> EngineSettings:
    """The settings of the engine of a run, whose tasks may have turns."""
    environments = (*config.environments, *config.eval_environments)
    keeps_turns = config.task.max_turns > 1 and any(map(_may_have_turns, environments))
    return replace(engine_settings(config), keeps_turns=keeps_turns)


def _may_have_turns(env: EnvSection) -> bool:
    """Whether a task may have several turns; a verifier and a taskset report it after loading."""
    adapter = env.task_name.partition(":")[0]
    if env.address is not None or adapter in registry.ADAPTERS:
        return adapter != "reasoning_gym"
    return turns_of(registry.resolve("task", env.task_name)) is not None


def weight_update(weights: PendingWeights) -> WeightUpdate:
    version = weights.version
    return WeightUpdate(
        version.step,
        weights.tensors,
        weights.folder,
        is_adapter=version.field("adapts") is not None,  # digest of the adapters' base weights
        base_dtype=base_dtype(version),
        base_digest=version.field("adapts_packed"),
    )


def base_dtype(version: Version) -> str:
    """Format in which the trainer stores the base model of a version's adapters."""
    return version.field("adapts_dtype") or "float32"


def base_folder(config: Config, version: Version) -> Path:
    """The folder of `model.name`, the base model of a version that has only adapters.

    Raises ConfigError if the version is for other base weights, or for an unknown format.
    """
    frozen_base.check_base_dtype(base_dtype(version))
    folder = models.model_folder(config.model.name)
    if lora.weights_digest(folder) != version.field("adapts"):
        raise ConfigError(
            f"version {version.number} is an adapter for {version.field('adapts_name')} "
            f"({version.field('adapts')}), but model.name {config.model.name} is another model; "
            "set model.name to the trainer's model, with identical files"
        )
    return folder


def make_sampling(config: Config, env: EnvSection | None = None, *, seed: int) -> Sampling:
    """The sampling parameters of training: of [sampling], or of an environment."""
    section = config.sampling if env is None else config.sampling_of(env)
    return Sampling(
        **section.model_dump(exclude={"num_generations", "stop", "max_completion_length"}),
        max_completion_length=section.max_completion_length or config.engine.max_model_len,
        fills_context=section.max_completion_length is None,
        stop=section.stop or (),
        seed=seed,
    )


def make_eval_sampling(config: Config, env: EnvSection | None = None, *, seed: int) -> Sampling:
    """The sampling parameters of an evaluation: of [sampling], or of an environment.

    `eval.sampling` and then `env.eval_sampling` replace these values. Unless they set a
    temperature, the only completion of a problem is sampled greedily.
    """
    sampling = make_sampling(config, env, seed=seed)
    num_completions = (
        config.rollouts_per_example_of(env) if env else config.eval.rollouts_per_example
    )
    own: dict[str, Any] = {"temperature": 0.0} if num_completions == 1 else {}
    for section in (config.eval.sampling, env.eval_sampling if env else None):
        own |= section.model_dump(exclude_none=True) if section else {}
    if "max_completion_length" in own:
        own["fills_context"] = False
    if own.get("temperature") == 0.0:
        sampling = Sampling(
            max_completion_length=sampling.max_completion_length,
            fills_context=sampling.fills_context,
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
        )
    return replace(sampling, **own)


def all_samplings(config: Config) -> list[Sampling]:
    """The sampling parameters of all environments, of training and evaluation."""
    return [make_sampling(config, env, seed=0) for env in config.environments] + [
        make_eval_sampling(config, env, seed=0) for env in config.eval_environments
    ]


def group_sampling(config: Config, *, seed: int) -> Callable[[Problem], GroupSampling]:
    default = GroupSampling(config.sampling.num_generations, make_sampling(config, seed=seed))
    own = {
        env.label: GroupSampling(
            config.sampling_of(env).num_generations, make_sampling(config, env, seed=seed)
        )
        for env in config.environments
        if env.sampling
    }
    return lambda problem: own.get(problem.task, default)


def eval_group_sampling(config: Config, *, seed: int) -> Callable[[Problem], GroupSampling]:
    default = GroupSampling(config.eval.rollouts_per_example, make_eval_sampling(config, seed=seed))
    own = {
        env.label: GroupSampling(
            config.rollouts_per_example_of(env), make_eval_sampling(config, env, seed=seed)
        )
        for env in config.eval_environments
        if env.sampling or env.rollouts_per_example or env.eval_sampling
    }
    return lambda problem: own.get(problem.task, default)
