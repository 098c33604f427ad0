"""Reward functions: their signatures, calls, and the checks of what they return.

The reward function of a task scores one completion. It returns a number, a Score, or a dict of
named terms to be summed:

    reward(problem, completion_text, **options)

Its further parameters get the entries of `problem.info` with their names, and with several turns
`messages`, those after the prompt; `completion_text` is then the text of the last turn. A function
with TRL's signature scores all completions of a problem (a group) in one call; None means that it
does not apply to a completion:

    f(prompts, completions, completion_ids, **columns) -> list of numbers or None

A function that raises or returns something else causes a RewardError, never a reward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, cast

from peralta_zmq.errors import RewardError, described
from peralta_zmq.rollout import MAX_REWARD, Message, Problem, Score
from peralta_zmq.signatures import Signature

# For one completion; None = the function does not apply.
Reward: TypeAlias = "float | dict[str, float] | Score | None"


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function with its options as keyword arguments."""

    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Its own code limits its running time. Any other is imported and called by reward workers.
    is_bounded: bool = False
    takes_group: bool = False  # TRL's signature
    label: str = ""  # in metrics
    weight: float = 1.0
    path: str = ""  # MODULE:NAME by which it is imported; empty: as the function says

    @property
    def name(self) -> str:
        return self.path or f"{self.function.__module__}:{self.function.__qualname__}"

    @property
    def is_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, (self.function, self.function.__call__)))

    def calls(
        self,
        problem: Problem,
        texts: Sequence[str],
        token_ids: Sequence[Sequence[int]],
        messages: Sequence[Sequence[Message]] = (),
    ) -> list[RewardCall]:
        """The calls that score the completions of a problem; arguments as in Functions.score."""
        common = self.name, self.is_async, self.takes_group, self.options, problem
        if self.takes_group:
            return [RewardCall(*common, tuple(texts), tuple(token_ids), tuple(messages))]
        episodes = [(each,) for each in messages] or [()] * len(texts)
        return [
            RewardCall(*common, (text,), messages=episode)
            for text, episode in zip(texts, episodes, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One call of a reward function, for one completion or for all completions of a problem."""

    name: str  # of the function
    is_async: bool
    takes_group: bool
    options: Mapping[str, Any]
    problem: Problem
    texts: tuple[str, ...]
    token_ids: tuple[Sequence[int], ...] = ()
    messages: tuple[Sequence[Message], ...] = ()
    reports_timeout: ClassVar[bool] = False  # see ReplyCall

    @property
    def names(self) -> tuple[str]:
        return (self.name,)

    @property
    def num_completions(self) -> int:
        return len(self.texts)

    def result_of(self, result: list[Reward] | str) -> list[Reward]:
        if isinstance(result, str):
            raise RewardError(
                f"reward function {self.name} {result}, for a completion of problem "
                f"{self.problem.id}; fix the function (its timeout is task.reward_timeout)"
            )
        return result

    def start(self, function: Callable[..., Any]) -> Any:
        """Call the function; returns its result, or a coroutine."""
        if self.takes_group:
            available = group_arguments(self.problem, self.texts, self.token_ids, self.messages)
        else:
            available = completion_arguments(self.problem, self.messages)
        positional = () if self.takes_group else (self.problem, self.texts[0])
        arguments = Signature(function, len(positional)).accepted(available)
        return function(*positional, **{**arguments, **self.options})

    def checked(self, result: object) -> list[Reward] | str:
        try:
            if not self.takes_group:
                num_turns = num_completions(self.messages[0]) if self.messages else 1
                return [checked_reward(result, num_turns=num_turns)]
            values = _checked_list(result)
            if len(values) != len(self.texts):
                return f"returned {len(values)} rewards for {len(self.texts)} completions"
            return [None if value is None else checked_reward(value) for value in values]
        except ValueError as error:
            return f"returned {error}"


def outcome(call: Any, *functions: Callable[..., Any]) -> Any:
    """The checked result of a RewardCall or a ReplyCall of these functions; a failure is text."""
    try:
        return call.checked(call.start(*functions))
    except Exception as error:  # noqa: BLE001  a user's function may raise anything
        return f"raised {described(error)}"


async def async_outcome(call: Any, *functions: Callable[..., Any]) -> Any:
    try:
        return call.checked(await call.start(*functions))
    except Exception as error:  # noqa: BLE001  a user's function may raise anything
        return f"raised {described(error)}"


def num_completions(messages: Sequence[Message]) -> int:
    """Number of completions among the messages of an episode after the prompt."""
    return sum(message.role == "assistant" for message in messages)


def is_group_function(function: Callable[..., Any]) -> bool:
    """Whether a function has TRL's signature."""
    return bool({"completions", "completion_ids"} & {*Signature(function).names})


def completion_arguments(
    problem: Problem, messages: Sequence[Sequence[Message]] = ()
) -> dict[str, Any]:
    return {**problem.info, **({"messages": list(messages[0])} if messages else {})}


def group_arguments(
    problem: Problem,
    texts: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    messages: Sequence[Sequence[Message]] = (),
) -> dict[str, list[Any]]:
    """The arguments of a function with TRL's signature: lists with one entry per completion.

    Prompts and completions are lists of messages, as TRL passes them for conversational data, or
    texts for the text of a row. With several turns, a completion has the messages of all turns.
    """
    prompt: object = problem.question if problem.is_text else _as_dicts(problem.messages)
    if problem.is_text and not messages:
        completions: list[Any] = list(texts)
    else:
        turns = messages or [[Message("assistant", text)] for text in texts]
        completions = list(map(_as_dicts, turns))
    columns = {"answer": problem.answer, "id": problem.id, "task": problem.task, **problem.info}
    return {
        **{name: [value] * len(texts) for name, value in columns.items()},
        "prompts": [prompt] * len(texts),
        "completions": completions,
        "completion_ids": [list(ids) for ids in token_ids],
    }


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [
        {"role": each.role, "content": each.content} | ({"name": each.name} if each.name else {})
        for each in messages
    ]


# Results.


def score_of(
    problem: Problem, functions: Sequence[RewardFunction], rewards: Sequence[Reward]
) -> Score:
    """The weighted sum of the rewards of a completion, with the unweighted ones as its parts.

    The terms of a single function keep their names. Raises RewardError if no function applies, or
    if a sum is too large.
    """
    totals = {
        function.label: (function.weight, _total(reward))
        for function, reward in zip(functions, rewards, strict=True)
        if reward is not None
    }
    if not totals:
        names = ", ".join(function.name for function in functions)
        raise RewardError(
            f"{names} returned None for a completion of problem {problem.id}; let one of "
            "task.reward return a number for each completion"
        )
    total = math.fsum(weight * reward for weight, reward in totals.values())
    turn_rewards = tuple(
        function.weight * value
        for function, reward in zip(functions, rewards, strict=True)
        if isinstance(reward, Score)  # one of them at most: the reward of the task
        for value in reward.turn_rewards
    )
    for value in (total, *turn_rewards):
        if abs(value) > MAX_REWARD:
            raise RewardError(
                f"the weighted sum of rewards {value:g} of a completion of problem {problem.id} is "
                f"beyond {MAX_REWARD:g}; lower task.reward_weights"
            )
    parts: Mapping[str, float] = {label: each for label, (_, each) in totals.items() if label}
    if len(functions) == 1 and isinstance(rewards[0], dict):
        parts = rewards[0]
    elif len(functions) == 1 and isinstance(rewards[0], Score):
        parts = rewards[0].rewards
    return Score(total, parts, turn_rewards)


def _total(reward: float | dict[str, float] | Score) -> float:
    if isinstance(reward, Score):
        return reward.reward
    return math.fsum(reward.values()) if isinstance(reward, dict) else reward


def checked_reward(result: object, *, num_turns: int = 0) -> float | dict[str, float] | Score:
    """The result of a reward function for one completion, with floats.

    Raises ValueError unless the result, or each named term, is a number and their sum is within
    MAX_REWARD. The rewards of turns in a Score must be `num_turns` numbers, or none.
    """
    if isinstance(result, Score):
        total = checked_reward(result.reward)
        rewards = checked_reward(result.rewards)
        if not (isinstance(total, float) and isinstance(rewards, dict)):
            raise ValueError(f"{_short_repr(result)}, which is not a Score of numbers")
        turns = _checked_list(result.turn_rewards)
        if len(turns) not in (0, num_turns):
            raise ValueError(f"{len(turns)} turn_rewards for {num_turns} completions of an episode")
        return Score(total, rewards, tuple(cast(float, checked_reward(each)) for each in turns))
    is_mapping = isinstance(result, Mapping)
    values = cast("Mapping[object, object]", result if is_mapping else {"": result})
    try:
        terms = {str(name).encode().decode(): _to_float(each) for name, each in values.items()}
        total = math.fsum(terms.values())  # raises for infinities of both signs
    except UnicodeEncodeError as error:
        raise ValueError(f"a term whose name is no valid text: {error}") from None
    except Exception:  # noqa: BLE001  a user's object may raise anything
        raise ValueError(f"{_short_repr(result)}, which is not a number") from None
    if not abs(total) <= MAX_REWARD:  # also true for NaN
        limits = f"-{MAX_REWARD:g} to {MAX_REWARD:g}"
        raise ValueError(f"{total}, which is not a number from {limits}")
    return terms if is_mapping else total


def checked_score(result: object) -> Score:
    """The score that an agent gives; raises ValueError as `checked_reward`."""
    reward = checked_reward(result)
    if isinstance(reward, Score):
        return reward
    return Score(_total(reward), reward if isinstance(reward, dict) else {})


def _checked_list(result: object) -> list[object]:
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
        raise ValueError(f"{_short_repr(result)}, which is not a list of numbers")
    try:
        values = list(cast("Iterable[object]", result))
    except Exception:  # noqa: BLE001  a user's object may raise anything
        raise ValueError(f"{_short_repr(result)}, which is not a list of numbers") from None
    for value in values:
        if isinstance(value, (Mapping, Score)):
            raise ValueError(f"{_short_repr(value)} for a completion, which is not a number")
    return values


def _to_float(value: object) -> float:
    """Like float(), but raises TypeError for text and for objects that are no number."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError
    return float(cast("Any", value))


def _short_repr(value: object) -> str:
    try:
        return f"{' '.join(repr(value).split()):.80}"
    except Exception:  # noqa: BLE001  e.g. an int of more than 4300 digits
        return f"a value of type {type(value).__name__}"
