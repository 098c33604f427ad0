"""Answers to held-out problems. Knows engines and a reward function; keeps no state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from peralta_zmq import models
from peralta_zmq.engines import Generates, ask
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Answer, Problem, Sampling, rollout_of

logger = logging.getLogger(__name__)


def evaluate(
    engine: Generates,
    tokenizer: models.Tokenizer,
    problems: Sequence[Problem],
    reward: Callable[[Problem, str], float | dict[str, float]],
    *,
    sampling: Sampling,
    num_generations: int = 1,
    reach: Callable[[int], None] = lambda done: None,
    between_steps: Callable[[], None] | None = None,
) -> list[tuple[Problem, list[Answer]]]:
    """`num_generations` answers to each problem, in the order of the problems.

    `reach` is told how many problems are done; `between_steps` may cancel the engine, and those
    that were answered by then are returned. A problem whose reward fails is left out and
    logged; raises TaskError when all are.
    """
    places = {id(problem): place for place, problem in enumerate(problems)}
    answers: dict[int, list[Answer]] = {}
    failure: TaskError | None = None
    asked = ask(
        engine, tokenizer, problems, num_generations=num_generations, sampling=sampling,
        between_steps=between_steps,
    )  # fmt: skip
    for done, (problem, completions) in enumerate(asked, start=1):
        try:
            answers[places[id(problem)]] = [
                Answer(
                    problem.question, each.text, rollout_of(each, reward(problem, each.text)).reward
                )
                for each in completions
            ]
        except TaskError as error:
            failure = error
            logger.warning("not evaluated: problem=%s reason=%s", problem.id, error)
        reach(done)
    if failure is not None and not answers:
        raise failure
    return [(problems[place], answers[place]) for place in sorted(answers)]
