"""Data files are read with line numbers, or refused with the line, the reason and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from peralta_zmq.environments.dataset import read_problems
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Problem

Write = Callable[[str, "str | bytes"], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file to a temporary folder and returns its path."""

    def make(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return make


def problems_of(source: str) -> list[Problem]:
    return [*read_problems(source, "x", prompt_column="q", answer_column="a")]


def error_of(source: str) -> str:
    with pytest.raises(TaskError) as caught:
        problems_of(source)
    return str(caught.value)


READABLE: dict[str, tuple[str, str | bytes, list[tuple[int, str, str]]]] = {
    "csv with quotes and blank lines": (
        "x.csv", 'q,a\n"one,\nand two",3\n\nfour,4\n',
        [(2, "one,\nand two", "3"), (5, "four", "4")]),
    "jsonl with blank lines": (
        "x.jsonl", '{"q": "one", "a": "1"}\n\n{"a": "2", "q": "two"}',
        [(1, "one", "1"), (3, "two", "2")]),
    "windows line ends": ("x.csv", "q,a\r\none,1\r\n", [(2, "one", "1")]),
    "line ends in quotes": ("x.csv", 'q,a\r\n"one\r\ntwo",1', [(2, "one\r\ntwo", "1")]),
    "csv with byte order mark": ("x.csv", b"\xef\xbb\xbfq,a\none,1\n", [(2, "one", "1")]),
    "jsonl with byte order mark": (
        "x.jsonl", b'\xef\xbb\xbf{"q": "one", "a": "1"}', [(1, "one", "1")]),
    "other columns": ("x.csv", "id,a,q,note\n7,1,one,\n", [(2, "one", "1")]),
    "other json columns of any type": (
        "x.jsonl", '{"q": "one", "a": "1", "tags": [null, NaN]}', [(1, "one", "1")]),
    "json numbers as text": (
        "x.jsonl", '{"q": 7, "a": 0.10000000000000000001}', [(1, "7", "0.10000000000000000001")]),
    "unicode line separator in jsonl": (
        "x.jsonl", '{"q": "one\u2028two", "a": "1"}', [(1, "one\u2028two", "1")]),
}  # fmt: skip


@pytest.mark.parametrize("case", READABLE)
def test_rows_have_line_numbers_and_unchanged_text(write: Write, case: str) -> None:
    name, content, expected = READABLE[case]
    problems = problems_of(write(name, content))
    assert [(each.row, each.question, each.answer) for each in problems] == expected


def test_field_may_be_longer_than_the_default_limit_of_csv(write: Write) -> None:
    text = "word " * 40_000
    (problem,) = problems_of(write("x.csv", f"q,a\n{text},1\n"))
    assert problem.question == text


def test_unknown_name_is_refused_with_similar_names(write: Write) -> None:
    error = error_of("math_1kk")
    assert "no data set or file 'math_1kk', did you mean 'math_1k'?" in error
    assert "choose one of countdown_100, countdown_1k, extract_500" in error
    assert "did you mean 'math_250'?" in error_of("data/math_250.csv")
    path = write("problems.csv", "q,a\none,1\n")
    assert f"did you mean '{path}'?" in error_of(path.replace("problems", "problms"))


@pytest.mark.parametrize("source", ["", "\x00", "a" * 5000, "~no-such-user/x.csv", "/"])
def test_impossible_file_name_is_a_task_error(source: str) -> None:
    assert "no data set or file" in error_of(source)


REFUSED = {
    "a column that is missing": (
        "x.csv", "q, b\none,1\n", "line 2: no column 'a'; the columns are 'q', ' b'"),
    "a key that is missing": (
        "x.jsonl", '{"q": 1, "a": 1}\n{"q": 2}', "line 2: no column 'a'; the columns are 'q'"),
    "an empty csv file": ("x.csv", "", "has no rows"),
    "an empty object": ("x.jsonl", "{}", "line 1: no column 'q'; the row is empty"),
    "an empty jsonl file": ("x.jsonl", "\n", "has no rows"),
    "a header alone": ("x.csv", "q,a\n\n", "has no rows"),
    "a comma without quotes": (
        "x.csv", "q,a\n1,1\nadd 1, 2,3\n", "line 3: 3 fields, but the header names 2 columns"),
    "a short row": ("x.csv", "q,a\nadd\n", "line 2: 1 fields, but the header names 2"),
    "a quote without end": (
        "x.csv", 'q,a\n1,1\n"add,1\n2,2\n', "line 3: unexpected end of data; check the quotes"),
    "a broken json line": (
        "x.jsonl", '{"q": 1, "a": 1}\n{"q": 1\n', "line 2: not JSON (Expecting ',' delimiter"),
    "a json line that is a list": ("x.jsonl", "[1, 2]", "line 1: [1, 2] is not an object"),
    "a json line of great depth": ("x.jsonl", "[" * 100_000, "line 1: n"),
    "a null": ("x.jsonl", '{"q": null, "a": 1}', "column 'q' is None; it must be text or a number"),
    "a truth value": ("x.jsonl", '{"q": "1", "a": true}', "column 'a' is True; it must be"),
    "a lone surrogate": ("x.jsonl", '{"q": "\\ud800", "a": 1}', "column 'q' has a lone surr"),
    "two columns of a name": ("x.csv", "q,a,a\none,1,2\n", "line 1: two columns are named 'a'"),
    "another encoding": ("x.csv", b"q,a\n1,1\ncaf\xe9,1\n", "line 3: invalid continuation byte"),
    "another format": ("x.txt", "q", "is neither .csv, .jsonl nor .parquet; convert or rename it"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_file_is_refused_with_line_and_reason(write: Write, case: str) -> None:
    name, content, message = REFUSED[case]
    path = write(name, content)
    error = error_of(path)
    assert error.startswith(f"'{path}' ")
    assert message in error
    assert not re.search(r"[\r\n]", error)


# The column `info`, and Parquet.


@pytest.mark.parametrize(("name", "content"), [
    ("x.jsonl", '{"q": "one", "a": "1", "info": {"level": 2, "tags": ["x"]}}'
                '\n{"q": "two", "a": "2"}'),
    ("x.jsonl", '{"q": "one", "a": "1", "info": "{\\"level\\": 2, \\"tags\\": [\\"x\\"]}"}'
                '\n{"q": "two", "a": "2", "info": null}'),
    ("x.csv", 'q,a,info\none,1,"{""level"": 2, ""tags"": [""x""]}"\ntwo,2,\n'),
])  # fmt: skip
def test_info_is_an_object(write: Write, name: str, content: str) -> None:
    infos = [each.info for each in problems_of(write(name, content))]
    assert infos == [{"level": 2, "tags": ["x"]}, {}]


@pytest.mark.parametrize(("name", "content"), [
    ("x.jsonl", '{"q": "one", "a": "1", "info": [2]}'), ("x.csv", "q,a,info\none,1,level 2\n"),
])  # fmt: skip
def test_other_info_is_refused(write: Write, name: str, content: str) -> None:
    assert "column 'info' is " in (message := error_of(write(name, content)))
    assert "which is not a JSON object" in message


def test_parquet_has_the_types_of_jsonl(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "x.parquet"
    columns = {"q": ["one", "two"], "a": [1, 2], "info": [{"level": 2}, None]}
    parquet.write_table(arrow.table(columns), file)
    assert [(each.question, each.answer, each.info) for each in problems_of(str(file))] == [
        ("one", "1", {"level": 2}), ("two", "2", {}),
    ]  # fmt: skip
    tokens = {"input_token_ids": [[5, 6]], "a": ["1"]}
    parquet.write_table(arrow.table(tokens), file)
    assert problems_of(str(file))[0].input_token_ids == (5, 6)
    parquet.write_table(arrow.table({"q": ["é".encode()], "a": [b"1"]}), file)
    (problem,) = problems_of(str(file))
    assert (problem.question, problem.answer) == ("é", "1")
    parquet.write_table(arrow.table({"q": [b"\xe9"], "a": ["1"]}), file)
    assert "row 1: bytes that are not UTF-8 text (unexpected end" in error_of(str(file))
    file.write_bytes(b"PAR1")
    assert "cannot be read as a table" in error_of(str(file))
