"""Reverse a text: the reward says how much of the answer is right, so that it can be climbed.

Knows texts and their likeness; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Literal

from peralta_zmq.environments.problems import problems_from
from peralta_zmq.rollout import Problem

NAME = "reverse_text"
REWARD_IS_BOUNDED = True  # at most MAX_LENGTH characters: no process of its own
MAX_LENGTH = 256  # characters compared: the comparison takes time by the square


def problems(
    split: Literal["train", "eval"],
    seed: int,  # of the contract
    *,
    train: str = "reverse_text_1k",
    eval: str = "reverse_text_100",
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    system_prompt: str = "",
) -> Iterator[Problem]:
    """Every row of the split's file once. Raises TaskError as `problems_from` does."""
    return problems_from(
        train if split == "train" else eval,
        task=NAME,
        prompt_column=prompt_column,
        answer_column=answer_column,
        system_prompt=system_prompt,
        check=_check,
    )


def reward(problem: Problem, completion_text: str) -> float:
    """Likeness to the answer from 0 to 1: twice the characters in matching blocks, divided by the
    characters of both (`difflib`'s ratio), whitespace around the completion ignored.
    """
    said = completion_text.strip()
    if max(len(said), len(problem.answer)) > MAX_LENGTH:
        return 0.0
    return SequenceMatcher(None, problem.answer, said, autojunk=False).ratio()


def _check(answer: str) -> None:
    if not answer.strip():
        raise ValueError("the answer is empty")
    if len(answer) > MAX_LENGTH:
        raise ValueError(f"the answer is longer than {MAX_LENGTH} characters")
