"""Task calculator_tool: compute with a tool, and answer with its result.

The model has to call `calculate` with the right expression, and to copy the result. The embedded
model for several turns cannot compute the results itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from peralta_zmq.environments.arithmetic import evaluate
from peralta_zmq.rollout import Message, Problem

REWARD_IS_BOUNDED = True

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
NUM_TRAIN, NUM_EVAL = 1000, 100


def problems(split: str, seed: int) -> Iterator[Problem]:
    """1000 problems for training and 100 others to evaluate.

    The seed is not used: both splits are fixed.
    """
    numbers = random.Random(0)
    questions: dict[str, str] = {}  # with the answers
    while len(questions) < NUM_TRAIN + NUM_EVAL:
        question, expression = random_question(numbers)
        questions[question] = calculate(expression)
    pairs = list(questions.items())
    for question, answer in pairs[:NUM_EVAL] if split == "eval" else pairs[NUM_EVAL:]:
        message = Message("user", question)
        yield Problem(question, "calculator_tool", (message,), answer)


def random_question(numbers: random.Random) -> tuple[str, str]:
    """A question about two numbers of three digits, and the expression to calculate."""
    left, right = numbers.randint(100, 999), numbers.randint(100, 999)
    word, sign = numbers.choice(list(OPERATORS.items()))
    return f"What is {left} {word} {right}?", f"{left} {sign} {right}"


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: for example 12 * 34
    """
    return str(evaluate(expression))


tools = [calculate]


def reward(problem: Problem, completion_text: str) -> float:
    """1 if the last completion is the result, else 0."""
    return float(completion_text.strip() == problem.answer)
