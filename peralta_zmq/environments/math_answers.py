"""Task math_answers, which compares answers by value: 1/2 equals 0.5 and \\frac{1}{2}.

Needs the library math-verify, which the extra `math` installs.
"""

from __future__ import annotations

import functools
import re
import threading
from typing import Any

from peralta_zmq.environments.dataset import parsed_answer, problems_from_files
from peralta_zmq.errors import import_extra
from peralta_zmq.rollout import Problem


def reward(problem: Problem, completion_text: str) -> float:
    """1 if the last answer in the text equals the target mathematically, else 0.

    A text that is the target, or the same number (1e10), earns 1. Raises TaskError for a target
    that cannot be parsed.
    """
    is_target = _is_target(last_box(completion_text) or completion_text, problem.answer)
    if is_target or ":" in problem.answer:  # a time or a ratio, for the library a quotient
        return float(is_target)
    library = _library()
    target = parsed_answer(problem, parse_target)
    parsed = library.parse(completion_text[-2000:], parsing_timeout=_timeout())
    return float(bool(parsed) and library.verify(list(target), parsed, timeout_seconds=_timeout()))


def _is_target(text: str, target: str) -> bool:
    answer, expected = (each.strip().strip("$").strip() for each in (text, target))
    try:
        return answer == expected or float(answer) == float(expected)
    except ValueError:
        return False


def last_box(text: str) -> str:
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end, char in enumerate(text[start:], start):
            depth += (char == "{") - (char == "}")
            if not depth:
                return text[start:end].strip()
    return ""


@functools.lru_cache(maxsize=4096)
def parse_target(answer: str) -> tuple[Any, ...]:
    """A target as math-verify represents it; ValueError if it has no mathematics."""
    text = answer if "$" in answer else f"${answer}$"
    parsed = _library().parse(text, parsing_timeout=_timeout())
    if not parsed:
        raise ValueError("math-verify finds no mathematics")
    return tuple(parsed)


def _timeout() -> int | None:
    """Seconds to parse or compare an answer. The library uses signals, hence the main thread."""
    return 3 if threading.current_thread() is threading.main_thread() else None


def _library() -> Any:
    return import_extra("math_verify", extra="math", needed_by="task math_answers")


problems = problems_from_files(
    "math_answers", train="math_answers_500", eval="math_answers_100", check=parse_target
)
