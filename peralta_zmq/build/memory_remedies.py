"""Settings that make a memory plan fit, tried in the order of their harm to training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from peralta_zmq.build.memory_plan import Machine, Plan, workload_of
from peralta_zmq.build.model_shape import ModelShape
from peralta_zmq.config import Config

MIN_LENGTH = 256  # tokens; a shorter engine.max_model_len is not proposed
RANK = 16  # of proposed adapters
MakePlan: TypeAlias = Callable[[Config], Plan]


class Remedy(NamedTuple):
    """A setting with the values to try, of which later ones save more memory."""

    setting: str
    values: tuple[Any, ...]
    cost: str


class Attempt(NamedTuple):
    """A value of a setting: the plan with it alone, and with the values of earlier attempts too."""

    setting: str
    value: Any
    cost: str
    alone: Plan
    combined: Plan

    @property
    def option(self) -> str:
        """The value as an option of the command line."""
        name = self.setting.replace("_", "-")
        return f"--{name}" if self.value is True else f"--{name} {self.value}"


def trainer_remedies(config: Config, shape: ModelShape, machine: Machine) -> list[Remedy]:
    """Remedies for the trainer, least harm first."""
    train, length = config.train, _length(config, shape)
    tokens = workload_of(config, shape, machine).tokens
    remedies = [
        Remedy(
            "train.max_tokens_per_microbatch",
            _powers_below(tokens, length),
            "same gradient, less speed",
        )
    ]
    if not train.gradient_checkpointing:
        cost = "same gradient, a third more time"
        remedies.append(Remedy("train.gradient_checkpointing", (True,), cost))
    if config.lora.rank is None:
        optims = ("adamw", "adamw_bf16", "adamw_8bit")
        smaller = optims[optims.index(train.optim) + 1 :]
        remedies += [
            Remedy("train.optim", (each,), "rounds the optimizer state") for each in smaller
        ]
        remedies.append(Remedy("lora.rank", (RANK,), "trains adapters instead of all weights"))
    remedies.append(_shorter(config, shape))
    return [remedy for remedy in remedies if remedy.values]


def generator_remedies(config: Config, shape: ModelShape, machine: Machine) -> list[Remedy]:
    """Remedies for a generator, least harm first."""
    engine = config.engine
    remedies = [
        Remedy("engine.slots", _powers_below(engine.slots, 1), "fewer completions at a time")
    ]
    if machine.sampling_dtype == "float32":
        cost = "rounds the weights that sample"
        remedies.append(Remedy("model.dtype", ("bfloat16",), cost))
    if machine.engine == "mlx" and engine.quantize is None:
        remedies.append(Remedy("engine.quantize", (8, 4), "logprobs differ from the trainer's"))
    remedies.append(_shorter(config, shape))
    return [remedy for remedy in remedies if remedy.values]


def try_remedies(config: Config, remedies: Sequence[Remedy], make_plan: MakePlan) -> list[Attempt]:
    """Try each remedy alone and after the ones before it.

    Of its values it takes the first that fits alone, else the last.
    """
    attempts, combined = list[Attempt](), config
    for setting, values, cost in remedies:
        plans = [(value, make_plan(changed(config, setting, value))) for value in values]
        value, alone = next((pair for pair in plans if pair[1].fits), plans[-1])
        combined = changed(combined, setting, value)
        attempts.append(Attempt(setting, value, cost, alone, make_plan(combined)))
    return attempts


def sufficient(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """The attempts to make together so that the plan fits; empty if all are not enough.

    That is the first that fits alone, else as many of the first ones as are needed.
    """
    if found := next((each for each in attempts if each.alone.fits), None):
        return [found]
    fitting = (number for number, each in enumerate(attempts, 1) if each.combined.fits)
    return attempts[: next(fitting, 0)]


def changed(config: Config, setting: str, value: Any) -> Config:
    """The settings with another value of one of them."""
    section, leaf = setting.split(".")
    updated = getattr(config, section).model_copy(update={leaf: value})
    return config.model_copy(update={section: updated})


def _shorter(config: Config, shape: ModelShape) -> Remedy:
    lengths = _powers_below(_length(config, shape), MIN_LENGTH)
    return Remedy("engine.max_model_len", lengths, "shorter prompts and completions")


def _length(config: Config, shape: ModelShape) -> int:
    """Tokens of the longest sequence."""
    return min(config.engine.max_model_len, shape.max_positions)


def _powers_below(number: int, smallest: int) -> tuple[int, ...]:
    """The powers of two below a number and of at least `smallest`, largest first."""
    exponents = range((number - 1).bit_length() - 1, -1, -1)
    return tuple(2**each for each in exponents if 2**each >= smallest)
