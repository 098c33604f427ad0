"""Countdown: make a target from given numbers, each used once, with + - * / and parentheses.

Knows what an expression may use and what it is worth; knows nothing of models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from peralta_zmq.environments.arithmetic import evaluate
from peralta_zmq.environments.problems import problems_from
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Problem

NAME = "countdown"
REWARD_IS_BOUNDED = True  # short formulas only: no process of its own
NUMBER = re.compile(r"\d+")
TARGET = re.compile(r"\s*\d{1,9}(?:\s+\d{1,9})*\s*=\s*\d{1,9}\s*")
FOREIGN = re.compile(r"\*\*|//|%|\.")  # arithmetic, but not of this game


def problems(
    split: Literal["train", "eval"],
    seed: int,  # of the contract
    *,
    train: str = "countdown_1k",
    eval: str = "countdown_100",
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    system_prompt: str = "",
) -> Iterator[Problem]:
    """Every row of the split's file once; an answer is written `3 7 25 = 46`.

    A row whose answer is not is left out and logged. Raises TaskError as `problems_from` does.
    """
    return problems_from(
        train if split == "train" else eval,
        task=NAME,
        prompt_column=prompt_column,
        answer_column=answer_column,
        system_prompt=system_prompt,
        check=_numbers_and_target,
    )


def reward(problem: Problem, completion_text: str) -> float:
    """1 for an expression that uses every number once and has the target's value, else 0.

    Raises TaskError for a problem without numbers or target.
    """
    try:
        numbers, target = _numbers_and_target(problem.answer)
    except ValueError as reason:
        raise TaskError(f"problem {problem.id}: {reason}") from None
    if FOREIGN.search(completion_text):
        return 0.0
    try:
        value = evaluate(completion_text)
    except ValueError:
        return 0.0
    used = sorted(map(int, NUMBER.findall(completion_text)))
    return float(value == target and used == numbers)


def _numbers_and_target(answer: str) -> tuple[list[int], int]:
    """Raises ValueError unless the text is `NUMBER NUMBER ... = TARGET`."""
    if not TARGET.fullmatch(answer):
        raise ValueError(f"the answer {answer!r:.80} is not numbers = target, as in 3 7 25 = 46")
    *numbers, target = map(int, NUMBER.findall(answer))
    return sorted(numbers), target
