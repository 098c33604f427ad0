"""Problems to completions, with any engine.

A request asks for one completion of a prompt. The requests for the same problem form a group, and
the completions of a group are siblings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import count

import numpy as np

from peralta_zmq import models
from peralta_zmq.errors import TaskError
from peralta_zmq.registry import Engine
from peralta_zmq.rollout import Answer, Completion, Problem, Request, Sampling, Score

CANCEL_SECONDS = 0.2  # between two calls of `is_cancelled` while rewards are computed
logger = logging.getLogger(__name__)


def generate_groups(
    engine: Engine,
    tokenizer: models.Tokenizer,
    problems: Iterable[Problem | None],
    *,
    num_generations: int,
    sampling: Sampling,
    between_steps: Callable[[], None] | None = None,
) -> Iterator[tuple[Problem, list[Completion]]]:
    """Yield each problem with its completions when all of its completions have ended.

    The next problem is read when the engine can start another completion. `problems` may yield None
    for "no problem is available now"; the engine then continues and reads again later. The engine
    calls `between_steps` between decode steps (one new token for every completion in flight);
    `between_steps` may apply newer weights or cancel the engine.
    """
    in_flight: dict[int, tuple[Problem, list[Completion]]] = {}  # by group number

    def requests() -> Iterator[Request | None]:
        group_numbers = count()
        for problem in problems:
            if problem is None:
                yield None
                continue
            group = next(group_numbers)
            in_flight[group] = problem, []
            tokens = problem.input_token_ids or models.chat_prompt(
                tokenizer, problem.messages, **problem.chat_template_kwargs
            )
            prompt_ids = np.array(tokens, np.int32)
            for sibling in range(num_generations):
                yield Request(group * num_generations + sibling, prompt_ids)

    for completion in engine.generate(requests(), sampling, between_steps):
        group = completion.index // num_generations
        problem, siblings = in_flight[group]
        siblings.append(completion)
        if len(siblings) == num_generations:
            del in_flight[group]
            yield problem, sorted(siblings, key=lambda sibling: sibling.index)


def evaluate(
    engine: Engine,
    tokenizer: models.Tokenizer,
    problems: Sequence[Problem],
    score: Callable[[Problem, Sequence[Completion]], Future[list[Score]]],
    *,
    sampling: Sampling,
    num_generations: int = 1,
    report_progress: Callable[[int], None] = lambda num_done: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> list[tuple[Problem, list[Answer]]]:
    """Return each problem with its scored answers, in the order of `problems`.

    `score` starts the computation of the rewards of a problem's completions. `report_progress`
    receives the number of scored problems. When `is_cancelled` returns True, the engine is
    cancelled, and only the problems that are scored by then are returned. A problem is skipped and
    logged if the reward function fails for it. Raises TaskError if it fails for all problems.
    """
    answered: dict[int, list[Answer]] = {}  # id() of a problem -> its answers
    failure: TaskError | None = None
    sampled: list[tuple[Problem, list[Completion], Future[list[Score]]]] = []

    def between_steps() -> None:
        if is_cancelled():
            engine.cancel()

    groups = generate_groups(
        engine,
        tokenizer,
        problems,
        num_generations=num_generations,
        sampling=sampling,
        between_steps=between_steps,
    )
    for problem, completions in groups:
        sampled.append((problem, completions, score(problem, completions)))
        report_progress(sum(scores.done() for _, _, scores in sampled))
    for num_done, (problem, completions, scores) in enumerate(sampled, start=1):
        while not (scores.done() or is_cancelled()):
            wait([scores], timeout=CANCEL_SECONDS)
        if not scores.done():
            continue
        report_progress(num_done)
        try:
            answered[id(problem)] = [
                Answer(problem.question, completion.text, result.reward)
                for completion, result in zip(completions, scores.result(), strict=True)
            ]
        except TaskError as error:
            failure = error
            logger.warning("not evaluated: problem=%s reason=%s", problem.id, error)
    if failure is not None and not answered:
        raise failure
    return [(problem, answered[id(problem)]) for problem in problems if id(problem) in answered]
