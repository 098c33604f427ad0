"""The knobs: one model per TOML section, every field with its default, bounds and meaning.

Leaf names are TRL's where TRL has one. Knows what combinations make sense; reads no file.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

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
from peralta_zmq.config.objective import (
    AdvantageSection,
    FilterSection,
    LoraSection,
    LossSection,
    Table,
)
from peralta_zmq.config.section import PLAIN_NAME, Decay, Fraction, Names, Port, Section, Text
from peralta_zmq.errors import ConfigError

TRACKERS = ("tensorboard", "trackio", "wandb")


class RunSection(Section):
    """Which run this is."""

    name: Text = "demo"
    """name of the run and of its folder"""
    dir: Text = "runs"
    """folder that holds the folders of runs"""
    seed: NonNegativeInt = 0
    """source of all randomness of the run"""
    num_local_generators: PositiveInt = 2
    """generators that `bin/lan local` starts beside the trainer on this machine"""
    report_to: Names = ()
    """where the trainer sends its metrics besides the run's folder: tensorboard, trackio, wandb"""


class ModelSection(Section):
    """The language model."""

    name: Text = "embedded"
    """a Hugging Face folder, a name in the local hub cache, or 'embedded'"""
    device: Text = "auto"
    """cpu, cuda, cuda:1, mps, or auto = the accelerator of this machine if it has one"""
    teacher: Text | None = None
    """model of the same vocabulary to which loss.teacher_tau pulls; None = the base itself"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """number format in which generators compute; the trainer's master weights are float32"""


class TaskSection(Section):
    """What is to be learned."""

    name: Text = "calculator"
    """a shipped task, or the dotted name of a module of your own"""
    reward: Text | None = None
    """a dotted name of your own (module:function) in the place of the task's reward"""
    reward_kwargs: Table = Field(default={})
    """options of the reward, as a TOML table or as JSON"""
    reward_timeout: PositiveFloat = 10.0
    """seconds that the reward of one answer may take; then its group is given up"""


class SamplingSection(Section):
    """How completions are drawn."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """completions per problem, compared with each other (a group)"""
    temperature: PositiveFloat | None = None
    """divides the logits before the softmax; None = 1, or what temp_scheduler says"""
    temp_scheduler: Literal["linear", "cosine"] | None = None
    """course of the temperature over train.max_steps; None = constant"""
    temp_start: PositiveFloat | None = None
    """temp_scheduler: temperature of the first weights"""
    temp_end: PositiveFloat | None = None
    """temp_scheduler: temperature of the weights that the last step learns from"""
    top_p: Fraction = 1.0
    """keep the most likely tokens up to this probability mass; 1 = off"""
    top_k: NonNegativeInt = 0
    """keep this many most likely tokens; 0 = off"""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """keep tokens at least this probable in proportion to the most likely one; 0 = off"""
    repetition_penalty: PositiveFloat = 1.0
    """above 1, tokens that prompt or completion already has become less likely; 1 = off"""
    min_tokens: NonNegativeInt = 0
    """generated tokens before a completion may end"""
    max_completion_length: PositiveInt = 48
    """generated tokens at most, the end token included"""
    stop: Text | None = None
    """a completion ends when its text has this string, which is then cut off"""


class EngineSection(Section):
    """The machinery that samples."""

    name: Text = "native"
    """a shipped engine, or a dotted name of your own (module:attribute)"""
    slots: PositiveInt = 32
    """completions sampled together; a finished one makes room for the next"""
    max_model_len: PositiveInt = 512
    """tokens of prompt and completion that a slot holds; memory grows with slots times this"""


class GeneratorSection(Section):
    """This one generator."""

    name: Text | None = None
    """name in metrics and logs; None = hostname-index"""
    index: NonNegativeInt = 0
    """which share of the problems this generator walks, from 0 to count - 1"""
    count: PositiveInt = 1
    """shares into which the problems are split, one per generator"""
    num_workers: PositiveInt = 1
    """processes that share the cores of the generator's machine"""


class TrainSection(Section):
    """The optimizer and its pace."""

    batch_size: PositiveInt = 128
    """rollouts per optimizer step, a multiple of sampling.num_generations"""
    token_batch_size: PositiveInt | None = None
    """tokens per optimizer step, of prompts and completions, in the place of batch_size"""
    max_steps: PositiveInt = 80
    """optimizer steps of the whole run"""
    learning_rate: PositiveFloat = 2e-4
    """peak step size of AdamW"""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """course of the learning rate after the warm-up"""
    warmup_steps: NonNegativeInt = 0
    """steps in which the learning rate rises from 0 to its peak"""
    adam_beta1: Decay = 0.9
    """memory of AdamW's mean of gradients"""
    adam_beta2: Decay = 0.95
    """memory of AdamW's mean of squared gradients"""
    weight_decay: NonNegativeFloat = 0.0
    """pull of the weights towards 0, decoupled from the gradient"""
    max_grad_norm: PositiveFloat = 1.0
    """longer gradients are scaled down to this norm"""
    max_tokens_per_microbatch: PositiveInt = 16384
    """tokens in one forward and backward pass; less memory, same gradient"""
    oversize: Literal["truncate", "drop"] = "truncate"
    """rollouts longer than max_tokens_per_microbatch: train their beginning, or not at all"""
    keep_zero_std: bool = False
    """learn also from groups whose rewards are all equal: their advantages are 0, but a
    reference, a teacher or an entropy bonus pulls there too"""
    num_iterations: PositiveInt = 1
    """updates of the optimizer in one step, each on its share of the groups (mini-batches)"""
    ref_sync_steps: PositiveInt | None = None
    """steps between two refreshes of the reference from the policy; None = it stays the base"""
    ref_mixup_alpha: Fraction = 1.0
    """share of the policy in a refreshed reference; the rest is the reference before"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """number format of the matrix products; weights, gradients and optimizer stay float32"""
    gradient_checkpointing: bool = False
    """compute each layer again in the backward pass; less memory, a third more time"""
    max_async_level: NonNegativeInt = 1
    """steps' worth of groups that generators run ahead of the newest weights; 0 = on-policy"""
    max_off_policy_steps: NonNegativeInt = 8
    """groups sampled by weights older than this many steps are dropped"""
    max_mismatch_kl: PositiveFloat = 0.1
    """a generator whose logprobs are farther than this from the trainer's is reported"""
    on_mismatch: Literal["report", "set_aside"] = "report"
    """what becomes of the groups of such a generator: trained all the same, or set aside"""
    num_workers: PositiveInt = 1
    """processes that share the cores of the trainer's machine"""


class WireSection(Section):
    """Where trainer and generators meet."""

    host: Text = "127.0.0.1"
    """machine of the trainer, as generators reach it"""
    port: Port = 5555
    """port for rollouts; announcements, counters and hellos use the three after it"""
    bind: Text = "127.0.0.1"
    """address on which the trainer listens; 0.0.0.0 = every network of its machine"""
    hwm: PositiveInt = 1
    """groups that one generator's queue holds before it waits"""


class WeightsSection(Section):
    """Where the trainer publishes and generators look."""

    dir: Text | None = None
    """folder that all machines see, s3://BUCKET/PREFIX, or for generators http://TRAINER:PORT;
    None = weights in the run's folder"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """number format of published weights; only bfloat16 makes small deltas"""
    keyframe_interval: PositiveInt = 10
    """every so many versions one is whole, the others are deltas; 1 = all whole"""
    keep_last: PositiveInt = 3
    """newest versions to keep, with what they are made from"""
    keep_interval: PositiveInt | None = None
    """keep every so many versions for good; None = none"""
    keep_seconds: NonNegativeFloat = 10.0
    """older versions stay so long for slow readers; 600 suits a NAS"""
    poll_seconds: PositiveFloat = 2.0
    """seconds between two looks at the folder when nothing was announced"""
    wait_for_weights_timeout: PositiveFloat | None = None
    """seconds after which a generator gives up waiting for its first weights; None = never"""
    update: Literal["in_flight", "between_groups"] = "in_flight"
    """apply a new version between two tokens, or when no group is under way"""
    max_mbit_per_s: PositiveFloat | None = None
    """share of a slow link that publishing may take; None = all"""
    serve_port: Port | None = None
    """port on which the trainer serves its weights folder over HTTP; None = not served"""
    token_file: Text | None = None
    """file of mode 0600 with the password for serve_port, the same on every machine"""


class CheckpointSection(Section):
    """What a restarted trainer continues from."""

    interval: PositiveInt = 20
    """optimizer steps between two checkpoints"""
    keep_last: PositiveInt | None = 2
    """newest checkpoints to keep; None here and in keep_interval = all"""
    keep_interval: PositiveInt | None = None
    """keep besides every checkpoint whose step is a multiple of this"""
    keep_journal: bool = False
    """keep the journal of steps older than every checkpoint, for bin/replay of the whole run"""
    resume_step: Annotated[int, Field(ge=-1)] = -1
    """roll back, once, to the checkpoint of this step; -1 = go on from the newest"""


class SecuritySection(Section):
    """Who may connect to the trainer."""

    keys: Text | None = None
    """folder of keys, made with bin/doctor keygen; None = everyone, without encryption"""
    insecure: bool = False
    """listen beyond this machine without keys"""


class DashboardSection(Section):
    """The page that the trainer shows."""

    enabled: bool = True
    """whether there is one while the trainer runs"""
    host: Text = "127.0.0.1"
    """address on which it listens; any other than this machine's own needs a token_file"""
    port: Port = 8470
    """port of the page; a taken one gives way to the next"""
    token_file: Text | None = None
    """file of mode 0600 with the password of the page; None = none"""


class LogSection(Section):
    """Messages."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """the least important messages to show"""


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
