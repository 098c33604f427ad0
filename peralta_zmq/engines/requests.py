"""Problems to completions, with any engine.

A request asks for one completion of a prompt. The requests for the same problem form a group, and
the completions of a group are siblings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import chain, count

import numpy as np

from peralta_zmq import models
from peralta_zmq.engines.episodes import Episodes, Replies
from peralta_zmq.errors import TaskError
from peralta_zmq.registry import Engine
from peralta_zmq.rollout import Answer, Completion, Problem, Request, Sampling, Score

CANCEL_SECONDS = 0.2  # between two calls of `is_cancelled` while rewards are computed
logger = logging.getLogger(__name__)


def generate_groups(
    engine: Engine,
    tokenizer: models.Tokenizer,
    problems: Iterable[Problem | None],
    on_group: Callable[[Problem, list[Completion]], None],
    *,
    num_generations: int,
    sampling: Sampling,
    replies: Replies | None = None,
    max_turns: int = 1,
    between_steps: Callable[[], None] | None = None,
) -> None:
    """Call `on_group` for each problem with its completions when all of them have ended.

    The next problem is read when the engine can start another completion. `problems` may yield None
    for "no problem is available now"; the engine then continues and reads again later. The engine
    calls `between_steps` between decode steps (one new token for every completion in flight);
    `between_steps` may apply newer weights or cancel the engine. With `replies`, completions have
    up to `max_turns` turns (see episodes.py).
    """
    groups = _Groups(num_generations, on_group)
    episodes = Episodes(engine, tokenizer, replies, max_turns=max_turns)

    def requests() -> Iterator[Request | None]:
        for problem in chain(problems, episodes.unfinished()):
            if problem is None:
                yield None
            else:
                tokens = problem.input_token_ids or models.chat_prompt(
                    tokenizer, problem.messages, **problem.chat_template_kwargs
                )
                prompt_ids = np.array(tokens, np.int32)
                for index in groups.start(problem):
                    yield episodes.start(problem, Request(index, prompt_ids))
            yield from episodes.next_turns()

    def receive_replies() -> None:
        for completion in episodes.receive_replies():
            groups.add(completion)
        if between_steps is not None:
            between_steps()

    try:
        for turn in engine.generate(requests(), sampling, receive_replies):
            if (completion := episodes.end_turn(turn)) is not None:
                groups.add(completion)
    finally:
        episodes.cancel()


class _Groups:
    """The groups in flight, of `size` completions each."""

    def __init__(self, size: int, on_group: Callable[[Problem, list[Completion]], None]) -> None:
        self._size, self._on_group = size, on_group
        self._numbers = count()
        self._in_flight: dict[int, tuple[Problem, list[Completion]]] = {}  # by number

    def start(self, problem: Problem) -> range:
        """Start a group; returns the indices of its completions."""
        number = next(self._numbers)
        self._in_flight[number] = problem, []
        return range(number * self._size, (number + 1) * self._size)

    def add(self, completion: Completion) -> None:
        """Add a completion to its group, and report the group if it is the last one."""
        number = completion.index // self._size
        problem, siblings = self._in_flight[number]
        siblings.append(completion)
        if len(siblings) == self._size:
            del self._in_flight[number]
            self._on_group(problem, sorted(siblings, key=lambda sibling: sibling.index))


def evaluate(
    engine: Engine,
    tokenizer: models.Tokenizer,
    problems: Sequence[Problem],
    score: Callable[[Problem, Sequence[Completion]], Future[list[Score]]],
    *,
    sampling: Sampling,
    num_generations: int = 1,
    replies: Replies | None = None,
    max_turns: int = 1,
    report_progress: Callable[[int], None] = lambda num_done: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> list[tuple[Problem, list[Answer]]]:
    """Return each problem with its scored answers, in the order of `problems`.

    `score` starts the computation of the rewards of a problem's completions. `replies` and
    `max_turns` are those of `generate_groups`. `report_progress`
    receives the number of scored problems. When `is_cancelled` returns True, the engine is
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
                Answer(problem.question, completion.transcript, result.reward)
                for completion, result in zip(completions, scores.result(), strict=True)
            ]
        except TaskError as error:
            failure = error
            logger.warning("not evaluated: problem=%s reason=%s", problem.id, error)
    if failure is not None and not answered:
        raise failure
    return [(problem, answered[id(problem)]) for problem in problems if id(problem) in answered]
