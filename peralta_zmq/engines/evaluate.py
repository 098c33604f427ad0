"""Greedy answers to held-out problems. Knows engines and a reward function; keeps no state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peralta_zmq import policy
from peralta_zmq.engines import Generates, ask
from peralta_zmq.rollout import Answer, Problem, Sampling, rollout_of

TOGETHER = 64  # problems answered in one batch


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
    answers: dict[int, Answer] = {}
    for start in range(0, len(problems), TOGETHER):
        asked = problems[start : start + TOGETHER]
        for index, (said,) in ask(engine, tokenizer, asked, num_generations=1, sampling=sampling):
            problem = asked[index]
            earned = rollout_of(said, reward(problem, said.text)).reward
            answers[start + index] = Answer(problem.messages[-1].content, said.text, earned)
    return [answers[index] for index in range(len(problems))]
