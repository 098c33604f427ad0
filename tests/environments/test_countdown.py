"""Countdown rewards an expression with the target value that uses every number once."""

from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.environments import countdown
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Problem

PROBLEM = Problem("p", "countdown", (), "3 7 7 = 28")


@pytest.mark.parametrize(
    "text", ["7 * (7 - 3)", " (7-3)*7 \n", "7 * 7 - 7 * 3 + 0", "-(3 - 7) * 7"]
)
def test_expression_with_every_number_once_earns_one(text: str) -> None:
    assert countdown.reward(PROBLEM, text) == float("0" not in text)


@pytest.mark.parametrize("text", [
    "28",
    "7 * 4",
    "7 * 7 - 3 * 7",  # 7 three times
    "3 + 7 + 7",  # another value
    "7 * (7 - 3) = 28",
    "37 - 7 - 2",
    "7 * (7 - 3.0)",
    "(7 // 7) * 28 ** 1",
    "",
])  # fmt: skip
def test_other_expressions_earn_zero(text: str) -> None:
    assert countdown.reward(PROBLEM, text) == 0.0


def test_other_operators_earn_zero() -> None:
    power = Problem("p", "countdown", (), "2 3 = 8")
    assert countdown.reward(power, "2 ** 3") == 0.0
    assert countdown.reward(Problem("p", "countdown", (), "2 4 = 8"), "2 * 4") == 1.0


def test_row_without_target_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("prompt,answer\nmake 5.,2 3 = 5\nmake 6.,2 3 6\n")
    assert [problem.answer for problem in countdown.problems("train", 0, train=str(file))] == [
        "2 3 = 5"
    ]


def test_problem_without_target_is_an_error() -> None:
    with pytest.raises(TaskError, match=r"problem p has .* '28' \(not of the form NUMBERS ="):
        countdown.reward(Problem("p", "countdown", (), "28"), "28")
