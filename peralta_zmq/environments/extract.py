"""Task extract: write a person's name, age and city, given in a sentence, as a JSON object."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from peralta_zmq.environments.dataset import parsed_answer, problems_from_files
from peralta_zmq.rollout import Problem

REWARD_IS_BOUNDED = True
FIELDS = ("name", "age", "city")
OBJECT = re.compile(r"\{[^{}]*\}")  # without objects inside


def reward(problem: Problem, completion_text: str) -> float:
    """0.25 for each right field of the first JSON object, and 0.25 for no text around it."""
    answer = parsed_answer(problem, _parse_answer)
    match = OBJECT.search(completion_text)
    if match is None:
        return 0.0
    try:
        written: dict[str, Any] = json.loads(match[0])
    except (ValueError, RecursionError):  # RecursionError: deeply nested lists
        return 0.0
    num_right = sum(written.get(field) == answer[field] for field in FIELDS)
    return (num_right + (completion_text.strip() == match[0])) / 4


def _parse_answer(answer: str) -> dict[str, Any]:
    fields = json.loads(answer)
    if not isinstance(fields, dict) or set(cast("dict[str, Any]", fields)) != set(FIELDS):
        raise ValueError(f"not a JSON object with the fields {', '.join(FIELDS)}")
    return cast("dict[str, Any]", fields)


problems = problems_from_files(
    "extract", train="extract_500", eval="extract_60", check=_parse_answer
)
