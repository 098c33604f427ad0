"""Task reverse_text: write a text backwards; the reward is the similarity to the right answer."""

from __future__ import annotations

from difflib import SequenceMatcher

from peralta_zmq.environments.dataset import problems_from_files
from peralta_zmq.rollout import Problem

MAX_LENGTH = 256  # characters; the run time of the comparison grows with its square
REWARD_IS_BOUNDED = True  # by MAX_LENGTH, so no process is needed


def reward(problem: Problem, completion_text: str) -> float:
    """Similarity to the answer, from 0 to 1; surrounding whitespace of the completion is ignored.

    It is 2 M / T for M characters in matching blocks and T characters in both texts together
    (difflib's ratio). A text longer than MAX_LENGTH earns 0.
    """
    text = completion_text.strip()
    if max(len(text), len(problem.answer)) > MAX_LENGTH:
        return 0.0
    return SequenceMatcher(None, problem.answer, text, autojunk=False).ratio()


def _check_answer(answer: str) -> None:
    if not answer.strip():
        raise ValueError("the answer is empty")
    if len(answer) > MAX_LENGTH:
        raise ValueError(f"the answer is longer than {MAX_LENGTH} characters")


problems = problems_from_files(
    "reverse_text", train="reverse_text_1k", eval="reverse_text_100", check=_check_answer
)
