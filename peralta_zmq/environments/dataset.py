"""Rows of a data file with named columns: CSV or JSONL, shipped or the user's own.

Knows files, columns and line numbers; knows nothing of what a column means.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from peralta_zmq.errors import TaskError

SHIPPED = (
    *("math_1k", "math_250", "math_10k"),
    *("countdown_1k", "countdown_100", "reverse_text_1k", "reverse_text_100"),
    *("math_answers_500", "math_answers_100"),
)
TOKENS = "input_token_ids"  # a column that may stand in for the prompt
JSONL_SUFFIXES = (".jsonl", ".ndjson")


class DataRow(NamedTuple):
    """One row: the line an editor shows it on, and its text by column name."""

    number: int
    columns: dict[str, str]


class _Broken(Exception):
    """Why the line `number` cannot be read."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def read_rows(
    source: str, *, columns: Sequence[str], prompt_column: str | None = None
) -> list[DataRow]:
    """The named columns of every row, in file order; other columns are ignored.

    `source` is a shipped set's name or a path. `prompt_column` is one more, in whose place a row
    may carry `input_token_ids`: a list in JSONL, numbers between spaces in CSV. A list comes as
    such a text. Raises TaskError for a file that is missing, empty or not UTF-8, a column that is
    missing, and a row that cannot be read.
    """
    path = _path_of(source)
    parse = _jsonl_rows if path.suffix.lower() in JSONL_SUFFIXES else _csv_rows
    try:
        rows = list(parse(_text_of(path), columns, prompt_column))
    except _Broken as broken:
        raise TaskError(f"'{source}' line {broken.number}: {broken}") from None
    if not rows:
        raise TaskError(f"'{source}' has no rows; a data set needs at least one")
    return rows


def _path_of(source: str) -> Path:
    """The file behind a shipped name or a path."""
    if source in SHIPPED:
        return Path(__file__).parent / "data" / f"{source}.csv"
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, it never raises
    if not os.path.isfile(path):
        raise TaskError(f"no data set or file '{source}'{_hint(path)}; {_menu()}")
    if path.suffix.lower() not in (".csv", *JSONL_SUFFIXES):
        raise TaskError(f"'{source}' is neither .csv nor .jsonl; convert or rename it")
    return path


def _hint(path: Path) -> str:
    """', did you mean X?' when a shipped set or a neighbour in the folder has a similar name."""
    neighbours = {}
    if os.path.isdir(path.parent):
        neighbours = {file.name: str(file) for file in path.parent.glob("*.*")}
    known = neighbours | {name: name for name in SHIPPED}
    near = difflib.get_close_matches(path.name, known, n=1)
    return f", did you mean '{known[near[0]]}'?" if near else ""


def _menu() -> str:
    return f"choose one of {', '.join(SHIPPED)}, or give the path of a .csv or .jsonl file"


def _text_of(path: Path) -> str:
    """The whole file as text, a byte order mark removed and line ends as they are."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TaskError(f"cannot read '{path}': {error.strerror}; check its permissions") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        raise _Broken(number, f"{error.reason}; save the file as UTF-8") from None


def _csv_rows(text: str, columns: Sequence[str], prompt_column: str | None) -> Iterator[DataRow]:
    records = _csv_records(text)
    header_number, header = next(records, (1, list[str]()))
    columns = _wanted(header, columns, prompt_column)
    _check_columns(header, columns, number=header_number)
    for number, fields in records:
        if len(fields) != len(header):
            raise _Broken(
                number,
                f"{len(fields)} fields, but the header names {len(header)} columns; "
                "put quotes around text with a comma in it",
            )
        row = dict(zip(header, fields, strict=True))
        yield DataRow(number, {column: row[column] for column in columns})


def _csv_records(text: str) -> Iterator[tuple[int, list[str]]]:
    """Records that are not blank, each with its first line: quoted text may hold line ends."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    number = 1
    try:
        for fields in reader:
            if fields:
                yield number, fields
            number = reader.line_num + 1
    except csv.Error as error:
        raise _Broken(number, f"{error}; check the quotes of this row") from None


def _jsonl_rows(text: str, columns: Sequence[str], prompt_column: str | None) -> Iterator[DataRow]:
    # Only "\n" ends a line here: JSON text may contain the other separators of str.splitlines.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            row = _json_object(line, number=number)
            wanted = _wanted(list(row), columns, prompt_column)
            _check_columns(list(row), wanted, number=number)
            texts = {name: _json_text(row[name], name, number=number) for name in wanted}
            yield DataRow(number, texts)


def _wanted(there: list[str], columns: Sequence[str], prompt_column: str | None) -> list[str]:
    """The columns to take: of prompt and tokens those that are there, the prompt if none is."""
    if prompt_column is None:
        return list(columns)
    either = [name for name in (prompt_column, TOKENS) if name in there] or [prompt_column]
    return [*either, *columns]


def _json_object(line: str, *, number: int) -> dict[str, object]:
    """One line as an object; numbers stay the text they are, so that 0.1 is one tenth."""
    try:
        row = json.loads(line, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        reason = f"not JSON ({error.msg} at character {error.colno})"
        raise _Broken(number, f"{reason}; write one object on each line") from None
    except RecursionError:
        raise _Broken(number, "nested too deeply; write one flat object on each line") from None
    if not isinstance(row, dict):
        raise _Broken(number, f"{line.strip():.40} is not an object; write one on each line")
    return cast("dict[str, object]", row)


def _json_text(value: object, name: str, *, number: int) -> str:
    """A text or number, or tokens; half of a surrogate pair, which JSON can spell, is no text."""
    if name == TOKENS and isinstance(value, list):
        return " ".join(map(str, cast("list[object]", value)))
    if not isinstance(value, str):
        raise _Broken(number, f"column '{name}' is {value!r:.40}; it must be text or a number")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Broken(number, f"column '{name}' holds half a character {value!a:.40}") from None
    return value


def _check_columns(there: list[str], wanted: Sequence[str], *, number: int) -> None:
    missing = [name for name in wanted if name not in there]
    if missing and there:
        menu = ", ".join(repr(name) for name in there)
        raise _Broken(number, f"no column '{missing[0]}'; the columns are {menu}")
    if missing:
        raise _Broken(number, f"no column '{missing[0]}', the file or line is empty; fill it")
