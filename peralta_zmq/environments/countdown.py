"""Task countdown: reach a target with + - * / and each given number used once."""

from __future__ import annotations

import re

from peralta_zmq.environments.arithmetic import evaluate
from peralta_zmq.environments.dataset import parsed_answer, problems_from_files
from peralta_zmq.rollout import Problem

REWARD_IS_BOUNDED = True  # evaluate() refuses expressions that take long
NUMBER = re.compile(r"\d+")
ANSWER = re.compile(r"\s*\d{1,9}(?:\s+\d{1,9})*\s*=\s*\d{1,9}\s*")
FORBIDDEN = re.compile(r"\*\*|//|%|\.")  # arithmetic, but not part of the game


def reward(problem: Problem, completion_text: str) -> float:
    """1 for an expression that uses each number once and equals the target, else 0."""
    numbers, target = parsed_answer(problem, _parse_answer)
    if FORBIDDEN.search(completion_text):
        return 0.0
    try:
        value = evaluate(completion_text)
    except ValueError:
        return 0.0
    used = sorted(map(int, NUMBER.findall(completion_text)))
    return float(value == target and used == numbers)


def _parse_answer(answer: str) -> tuple[list[int], int]:
    """The sorted numbers and the target of an answer such as 3 7 25 = 46. Raises ValueError."""
    if not ANSWER.fullmatch(answer):
        raise ValueError("not of the form NUMBERS = TARGET, as in 3 7 25 = 46")
    *numbers, target = map(int, NUMBER.findall(answer))
    return sorted(numbers), target


problems = problems_from_files(
    "countdown", train="countdown_1k", eval="countdown_100", check=_parse_answer
)
