"""Problems to completions, with any engine.

A request asks for one completion of a prompt. The requests for the same problem form a group, and
the completions of a group are siblings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import numpy as np

from peralta_zmq import models
from peralta_zmq.engines.episodes import TURN_STRIDE, Episodes, Replies
from peralta_zmq.errors import TaskError
from peralta_zmq.registry import Engine
from peralta_zmq.rollout import (
    Answer,
    Completion,
    GroupSampling,
    Problem,
    Request,
    Sampling,
    Score,
)

CANCEL_SECONDS = 0.2  # between two calls of `is_cancelled` while rewards are computed
OnGroup: TypeAlias = Callable[[Problem, list[Completion]], None]
logger = logging.getLogger(__name__)


class GroupSampler:
    """Samples groups with an engine, over several calls of `sample`.

    A call that is cancelled leaves groups in flight; the next call resumes them. With `replies`,
    completions have up to `max_turns` turns (see episodes.py).
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: models.Tokenizer,
        *,
        num_generations: int,
        replies: Replies | None = None,
        max_turns: int = 1,
    ) -> None:
        self._engine, self._tokenizer, self._size = engine, tokenizer, num_generations
        self._episodes = Episodes(engine, tokenizer, replies, max_turns=max_turns)
        self._num_started = 0  # completions
        self._in_flight: dict[int, _Group] = {}  # by number, the index of the first completion
        self._failed: set[int] = set()  # numbers of the groups in flight at the last failure
        self._numbers: dict[int, int] = {}  # index of each completion -> number of its group

    @property
    def num_in_flight(self) -> int:
        """Number of groups whose completions have not all ended."""
        return len(self._in_flight)

    @property
    def num_resumed(self) -> int:
        """Number of completions that were resumed so far, after some tokens."""
        return self._episodes.num_resumed

    def sample(
        self,
        problems: Iterable[Problem | None],
        on_group: OnGroup,
        *,
        sampling: Sampling,
        overrides: Mapping[str, GroupSampling] = {},
        between_steps: Callable[[], None] | None = None,
    ) -> None:
        """Call `on_group` for each problem with its completions when all of them have ended.

        The next problem is read when the engine can start another completion. `problems` may yield
        None for "no problem is available now"; the engine then continues and reads again later. The
        engine calls `between_steps` between decode steps (one new token for every completion in
        flight); `between_steps` may apply newer weights or cancel the engine. After an exception
        of the engine, the completions in flight are resumed as well, unless `drop` is called.
        `overrides` replaces `num_generations` and `sampling` for the environments with these labels
        (Problem.task).
        """
        self._episodes.resume()

        def requests() -> Iterator[Request | None]:
            yield from self._episodes.requests()
            for problem in chain(problems, self._episodes.unfinished()):
                if problem is None:
                    yield None
                else:
                    self._start(problem, *overrides.get(problem.task, (self._size, None)))
                yield from self._episodes.requests()

        def receive_replies() -> None:
            for completion in self._episodes.receive_replies():
                self._add(completion, on_group)
            if between_steps is not None:
                between_steps()

        for turn in self._engine.generate(requests(), sampling, receive_replies):
            if turn.is_partial:
                self._episodes.interrupt_turn(turn)
            elif (completion := self._episodes.end_turn(turn)) is not None:
                self._add(completion, on_group)

    def drop(self, *, older_than: int | None = None) -> int:
        """Drop the groups in flight that have a token of weights before policy step `older_than`.

        None drops all groups. Returns the number of dropped groups. Not during a call of `sample`.
        """
        numbers = set(self._in_flight)
        if older_than is not None:
            ended = (each for group in self._in_flight.values() for each in group.completions)
            numbers = {
                self._number_of(completion)
                for completion in chain(ended, self._episodes.completions())
                if _has_older_token(completion, older_than)
            }
        return self._drop(numbers)

    def drop_failed(self) -> int:
        """Drop the groups that were in flight at an earlier call; returns their number.

        To be called after each failure of the engine; such groups may be its cause.
        """
        num_dropped = self._drop(self._failed & self._in_flight.keys())
        self._failed = set(self._in_flight)
        return num_dropped

    def _drop(self, numbers: set[int]) -> int:
        """Drop the groups with these numbers; returns how many they are."""
        for number in numbers:
            self._episodes.drop(self._remove(number).indices)
        return len(numbers)

    def _start(self, problem: Problem, size: int, sampling: Sampling | None) -> None:
        """Start a group of `size` completions; `sampling` is that of its requests."""
        tokens = problem.input_token_ids or models.chat_prompt(
            self._tokenizer, problem.messages, **problem.chat_template_kwargs
        )
        prompt_ids, number = np.array(tokens, np.int32), self._num_started
        self._num_started += size
        self._in_flight[number] = group = _Group(problem, range(number, number + size))
        for index in group.indices:
            self._numbers[index] = number
            self._episodes.start(problem, Request(index, prompt_ids, sampling=sampling))

    def _add(self, completion: Completion, on_group: OnGroup) -> None:
        """Add a completion to its group, and report the group if it is the last one."""
        number = self._number_of(completion)
        group = self._in_flight[number]
        group.completions.append(completion)
        if len(group.completions) == len(group.indices):
            self._remove(number)
            on_group(group.problem, sorted(group.completions, key=lambda each: each.index))

    def _remove(self, number: int) -> _Group:
        group = self._in_flight.pop(number)
        for index in group.indices:
            del self._numbers[index]
        return group

    def _number_of(self, completion: Completion) -> int:
        return self._numbers[completion.index % TURN_STRIDE]


@dataclass(slots=True)
class _Group:
    """A group in flight."""

    problem: Problem
    indices: range  # of the first turns of its completions
    completions: list[Completion] = field(default_factory=list[Completion])  # that have ended


def _has_older_token(completion: Completion, step: int) -> bool:
    """Whether weights before policy step `step` sampled a token."""
    steps = completion.policy_steps  # -1 on tokens that are not sampled
    return bool(((steps >= 0) & (steps < step)).any())


def generate_groups(
    engine: Engine,
    tokenizer: models.Tokenizer,
    problems: Iterable[Problem | None],
    on_group: OnGroup,
    *,
    num_generations: int,
    sampling: Sampling,
    overrides: Mapping[str, GroupSampling] = {},
    replies: Replies | None = None,
    max_turns: int = 1,
    between_steps: Callable[[], None] | None = None,
) -> None:
    """Sample groups with one call of a GroupSampler; drops those in flight when it ends."""
    sampler = GroupSampler(
        engine, tokenizer, num_generations=num_generations, replies=replies, max_turns=max_turns
    )
    try:
        sampler.sample(
            problems, on_group, sampling=sampling, overrides=overrides, between_steps=between_steps
        )
    finally:
        sampler.drop()


def evaluate(
    engine: Engine,
    tokenizer: models.Tokenizer,
    problems: Sequence[Problem],
    score: Callable[[Problem, Sequence[Completion]], Future[list[Score]]],
    *,
    sampling: Sampling,
    num_generations: int = 1,
    overrides: Mapping[str, GroupSampling] = {},
    replies: Replies | None = None,
    max_turns: int = 1,
    report_progress: Callable[[int], None] = lambda num_done: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> list[tuple[Problem, list[Answer]]]:
    """Return each problem with its scored answers, in the order of `problems`.

    `score` starts the computation of the rewards of a problem's completions. `overrides`, `replies`
    and `max_turns` are those of `generate_groups`. `report_progress` receives the number of scored
    problems. When `is_cancelled` returns True, the engine is
    cancelled, and only the problems that are scored by then are returned. A problem is skipped and
    logged if the reward function fails for it. Raises TaskError if it fails for all problems.
    """
    answered: dict[int, list[Answer]] = {}  # id() of a problem -> its answers
    failure: TaskError | None = None
    sampled: list[tuple[Problem, list[Completion], Future[list[Score]]]] = []

    def on_group(problem: Problem, completions: list[Completion]) -> None:
        sampled.append((problem, completions, score(problem, completions)))
        report_progress(sum(scores.done() for _, _, scores in sampled))

    def between_steps() -> None:
        if is_cancelled():
            engine.cancel()

    generate_groups(
        engine,
        tokenizer,
        problems,
        on_group,
        num_generations=num_generations,
        sampling=sampling,
        overrides=overrides,
        replies=replies,
        max_turns=max_turns,
        between_steps=between_steps,
    )
    for num_done, (problem, completions, scores) in enumerate(sampled, start=1):
        while not (scores.done() or is_cancelled()):
            wait([scores], timeout=CANCEL_SECONDS)
        if not scores.done():
            continue
        report_progress(num_done)
        try:
            answered[id(problem)] = [
                Answer(
                    problem.question,
                    completion.transcript,
                    result.reward,
                    cut_off=completion.finish_reason == "length",
                )
                for completion, result in zip(completions, scores.result(), strict=True)
            ]
        except TaskError as error:
            failure = error
            logger.warning("not evaluated: problem=%s reason=%s", problem.id, error)
    if failure is not None and not answered:
        raise failure
    return [(problem, answered[id(problem)]) for problem in problems if id(problem) in answered]
