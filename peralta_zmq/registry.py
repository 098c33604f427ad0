"""The plug points: what each kind of part must do, and the short names of the shipped ones.

Knows names and contracts; imports a part only when a run asks for it by name.
A name with a dot is a part of your own: `my_lab.sudoku` is a module (a task), `my_lab.losses.mine`
or `my_lab.losses:mine` an attribute of one (all others).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, overload

from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Completion, Problem, Request, Rollout, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from peralta_zmq.learning.tokens import Tokens

Kind: TypeAlias = Literal["task", "engine", "loss", "advantage", "filter", "reward"]

TABLES: dict[Kind, dict[str, str]] = {
    "task": {
        "calculator": "peralta_zmq.environments.calculator",
        "countdown": "peralta_zmq.environments.countdown",
        "math_answers": "peralta_zmq.environments.math_answers",
        "reverse_text": "peralta_zmq.environments.reverse_text",
    },
    "engine": {
        "native": "peralta_zmq.engines.native:open_engine",
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
    "reward": {},  # each task has its own
}


class Task(Protocol):
    """A module that asks and judges."""

    def problems(self, split: str, seed: int, **options: Any) -> Iterator[Problem]:
        """The problems of 'train' or 'eval'; options are the settings in [data]."""
        ...

    def reward(self, problem: Problem, completion_text: str) -> float | dict[str, float]:
        """What an answer is worth; a dict names parts that are added up."""
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
        """One completion per request, in any order; `index` tells whose it is.

        Requests are taken as there is room; None among them says that there is nothing to start
        right now. `between_steps` is called wherever newer weights may be applied. Tokens are
        drawn as `sampling.at(step)` says, with the step of the weights that draw them.
        """
        ...

    def apply(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Sample from `weights` from now on, in place. Raises ValueError with nothing changed.

        Nobody samples meanwhile; whoever staged them has seen that they are finite.
        """
        ...

    def cancel(self) -> None:
        """Give up what is under way; `generate` ends."""
        ...


class EngineMaker(Protocol):
    """Makes an engine over a loaded model, for `slots` completions of `max_model_len` tokens.

    With `live` the weights belong to a trainer, which changes them between two `generate`.
    """

    def __call__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        step: int = 0,
        slots: int = 32,
        max_model_len: int = 512,
        live: bool = False,
    ) -> Engine: ...


class Loss(Protocol):
    """A formula over `learning.tokens.Tokens`: a scalar to be made small, and named metrics.

    Both are divided by the totals of the whole step, so that the trainer only adds them up.
    """

    def __call__(self, tokens: Tokens, **options: Any) -> tuple[Tensor, dict[str, Tensor]]: ...


class Advantage(Protocol):
    """K advantages from the K rewards of a group and the generated tokens of each.

    With a keyword `group_adv_norm` that is false, of all rollouts of a step at once.
    """

    def __call__(
        self, rewards: Sequence[float], lengths: Sequence[int], **options: Any
    ) -> list[float]: ...


class Filter(Protocol):
    """Whether a rollout is better not learned from."""

    def __call__(self, rollout: Rollout, **options: Any) -> bool: ...


@overload
def resolve(kind: Literal["task"], name: str) -> Task: ...
@overload
def resolve(kind: Literal["engine"], name: str) -> EngineMaker: ...
@overload
def resolve(kind: Literal["loss"], name: str) -> Loss: ...
@overload
def resolve(kind: Literal["advantage"], name: str) -> Advantage: ...
@overload
def resolve(kind: Literal["filter"], name: str) -> Filter: ...
@overload
def resolve(kind: Kind, name: str) -> Any: ...
def resolve(kind: Kind, name: str) -> Any:
    """The part that `name` stands for.

    Raises ConfigError when the name is unknown, cannot be imported, or is not such a part.
    """
    target = TABLES[kind].get(name) or _own(kind, name)
    if kind == "task" and ":" not in target:
        target += ":"  # a module; without the colon an import error inside it would be hidden
    try:
        part: Any = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{kind} '{name}' cannot be imported: {reason}; "
            "check the name, and that its folder is on PYTHONPATH"
        ) from None
    _check_contract(kind, name, part)
    return part


def _own(kind: Kind, name: str) -> str:
    if ":" in name or (kind == "task" and "." in name):
        return name
    if "." in name:
        module, _, attribute = name.rpartition(".")
        return f"{module}:{attribute}"
    if not TABLES[kind]:
        raise ConfigError(f"unknown {kind} '{name}'; give a dotted name of your own")
    menu = ", ".join(sorted(TABLES[kind]))
    near = get_close_matches(name, TABLES[kind], n=1)
    hint = f"did you mean {near[0]}? Choose" if near else "choose"
    raise ConfigError(
        f"unknown {kind} '{name}'; {hint} one of {menu}, or a dotted name of your own"
    )


def _check_contract(kind: Kind, name: str, part: Any) -> None:
    if kind != "task":
        if not callable(part):
            raise ConfigError(f"{kind} '{name}' is not callable; name a function or class")
        return
    if missing := [each for each in ("problems", "reward") if not callable(getattr(part, each, 0))]:
        raise ConfigError(
            f"task '{name}' has no {missing[0]}(); a task is a module with problems() and reward()"
        )
