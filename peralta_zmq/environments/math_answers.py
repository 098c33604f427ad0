"""Mathematical answers, compared by math-verify: 1/2 is 0.5 and \\frac{1}{2}.

Knows the library and what an answer is worth; knows nothing of models. It needs the extra `math`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

from peralta_zmq.environments.problems import problems_from
from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.rollout import Problem

NAME = "math_answers"
MAX_LENGTH = 2000  # characters at the end of a completion, where the answer stands
DEADLINE_SECONDS = 3  # to read one answer, and to compare it


def problems(
    split: Literal["train", "eval"],
    seed: int,  # of the contract
    *,
    train: str = "math_answers_500",
    eval: str = "math_answers_100",
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    system_prompt: str = "",
) -> Iterator[Problem]:
    """Every row of the split's file once; one with an unreadable answer is left out and logged.

    Raises ConfigError without math-verify, TaskError as `problems_from` does.
    """
    _library()
    return problems_from(
        train if split == "train" else eval,
        task=NAME,
        prompt_column=prompt_column,
        answer_column=answer_column,
        system_prompt=system_prompt,
        check=_read,
    )


def reward(problem: Problem, completion_text: str) -> float:
    """1 when the last answer in the text equals the target mathematically, else 0.

    An answer that cannot be read, or not compared in time, is worth 0. Raises TaskError for a
    target that cannot be read.
    """
    parse, verify = _library()
    try:
        target = _read(problem.answer)
    except ValueError as reason:
        raise TaskError(f"problem {problem.id}: {reason}") from None
    said = parse(completion_text[-MAX_LENGTH:], parsing_timeout=_deadline())
    return float(bool(said) and verify(list(target), said, timeout_seconds=_deadline()))


@functools.lru_cache(maxsize=4096)
def _read(answer: str) -> tuple[Any, ...]:
    """A target as math-verify reads it. Raises ValueError when there is nothing to read."""
    parse, _ = _library()
    found = parse(f"${answer}$" if "$" not in answer else answer, parsing_timeout=_deadline())
    if not found:
        raise ValueError(f"the answer {answer!r:.80} is not mathematics")
    return tuple(found)


def _deadline() -> int | None:
    """math-verify's deadline is a signal, which only the main thread of a process may set."""
    return DEADLINE_SECONDS if threading.current_thread() is threading.main_thread() else None


@functools.lru_cache(maxsize=1)
def _library() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        import math_verify  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "task math_answers needs math-verify; pip install 'peralta_zmq[math]'"
        ) from None
    return math_verify.parse, math_verify.verify
