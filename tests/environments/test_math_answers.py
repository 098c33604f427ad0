"""Mathematical answers are compared by value, in any form. Needs the extra `math`."""

from __future__ import annotations

import sys

import pytest

from peralta_zmq.environments import math_answers
from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.rollout import Problem


def problem(answer: str) -> Problem:
    return Problem("p", "math_answers", (), answer)


@pytest.mark.parametrize(("target", "text", "reward"), [
    (r"\frac{1}{2}", "The answer is $0.5$.", 1.0),
    (r"\frac{1}{2}", r"so we get \boxed{\frac{2}{4}}", 1.0),
    (r"3\sqrt{5}", r"$\sqrt{45}$", 1.0),
    (r"3\sqrt{5}", r"$\sqrt{46}$", 0.0),
    ("64", "64", 1.0),
    ("64", "63", 0.0),
    ("64", "I do not know", 0.0),
    ("Yes", " Yes\n", 1.0),
    ("(1, 2]", "$(1, 2]$", 1.0),
    ("1e10", r"\boxed{10000000000}", 1.0),
    ("3:30", r"\boxed{1/10}", 0.0),
    ("3:30", r"\boxed{3:30}", 1.0),
])  # fmt: skip
def test_equal_values_earn_one(target: str, text: str, reward: float) -> None:
    pytest.importorskip("math_verify")
    assert math_answers.reward(problem(target), text) == reward


def test_target_that_cannot_be_parsed_is_an_error() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(TaskError, match=r"problem p has .* \(math-verify finds no mathematics\)"):
        math_answers.reward(problem(""), "1")


def test_missing_library_is_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    math_answers.parse_target.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'peralta_zmq\[math\]'"):
        next(math_answers.problems("train", 0))
