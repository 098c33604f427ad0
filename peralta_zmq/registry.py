"""Plug-ins: protocols, table of short names, import by name, checks of options.

A plug-in is a task (problems with a reward function), an engine, or a loss, advantage, filter or
reward function. Its setting is a short name of TABLES, or the import path of a plug-in that the
user wrote: for a task a module (`my_lab.sudoku`, or a file `sudoku.py`), for any other an attribute
of a module (`my_lab.losses:mine` or `losses.py:mine`). A task with a prefix of ADAPTERS
(`reasoning_gym:chain_sum`) belongs to another library.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, overload

from peralta_zmq.errors import ConfigError, choices_text, described
from peralta_zmq.imports import add_folder, import_object
from peralta_zmq.named_losses import LOSSES
from peralta_zmq.rollout import Completion, Problem, Request, Rollout
from peralta_zmq.signatures import Signature, call_error

Kind: TypeAlias = Literal["task", "engine", "loss", "advantage", "filter", "reward"]

# Kind -> short name -> import path, for all plug-ins in this package.
TABLES: dict[Kind, dict[str, str]] = {
    "task": {
        "calculator": "peralta_zmq.environments.calculator",
        "calculator_tool": "peralta_zmq.environments.calculator_tool",
        "countdown": "peralta_zmq.environments.countdown",
        "extract": "peralta_zmq.environments.extract",
        "guess_number": "peralta_zmq.environments.guess_number",
        "math_answers": "peralta_zmq.environments.math_answers",
        "reverse_text": "peralta_zmq.environments.reverse_text",
        "rows": "peralta_zmq.environments.rows_task",
    },
    "engine": {
        "native": "peralta_zmq.engines.native.native_engine",
        "hf": "peralta_zmq.engines.hf_engine",
        "mlx": "peralta_zmq.engines.mlx",
        "vllm": "peralta_zmq.engines.vllm.vllm_engine:VllmEngine",
    },
    "loss": dict.fromkeys(LOSSES, "peralta_zmq.learning.losses:policy_loss"),
    "advantage": {
        "group_mean": "peralta_zmq.learning.advantages:group_mean",
        "group_zscore": "peralta_zmq.learning.advantages:group_zscore",
        "leave_one_out": "peralta_zmq.learning.advantages:leave_one_out",
        "max_rl": "peralta_zmq.learning.advantages:max_rl",
        "length_weighted": "peralta_zmq.learning.advantages:length_weighted",
        "token_whitening": "peralta_zmq.learning.advantages:token_whitening",
    },
    "filter": {
        "gibberish": "peralta_zmq.learning.advantages:gibberish",
        "repetition": "peralta_zmq.learning.advantages:repetition",
        "overlong": "peralta_zmq.learning.advantages:overlong",
    },
    "reward": {
        "answer_match": "peralta_zmq.environments.answer_match:answer_match",
        "exact_match": "peralta_zmq.environments.shipped_rewards:exact_match",
        "regex": "peralta_zmq.environments.shipped_rewards:regex",
        "soft_overlong": "peralta_zmq.environments.shipped_rewards:soft_overlong",
    },
}
# Prefix of a task's name -> class that makes the task from the rest of the name, after a colon.
ADAPTERS = {
    "agent": "peralta_zmq.environments.agents:AgentTask",
    "reasoning_gym": "peralta_zmq.environments.reasoning_gym_task:ReasoningGymTask",
    "verifiers": "peralta_zmq.environments.verifiers_task:VerifiersTask",
}
# Number of positional parameters, as in the protocols below; all further parameters are options.
NUM_ARGUMENTS: dict[Kind, int] = {"loss": 1, "advantage": 2, "filter": 1}
# Functions that a task (a module) and an engine (a module or a class) must have.
REQUIRED_FUNCTIONS: dict[Kind, tuple[str, ...]] = {
    "task": ("problems", "reward"),
    "engine": ("open",),
}


# Protocols.


class Task(Protocol):
    """A module with problems and a reward function; for several turns, see environments/turns.py.

    A reward function runs in a reward worker, a process with a timeout. If the module sets
    REWARD_IS_BOUNDED = True (bounded running time), its function is called directly.
    """

    def problems(self, split: str, seed: int, **options: Any) -> Iterator[Problem]:
        """The problems of split 'train' or 'eval', in any order.

        `options` are the settings of [data]. `seed` is for problems that are generated at random.
        """
        ...

    def reward(self, problem: Problem, completion_text: str) -> float | dict[str, float]:
        """The reward of a completion: a number, or a dict of named terms to be summed."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSettings:
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    slots: int = 32  # completions that are sampled concurrently
    max_model_len: int = 1024  # maximum of prompt and completion together, in tokens
    quantize: int | None = None  # bits per weight; None = the weights as published
    gpu_memory_utilization: float | None = None  # fraction; None = vLLM's default, all
    vllm_args: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # fields of vllm.EngineArgs
    keeps_turns: bool = False  # keep keys and values for requests that continue others


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The weights of one policy step, for `Engine.apply`. All values are finite.

    An adapter is added to the weights that the engine was opened with, with the values that the
    format `base_dtype` gives them (models/base_formats.py).
    """

    step: int  # policy step
    tensors: Mapping[str, Any]  # torch tensors by name, valid during `apply` only
    folder: Path | None = None  # the version's files; None if the weights are in memory only
    is_adapter: bool = False  # the tensors are those of a LoRA adapter (models/lora.py)
    base_dtype: str = "float32"  # format of the base that an adapter was trained on
    base_digest: str | None = None  # digest of the base weights if they are packed


class Engine(Protocol):
    """Samples completions with weights that can be replaced at any time.

    A decode step samples the next token of each completion in flight, and starts what it can.
    """

    @property
    def step(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """Maximum of prompt and completion together, in tokens."""
        ...

    def num_free(self) -> int:
        """Number of requests that can be submitted now."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Start at most `num_free()` requests, with indices that no request in flight has.

        A completion ends at the latest when it fills the context of `max_model_len` tokens.
        """
        ...

    def advance(self) -> list[Completion]:
        """Take one decode step; returns the completions that have ended, in any order.

        Raises EngineError for logits that are not finite, which drops the requests in flight, and
        EngineProcessError if a process of the engine fails: `drop` still returns what its requests
        have, and `apply` starts the process again.
        """
        ...

    def apply(self, update: WeightUpdate) -> None:
        """Replace the weights in place, also for the completions in flight.

        Raises ValueError, and changes nothing, if the tensors do not fit the model; OutageError,
        with unchanged weights, if a later call may succeed; EngineProcessError as `advance`.
        """
        ...

    def drop(self, ids: Collection[int]) -> list[Completion]:
        """End the requests with these indices now, as far as they are in flight.

        Returns the tokens of each as a completion, which another request can resume
        (Request.resumes). Requests without a token are left out.
        """
        ...


class EngineFactory(Protocol):
    """A module or a class."""

    def open(self, folder: Path, settings: EngineSettings, *, step: int = ...) -> Engine:
        """An engine that loads the weights of policy step `step` from `folder`.

        Raises StoreError if it cannot be loaded, and ConfigError for settings that this engine or
        this machine cannot use.
        """
        ...


class LiveEngineFactory(EngineFactory, Protocol):
    """An engine that can also sample from a torch model in memory."""

    def open_live(self, model: Any, tokenizer: Any, settings: EngineSettings) -> Engine:
        """An engine that samples with the weights of a torch model without copying them.

        The trainer opens it for each evaluation; the weights do not change meanwhile.
        """
        ...


class Loss(Protocol):
    """A function that returns the loss, a scalar tensor, and metrics by name.

    `tokens`, a `learning.losses.Tokens`, holds the tokens of one micro-batch. The trainer sums
    losses and metrics of all micro-batches of a step; therefore the function divides by the totals
    of the step, `tokens.step_tokens` or `tokens.step_sequences`.
    """

    def __call__(self, tokens: Any, **options: Any) -> tuple[Any, dict[str, Any]]: ...


class Advantage(Protocol):
    """A function that returns one advantage per rollout of a group.

    `rewards` and `lengths` (numbers of generated tokens) have one entry per rollout. The keywords
    `step_rewards` and `step_lengths` get those of all groups of the step.
    """

    def __call__(
        self, rewards: Sequence[float], lengths: Sequence[int], **options: Any
    ) -> list[float]: ...


class FilterFunction(Protocol):
    """A function that returns True for a rollout that should not be trained on."""

    def __call__(self, rollout: Rollout, **options: Any) -> bool: ...


# Names.


@overload
def resolve(kind: Literal["task"], name: str) -> Task: ...
@overload
def resolve(kind: Literal["engine"], name: str) -> EngineFactory: ...
@overload
def resolve(kind: Literal["loss"], name: str) -> Loss: ...
@overload
def resolve(kind: Literal["advantage"], name: str) -> Advantage: ...
@overload
def resolve(kind: Literal["filter"], name: str) -> FilterFunction: ...
@overload
def resolve(kind: Kind, name: str) -> Any: ...
def resolve(kind: Kind, name: str) -> Any:
    """Import and return the plug-in with a short name or an import path. Raises ConfigError."""
    prefix, _, rest = name.partition(":")
    if kind == "task" and prefix in ADAPTERS:
        return pkgutil.resolve_name(ADAPTERS[prefix])(rest)
    target = import_path(kind, name)
    try:
        plugin: Any = import_object(target)
    except Exception as error:  # noqa: BLE001  a user's module may raise anything
        is_plain = isinstance(
            error, (ImportError, AttributeError, SyntaxError, ValueError, OSError)
        )
        reason = " ".join(str(error).split()) if is_plain else described(error)
        raise ConfigError(
            f"{kind} '{name}' cannot be imported: {reason}; "
            "check the name, and that its folder is on PYTHONPATH"
        ) from None
    for function in REQUIRED_FUNCTIONS.get(kind, ()):
        if not callable(getattr(plugin, function, None)):
            raise ConfigError(
                f"{kind} '{name}' has no {function}(); add it, or name another {kind}"
            )
    if kind not in REQUIRED_FUNCTIONS and not callable(plugin):
        raise ConfigError(f"{kind} '{name}' is not callable; name a function or class")
    return plugin


def is_shipped(kind: Kind, name: str) -> bool:
    return name in TABLES[kind]


def import_path(kind: Kind, name: str) -> str:
    """The argument of `import_object`; ConfigError if the name is unknown and not dotted."""
    if name in TABLES[kind]:
        return TABLES[kind][name]
    adapter, _, rest = name.partition(":")
    if kind == "task" and adapter.replace("-", "_") in ADAPTERS:
        right = f"{adapter.replace('-', '_')}:{rest or 'NAME'}"
        raise ConfigError(f"unknown task '{name}'; did you mean {right}?")
    if ":" in name or (kind == "task" and ("." in name or _is_own_module(name))):
        return name
    if name.endswith(".py"):
        raise ConfigError(f"{kind} '{name}' is a file; name its function: {name}:FUNCTION")
    if "." in name:
        module, _, attribute = name.rpartition(".")
        return f"{module}:{attribute}"
    choices = choices_text("choose one of", name, sorted(TABLES[kind]))
    raise ConfigError(f"unknown {kind} '{name}'; {choices}, or the import path of your own {kind}")


def _is_own_module(name: str) -> bool:
    add_folder(os.getcwd())
    is_own = name.isidentifier() and name not in sys.stdlib_module_names
    return is_own and importlib.util.find_spec(name) is not None


# Options.


def bind_options(
    kind: Kind,
    name: str,
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The keyword arguments for a loss or advantage function, after checks.

    `settings` holds the options that are set in the section [loss] or [advantage], `kwargs` those
    of its table `kwargs`, for a function that the user wrote. Raises ConfigError for an unknown
    option.
    """
    for option in settings:
        if not _accepts(kind, name, option):
            names = [other for other in TABLES[kind] if _accepts(kind, other, option)]
            remedy = f"remove it or set {kind}.name to {' or '.join(names)}"
            raise ConfigError(
                f"{kind}.{option} is not an option of {kind} '{name}'; "
                f"{remedy if names else 'remove it'}"
            )
    if is_shipped(kind, name) and kwargs:
        names = [f"{kind}.{option}" for option in option_names(kind, function)]
        raise ConfigError(
            f"{kind}.kwargs is only for a {kind} of your own; "
            f"the options of '{name}' are {', '.join(names) or 'none'}"
        )
    if both := settings.keys() & kwargs.keys():
        option = min(both)
        raise ConfigError(
            f"{kind}.{option} and {kind}.kwargs.{option} set the same option; remove one"
        )
    options = {**settings, **kwargs}
    check_options(kind, name, function, options)
    return options


def option_names(kind: Kind, function: Callable[..., Any]) -> list[str]:
    """The names of a function's options, without a catch-all `**options` and values of a step."""
    names = Signature(function, NUM_ARGUMENTS[kind]).names
    return [name for name in names if name not in ("step_rewards", "step_lengths")]


def check_options(
    kind: Kind, name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    """Raise ConfigError if the function cannot be called with these options."""
    if error := call_error(function, *[None] * NUM_ARGUMENTS[kind], **options):
        setting = f"filter.kwargs.'{name}'" if kind == "filter" else f"{kind}.kwargs"
        names = ", ".join(option_names(kind, function)) or "none"
        raise ConfigError(
            f"{kind} '{name}': {error}; its options are {names}, set them in {setting}"
        )


def _accepts(kind: Kind, name: str, option: str) -> bool:
    function: Callable[..., Any] = resolve(kind, name)
    return Signature(function).takes_all or option in option_names(kind, function)
