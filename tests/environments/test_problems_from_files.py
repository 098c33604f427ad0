"""Problems of a file: order, ids, system prompt, and rows that are skipped."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from peralta_zmq.environments import calculator
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Message, Problem


def csv_file(folder: Path, *lines: str) -> str:
    """A CSV file with the shipped header."""
    path = folder / "x.csv"
    path.write_text("\n".join(["python_expression,natural_language", *lines]) + "\n")
    return str(path)


def from_file(source: str) -> list[Problem]:
    return list(calculator.problems("train", 0, train=source))


def test_problems_are_in_file_order_with_stable_ids(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"question": "two plus one", "solution": 3, "level": 1}\n'
        '{"question": "one plus one", "solution": "1 + 1"}\n'
    )
    columns = {"prompt_column": "question", "answer_column": "solution"}
    made = list(calculator.problems("eval", 0, eval=str(path), **columns))
    assert [(problem.messages, problem.answer) for problem in made] == [
        ((Message("user", "two plus one"),), "3"),
        ((Message("user", "one plus one"),), "1 + 1"),
    ]
    assert made[1].id == hashlib.sha256(b"calculator\none plus one").hexdigest()[:16]


def test_messages_begin_with_the_system_prompt_and_have_no_answer() -> None:
    for problem in calculator.problems("train", 0, system_prompt="be brief"):
        assert problem.messages[0] == Message("system", "be brief")
        assert [message.role for message in problem.messages] == ["system", "user"]
        assert all(problem.answer not in message.content for message in problem.messages)


def test_rows_with_invalid_target_or_empty_prompt_are_skipped_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = csv_file(tmp_path, "1 + 1,good", "one,bad", "9**9**9,worse", "3, ", "2,good too")
    with caplog.at_level(logging.WARNING):
        assert [problem.answer for problem in from_file(source)] == ["1 + 1", "2"]
    prefix = f"event=row_refused source='{source}'"
    assert [record.getMessage() for record in caplog.records] == [
        f"{prefix} row=3 reason='answer 'one': 'e' is not arithmetic'",
        f"{prefix} row=4 reason='answer '9**9**9': an exponent beyond 64'",
        f"{prefix} row=5 reason='the prompt is empty'",
        f"event=rows_refused source='{source}' refused=3 kept=2",
    ]


def test_file_without_usable_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"none of the 2 rows .* row=2 .*'one'.* the right columns"):
        from_file(csv_file(tmp_path, "one,bad", "two,worse"))


def test_input_token_ids_replace_the_messages(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("python_expression,input_token_ids\n1 + 1,5 0 17\n2,\n3,5 -1\n4,x\n")
    (problem,) = calculator.problems("train", 0, train=str(path), system_prompt="be brief")
    assert (problem.input_token_ids, problem.messages, problem.answer) == ((5, 0, 17), (), "1 + 1")
