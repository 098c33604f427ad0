"""Greedy answers to held-out problems. Knows engines and a reward function; keeps no state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from peralta_zmq import policy
from peralta_zmq.engines import Generates, ask
from peralta_zmq.errors import RewardError, TaskError
from peralta_zmq.rollout import Answer, Problem, Sampling, rollout_of

logger = logging.getLogger(__name__)


def evaluate(
    engine: Generates,
    tokenizer: policy.Tokenizer,
    problems: Sequence[Problem],
    reward: Callable[[Problem, str], float | dict[str, float]],
    *,
    max_completion_length: int,
) -> list[Answer]:
    """One greedy answer to each problem, in their order; without those whose reward fails.

    Raises TaskError when that is all of them.
    """
    sampling = Sampling(temperature=0.0, max_completion_length=max_completion_length)
    answers: dict[str, Answer] = {}
    for problem, (said,) in ask(engine, tokenizer, problems, num_generations=1, sampling=sampling):
        try:
            earned = rollout_of(said, reward(problem, said.text)).reward
        except RewardError as error:
            logger.warning("left an answer out of the evaluation: %s", error)
            continue
        answers[problem.id] = Answer(problem.messages[-1].content, said.text, earned)
    if not answers:
        raise TaskError("no held-out answer could be rewarded; the log says why")
    return [answers[problem.id] for problem in problems if problem.id in answers]
