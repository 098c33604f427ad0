"""Shipped tasks: rewards by hand, refused targets, splits, turns and tools."""

from __future__ import annotations

import re
from typing import Any

import pytest

from peralta_zmq.environments import (
    calculator,
    calculator_tool,
    countdown,
    extract,
    guess_number,
    reverse_text,
)
from peralta_zmq.environments.dataset import load_problems
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Message, Problem
from tools import make_data

ANN = '{"name": "Ann", "age": 30, "city": "Oslo"}'
NO_EXPRESSIONS = (
    "", "the answer is 3.5", "3.5.", "`7/2`", "7/2\n7/2", "x = 7/2", "1 / 0", "9**9**9",
)  # fmt: skip


def problem(answer: str) -> Problem:
    return Problem("p", "x", (Message("user", "?"),), answer)


def cases(
    task: Any, answer: str, rewards: dict[float, tuple[str, ...]]
) -> list[tuple[Any, str, str, float]]:
    return [(task, answer, text, value) for value, texts in rewards.items() for text in texts]


@pytest.mark.parametrize(("task", "answer", "text", "reward"), [
    *cases(calculator, "(3 + 4) / 2", {
        1.0: ("(3 + 4) / 2", "3.5", "7/2", " 7 / 2\n", "21 / 6", "4 - 0.5"),
        0.0: ("3", "3.4999999999999", "7 // 2", "-(7 / 2)", *NO_EXPRESSIONS),
    }),
    *cases(countdown, "3 7 7 = 28", {
        1.0: ("7 * (7 - 3)", " (7-3)*7 \n", "-(3 - 7) * 7"),
        0.0: ("7 * 7 - 7 * 3 + 0", "28", "7 * 4",
              "7 * 7 - 3 * 7",  # 7 three times
              "3 + 7 + 7",  # another value
              "7 * (7 - 3) = 28", "37 - 7 - 2", "7 * (7 - 3.0)", "(7 // 7) * 28 ** 1", ""),
    }),
    *cases(countdown, "2 4 = 8", {1.0: ("2 * 4",)}),
    *cases(countdown, "2 3 = 8", {0.0: ("2 ** 3",)}),
    *cases(extract, ANN, {
        1.0: (ANN, ' {"city":"Oslo","age":30,"name":"Ann"}\n'),
        0.75: (f"Here it is: {ANN}", f"{ANN} {ANN}", ANN.replace("30", "31"),
               ANN.replace("30", '"30"')),  # a text is not a number
        0.5: ('{"name": "Ann"}',),
        0.25: ("{}",),
        0.0: (ANN.replace("Ann", "Bob").replace("30", "5").replace("Oslo", "Bonn") + ANN,
              ANN[:-1], "{name: Ann}", "Ann, 30, Oslo", ""),
    }),
    *cases(reverse_text, "dcba", {
        1.0: ("dcba", " dcba\n"),
        6 / 7: ("dcb",),  # 2 * 3 characters of 4 + 3
        6 / 8: ("dxba",),  # d, ba: 2 * 3 of 8
        0.0: ("xyz", "", "dcba" * 10**6),
    }),
    *cases(guess_number, "4327", {1.0: (" 4327\n",), 0.0: ("4323",)}),
    *cases(calculator_tool, "408", {1.0: (" 408\n",), 0.0: ("12",)}),
])  # fmt: skip
def test_reward_of_a_completion(task: Any, answer: str, text: str, reward: float) -> None:
    assert task.reward(problem(answer), text) == pytest.approx(reward)


@pytest.mark.timeout(10)  # each takes well below a second
@pytest.mark.parametrize("text", [
    '{"name": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}",
    '{"name": ' * 1_000_000,
    '{"age": ' + "9" * 1_000_000 + "}",
    "{" * 1_000_000,
    '{"name": "\\ud800"' + " " * 1_000_000,
], ids=["lists", "objects", "digits", "braces", "spaces"])  # fmt: skip
def test_hostile_json_earns_nothing_within_seconds(text: str) -> None:
    assert extract.reward(problem(ANN), text) == 0.0


@pytest.mark.parametrize(("task", "answer"), [
    *((calculator, text) for text in ("", "nonsense", "1 / 0", "9**9**9")),
    (countdown, "28"), (countdown, "2 3 6"),
    *((extract, text) for text in ("Ann", "[]", '{"name": "Ann"}')),
])  # fmt: skip
def test_invalid_target_is_an_error_even_for_the_same_text(task: Any, answer: str) -> None:
    match = re.escape(f"problem p has the unusable answer {answer!r} (")
    with pytest.raises(TaskError, match=match):
        task.reward(problem(answer), answer)


def test_splits_of_extract_share_no_sentence_name_or_city() -> None:
    train, held_out = (
        load_problems(extract.problems, split, seed=0, options={}) for split in ("train", "eval")
    )
    for each in (*train, *held_out):
        assert extract.reward(each, each.answer) == 1.0
    assert not {each.question for each in train} & {each.question for each in held_out}
    words = " ".join(each.question for each in held_out)
    for name in (*make_data.TRAIN_NAMES.split(), *make_data.TRAIN_CITIES.split()):
        assert name not in words


# guess_number.


def reply_to(*guesses: str) -> list[Message] | None:
    messages = [Message("user", "Guess.")]
    for guess in guesses:
        messages += [Message("assistant", guess), Message("user", "?")]
    return guess_number.reply(problem("4327"), messages[:-1])


@pytest.mark.parametrize(("guess", "feedback"), [
    ("4323", "It is 4 higher."), (" 4329\n", "It is 2 lower."), ("9327", "It is 5000 lower."),
    *((text, "That is no number.") for text in ("", "four", "9" * 5000, "-4", "٤")),
])  # fmt: skip
def test_reply_is_the_distance_of_the_guess(guess: str, feedback: str) -> None:
    assert reply_to(guess) == [Message("user", feedback)]


def test_episode_ends_at_the_number_or_after_two_guesses() -> None:
    assert reply_to("4327") is None
    assert reply_to("4323", "4324") is None


def test_splits_of_guess_number_are_disjoint_and_numbers_in_their_ranges() -> None:
    train, held_out = (list(guess_number.problems(split, 0)) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (800, 100)
    prompts = {each.question for each in train + held_out}
    assert len(prompts) == 900  # a prompt identifies the problem
    assert all(0 <= int(each.answer) - int(each.id) <= 9 for each in train + held_out)


# calculator_tool.


def test_answer_is_the_result_of_the_tool() -> None:
    train, held_out = (list(calculator_tool.problems(split, 0)) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (1000, 100)
    assert len({each.question for each in train + held_out}) == 1100
    for each in train[:50]:
        left, right = re.findall(r"\d+", each.question)
        assert calculator_tool.calculate(f"{left} * {right}") == each.answer
    with pytest.raises(ValueError, match=r"not an expression|arithmetic"):
        calculator_tool.calculate("open('/etc/passwd')")
