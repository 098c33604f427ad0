"""Greedy answers to held-out problems. Knows engines and a reward function; keeps no state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peralta_zmq import policy
from peralta_zmq.engines import Generates, ask
from peralta_zmq.rollout import Answer, Problem, Sampling, rollout_of


def evaluate(
    engine: Generates,
    tokenizer: policy.Tokenizer,
    problems: Sequence[Problem],
    reward: Callable[[Problem, str], float | dict[str, float]],
    *,
    max_completion_length: int,
) -> list[Answer]:
    """One greedy answer to each problem, in their order."""
    sampling = Sampling(temperature=0.0, max_completion_length=max_completion_length)
    answers: dict[str, Answer] = {}
    for problem, (said,) in ask(engine, tokenizer, problems, num_generations=1, sampling=sampling):
        earned = rollout_of(said, reward(problem, said.text)).reward
        answers[problem.id] = Answer(problem.question, said.text, earned)
    return [answers[problem.id] for problem in problems]
