"""Plug-ins: protocols, names of the shipped ones, their options, and calls with a timeout.

A name without a dot is a key of TABLES. A dotted name is the user's own: `my_lab.sudoku` is a
module (a task), `my_lab.losses.mine` or `my_lab.losses:mine` an attribute of a module (all other
kinds). A plug-in is imported only when a run uses it.
"""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol, TypeAlias, overload

from peralta_zmq.errors import ConfigError, PeraltaError, UserCodeError, described
from peralta_zmq.rollout import Completion, Problem, Request, Rollout, Sampling

Kind: TypeAlias = Literal["task", "engine", "loss", "advantage", "filter", "reward"]

TABLES: dict[Kind, dict[str, str]] = {
    "task": {
        "calculator": "peralta_zmq.environments.calculator",
        "countdown": "peralta_zmq.environments.countdown",
        "math_answers": "peralta_zmq.environments.math_answers",
        "reverse_text": "peralta_zmq.environments.reverse_text",
    },
    "engine": {
        "native": "peralta_zmq.engines.native:NativeEngine",
        "hf": "peralta_zmq.engines.hf:HfEngine",
    },
    "loss": {
        "reinforce": "peralta_zmq.learning.losses:reinforce",
        "grpo": "peralta_zmq.learning.losses:grpo",
        "importance": "peralta_zmq.learning.losses:importance",
        "decoupled_ppo": "peralta_zmq.learning.losses:decoupled_ppo",
        "grpo_kl": "peralta_zmq.learning.losses:grpo_kl",
        "dppo": "peralta_zmq.learning.losses:dppo",
        "gspo": "peralta_zmq.learning.losses:gspo",
    },
    "advantage": {
        "group_mean": "peralta_zmq.learning.advantages:group_mean",
        "group_zscore": "peralta_zmq.learning.advantages:group_zscore",
        "leave_one_out": "peralta_zmq.learning.advantages:leave_one_out",
        "length_weighted": "peralta_zmq.learning.advantages:length_weighted",
        "token_whitening": "peralta_zmq.learning.advantages:token_whitening",
    },
    "filter": {
        "gibberish": "peralta_zmq.learning.filters:gibberish",
        "repetition": "peralta_zmq.learning.filters:repetition",
        "overlong": "peralta_zmq.learning.filters:overlong",
    },
    "reward": {},  # every task has its own
}
NUM_ARGUMENTS: dict[Kind, int] = {"loss": 1, "advantage": 2, "filter": 1}  # before the options
CALL_TIMEOUT_SECONDS = 60.0  # for one call of a user's loss, advantage or filter
INTERRUPT_SECONDS = 5.0  # after the timeout, for a call that can be interrupted


# Protocols.


class Task(Protocol):
    """A module with problems and a reward function."""

    def problems(self, split: str, seed: int, **options: Any) -> Iterator[Problem]:
        """The problems of 'train' or 'eval'; options are the settings in [data]."""
        ...

    def reward(self, problem: Problem, completion_text: str) -> float | dict[str, float]:
        """The reward of a completion; a dict holds named parts, which are summed."""
        ...


class Engine(Protocol):
    """Samples completions from the weights of `step`."""

    step: int

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """One completion per request, in any order; `index` is the index of its request.

        The engine takes the next request when a slot is free; None means that no request is ready
        at the moment. It calls `between_steps` where newer weights may be applied. It samples with
        `sampling.at(step)`, where `step` is the step of the weights in use.
        """
        ...

    def apply(self, weights: Mapping[str, Any], *, step: int, folder: Path | None = None) -> None:
        """Replace the weights in place by a newer version; not called while sampling.

        `weights` maps names to all tensors of the version, checked to be finite and valid during
        the call only. `folder` has the version's files; None if they exist in memory only. Raises
        ValueError, with nothing changed, if they do not fit the model.
        """
        ...

    def cancel(self) -> None:
        """Abort the requests in flight; `generate` ends."""
        ...


class EngineFactory(Protocol):
    """Opens engines for `slots` concurrent sequences of up to `max_model_len` tokens."""

    def open(
        self,
        folder: Path,
        *,
        device: Any,
        dtype: Any,
        step: int,
        slots: int = ...,
        max_model_len: int = ...,
    ) -> Engine:
        """An engine on the weight version in `folder`, whose files `from_pretrained` can load."""
        ...

    def open_live(
        self, model: Any, tokenizer: Any, *, slots: int = ..., max_model_len: int = ...
    ) -> Engine:
        """An engine on a model in training, for its evaluation.

        It holds no copy of the weights: the trainer changes them between two `generate`.
        """
        ...


class Loss(Protocol):
    """A function of `learning.losses.Tokens` that returns a scalar tensor and named metrics.

    It divides both by the totals of the whole step; the trainer sums over micro-batches.
    """

    def __call__(self, tokens: Any, **options: Any) -> tuple[Any, dict[str, Any]]: ...


class Advantage(Protocol):
    """K advantages from the K rewards of a group and the number of generated tokens of each.

    A function with the option `group_adv_norm` set to false gets all rollouts of a step at once.
    """

    def __call__(
        self, rewards: Sequence[float], lengths: Sequence[int], **options: Any
    ) -> list[float]: ...


class Filter(Protocol):
    """True for a rollout that should not be trained on."""

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
def resolve(kind: Literal["filter"], name: str) -> Filter: ...
@overload
def resolve(kind: Kind, name: str) -> Any: ...
def resolve(kind: Kind, name: str) -> Any:
    """The plug-in with a short or dotted name.

    Raises ConfigError if the name is unknown, cannot be imported, or does not fit the protocol.
    """
    target = TABLES[kind].get(name) or _target(kind, name)
    if kind == "task" and ":" not in target:
        target += ":"  # a module; without the colon resolve_name hides an import error inside it
    try:
        plugin: Any = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{kind} '{name}' cannot be imported: {reason}; "
            "check the name, and that its folder is on PYTHONPATH"
        ) from None
    if kind == "task":
        for function in ("problems", "reward"):
            if not callable(getattr(plugin, function, None)):
                raise ConfigError(
                    f"task '{name}' has no {function}(); "
                    "a task is a module with problems() and reward()"
                )
    elif kind == "engine" and not (hasattr(plugin, "open") and hasattr(plugin, "open_live")):
        raise ConfigError(f"engine '{name}' has no open() and open_live(); name an engine class")
    elif not callable(plugin):
        raise ConfigError(f"{kind} '{name}' is not callable; name a function or class")
    return plugin


def load_function(kind: Kind, name: str, convert: Callable[..., Any]) -> Callable[..., Any]:
    """A shipped function as it is; a user's with a timeout and with a converted result.

    `convert` gets the name, the result and the arguments; it may raise UserCodeError.
    """
    function: Callable[..., Any] = resolve(kind, name)
    if is_shipped(kind, name):
        return function

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return convert(name, function(*arguments, **options), *arguments)

    return call_with_timeout(f"{kind} '{name}'", call, seconds=CALL_TIMEOUT_SECONDS)


def is_shipped(kind: Kind, name: str) -> bool:
    """Whether the name is one of TABLES."""
    return name in TABLES[kind]


def _target(kind: Kind, name: str) -> str:
    """The argument of `pkgutil.resolve_name` for a dotted name."""
    if ":" in name or (kind == "task" and "." in name):
        return name
    if "." in name:
        module, _, attribute = name.rpartition(".")
        return f"{module}:{attribute}"
    if not TABLES[kind]:
        raise ConfigError(f"unknown {kind} '{name}'; give the dotted name of your own {kind}")
    choices = ", ".join(sorted(TABLES[kind]))
    near = get_close_matches(name, TABLES[kind], n=1)
    hint = f"did you mean {near[0]}? Choose" if near else "choose"
    raise ConfigError(
        f"unknown {kind} '{name}'; {hint} one of {choices}, or the dotted name of your own {kind}"
    )


# Options.


def bind_options(
    kind: Kind,
    name: str,
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """The keyword options of a function, checked against its signature.

    `settings` are the options of the kind's section that differ from their defaults, `kwargs` those
    of a user's function. Raises ConfigError for an option that the function does not have.
    """
    for option in settings:
        if option not in option_names(kind, function) and not _accepts_any_option(function):
            names = [
                other
                for other in TABLES[kind]
                if option in option_names(kind, resolve(kind, other))
            ]
            raise ConfigError(
                f"{kind}.{option} is not an option of {kind} '{name}'; "
                f"remove it or set {kind}.name to {' or '.join(names)}"
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
    """The names of a function's options, by its signature."""
    parameters = list(inspect.signature(function).parameters.values())[NUM_ARGUMENTS[kind] :]
    return [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The default values of a function's options."""
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not parameter.empty
    }


def check_options(
    kind: Kind, name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    """Raise ConfigError if the function cannot be called with these options."""
    try:
        inspect.signature(function).bind(*[None] * NUM_ARGUMENTS[kind], **options)
    except TypeError as error:
        setting = f"filter.custom.'{name}'.kwargs" if kind == "filter" else f"{kind}.kwargs"
        names = ", ".join(option_names(kind, function)) or "none"
        raise ConfigError(
            f"{kind} '{name}': {error}; its options are {names}, set them in {setting}"
        ) from None


def _accepts_any_option(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


# Calls.


class _TimeoutInterrupt(BaseException):
    """Not an Exception, so that `except Exception` in the user's function does not catch it."""


def call_with_timeout(
    name: str, function: Callable[..., Any], *, seconds: float = CALL_TIMEOUT_SECONDS
) -> Callable[..., Any]:
    """The function, with a timeout; its exceptions become a UserCodeError that begins with `name`.

    In the main thread the timeout interrupts Python code. In another thread, and in native code,
    nothing can: INTERRUPT_SECONDS later the process exits with a line on stderr and code 2.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            with _exit_after(name, seconds), _interrupt_after(seconds):
                return function(*arguments, **options)
        except PeraltaError:
            raise
        except _TimeoutInterrupt:
            raise UserCodeError(
                f"{name} did not return within {seconds:g} s; make it faster"
            ) from None
        except Exception as error:
            raise UserCodeError(f"{name} raised {described(error)}; fix the function") from error

    return call


@contextmanager
def _exit_after(name: str, seconds: float) -> Generator[None]:
    """End the process if the block cannot be interrupted; a restart resumes from the journal."""

    def end() -> None:
        sys.stderr.write(
            f"{name} did not return within {seconds:g} s and cannot be interrupted; "
            "make it faster\n"
        )
        sys.stderr.flush()
        os._exit(2)

    timer = threading.Timer(seconds + INTERRUPT_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _interrupt_after(seconds: float) -> Generator[None]:
    """Raise _TimeoutInterrupt in the main thread; restores an alarm that was set before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TimeoutInterrupt

    handler, started = signal.signal(signal.SIGALRM, interrupt), time.monotonic()
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            remaining = max(0.001, remaining - (time.monotonic() - started))
            signal.setitimer(signal.ITIMER_REAL, remaining, interval)
