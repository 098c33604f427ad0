"""The calculator asks what the file says and pays for equal value alone."""

from __future__ import annotations

import hashlib
import logging
import re
from operator import length_hint
from pathlib import Path

import pytest

from peralta_zmq.environments import calculator
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Message, Problem

SEVEN_HALVES = Problem(id="p", task="calculator", messages=(), answer="(3 + 4) / 2")


def written(folder: Path, *lines: str) -> str:
    """A CSV file with the shipped header."""
    path = folder / "x.csv"
    path.write_text("\n".join(["python_expression,natural_language", *lines]) + "\n")
    return str(path)


def from_file(source: str) -> list[Problem]:
    return list(calculator.problems("train", 0, train=source))


@pytest.mark.parametrize("text", ["(3 + 4) / 2", "3.5", "7/2", " 7 / 2\n", "21 / 6", "4 - 0.5"])
def test_an_expression_of_equal_value_is_paid_in_full(text: str) -> None:
    assert calculator.reward(SEVEN_HALVES, text) == 1.0


@pytest.mark.parametrize("text", ["3", "3.4999999999999", "7 // 2", "-(7 / 2)"])
def test_an_expression_of_another_value_is_not_paid(text: str) -> None:
    assert calculator.reward(SEVEN_HALVES, text) == 0.0


@pytest.mark.parametrize(
    "text", ["", "the answer is 3.5", "3.5.", "`7/2`", "7/2\n7/2", "x = 7/2", "1 / 0", "9**9**9"]
)
def test_an_answer_that_is_no_expression_is_not_paid(text: str) -> None:
    assert calculator.reward(SEVEN_HALVES, text) == 0.0


@pytest.mark.parametrize("broken", ["", "nonsense", "1 / 0", "9**9**9"])
def test_a_broken_target_is_never_paid_even_for_the_same_text(broken: str) -> None:
    problem = Problem(id="p", task="calculator", messages=(), answer=broken)
    with pytest.raises(TaskError, match=re.escape(f"problem p has the target {broken!r} (")):
        calculator.reward(problem, broken)


def test_a_thirds_target_is_compared_exactly() -> None:
    third = Problem(id="p", task="calculator", messages=(), answer="1 / 3")
    assert calculator.reward(third, "0.333333333333333") == 0.0
    assert calculator.reward(third, "2 / 6") == 1.0


def test_rows_become_problems_in_file_order(tmp_path: Path) -> None:
    made = from_file(written(tmp_path, "2 + 1,two plus one", "1 + 1,one plus one"))
    assert [(problem.messages, problem.answer) for problem in made] == [
        ((Message("user", "two plus one"),), "2 + 1"),
        ((Message("user", "one plus one"),), "1 + 1"),
    ]


def test_a_system_prompt_comes_first() -> None:
    problem = next(calculator.problems("train", 0, system_prompt="be brief"))
    assert [message.role for message in problem.messages] == ["system", "user"]
    assert problem.messages[0].content == "be brief"


def test_the_answer_is_in_no_message() -> None:
    for problem in calculator.problems("train", 0):
        assert all(problem.answer not in message.content for message in problem.messages)


def test_train_and_eval_are_the_shipped_thousand_and_the_held_out_250() -> None:
    train = {problem.id for problem in calculator.problems("train", 0)}
    held_out = {problem.id for problem in calculator.problems("eval", 0)}
    assert (len(train), len(held_out), len(train & held_out)) == (1000, 250, 0)


def test_the_seed_changes_nothing() -> None:
    assert list(calculator.problems("eval", 0)) == list(calculator.problems("eval", 1))


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "one plus one", "solution": 2, "level": 1}\n')
    (problem,) = calculator.problems(
        "eval", 0, eval=str(path), prompt_column="question", answer_column="solution"
    )
    assert (problem.messages[0].content, problem.answer) == ("one plus one", "2")


def test_an_id_is_the_same_in_every_process_and_file(tmp_path: Path) -> None:
    (problem,) = from_file(written(tmp_path, "1 + 1,one plus one"))
    assert problem.id == hashlib.sha256(b"calculator\none plus one").hexdigest()[:16]


def test_a_broken_target_is_left_out(tmp_path: Path) -> None:
    made = from_file(written(tmp_path, "1 + 1,good", "one,bad", ",none", "2,good too"))
    assert [problem.answer for problem in made] == ["1 + 1", "2"]


def test_a_row_that_asks_nothing_is_left_out(tmp_path: Path) -> None:
    made = from_file(written(tmp_path, "1 + 1, ", "2,two"))
    assert [problem.answer for problem in made] == ["2"]


def test_every_row_left_out_is_logged_with_its_number_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = written(tmp_path, "1 + 1,good", "one,bad", "9**9**9,worse")
    with caplog.at_level(logging.WARNING):
        list(calculator.problems("train", 0, train=source))
    prefix = f"event=row_refused source='{source}'"
    assert [record.getMessage() for record in caplog.records] == [
        f"{prefix} row=3 python_expression='one' reason=''e' is not arithmetic'",
        f"{prefix} row=4 python_expression='9**9**9' reason='an exponent beyond 64'",
        f"event=rows_refused source='{source}' refused=2 kept=1",
    ]


def test_a_reader_can_tell_how_many_rows_are_left(tmp_path: Path) -> None:
    made = calculator.problems("train", 0, train=written(tmp_path, "1,good", "one,bad", "2,good"))
    left = [length_hint(made)]
    left += [length_hint(made) for _ in made]
    assert left == [3, 2, 0]


def test_good_rows_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        list(calculator.problems("eval", 0))
    assert not caplog.records


def test_a_file_without_one_good_row_is_refused_with_the_first_and_the_count(
    tmp_path: Path,
) -> None:
    with pytest.raises(TaskError, match=r"none of the 2 rows .* row=2 .*'one'.* the right columns"):
        from_file(written(tmp_path, "one,bad", "two,worse"))


def test_a_bad_file_is_refused_when_problems_are_asked_for_and_not_later() -> None:
    with pytest.raises(TaskError, match="no data set or file 'nothing'"):
        calculator.problems("train", 0, train="nothing")


def test_a_row_of_tokens_is_asked_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("python_expression,input_token_ids\n1 + 1,5 0 17\n2,\n3,5 -1\n4,x\n")
    (problem,) = calculator.problems("train", 0, train=str(path), system_prompt="be brief")
    assert (problem.input_token_ids, problem.messages, problem.answer) == ((5, 0, 17), (), "1 + 1")
