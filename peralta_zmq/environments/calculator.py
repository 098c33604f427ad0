"""Task calculator: write the arithmetic expression that a sentence describes."""

from __future__ import annotations

from peralta_zmq.environments.arithmetic import evaluate
from peralta_zmq.environments.dataset import parsed_answer, problems_from_files
from peralta_zmq.rollout import Problem

REWARD_IS_BOUNDED = True  # evaluate() refuses expressions that take long

problems = problems_from_files(
    "calculator",
    train="math_1k",
    eval="math_250",
    prompt_column="natural_language",
    answer_column="python_expression",
    check=evaluate,
)


def reward(problem: Problem, completion_text: str) -> float:
    """1 for an expression with exactly the value of the target expression, else 0."""
    target = parsed_answer(problem, evaluate)
    try:
        return float(evaluate(completion_text) == target)
    except ValueError:
        return 0.0
