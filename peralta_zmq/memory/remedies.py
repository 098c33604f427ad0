"""Settings that make a memory plan fit, the least costly first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError
from peralta_zmq.memory.model_shape import ModelShape
from peralta_zmq.memory.plan import (
    Machine,
    Plan,
    Role,
    generator_fraction,
    reserves_memory,
    sampling_dtype,
    workload_of,
)

MIN_LENGTH = 256  # tokens; a shorter engine.max_model_len is not proposed
RANK = 16  # of proposed adapters
NOTHING_HELPS = "choose a smaller model.name or a machine with more memory"
BASE_DTYPES = ("float32", "bfloat16", "int8", "nf4")  # largest first
MakePlan: TypeAlias = Callable[[Config], Plan]
Changes: TypeAlias = Mapping[str, Any]  # values by setting, such as lora.rank


class Advice(NamedTuple):
    """Settings that make a plan smaller."""

    attempts: Sequence[Attempt]
    options: str  # of the command line, with which the plan fits; empty if no setting is enough
    plan: Plan | None  # with these options


class Remedy(NamedTuple):
    """Changes of settings to try, of which later ones save more memory."""

    values: tuple[Changes, ...]
    cost: str


class Attempt(NamedTuple):
    """Changes of settings: the plan with them alone, and with those of earlier attempts too."""

    changes: Changes
    cost: str
    alone: Plan
    combined: Plan

    @property
    def options(self) -> str:
        """The changes as options of the command line."""
        return _options_of([self])


def advise(
    config: Config, role: Role, make_plan: MakePlan, *, shape: ModelShape, machine: Machine
) -> Advice:
    """What each remedy of a role saves, and which to choose.

    That is the first that fits alone, else as many of the first ones as are needed.
    """
    make_remedies = _trainer_remedies if role == "trainer" else _generator_remedies
    attempts = _try_remedies(config, make_remedies(config, shape, machine), make_plan)
    if found := next((each for each in attempts if each.alone.fits), None):
        return Advice(attempts, _options_of([found]), found.alone)
    for number, each in enumerate(attempts, start=1):
        if each.combined.fits:
            return Advice(attempts, _options_of(attempts[:number]), each.combined)
    return Advice(attempts, "", None)


def changed(config: Config, changes: Changes) -> Config:
    """The settings with other values of some of them; ConfigError if these contradict others."""
    tables = config.model_dump()
    for setting, value in changes.items():
        section, leaf = setting.split(".")
        tables[section][leaf] = value
    return Config.model_validate(tables)


def _trainer_remedies(config: Config, shape: ModelShape, machine: Machine) -> list[Remedy]:
    """Remedies for the trainer, the least costly first."""
    train, length = config.train, _length(config, shape)
    tokens = workload_of(config, shape, machine).tokens
    remedies = [
        _remedy(
            "train.max_tokens_per_microbatch",
            _powers_below(tokens, length),
            "same gradient, less speed",
        )
    ]
    if not train.gradient_checkpointing:
        cost = "same gradient, a third more time"
        remedies.append(_remedy("train.gradient_checkpointing", (True,), cost))
    remedies.append(_fewer_slots(config))
    rank: Changes = {}
    if config.lora.rank is None:
        optims = ("adamw", "adamw_bf16", "adamw_8bit")
        smaller = optims[optims.index(train.optim) + 1 :]
        cost = "rounds the optimizer state"
        costs = {"adamw_bf16": cost, "adamw_8bit": f"{cost}; needs the extra optim"}
        remedies += [_remedy("train.optim", (each,), costs[each]) for each in smaller]
        rank = {"lora.rank": RANK}
        cost = "trains adapters instead of all weights; needs the extra lora"
        remedies.append(Remedy((rank,), cost))
    base_dtypes = BASE_DTYPES[BASE_DTYPES.index(config.lora.base_dtype) + 1 :]
    smaller_bases = tuple({**rank, "lora.base_dtype": each} for each in base_dtypes)
    remedies.append(Remedy(smaller_bases, "rounds the weights under the adapters"))
    remedies.append(_shorter(config, shape))
    return [remedy for remedy in remedies if remedy.values]


def _generator_remedies(config: Config, shape: ModelShape, machine: Machine) -> list[Remedy]:
    """Remedies for a generator, the least costly first."""
    engine, remedies = config.engine, [_fewer_slots(config)]
    if sampling_dtype(config, machine) == "float32":
        cost = "rounds the weights that sample"
        remedies.append(_remedy("model.dtype", ("bfloat16",), cost))
    if machine.engine == "mlx" and engine.quantize is None:
        remedies.append(_remedy("engine.quantize", (8, 4), "logprobs differ from the trainer's"))
    if reserves_memory(machine):
        tenths = int(10 * generator_fraction(config, machine) - 1e-9)
        fractions = tuple(number / 10 for number in range(tenths, 0, -1))
        remedies.append(_remedy("engine.gpu_memory_utilization", fractions, "a smaller KV cache"))
    remedies.append(_shorter(config, shape))
    return [remedy for remedy in remedies if remedy.values]


def _try_remedies(config: Config, remedies: Sequence[Remedy], make_plan: MakePlan) -> list[Attempt]:
    """Try each remedy alone and after the ones before it.

    Of its values it takes the first that fits alone, else the first that fits after the ones before
    it, else the last. Leaves out values that contradict other settings or save nothing.
    """
    attempts, combined, peak = list[Attempt](), config, make_plan(config).peak
    for values, cost in remedies:
        tried = list[Attempt]()
        for changes in values:
            with suppress(ConfigError):
                plans = [make_plan(changed(each, changes)) for each in (config, combined)]
                tried.append(Attempt(changes, cost, *plans))
        if saving := [each for each in tried if each.combined.peak < peak]:
            fitting = [each for each in saving if each.alone.fits]
            fitting += [each for each in saving if each.combined.fits]
            attempts.append((fitting or saving[-1:])[0])
            combined = changed(combined, attempts[-1].changes)
            peak = attempts[-1].combined.peak
    return attempts


def _options_of(attempts: Sequence[Attempt]) -> str:
    """The changes of all attempts as options of the command line."""
    changes = {name: value for each in attempts for name, value in each.changes.items()}
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in changes.items()
    )


def _remedy(setting: str, values: Sequence[Any], cost: str) -> Remedy:
    """Values of one setting."""
    return Remedy(tuple({setting: value} for value in values), cost)


def _fewer_slots(config: Config) -> Remedy:
    slots = _powers_below(config.engine.slots, 1)
    return _remedy("engine.slots", slots, "fewer completions at a time")


def _shorter(config: Config, shape: ModelShape) -> Remedy:
    completions = (config.sampling_of(env).max_completion_length for env in config.environments)
    longest = max(length or 0 for length in completions)  # None: as long as the context permits
    lengths = _powers_below(_length(config, shape), max(MIN_LENGTH, longest + 1))
    return _remedy("engine.max_model_len", lengths, "shorter prompts and completions")


def _length(config: Config, shape: ModelShape) -> int:
    """Tokens of the longest sequence."""
    return min(config.engine.max_model_len, shape.max_positions)


def _powers_below(number: int, smallest: int) -> tuple[int, ...]:
    """The powers of two below a number and of at least `smallest`, largest first."""
    exponents = range((number - 1).bit_length() - 1, -1, -1)
    return tuple(2**each for each in exponents if 2**each >= smallest)
