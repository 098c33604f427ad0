"""Settings of machines and processes: one pydantic model per TOML section.

`--help` and docs/config.md are generated from the fields. A setting that TRL also has uses the name
in TRL. `training_sections` and `objective_sections` have the other sections.
"""

from __future__ import annotations

import os
import re
import socket
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from pydantic.fields import FieldInfo
from pydantic_config import BaseConfig  # pyright: ignore[reportMissingTypeStubs]

from peralta_zmq.addresses import host_of
from peralta_zmq.atomic_files import MAX_NAME, PLAIN_NAME

# nas:/share, smb://nas, //nas/share, \\nas\share, and $NAME anywhere.
NO_FOLDER = re.compile(r"[^/]*:|//[^/]|\\\\|.*\$[{(A-Za-z_]", re.DOTALL)


def _split_commas(value: object) -> object:
    """Split `1,2` from the command line into ['1', '2']; keep a list from TOML."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",")] if value.strip() else []


def _parse_digits(value: object) -> object:
    """Turn `4` from the command line into a number, for a choice of numbers."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _one_or_list(value: object) -> object:
    """A single string as a list, without splitting it."""
    return [value] if isinstance(value, str) else value


def _check_plain_name(name: str) -> str:
    """Reject a name that is not a valid file name on every system."""
    if not PLAIN_NAME.fullmatch(name):
        raise ValueError("should be a plain name; use letters, digits, . _ and -")
    return name


def check_folder(text: str) -> str:
    """Reject a share of a NAS, and what only a shell expands: a new folder would get that name."""
    if NO_FOLDER.match(text) or os.path.expanduser(text).startswith("~"):
        raise ValueError("should be a path on this machine (mount it), without $NAME or ~user")
    return text


def _check_store(text: str) -> str:
    return text if text.startswith(("http://", "s3://")) else check_folder(text)


Text: TypeAlias = Annotated[str, Field(min_length=1)]
Host: TypeAlias = Annotated[Text, AfterValidator(host_of)]
LocalPath: TypeAlias = Annotated[Text, AfterValidator(check_folder)]
Store: TypeAlias = Annotated[Text, AfterValidator(_check_store)]
PlainName: TypeAlias = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_check_plain_name)]
Fraction: TypeAlias = Annotated[float, Field(gt=0, le=1)]
FractionOrZero: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Probability: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
# At most 65535 - 3, because the trainer also binds the three ports after wire.port.
Port: TypeAlias = Annotated[int, Field(ge=1, le=65532)]
CommaSeparated = BeforeValidator(_split_commas)
Names: TypeAlias = Annotated[tuple[Text, ...], CommaSeparated]
Strings: TypeAlias = Annotated[tuple[Text, ...], BeforeValidator(_one_or_list)]
Numbers: TypeAlias = Annotated[tuple[float, ...], CommaSeparated]
Bits: TypeAlias = Annotated[Literal[4, 8], BeforeValidator(_parse_digits)]
Tracker: TypeAlias = Literal["tensorboard", "trackio", "wandb"]
Table: TypeAlias = dict[str, Any]


class Section(BaseConfig):
    """Base of all sections: immutable; rejects unknown keys, NaN and infinity."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_misplaced_bool(cls, value: object, info: ValidationInfo) -> object:
        """Reject a bool where none is expected; pydantic would convert it to 1 or 0."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            message = "should be a number or text; set a value, or leave it out for the default"
            raise ValueError(message)
        return value


class PartialSection(Section):
    """A section that is written without the fields that were not set."""

    @model_serializer(mode="wrap")
    def _without_unset(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        return {name: values[name] for name in values if name in self.model_fields_set}


def row_model_of(field: FieldInfo) -> type[Section] | None:
    """Return the model of a row if `field` is an array of tables (rows) such as [[env]]."""
    if get_origin(field.annotation) is not tuple:
        return None
    kind = get_args(field.annotation)[0]
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def default_text(field: FieldInfo) -> str:
    """Return the default value of a setting in the notation of the command line."""
    default = cast(object, field.default)
    if isinstance(default, tuple):
        return ",".join(map(str, cast("tuple[object, ...]", default)))
    return str(default)


class RunSection(Section):
    """Name, folder and seed of the run."""

    name: PlainName = "demo"
    """name of the run and of its folder"""
    dir: LocalPath = "runs"
    """parent folder of all run folders"""
    fork: Text | None = None
    """run whose weights a new run continues from: a name in run.dir or the folder of a run; read at
    the first start only"""
    from_step: NonNegativeInt | None = None
    """step of run.fork that has a checkpoint or published weights; None = the newest checkpoint"""
    fork_optimizer: bool = True
    """continue with the optimizer's state too, if a checkpoint of the same train.optim has it"""
    seed: NonNegativeInt = 0
    """seed of all random number generators of the run"""
    num_local_generators: PositiveInt = 1
    """number of generators that `bin/lan local` starts on this machine, besides the trainer"""
    report_to: Annotated[tuple[Tracker, ...], CommaSeparated] = ()
    """experiment trackers that also receive metrics and samples: tensorboard, trackio, wandb; the
    environment variable WANDB_PROJECT names the project of the latter two"""
    num_workers: PositiveInt = 1
    """processes (trainer, generators) that share this machine's cores; more = fewer threads"""


class ModelSection(Section):
    """The language model."""

    name: Text = "embedded"
    """a Hugging Face folder, a name in the local hub cache, or a shipped model: 'embedded',
    'embedded_turns'"""
    device: Text = "auto"
    """cpu, cuda, cuda:1, mps, or auto = the accelerator if there is one"""
    teacher: Text | None = None
    """teacher model with the same vocabulary, for loss.teacher_tau; None = the base model"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """number format in which generators compute; train.dtype is that of the trainer"""
    trust_remote_code: bool = False
    """run custom Python code of a model folder (auto_map); then anyone with write access to the
    weights folder can run code on the generators"""


class EngineSection(Section):
    """The sampling engine of the generators."""

    name: Text = "auto"
    """native, hf, mlx, vllm, a custom engine (module:attribute), or auto = mlx on Apple silicon and
    vllm on CUDA if installed, else native"""
    slots: PositiveInt = 32
    """completions that are sampled concurrently; each is replaced when it ends (not with hf)"""
    max_model_len: PositiveInt = 1024
    """tokens of prompt and completion per slot. Left out: as the longest prompt needs"""
    quantize: Bits | None = None
    """bits per weight of linear layers while sampling, with engine mlx; None = as published"""
    gpu_memory_utilization: Fraction | None = None
    """fraction of the memory of its device that each generator may use; None = vLLM's default, or
    all"""
    vllm_args: Table = Field(default={})
    """other arguments of vLLM's EngineArgs, with engine vllm, e.g. { tensor_parallel_size = 2 }"""


class GeneratorSection(Section):
    """Name and chat server of a generator."""

    name: PlainName | None = None
    """name in metrics and logs, another one for each generator; None = the name of the machine"""
    serve_port: Port | None = None
    """port for chats with the newest weights through OpenAI's API; if it is in use, the next free
    one; None = not served"""
    token_file: LocalPath | None = None
    """file of mode 0600 with the API key for serve_port; None = only this machine can connect"""

    @property
    def full_name(self) -> str:
        """`name`, or the machine's with underscores for characters that no name may have."""
        return self.name or re.sub(r"^[.-]|[^A-Za-z0-9._-]", "_", socket.gethostname())


class WireSection(Section):
    """Network addresses of the trainer."""

    host: Host = "127.0.0.1"
    """host name or address of the trainer, as seen from the generators"""
    port: Port = 5555
    """port for rollouts; the next three ports: announcements, generator status, bin/doctor"""
    bind: Host = "127.0.0.1"
    """address that the trainer binds; 0.0.0.0 = all network interfaces, :: = also with IPv6"""
    address_dir: LocalPath | None = None
    """folder shared by all machines, in which a started trainer writes its address and generators
    find it, also after a move to another machine; None = generators use host and port"""


class WeightsSection(Section):
    """The weight store: where the trainer publishes and generators load weights."""

    dir: Store | None = None
    """folder shared by all machines, s3://BUCKET/PREFIX, or on generators http://TRAINER:PORT; None
    = weights/ in the run folder"""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """number format of published weights; only bfloat16 gives small deltas"""
    interval: PositiveInt = 1
    """training steps between two published versions"""
    keep_last: PositiveInt = 3
    """number of newest versions to keep"""
    keep_interval: PositiveInt | None = None
    """keep versions whose number is a multiple of this; None = off"""
    keep_seconds: NonNegativeFloat = 10.0
    """minimum seconds to keep an old version, for slow readers (NAS: 600)"""
    poll_seconds: PositiveFloat = 2.0
    """seconds between two searches while the trainer announces no version"""
    update: Literal["in_flight", "between_groups"] = "in_flight"
    """when a generator applies a new version: between two tokens, or with no group in flight"""
    max_mbit_per_s: PositiveFloat | None = None
    """upper limit for the bandwidth of publishing; None = unlimited"""
    serve_port: Port | None = None
    """port on which the trainer serves its weights folder over HTTP; None = not served"""


class CheckpointSection(Section):
    """Checkpoints and journal, from which a restarted trainer resumes."""

    interval: PositiveInt = 20
    """training steps between two checkpoints"""
    keep_last: PositiveInt | None = 2
    """number of newest checkpoints to keep; None = all"""
    keep_journal: bool = False
    """keep the journal from the first step, so that bin/replay can start at 0"""


class VerifierSection(Section):
    """Address of bin/verifier, which serves problems and rewards to other machines."""

    host: Host = "127.0.0.1"
    """address that the verifier binds; any other than loopback needs a security.token_file"""
    port: Port = 5560
    """port that the verifier binds"""


class SecuritySection(Section):
    """Authentication of generators."""

    keys: LocalPath | None = None
    """folder of CURVE keys, made with bin/doctor keygen; None = no keys and no encryption"""
    insecure: bool = False
    """allow connections from other machines without keys"""
    token_file: LocalPath | None = None
    """file of mode 0600 with the password of weights.serve_port and of the verifier, equal on all
    machines"""


class DashboardSection(Section):
    """The dashboard of the trainer."""

    host: Host = "127.0.0.1"
    """address that the dashboard binds; any other than loopback needs a token_file"""
    port: Port | None = 8470
    """port of the dashboard; if it is in use, the next free one; None = no dashboard"""
    token_file: LocalPath | None = None
    """file of mode 0600 with the access token of the dashboard; None = no token"""


class LogSection(Section):
    """Log messages."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level that is printed"""
