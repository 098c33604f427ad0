"""Two turns: a guess, the distance to the number, and a second guess."""

from __future__ import annotations

import pytest

from peralta_zmq.environments import guess_number
from peralta_zmq.rollout import Message, Problem

PROBLEM = Problem("1", "guess_number", (Message("user", "Guess."),), "4327")


def reply_to(*guesses: str) -> list[Message] | None:
    messages = [*PROBLEM.messages]
    for guess in guesses:
        messages += [Message("assistant", guess), Message("user", "?")]
    return guess_number.reply(PROBLEM, messages[:-1])


@pytest.mark.parametrize(("guess", "feedback"), [
    ("4323", "It is 4 higher."), (" 4329\n", "It is 2 lower."), ("9327", "It is 5000 lower."),
    ("", "That is no number."), ("four", "That is no number."), ("9" * 5000, "That is no number."),
    ("-4", "That is no number."), ("٤", "That is no number."),
])  # fmt: skip
def test_reply_is_the_distance_of_the_guess(guess: str, feedback: str) -> None:
    assert reply_to(guess) == [Message("user", feedback)]


def test_episode_ends_at_the_number_or_after_two_guesses() -> None:
    assert reply_to("4327") is None
    assert reply_to("4323", "4324") is None


def test_reward_is_that_of_the_last_guess() -> None:
    assert guess_number.reward(PROBLEM, " 4327\n") == 1.0
    assert guess_number.reward(PROBLEM, "4323") == 0.0


def test_splits_are_disjoint_and_numbers_in_their_ranges() -> None:
    train, held_out = (list(guess_number.problems(split, 0)) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (800, 100)
    prompts = {problem.question for problem in train + held_out}
    assert len(prompts) == 900  # a prompt identifies the problem
    assert all(0 <= int(each.answer) - int(each.id) <= 9 for each in train + held_out)
