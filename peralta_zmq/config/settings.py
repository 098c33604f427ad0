"""All settings of a run together, and what they must be together."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pydantic import model_validator

from peralta_zmq.atomic_files import MAX_NAME
from peralta_zmq.config.environments import (
    CurriculumSection,
    DataSection,
    EnvSection,
    EvalSection,
    VerifierSection,
    check_curriculum,
    check_environments,
)
from peralta_zmq.config.names import refuse_strange_rows, refuse_strange_settings
from peralta_zmq.config.objective import AdvantageSection, FilterSection, LoraSection, LossSection
from peralta_zmq.config.section import PLAIN_NAME, Section
from peralta_zmq.config.sections import (
    MAX_BETA_BF16,
    TRACKERS,
    CheckpointSection,
    DashboardSection,
    EngineSection,
    GeneratorSection,
    LogSection,
    ModelSection,
    RunSection,
    SamplingSection,
    SecuritySection,
    TaskSection,
    TrainSection,
    WeightsSection,
    WireSection,
)
from peralta_zmq.errors import ConfigError


class Config(Section):
    """All settings of a run, the same for the trainer and every generator."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    data: DataSection = DataSection()
    env: tuple[EnvSection, ...] = ()
    curriculum: CurriculumSection = CurriculumSection()
    sampling: SamplingSection = SamplingSection()
    engine: EngineSection = EngineSection()
    generator: GeneratorSection = GeneratorSection()
    train: TrainSection = TrainSection()
    lora: LoraSection = LoraSection()
    loss: LossSection = LossSection()
    advantage: AdvantageSection = AdvantageSection()
    filter: FilterSection = FilterSection()
    eval: EvalSection = EvalSection()
    verifier: VerifierSection = VerifierSection()
    wire: WireSection = WireSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    security: SecuritySection = SecuritySection()
    log: LogSection = LogSection()
    dashboard: DashboardSection = DashboardSection()

    @property
    def run_folder(self) -> Path:
        """The folder of this run."""
        return Path(self.run.dir).expanduser() / self.run.name

    @property
    def weights_folder(self) -> Path:
        """The folder of published versions."""
        folder = self.weights.dir
        return Path(folder).expanduser() if folder else self.run_folder / "weights"

    @property
    def weights_address(self) -> str:
        """Where the published versions are: a folder, or http:// or s3:// and so on."""
        return self.weights.dir or str(self.run_folder / "weights")

    @property
    def keys_folder(self) -> Path | None:
        """The folder of keys; None = no keys."""
        return Path(self.security.keys).expanduser() if self.security.keys else None

    @property
    def environments(self) -> tuple[EnvSection, ...]:
        """What is trained on: [[env]], or the one that [task] and [data] describe."""
        return self.env or (EnvSection(task=self.task.name, **self.data.model_dump()),)

    @property
    def eval_environments(self) -> tuple[EnvSection, ...]:
        """What is evaluated."""
        return self.eval.env or self.environments

    @property
    def data_options(self) -> dict[str, str]:
        """What [data] says, as keywords for the task's `problems`; defaults left to the task."""
        return self.data.model_dump(exclude_none=True)

    @property
    def groups_per_step(self) -> int:
        """Groups in one optimizer step."""
        return self.train.batch_size // self.sampling.num_generations

    @model_validator(mode="before")
    @classmethod
    def _refuse_strange_settings(cls, settings: object) -> object:
        if isinstance(settings, Mapping):
            settings = cast("Mapping[str, object]", settings)
            known = known_fields()
            refuse_strange_rows(settings, known, leaves=list(EnvSection.model_fields))
            refuse_strange_settings(settings, known)
        return cast(object, settings)

    @model_validator(mode="after")
    def _check(self) -> Config:
        _check_names(self)
        _check_batch(self)
        _check_temperature(self.sampling)
        _check_reference(self)
        _check_ranges(self)
        _check_security(self)
        _check_environments(self)
        return self


def sections() -> dict[str, type[Section]]:
    """The model of every section by its name."""
    kinds = {name: field.annotation for name, field in Config.model_fields.items()}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def known_fields() -> dict[str, dict[str, object]]:
    """The type of every setting by section and leaf name."""
    return {
        name: {leaf: field.annotation for leaf, field in section.model_fields.items()}
        for name, section in sections().items()
    }


def _check_names(config: Config) -> None:
    for tracker in config.run.report_to:
        if tracker not in TRACKERS:
            raise ConfigError(
                f"run.report_to has {tracker!r}; choose from {', '.join(TRACKERS)}, or leave it out"
            )
    names = {"run.name": config.run.name, "generator.name": config.generator.name}
    for key, name in names.items():
        if name is not None and not PLAIN_NAME.fullmatch(name):
            raise ConfigError(f"{key} {name!r} is not a plain name; use letters, digits, . _ and -")
        if name is not None and len(name) > MAX_NAME:
            raise ConfigError(f"{key} has {len(name)} letters; use {MAX_NAME} at most")


def _check_batch(config: Config) -> None:
    batch_size, num_generations = config.train.batch_size, config.sampling.num_generations
    if batch_size % num_generations:
        below = max(1, batch_size // num_generations) * num_generations
        raise ConfigError(
            f"train.batch_size {batch_size} is not a multiple of sampling.num_generations "
            f"{num_generations}; use {below} or {below + num_generations}"
        )


def _check_temperature(sampling: SamplingSection) -> None:
    kind = sampling.temp_scheduler
    ends = {"temp_start": sampling.temp_start, "temp_end": sampling.temp_end}
    if kind is not None and sampling.temperature is not None:
        raise ConfigError(
            f"sampling.temperature {sampling.temperature} and sampling.temp_scheduler {kind} "
            "exclude each other; leave one of them out, or set it to None"
        )
    for name, end in ends.items():
        if kind is None and end is not None:
            raise ConfigError(
                f"sampling.{name} {end} needs a sampling.temp_scheduler; choose linear or cosine, "
                "or use sampling.temperature for a constant"
            )
        if kind is not None and end is None:
            raise ConfigError(
                f"sampling.temp_scheduler {kind} needs sampling.{name}; give it a temperature"
            )


def _check_reference(config: Config) -> None:
    alpha = config.train.ref_mixup_alpha
    if alpha != 1 and config.train.ref_sync_steps is None:
        raise ConfigError(f"train.ref_mixup_alpha {alpha} needs train.ref_sync_steps; give both")
    if alpha != 1 and config.lora.rank is not None:
        raise ConfigError(
            f"train.ref_mixup_alpha {alpha} and lora.rank {config.lora.rank} exclude each other: "
            "mixed adapters are not the adapters of mixed weights; leave one of them out"
        )


def _check_ranges(config: Config) -> None:
    train, generator = config.train, config.generator
    if config.eval.num_examples == 0 or config.eval.num_examples < -1:
        raise ConfigError(
            f"eval.num_examples {config.eval.num_examples} measures nothing; "
            "use -1 for all, or 1 or more"
        )
    if train.warmup_steps > train.max_steps:
        raise ConfigError(
            f"train.warmup_steps {train.warmup_steps} is more than train.max_steps "
            f"{train.max_steps}; use {train.max_steps} or less"
        )
    for name in ("adam_beta1", "adam_beta2"):
        if train.optim == "adamw_bf16" and (beta := getattr(train, name)) > MAX_BETA_BF16:
            raise ConfigError(
                f"train.{name} {beta} with train.optim adamw_bf16 makes steps that bfloat16 rounds "
                f"away; use {MAX_BETA_BF16} or less, or another train.optim"
            )
    if generator.index >= generator.count:
        raise ConfigError(
            f"generator.index {generator.index} is not below generator.count {generator.count}; "
            "indices start at 0, and the count is the same for all generators"
        )


def _check_environments(config: Config) -> None:
    if config.env and (config.task.name, config.data) != (TaskSection().name, DataSection()):
        raise ConfigError(
            "[[env]] and the settings of [task] or [data] exclude each other; "
            "move them into an [[env]]"
        )
    check_environments(config.environments, config.eval.env)
    check_curriculum(config.curriculum, num_environments=len(config.environments))


def _check_security(config: Config) -> None:
    bind, security = config.wire.bind, config.security
    if not (_is_loopback(bind) or security.keys or security.insecure):
        raise ConfigError(
            f"wire.bind {bind} lets other machines connect, and there are no keys; "
            "make them with bin/doctor keygen --security.keys DIR, "
            "or allow everyone with --security.insecure"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, an interface, *
        return False
