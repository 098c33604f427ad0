"""Evaluation on held-out problems: assignment to generators, collected answers, avg@n, pass@k.

An example is one held-out problem; a generator sends its answers as one group. They are sampled
while the training continues, perhaps with newer weights than those of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean, stdev

from peralta_zmq.environments.curriculum import bitmap
from peralta_zmq.rollout import Answer, Problem


class Evaluation:
    """Collects the answers to the held-out examples for the weights of one step.

    An example needs one group of `rollouts_per_example[task]` answers.
    """

    def __init__(
        self, step: int, problems: Sequence[Problem], *, rollouts_per_example: Mapping[str, int]
    ) -> None:
        self.step = step
        self.policy_steps: list[int] = []  # of each group; may be above `step` (see the module)
        self._problems = problems
        # Number of answers by problem id. Problems with equal ids share one group.
        self._unanswered = {problem.id: rollouts_per_example[problem.task] for problem in problems}
        self._answers: dict[str, Sequence[tuple[str, float, bool]]] = {}  # by problem id

    def is_answered(self, problem_id: str) -> bool:
        return problem_id not in self._unanswered

    def expects(self, problem_id: str, num_answers: int) -> bool:
        return self._unanswered.get(problem_id) == num_answers

    def add(
        self, problem_id: str, answers: Sequence[tuple[str, float, bool]], *, policy_step: int
    ) -> None:
        """Store the answers (text, reward, is cut off) of a group for which `expects` is True."""
        self.policy_steps.append(policy_step)
        del self._unanswered[problem_id]
        self._answers[problem_id] = answers

    @property
    def num_answered(self) -> int:
        return len(self._answers)

    @property
    def complete(self) -> bool:
        return not self._unanswered

    @property
    def answered(self) -> bytes:
        """Bitmap (see curriculum.py) with 1 for each answered example."""
        return bitmap([problem.id in self._answers for problem in self._problems])

    def answers(self) -> list[tuple[Problem, list[Answer]]]:
        return [
            (problem, [Answer(problem.question, *answer) for answer in self._answers[problem.id]])
            for problem in self._problems
            if problem.id in self._answers
        ]


def examples_for(
    num_examples: int, *, index: int, count: int, answered: Callable[[int], bool]
) -> Iterator[int]:
    """The positions of the examples that are not yet `answered`, for generator `index` of `count`.

    First its own share, every `count`-th example from `index` on, then the others in descending
    order, because their generators answer them in ascending order.
    """
    own_share = range(index, num_examples, count)
    other_shares = (
        example for example in reversed(range(num_examples)) if example % count != index
    )
    return (example for example in chain(own_share, other_shares) if not answered(example))


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k answers is correct.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating large language models trained on code".
    """
    assert 0 <= num_correct <= num_answers and 1 <= k <= num_answers
    return 1 - math.comb(num_answers - num_correct, k) / math.comb(num_answers, k)


def summarize(
    results: Sequence[tuple[Problem, Sequence[Answer]]],
) -> tuple[float, float, dict[str, float]]:
    """Mean reward, its standard error over the examples (NaN for one), and metrics by name.

    The metrics are ENV/avg@n and ENV/pass@1, 2, 4 ... n, where n is the smallest number of answers
    and an answer passes with a reward of 1.
    """
    rewards: dict[str, list[list[float]]] = {}  # of the answers to each example, by environment
    for problem, answers in results:
        rewards.setdefault(problem.task, []).append([answer.reward for answer in answers])
    means = [fmean(answer.reward for answer in answers) for _, answers in results]
    error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else math.nan
    metrics: dict[str, float] = {}
    for env, examples in rewards.items():
        size = min(map(len, examples))
        metrics[f"{env}/avg@{size}"] = fmean(map(fmean, examples))
        for k in sorted({1 << power for power in range(size.bit_length())} | {size}):
            metrics[f"{env}/pass@{k}"] = fmean(
                pass_at_k(len(answers), sum(reward >= 1.0 for reward in answers), k)
                for answers in examples
            )
    return fmean(means), error, metrics
