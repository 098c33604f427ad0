"""`Config`: all settings of a run, and checks across several settings.

A field of `Config` is a section: the table [section] of a TOML file. The checks raise ConfigError
for the first contradiction between several settings.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import model_validator

from peralta_zmq.addresses import host_and_port, is_loopback
from peralta_zmq.config import objective_sections as objective
from peralta_zmq.config import sections
from peralta_zmq.config import training_sections as training
from peralta_zmq.config.foreign_names import with_present_names
from peralta_zmq.config.sections import Section
from peralta_zmq.errors import ConfigError, program_name

# Section, setting, and the setting without which it has no effect.
NEEDED_SETTINGS = (
    ("run", "from_step", "fork"),
    ("run", "fork_optimizer", "fork"),
    ("loss", "sft_weight", "sft_file"),
    ("loss", "importance_sampling_clip_max", "importance_sampling_mode"),
    ("generator", "token_file", "serve_port"),
    ("lora", "base_dtype", "rank"),
)


class Config(Section):
    """All settings of a run; the same file configures the trainer and every generator."""

    run: sections.RunSection = sections.RunSection()
    model: sections.ModelSection = sections.ModelSection()
    task: training.TaskSection = training.TaskSection()
    data: training.DataSection = training.DataSection()
    env: tuple[training.EnvSection, ...] = ()
    curriculum: training.CurriculumSection = training.CurriculumSection()
    sampling: training.SamplingSection = training.SamplingSection()
    engine: sections.EngineSection = sections.EngineSection()
    generator: sections.GeneratorSection = sections.GeneratorSection()
    train: training.TrainSection = training.TrainSection()
    early_stop: training.EarlyStopSection = training.EarlyStopSection()
    lora: training.LoraSection = training.LoraSection()
    loss: objective.LossSection = objective.LossSection()
    advantage: objective.AdvantageSection = objective.AdvantageSection()
    filter: objective.FilterSection = objective.FilterSection()
    eval: training.EvalSection = training.EvalSection()
    verifier: sections.VerifierSection = sections.VerifierSection()
    wire: sections.WireSection = sections.WireSection()
    weights: sections.WeightsSection = sections.WeightsSection()
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    security: sections.SecuritySection = sections.SecuritySection()
    log: sections.LogSection = sections.LogSection()
    dashboard: sections.DashboardSection = sections.DashboardSection()

    @property
    def run_folder(self) -> Path:
        """run.dir/run.name, with checkpoints, journal, metrics and logs."""
        return Path(self.run.dir).expanduser() / self.run.name

    @property
    def weights_address(self) -> str:
        """Address of the weight store: a folder or a URL (http:// or s3://)."""
        return self.weights.dir or str(self.run_folder / "weights")

    @property
    def weights_folder(self) -> Path:
        """Folder of the weight store; valid only if `weights_address` is not a URL."""
        return Path(self.weights_address).expanduser()

    @property
    def address_folder(self) -> Path | None:
        """Shared folder with the trainer's address; None = wire.host and wire.port."""
        return Path(self.wire.address_dir).expanduser() if self.wire.address_dir else None

    @property
    def keys_folder(self) -> Path | None:
        """Folder of the CURVE keys (ZeroMQ authentication); None = no keys."""
        return Path(self.security.keys).expanduser() if self.security.keys else None

    @property
    def environments(self) -> tuple[training.EnvSection, ...]:
        """Training environments: [[env]], or the single one of [task] and [data]."""
        single = training.EnvSection(task=self.task.name, **self.data.model_dump())
        return tuple(env.with_rewards_of(self.task) for env in self.env or (single,))

    @property
    def eval_environments(self) -> tuple[training.EnvSection, ...]:
        """Evaluation environments: [[eval.env]], or those of the training."""
        evaluated = tuple(env.with_rewards_of(self.task) for env in self.eval.env)
        return evaluated or self.environments

    def sampling_of(self, env: training.EnvSection) -> training.SamplingSection:
        """The settings of [sampling] for an environment."""
        own = env.sampling.model_dump(exclude_none=True) if env.sampling else {}
        if env.sampling and "max_completion_length" in env.sampling.model_fields_set:
            own["max_completion_length"] = env.sampling.max_completion_length  # None = no limit
        return self.sampling.model_copy(update=own)

    def rollouts_per_example_of(self, env: training.EnvSection) -> int:
        """Number of completions per problem in evaluations of an environment."""
        return env.rollouts_per_example or self.eval.rollouts_per_example

    @property
    def max_completion_length(self) -> int:
        """Maximum number of sampled tokens of a completion for training, of all environments."""
        return max(map(self.max_completion_length_of, self.environments))

    def max_completion_length_of(self, env: training.EnvSection) -> int:
        """Maximum number of sampled tokens of a completion for training in an environment."""
        return self.sampling_of(env).max_completion_length or self.engine.max_model_len

    @property
    def group_sizes(self) -> dict[str, int]:
        """Number of completions per problem in training, by label of the environment."""
        return {env.label: self.sampling_of(env).num_generations for env in self.environments}

    @property
    def groups_per_step(self) -> int:
        """Estimated number of groups per training step; for equal numbers of problems in the
        environments, unless curriculum.env_ratios is set.
        """
        sizes = self.group_sizes.values()
        ratios = self.curriculum.env_ratios or [1.0] * len(sizes)
        weighted = math.fsum(size * ratio for size, ratio in zip(sizes, ratios, strict=True))
        return max(1, round(self.train.batch_size * math.fsum(ratios) / weighted))

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, settings: Any) -> Any:
        return with_present_names(settings) if isinstance(settings, dict) else settings

    @model_validator(mode="after")
    def _check_contradictions(self) -> Config:
        _check_batch(self)
        _check_unused(self)
        _check_ranges(self)
        _check_interval(self)
        _check_security(self)
        _check_environments(self)
        _check_curriculum(self)
        return self


def section_models() -> dict[str, type[Section]]:
    """Section name -> pydantic model, without the array of tables [[env]]."""
    kinds = {name: field.annotation for name, field in Config.model_fields.items()}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def known_fields() -> dict[str, dict[str, object]]:
    """Section name -> leaf name -> type of the setting."""
    return {
        name: {leaf: field.annotation for leaf, field in section.model_fields.items()}
        for name, section in section_models().items()
    }


def check_memory_fractions(
    config: Config, *, has_trainer: bool, num_generators: int, machine: str
) -> None:
    """Check that processes of one device are not given more than all of its memory."""
    trainer = (config.train.memory_fraction or 0.0) * has_trainer
    generators = (config.engine.gpu_memory_utilization or 0.0) * num_generators
    if (total := trainer + generators) > 1 + 1e-9:
        shares = [f"train.memory_fraction {trainer:g}"] * (trainer > 0)
        shares += [
            f"engine.gpu_memory_utilization {config.engine.gpu_memory_utilization:g} for each of "
            f"{num_generators} generators"
        ] * (generators > 0)
        raise ConfigError(
            f"{' and '.join(shares)} are {total:g} of the memory of {machine}; lower them to 1 "
            "together, or start fewer generators"
        )


def _check_batch(config: Config) -> None:
    batch_size = config.train.batch_size
    sizes = {*config.group_sizes.values()}
    num_generations = max(sizes)
    if len(sizes) == 1 and batch_size % num_generations:
        is_common = num_generations == config.sampling.num_generations
        section = "sampling" if is_common else "env.sampling"
        below = max(1, batch_size // num_generations) * num_generations
        raise ConfigError(
            f"train.batch_size {batch_size} is not a multiple of {section}.num_generations "
            f"{num_generations}; use {below} or {below + num_generations}"
        )


def _check_unused(config: Config) -> None:
    for name, leaf, needed in NEEDED_SETTINGS:
        section: Section = getattr(config, name)
        is_default = getattr(section, leaf) == type(section).model_fields[leaf].default
        if getattr(section, needed) is None and not is_default:
            raise ConfigError(
                f"{name}.{leaf} has no effect without {name}.{needed}; set it or remove "
                f"{name}.{leaf}"
            )


def _check_ranges(config: Config) -> None:
    train = config.train
    if config.eval.num_examples == 0 or config.eval.num_examples < -1:
        raise ConfigError(
            f"eval.num_examples {config.eval.num_examples} evaluates no problem; "
            "use -1 for all, or 1 or more"
        )
    if train.warmup_steps > train.max_steps:
        raise ConfigError(
            f"train.warmup_steps {train.warmup_steps} is more than train.max_steps "
            f"{train.max_steps}; use {train.max_steps} or less"
        )


def _check_interval(config: Config) -> None:
    interval = config.weights.interval
    train = config.train
    if interval == 1:
        return
    if train.max_async_level == 0:
        raise ConfigError(
            f"weights.interval {interval} needs older weights in the steps between two versions, "
            "but train.max_async_level is 0; use weights.interval 1, or train.max_async_level 1 "
            "or more"
        )
    longest = (train.max_async_level + 1) * interval - 1
    if longest > train.max_off_policy_steps:
        raise ConfigError(
            f"weights.interval {interval} with train.max_async_level {train.max_async_level} makes "
            f"groups up to {longest} steps old, and train.max_off_policy_steps "
            f"{train.max_off_policy_steps} would drop them; set it to {longest} or more, or lower "
            "weights.interval"
        )


def _check_security(config: Config) -> None:
    bind = config.wire.bind
    security = config.security
    if not (is_loopback(bind) or security.keys or security.insecure):
        raise ConfigError(
            f"wire.bind {bind} accepts connections from other machines, and there are no keys; "
            f"make them with {program_name('doctor')} keygen --security.keys DIR, "
            "or allow unauthenticated connections with --security.insecure"
        )


def _check_environments(config: Config) -> None:
    if config.env and (config.task.name is not None or config.data != training.DataSection()):
        raise ConfigError(
            "[[env]] and the settings of [task] or [data] exclude each other; "
            "move the settings into an [[env]]"
        )
    _check_args("data", config.data)
    _check_rewards("task", config.task)
    for option, environments in (("env", config.env), ("eval.env", config.eval.env)):
        for label, count in Counter(env.label for env in environments).items():
            if count > 1:
                raise ConfigError(
                    f"{option}.name '{label}' is used by {count} environments; "
                    "give each of them its own name"
                )
        for env in environments:
            for address in env.address or ():
                host_and_port(address, option=f"{option}.address")
            _check_args(option, env)
            _check_rewards(option, env)
    if any(env.sampling is not None for env in config.eval.env):
        raise ConfigError(
            "eval.env.sampling has no effect in evaluations; set eval.env.eval_sampling instead"
        )
    for name in ("rollouts_per_example", "eval_sampling") if config.eval.env else ():
        if any(getattr(env, name) is not None for env in config.env):
            raise ConfigError(
                f"env.{name} has no effect with [[eval.env]]; set eval.env.{name} instead"
            )


def _check_args(option: str, settings: training.DataSection) -> None:
    """Check that `args` has no data setting; `option` is data, env or eval.env."""
    for name in settings.args:
        if name in training.DataSection.model_fields:
            raise ConfigError(
                f"{option}.args.{name} is a setting of its own; set {option}.{name} instead"
            )


def _check_rewards(option: str, settings: training.RewardSettings) -> None:
    """Check that weights fit the reward functions; `option` is task, env or eval.env."""
    weights = settings.reward_weights
    if weights is not None and len(weights) != len(settings.reward):
        raise ConfigError(
            f"{option}.reward_weights has {len(weights)} numbers for {len(settings.reward)} "
            f"functions in {option}.reward ({', '.join(settings.reward) or 'none'}); "
            "give one for each"
        )


def _check_curriculum(config: Config) -> None:
    curriculum = config.curriculum
    if (ratios := curriculum.env_ratios) is not None:
        num_environments = len(config.environments)
        are_valid = len(ratios) == num_environments and min(ratios) >= 0
        if not (are_valid and 0 < math.fsum(ratios) < math.inf):
            raise ConfigError(
                f"curriculum.env_ratios {', '.join(f'{ratio:g}' for ratio in ratios)} must be "
                f"{num_environments} numbers, one for each [[env]], of 0 or more and not all 0"
            )
    easy = curriculum.easy_threshold
    hard = curriculum.hard_threshold
    if easy is not None and hard is not None and hard >= easy:
        raise ConfigError(
            f"curriculum.hard_threshold {hard} is not below curriculum.easy_threshold {easy}; "
            "only problems between the two are sampled"
        )
