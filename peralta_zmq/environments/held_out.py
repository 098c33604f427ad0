"""Held-out examples: who answers which, what is answered, and what the answers come to.

Knows rewards and numbers of examples; knows nothing of models, sockets or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean

from peralta_zmq.rollout import Answer, Problem

PASSED = 1.0  # the reward from which on an answer is right


class Evaluation:
    """The answers that generators give to held-out examples with the weights of `step`.

    An example is answered by the first group of `rollouts_per_example` that comes for it.
    """

    def __init__(
        self, step: int, problems: Sequence[Problem], *, rollouts_per_example: int
    ) -> None:
        self.step = step
        self.policy_steps: list[int] = []  # of the weights that answered
        self._problems, self._size = problems, rollouts_per_example
        self._places: dict[str, list[int]] = {}
        for place, problem in enumerate(problems):
            self._places.setdefault(problem.id, []).append(place)
        self._answers: dict[int, list[Answer]] = {}

    def expects(self, problem_id: str, num_answers: int) -> bool:
        """Whether these answers are wanted: of an example without any, and of their number."""
        places = self._places.get(problem_id, [])
        return num_answers == self._size and any(each not in self._answers for each in places)

    def take(
        self, problem_id: str, answers: Sequence[tuple[str, float]], *, policy_step: int
    ) -> None:
        """Keep the answers (text, reward) to an example."""
        self.policy_steps.append(policy_step)
        for place in self._places[problem_id]:
            question = self._problems[place].question
            self._answers[place] = [Answer(question, text, reward) for text, reward in answers]

    @property
    def complete(self) -> bool:
        """Whether every example is answered."""
        return len(self._answers) == len(self._problems)

    @property
    def num_answered(self) -> int:
        """Examples with an answer."""
        return len(self._answers)

    @property
    def answered(self) -> bytes:
        """A bit for each example that needs no further answer: bit p % 8 of byte p // 8."""
        bits = bytearray(-(-len(self._problems) // 8))
        for place in self._answers:
            bits[place // 8] |= 1 << place % 8
        return bytes(bits)

    def answers(self) -> list[tuple[Problem, list[Answer]]]:
        """The examples that are answered, in their order."""
        return [(self._problems[place], self._answers[place]) for place in sorted(self._answers)]


def examples_for(
    num_examples: int, *, index: int, count: int, answered: Callable[[int], bool]
) -> Iterator[int]:
    """The examples that generator `index` of `count` answers: its share, then from the end
    what nobody has answered by then.
    """
    rest = (each for each in reversed(range(num_examples)) if each % count != index)
    return (each for each in chain(range(index, num_examples, count), rest) if not answered(each))


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Chance that one of k answers is right, estimated without bias from n >= k answers.

    1 - C(n - c, k) / C(n, k), Chen et al. 2021, "Evaluating large language models trained on code".
    """
    assert 0 <= num_right <= num_answers and 1 <= k <= num_answers
    return 1 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def figures(rewards: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """avg@n and pass@1, 2, 4 .. n of every environment, by ENV/FIGURE.

    `rewards` holds those of each example's n answers. An answer passes with the whole reward, 1.
    """
    found: dict[str, float] = {}
    for env, examples in rewards.items():
        size = min(map(len, examples))
        found[f"{env}/avg@{size}"] = fmean(fmean(each) for each in examples)
        for k in sorted({1 << power for power in range(size.bit_length())} | {size}):
            passed = [
                pass_at_k(len(each), sum(reward >= PASSED for reward in each), k)
                for each in examples
            ]
            found[f"{env}/pass@{k}"] = fmean(passed)
    return found
