"""Task guess_number: find a number in two turns.

The reply says how far the first guess is from the number. One number of ten is right by chance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from peralta_zmq.rollout import Message, Problem

REWARD_IS_BOUNDED = True


def problems(split: str, seed: int) -> Iterator[Problem]:
    """800 problems for training and 100 others to evaluate: tens, with a number in each."""
    numbers = random.Random(0)
    tens = [(low, low + numbers.randrange(10)) for low in range(1000, 10_000, 10)]
    numbers.shuffle(tens)
    for low, number in tens[:100] if split == "eval" else tens[100:]:
        message = Message("user", f"Guess a number from {low} to {low + 9}.")
        yield Problem(str(low), "guess_number", (message,), str(number))


def reply(problem: Problem, messages: Sequence[Message]) -> list[Message] | None:
    """The distance of the first guess; None after the right number or two completions."""
    guesses = [message.content for message in messages if message.role == "assistant"]
    if len(guesses) > 1 or reward(problem, guesses[0]):
        return None
    return [Message("user", feedback(guesses[0], int(problem.answer)))]


def feedback(guess: str, number: int) -> str:
    text = guess.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        return "That is no number."
    distance = number - int(text)
    return f"It is {abs(distance)} {'higher' if distance > 0 else 'lower'}."


def reward(problem: Problem, completion_text: str) -> float:
    return float(completion_text.strip() == problem.answer)
