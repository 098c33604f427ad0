"""Plug-in registry: protocols, names and options of tasks, engines, losses, advantages, filters.

A name without a dot is a key of TABLES. A dotted name is a user's plug-in: a module for a task
(`my_lab.sudoku`), an attribute of a module for all other kinds (`my_lab.losses.mine` or
`my_lab.losses:mine`). A plug-in is imported only when a run uses it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, overload

from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Completion, Problem, Request, Rollout, Sampling

Kind: TypeAlias = Literal["task", "engine", "loss", "advantage", "filter", "reward"]

# Import paths of the shipped plug-ins.
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
        "gibberish": "peralta_zmq.learning.advantages:gibberish",
        "repetition": "peralta_zmq.learning.advantages:repetition",
        "overlong": "peralta_zmq.learning.advantages:overlong",
    },
    "reward": {},  # every task defines its own
}
NUM_ARGUMENTS: dict[Kind, int] = {"loss": 1, "advantage": 2, "filter": 1}  # without the options
REQUIRED_FUNCTIONS: dict[Kind, tuple[str, ...]] = {
    "task": ("problems", "reward"),
    "engine": ("open", "open_live"),
}


# Protocols.


class Task(Protocol):
    """A module with problems and a reward function."""

    def problems(self, split: str, seed: int, **options: Any) -> Iterator[Problem]:
        """The problems of split 'train' or 'eval'; `options` are the settings in [data]."""
        ...

    def reward(self, problem: Problem, completion_text: str) -> float | dict[str, float]:
        """The reward of a completion; a dict holds named parts, which are summed."""
        ...


class Engine(Protocol):
    """Samples completions with the weights of optimizer step `step`."""

    step: int

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """One completion per request, in any order; `index` is the index of its request.

        The engine takes the next request when a slot is free; None means that no request is ready
        yet. It calls `between_steps` whenever newer weights may be applied. It samples with
        `sampling.at(step)`, where `step` is the step of the weights in use.
        """
        ...

    def apply(self, weights: Mapping[str, Any], *, step: int, folder: Path | None = None) -> None:
        """Replace the weights in place by a newer version.

        Called between two decode steps, also with completions in flight. `weights` has all tensors
        of the version by name; they are finite and valid during the call only. `folder` has the
        version's files; None if it exists in memory only. Raises ValueError, with nothing changed,
        if the tensors do not fit the model.
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
        """An engine for the weight version in `folder`, which `from_pretrained` can load."""
        ...

    def open_live(
        self, model: Any, tokenizer: Any, *, slots: int = ..., max_model_len: int = ...
    ) -> Engine:
        """An engine that shares the weights of `model`, to evaluate it during training.

        The trainer changes the weights between two calls of `generate`.
        """
        ...


class Loss(Protocol):
    """A function of `learning.losses.Tokens` that returns a scalar tensor and named metrics.

    It divides both by the totals of the whole step, because the trainer sums them over
    micro-batches.
    """

    def __call__(self, tokens: Any, **options: Any) -> tuple[Any, dict[str, Any]]: ...


class Advantage(Protocol):
    """One advantage per rollout of a group, from all rewards and numbers of generated tokens.

    With its option `group_adv_norm` set to false, it gets all rollouts of a step at once.
    """

    def __call__(
        self, rewards: Sequence[float], lengths: Sequence[int], **options: Any
    ) -> list[float]: ...


class Filter(Protocol):
    """Returns True for a rollout to exclude from training."""

    def __call__(self, rollout: Rollout, **options: Any) -> bool: ...


# Names.


@overload
def resolve(kind: Literal["task"], name: str) -> Task: ...
@overload
def resolve(kind: Literal["engine"], name: str) -> EngineFactory: ...
@overload
def resolve(kind: Kind, name: str) -> Any: ...
def resolve(kind: Kind, name: str) -> Any:
    """The plug-in with a short or dotted name.

    Raises ConfigError if the name is unknown, cannot be imported, or does not fit the protocol.
    """
    target = TABLES[kind].get(name) or _import_path(kind, name)
    if kind == "task" and ":" not in target:
        target += ":"  # a module; only with a colon resolve_name reports an import error inside it
    try:
        plugin: Any = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{kind} '{name}' cannot be imported: {reason}; "
            "check the name, and that its folder is on PYTHONPATH"
        ) from None
    for function in REQUIRED_FUNCTIONS.get(kind, ()):
        if not callable(getattr(plugin, function, None)):
            raise ConfigError(
                f"{kind} '{name}' has no {function}(); add it, or name another {kind}"
            )
    if kind != "task" and not callable(plugin):
        raise ConfigError(f"{kind} '{name}' is not callable; name a function or class")
    return plugin


def is_shipped(kind: Kind, name: str) -> bool:
    """Whether the name is a key of TABLES."""
    return name in TABLES[kind]


def _import_path(kind: Kind, name: str) -> str:
    """The argument of `pkgutil.resolve_name` for a dotted name."""
    if ":" in name or (kind == "task" and "." in name):
        return name
    if "." in name:
        module, _, attribute = name.rpartition(".")
        return f"{module}:{attribute}"
    if not TABLES[kind]:
        raise ConfigError(f"unknown {kind} '{name}'; give the dotted name of your own {kind}")
    choices = ", ".join(sorted(TABLES[kind]))
    similar = get_close_matches(name, TABLES[kind], n=1)
    hint = f"did you mean {similar[0]}? Choose" if similar else "choose"
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

    `settings` are the non-default options in the config section of the kind, `kwargs` the options
    of a user's function. Raises ConfigError for an option that the function does not have.
    """
    for option in settings:
        if not _accepts(kind, name, option):
            names = [other for other in TABLES[kind] if _accepts(kind, other, option)]
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
    """The names of a function's options, from its signature."""
    parameters = list(inspect.signature(function).parameters.values())[NUM_ARGUMENTS[kind] :]
    return [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The default values of a function's options."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


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


def _accepts(kind: Kind, name: str, option: str) -> bool:
    """True if the function with this name has the option, or takes any as `**options`."""
    function: Callable[..., Any] = resolve(kind, name)
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return takes_all or option in option_names(kind, function)
