"""Settings that make a memory plan fit, the least costly first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from peralta_zmq.config import Config, with_settings
from peralta_zmq.errors import ConfigError
from peralta_zmq.memory.model_shape import ModelShape
from peralta_zmq.memory.plan import (
    OPTIMIZER_BYTES,
    Machine,
    Plan,
    Role,
    generator_fraction,
    sampling_dtype,
    workload_of,
)
from peralta_zmq.models.base_formats import BYTES_PER_WEIGHT

NOTHING_HELPS = "choose a smaller model.name or a machine with more memory"
MakePlan: TypeAlias = Callable[[Config], Plan]
Changes: TypeAlias = Mapping[str, Any]  # values by setting, such as lora.rank
# What a remedy costs, and the changes to try, of which later ones save more memory.
Remedy: TypeAlias = tuple[str, Sequence[Changes]]


class Attempt(NamedTuple):
    """Changes of settings: the plan with them alone, and with those of earlier attempts too."""

    changes: Changes
    cost: str
    alone: Plan
    combined: Plan

    @property
    def options(self) -> str:
        return _options_of([self])


class Advice(NamedTuple):
    attempts: Sequence[Attempt]
    options: str  # command line with which the plan fits; empty if no setting is enough
    plan: Plan | None  # with these options


def advise(
    config: Config, role: Role, make_plan: MakePlan, *, shape: ModelShape, machine: Machine
) -> Advice:
    """What each remedy of a role saves, and which to choose.

    That is the first that fits alone, else as many of the first ones as are needed.
    """
    remedies = _trainer_remedies if role == "trainer" else _generator_remedies
    attempts = list[Attempt]()
    combined = config
    peak = make_plan(config).peak
    for cost, values in remedies(config, shape, machine):
        saving = list[Attempt]()
        for changes in values:
            with suppress(ConfigError):  # the values contradict other settings
                alone = make_plan(with_settings(config, changes))
                attempt = Attempt(changes, cost, alone, make_plan(with_settings(combined, changes)))
                if attempt.combined.peak < peak:
                    saving.append(attempt)
        if saving:
            fitting = [attempt for attempt in saving if attempt.alone.fits]
            fitting += [attempt for attempt in saving if attempt.combined.fits]
            attempts.append((fitting or saving[-1:])[0])
            combined = with_settings(combined, attempts[-1].changes)
            peak = attempts[-1].combined.peak
    for attempt in attempts:
        if attempt.alone.fits:
            return Advice(attempts, attempt.options, attempt.alone)
    for number, attempt in enumerate(attempts, start=1):
        if attempt.combined.fits:
            return Advice(attempts, _options_of(attempts[:number]), attempt.combined)
    return Advice(attempts, "", None)


def _trainer_remedies(config: Config, shape: ModelShape, machine: Machine) -> Iterator[Remedy]:
    tokens = workload_of(config, shape, machine).tokens
    numbers = _powers_below(tokens, min(config.engine.max_model_len, shape.max_positions))
    yield (
        "same gradient, less speed",
        [{"train.max_tokens_per_microbatch": number} for number in numbers],
    )
    if not config.train.gradient_checkpointing:
        yield "same gradient, a third more time", [{"train.gradient_checkpointing": True}]
    yield _fewer_slots(config)
    rank: Changes = {}
    if config.lora.rank is None:
        optims = list(OPTIMIZER_BYTES)
        for optim in optims[optims.index(config.train.optim) + 1 :]:
            extra = "; needs the extra optim" if optim == "adamw_8bit" else ""
            yield f"rounds the optimizer state{extra}", [{"train.optim": optim}]
        rank = {"lora.rank": 16}
        yield "trains adapters instead of all weights; needs the extra lora", [rank]
    formats = list(BYTES_PER_WEIGHT)
    yield (
        "rounds the weights under the adapters",
        [
            {**rank, "lora.base_dtype": base_dtype}
            for base_dtype in formats[formats.index(config.lora.base_dtype) + 1 :]
        ],
    )
    yield _shorter(config, shape)


def _generator_remedies(config: Config, shape: ModelShape, machine: Machine) -> Iterator[Remedy]:
    yield _fewer_slots(config)
    if sampling_dtype(config, machine) == "float32":
        yield "rounds the weights that sample", [{"model.dtype": "bfloat16"}]
    if machine.engine == "mlx" and config.engine.quantize is None:
        bits = [{"engine.quantize": 8}, {"engine.quantize": 4}]
        yield "logprobs differ from the trainer's", bits
    if machine.reserves_memory:
        tenths = int(10 * generator_fraction(config, machine) - 1e-9)
        yield (
            "a smaller KV cache",
            [{"engine.gpu_memory_utilization": number / 10} for number in range(tenths, 0, -1)],
        )
    yield _shorter(config, shape)


def _fewer_slots(config: Config) -> Remedy:
    numbers = _powers_below(config.engine.slots, 1)
    return "fewer completions at a time", [{"engine.slots": number} for number in numbers]


def _shorter(config: Config, shape: ModelShape) -> Remedy:
    """Shorter sequences, of at least 256 tokens."""
    completions = (config.sampling_of(env).max_completion_length for env in config.environments)
    longest = max(length or 0 for length in completions)  # None: as long as the context permits
    length = min(config.engine.max_model_len, shape.max_positions)
    lengths = _powers_below(length, max(256, longest + 1))
    return (
        "shorter prompts and completions",
        [{"engine.max_model_len": shorter} for shorter in lengths],
    )


def _options_of(attempts: Sequence[Attempt]) -> str:
    changes = {name: value for each in attempts for name, value in each.changes.items()}
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in changes.items()
    )


def _powers_below(number: int, smallest: int) -> list[int]:
    """The powers of two below a number and of at least `smallest`, largest first."""
    exponents = range((number - 1).bit_length() - 1, -1, -1)
    return [2**exponent for exponent in exponents if 2**exponent >= smallest]
