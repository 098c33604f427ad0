"""The calculator: a sentence asks for arithmetic, an expression of equal value is paid.

Knows which columns ask and answer, and what an answer is worth; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from peralta_zmq.environments.arithmetic import evaluate
from peralta_zmq.environments.problems import problems_from
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Problem

NAME = "calculator"
REWARD_IS_BOUNDED = True  # evaluate() refuses what would take long: no process of its own


def problems(
    split: Literal["train", "eval"],
    seed: int,  # of the contract: a file needs none, and order is the curriculum's business
    *,
    train: str = "math_1k",
    eval: str = "math_250",
    prompt_column: str = "natural_language",
    answer_column: str = "python_expression",
    system_prompt: str = "",
) -> Iterator[Problem]:
    """Every row of the split's file once, in file order.

    A row without a prompt or with a target that is not arithmetic is left out and logged with
    its number. Raises TaskError when the file cannot be read or no row is left.
    """
    return problems_from(
        train if split == "train" else eval,
        task=NAME,
        prompt_column=prompt_column,
        answer_column=answer_column,
        system_prompt=system_prompt,
        check=evaluate,
    )


def reward(problem: Problem, completion_text: str) -> float:
    """1 for an expression with exactly the target's value, whitespace around it ignored, else 0.

    Raises TaskError for a problem whose own target is not arithmetic, which can never be paid.
    """
    try:
        target = evaluate(problem.answer)
    except ValueError as reason:
        raise TaskError(
            f"problem {problem.id} has the target {problem.answer!r:.80} ({reason}); "
            "make it an arithmetic expression"
        ) from None
    try:
        return float(evaluate(completion_text) == target)
    except ValueError:
        return 0.0
