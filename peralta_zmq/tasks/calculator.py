"""The calculator: a sentence asks for arithmetic, an expression of equal value is paid.

Knows which columns ask and answer, and what an answer is worth; knows nothing of models.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Literal

from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Message, Problem
from peralta_zmq.tasks.arithmetic import evaluate
from peralta_zmq.tasks.rows import DataRow, read_rows

NAME = "calculator"
REWARD_IS_BOUNDED = True  # evaluate() refuses what would take long: no process of its own

log = logging.getLogger(__name__)


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
    source = train if split == "train" else eval
    made: list[Problem] = []
    refused: list[str] = []
    for row in read_rows(source, columns=(prompt_column, answer_column)):
        try:
            made.append(_problem_of(row, prompt_column, answer_column, system_prompt))
        except ValueError as reason:
            value = row.columns[answer_column]
            refused.append(f"row={row.number} {answer_column}={value!r:.80} reason='{reason}'")
    if not made:
        raise TaskError(
            f"none of the {len(refused)} rows of '{source}' can be used, the first is "
            f"{refused[0]}; name the right columns or mend the file"
        )
    _report(source, refused, num_kept=len(made))
    return iter(made)


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


def _problem_of(
    row: DataRow, prompt_column: str, answer_column: str, system_prompt: str
) -> Problem:
    """Raises ValueError with the reason when a row asks nothing or its target has no value."""
    prompt, answer = row.columns[prompt_column], row.columns[answer_column]
    if not prompt.strip():
        raise ValueError(f"{prompt_column} is empty")
    evaluate(answer)
    system = (Message("system", system_prompt),) if system_prompt else ()
    return Problem(
        id=hashlib.sha256(f"{NAME}\n{prompt}".encode()).hexdigest()[:16],
        task=NAME,
        messages=(*system, Message("user", prompt)),
        answer=answer,
    )


def _report(source: str, refused: list[str], *, num_kept: int) -> None:
    for line in refused:
        log.warning("event=row_refused source='%s' %s", source, line)
    if refused:
        log.warning(
            "event=rows_refused source='%s' refused=%d kept=%d", source, len(refused), num_kept
        )
