"""pass@k and avg@n, and the split of the examples between generators."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import fmean, stdev

import pytest

from peralta_zmq.environments.curriculum import is_in_bitmap
from peralta_zmq.environments.held_out import Evaluation, examples_for, pass_at_k, summarize
from peralta_zmq.rollout import Answer, Message, Problem

PROBLEMS = [Problem(str(n), "t", (Message("user", f"what is {n}?"),), "") for n in range(3)]


@pytest.mark.parametrize("num_right", range(7))
def test_pass_at_k_equals_enumeration(num_right: int) -> None:
    answers = [True] * num_right + [False] * (6 - num_right)
    for k in range(1, 7):
        chosen = [any(each) for each in combinations(answers, k)]
        assert pass_at_k(6, num_right, k) == pytest.approx(sum(chosen) / len(chosen))


def summary_of(*examples: tuple[str, list[float]]) -> tuple[float, float, dict[str, float]]:
    """The summary of examples with these rewards, each in an environment."""
    return summarize(
        [(Problem("", env, (), ""), [Answer("", "", r) for r in rewards])
         for env, rewards in examples]
    )  # fmt: skip


def test_summary_of_two_environments_by_hand() -> None:
    mean, error, found = summary_of(("a", [1, 0, 0, 0]), ("b", [0.9]), ("a", [1, 1, 0.5, 0]))
    means = (0.25, 0.9, 0.625)
    assert (mean, error) == pytest.approx((fmean(means), stdev(means) / 3**0.5))
    assert found == pytest.approx(
        {
            "a/avg@4": (0.25 + 0.625) / 2,
            "a/pass@1": (1 / 4 + 2 / 4) / 2,
            "a/pass@2": (1 / 2 + 5 / 6) / 2,
            "a/pass@4": 1.0,
            "b/avg@1": 0.9,
            "b/pass@1": 0.0,  # an answer passes with the whole reward
        }
    )
    mean, error, found = summary_of(("a", [1, 0, 0]))
    assert mean == pytest.approx(1 / 3) and math.isnan(error)
    assert list(found) == ["a/avg@3", "a/pass@1", "a/pass@2", "a/pass@3"]


def test_evaluation_is_complete_with_its_last_example() -> None:
    made = Evaluation(5, PROBLEMS, rollouts_per_example={PROBLEMS[0].task: 2})
    assert not made.expects("9", 2)  # unknown example
    assert not made.expects("1", 1)  # too few rollouts
    for number, problem in enumerate(("1", "0", "2")):
        assert made.expects(problem, 2)
        made.add(problem, [("x", 1.0, False), ("y", 0.0, True)], policy_step=5 + number)
        assert not made.expects(problem, 2)  # the first answer counts
        assert made.complete == (number == 2)
        assert is_in_bitmap(made.answered, int(problem))
    assert [problem.id for problem, _ in made.answers()] == ["0", "1", "2"]
    first, second = made.answers()[2][1]
    assert (first.problem, first.cut_off, second.cut_off) == ("what is 2?", False, True)
    assert made.policy_steps == [5, 6, 7]


def test_generator_answers_the_shares_of_others_after_its_own() -> None:
    def todo(index: int) -> list[int]:
        return list(examples_for(7, index=index, count=2, answered=lambda place: place == 4))

    assert todo(0) == [0, 2, 6, 5, 3, 1]
    assert todo(1) == [1, 3, 5, 6, 2, 0]
