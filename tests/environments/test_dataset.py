"""Data files are read whole, with the line numbers an editor shows, or refused with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from peralta_zmq.environments.dataset import read_rows
from peralta_zmq.errors import TaskError

Write = Callable[[str, "str | bytes"], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Make a file in a fresh folder and give its path."""

    def make(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return make


def rows_of(source: str) -> list[tuple[int, dict[str, str]]]:
    return [(row.number, row.columns) for row in read_rows(source, columns=("q", "a"))]


def error_of(source: str) -> str:
    with pytest.raises(TaskError) as caught:
        read_rows(source, columns=("q", "a"))
    return str(caught.value)


def test_csv_rows_have_line_numbers(write: Write) -> None:
    path = write("x.csv", 'q,a\n"one,\nand two",3\n\nfour,4\n')
    assert rows_of(path) == [(2, {"q": "one,\nand two", "a": "3"}), (5, {"q": "four", "a": "4"})]


def test_jsonl_rows_have_line_numbers(write: Write) -> None:
    path = write("x.jsonl", '{"q": "one", "a": "1"}\n\n{"a": "2", "q": "two"}')
    assert rows_of(path) == [(1, {"q": "one", "a": "1"}), (3, {"q": "two", "a": "2"})]


def test_windows_line_ends_give_the_same_rows(write: Write) -> None:
    assert rows_of(write("x.csv", "q,a\r\none,1\r\n")) == [(2, {"q": "one", "a": "1"})]


def test_line_ends_inside_quotes_are_kept(write: Write) -> None:
    assert rows_of(write("x.csv", 'q,a\r\n"one\r\ntwo",1')) == [(2, {"q": "one\r\ntwo", "a": "1"})]


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def test_byte_order_mark_is_removed(write: Write, name: str) -> None:
    content = "q,a\none,1\n" if name == "x.csv" else '{"q": "one", "a": "1"}\n'
    assert rows_of(write(name, b"\xef\xbb\xbf" + content.encode()))[0][1] == {"q": "one", "a": "1"}


def test_other_columns_are_ignored(write: Write) -> None:
    assert rows_of(write("x.csv", "id,a,q,note\n7,1,one,\n")) == [(2, {"q": "one", "a": "1"})]


def test_other_json_columns_may_have_any_type(write: Write) -> None:
    path = write("x.jsonl", '{"q": "one", "a": "1", "tags": [null, NaN]}')
    assert rows_of(path) == [(1, {"q": "one", "a": "1"})]


def test_json_numbers_keep_their_text(write: Write) -> None:
    path = write("x.jsonl", '{"q": 7, "a": 0.10000000000000000001}')
    assert rows_of(path) == [(1, {"q": "7", "a": "0.10000000000000000001"})]


def test_unicode_line_separator_does_not_end_a_jsonl_line(write: Write) -> None:
    path = write("x.jsonl", '{"q": "one\u2028two", "a": "1"}')
    assert rows_of(path) == [(1, {"q": "one\u2028two", "a": "1"})]


@pytest.mark.parametrize(
    ("name", "count"), [("math_1k", 1000), ("math_250", 250), ("math_10k", 10_000)]
)
def test_shipped_data_set_is_read_by_name(name: str, count: int) -> None:
    columns = ("natural_language", "python_expression")
    rows = read_rows(name, columns=columns)
    assert [row.number for row in rows] == list(range(2, count + 2))


def test_unknown_data_set_is_refused_with_choices() -> None:
    error = error_of("math_1kk")
    assert "no data set or file 'math_1kk', did you mean 'math_1k'?" in error
    assert "choose one of math_1k, math_250, math_10k" in error


def test_shipped_name_with_suffix_suggests_the_name() -> None:
    assert "did you mean 'math_250'?" in error_of("data/math_250.csv")


def test_misspelt_path_suggests_a_file_of_the_folder(write: Write) -> None:
    path = write("problems.csv", "q,a\none,1\n")
    assert f"did you mean '{path}'?" in error_of(path.replace("problems", "problms"))


@pytest.mark.parametrize("source", ["", "\x00", "a" * 5000, "~no-such-user/x.csv", "/"])
def test_impossible_file_name_is_a_task_error(source: str) -> None:
    assert "no data set or file" in error_of(source)


REFUSED = {
    "a column that is missing": (
        "x.csv", "q, b\none,1\n", "line 1: no column 'a'; the columns are 'q', ' b'"),
    "a key that is missing": (
        "x.jsonl", '{"q": 1, "a": 1}\n{"q": 2}', "line 2: no column 'a'; the columns are 'q'"),
    "an empty csv file": ("x.csv", "", "line 1: no column 'q'; it is empty"),
    "an empty object": ("x.jsonl", "{}", "line 1: no column 'q'; it is empty"),
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
    "another encoding": ("x.csv", b"q,a\n1,1\ncaf\xe9,1\n", "line 3: invalid continuation byte"),
    "another format": ("x.parquet", "PAR1", "is neither .csv nor .jsonl; convert or rename it"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_file_is_refused_with_line_and_reason(write: Write, case: str) -> None:
    name, content, message = REFUSED[case]
    path = write(name, content)
    error = error_of(path)
    assert error.startswith(f"'{path}' ")
    assert message in error


@pytest.mark.parametrize("case", REFUSED)
def test_errors_are_one_line(write: Write, case: str) -> None:
    name, content, _ = REFUSED[case]
    assert not re.search(r"[\r\n]", error_of(write(name, content)))


def test_input_token_ids_may_replace_the_prompt(write: Write) -> None:
    path = write("x.jsonl", '{"input_token_ids": [5, 0, 17], "a": "1"}\n{"q": "one", "a": "2"}')
    rows = read_rows(path, columns=("a",), prompt_column="q")
    assert [row.columns for row in rows] == [
        {"input_token_ids": "5 0 17", "a": "1"},
        {"q": "one", "a": "2"},
    ]


def test_row_without_prompt_and_tokens_is_refused(write: Write) -> None:
    path = write("x.csv", "a,b\n1,2\n")
    with pytest.raises(TaskError, match=r"line 1: no column 'q'; the columns are 'a', 'b'"):
        read_rows(path, columns=("a",), prompt_column="q")
