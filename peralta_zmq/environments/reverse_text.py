"""Task reverse_text: write a text backwards; the reward is a similarity."""

from __future__ import annotations

from difflib import SequenceMatcher

from peralta_zmq.environments.dataset import problems_from_files
from peralta_zmq.rollout import Problem

MAX_ANSWER_LENGTH = 256  # characters; the run time of the comparison grows with its square
REWARD_IS_BOUNDED = True


def reward(problem: Problem, completion_text: str) -> float:
    """Similarity of completion and answer, 2 M / T (difflib's ratio); 0 for a long text.

    M are the characters in matching blocks, T those of both texts.
    """
    text = completion_text.strip()
    if max(len(text), len(problem.answer)) > MAX_ANSWER_LENGTH:
        return 0.0
    return SequenceMatcher(None, problem.answer, text, autojunk=False).ratio()


def _check_answer(answer: str) -> None:
    if not answer.strip():
        raise ValueError("the answer is empty")
    if len(answer) > MAX_ANSWER_LENGTH:
        raise ValueError(f"the answer is longer than {MAX_ANSWER_LENGTH} characters")


problems = problems_from_files(
    "reverse_text", train="reverse_text_1k", eval="reverse_text_100", check=_check_answer
)
