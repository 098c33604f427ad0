"""A tool that computes, and problems whose results the model has to copy."""

from __future__ import annotations

import re

import pytest

from peralta_zmq.environments import calculator_tool
from peralta_zmq.environments.turns import turns_of
from peralta_zmq.rollout import Problem


def test_answer_is_the_result_of_the_tool() -> None:
    train, held_out = (list(calculator_tool.problems(split, 0)) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (1000, 100)
    assert len({problem.question for problem in train + held_out}) == 1100
    for problem in train[:50]:
        left, right = re.findall(r"\d+", problem.question)
        assert calculator_tool.calculate(f"{left} * {right}") == problem.answer
        assert calculator_tool.reward(problem, f" {problem.answer}\n") == 1.0
        assert calculator_tool.reward(problem, left) == 0.0


def test_tool_evaluates_arithmetic_only() -> None:
    assert calculator_tool.calculate("12 * 34") == "408"
    with pytest.raises(ValueError, match=r"not an expression|arithmetic"):
        calculator_tool.calculate("open('/etc/passwd')")


def test_tool_has_a_schema() -> None:
    turns = turns_of(calculator_tool)
    assert turns is not None and not turns.reply
    (schema,) = turns.schemas
    expression = schema["function"]["parameters"]["properties"]["expression"]
    assert expression == {"type": "string", "description": "for example 12 * 34"}
    assert calculator_tool.reward(Problem("1", "x", (), "408"), "408") == 1.0
