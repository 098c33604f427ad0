"""Extract rewards each right field of the first JSON object, and no text around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.environments import extract
from peralta_zmq.environments.dataset import load_problems
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Problem
from tools import extract_problems

ANSWER = '{"name": "Ann", "age": 30, "city": "Oslo"}'
PROBLEM = Problem("p", "extract", (), ANSWER)


@pytest.mark.parametrize(("text", "expected"), [
    (ANSWER, 1.0),
    (' {"city":"Oslo","age":30,"name":"Ann"}\n', 1.0),
    (f"Here it is: {ANSWER}", 0.75),
    (f"{ANSWER} {ANSWER}", 0.75),
    ('{"name": "Bob", "age": 50, "city": "Bonn"} ' + ANSWER, 0.0),  # the first object counts
    ('{"name": "Ann", "age": 31, "city": "Oslo"}', 0.75),
    ('{"name": "Ann", "age": "30", "city": "Oslo"}', 0.75),  # a text is not a number
    ('{"name": "Ann"}', 0.5),
    ("{}", 0.25),
    ('{"name": "Ann", "age": 30, "city": "Oslo"', 0.0),
    ("{name: Ann}", 0.0),
    ("Ann, 30, Oslo", 0.0),
    ("", 0.0),
])  # fmt: skip
def test_reward_counts_right_fields_and_absence_of_other_text(text: str, expected: float) -> None:
    assert extract.reward(PROBLEM, text) == expected


@pytest.mark.timeout(10)  # each takes well below a second
@pytest.mark.parametrize("text", [
    '{"name": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}",
    '{"name": ' * 1_000_000,
    '{"age": ' + "9" * 1_000_000 + "}",
    "{" * 1_000_000,
    '{"name": "\\ud800"' + " " * 1_000_000,
], ids=["lists", "objects", "digits", "braces", "spaces"])  # fmt: skip
def test_hostile_json_earns_nothing_within_seconds(text: str) -> None:
    assert extract.reward(PROBLEM, text) == 0.0


@pytest.mark.parametrize("answer", ["Ann", "[]", '{"name": "Ann"}'])
def test_problem_without_three_fields_is_an_error(answer: str) -> None:
    with pytest.raises(TaskError, match="unusable answer"):
        extract.reward(Problem("p", "extract", (), answer), ANSWER)


def test_answers_earn_one_and_splits_share_no_sentence_name_or_city() -> None:
    train, held_out = (
        load_problems(extract.problems, split, seed=0, options={}) for split in ("train", "eval")
    )
    for problem in (*train, *held_out):
        assert extract.reward(problem, problem.answer) == 1.0
    assert not {problem.question for problem in train} & {p.question for p in held_out}
    words = " ".join(problem.question for problem in held_out)
    for name in (*extract_problems.TRAIN_NAMES.split(), *extract_problems.TRAIN_CITIES.split()):
        assert name not in words


def test_row_with_another_answer_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text('prompt,answer\none,Ann\ntwo,"{""name"": 1, ""age"": 2, ""city"": 3}"\n')
    (problem,) = extract.problems("train", 0, train=str(file))
    assert problem.question == "two"
