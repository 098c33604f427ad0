"""Task calculator_tool: multiply with a tool, and answer with its result.

The model has to call `calculate` with the right expression, and to copy the result. The embedded
model for several turns cannot compute the products itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from peralta_zmq.environments.arithmetic import evaluate
from peralta_zmq.rollout import Message, Problem

REWARD_IS_BOUNDED = True


def problems(split: str, seed: int) -> Iterator[Problem]:
    """1000 problems for training and 100 others to evaluate; both splits are fixed."""
    numbers = random.Random(0)
    answers: dict[str, str] = {}  # by question
    while len(answers) < 1100:
        left = numbers.randint(100, 999)
        right = numbers.randint(100, 999)
        answers[f"What is {left} times {right}?"] = calculate(f"{left} * {right}")
    pairs = list(answers.items())
    for question, answer in pairs[:100] if split == "eval" else pairs[100:]:
        message = Message("user", question)
        yield Problem(question, "calculator_tool", (message,), answer)


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example 12 * 34
    """
    return str(evaluate(expression))


tools = [calculate]


def reward(problem: Problem, completion_text: str) -> float:
    return float(completion_text.strip() == problem.answer)
