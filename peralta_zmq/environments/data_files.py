"""The rows of data sets in CSV, JSONL and Parquet files.

A data set has one problem per row, in a column for the prompt and a column for the answer. The
column `input_token_ids` may hold the tokens of the prompt instead. The column `info` may hold an
object for the reward functions: in CSV, and in a text column of Parquet, as JSON.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from peralta_zmq.errors import TaskError, import_extra

DATA_FOLDER = Path(__file__).parent / "data"
SHIPPED = tuple(sorted(file.stem for file in DATA_FOLDER.glob("*.csv")))  # names of data sets
TOKENS_COLUMN = "input_token_ids"
INFO_COLUMN = "info"
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
csv.field_size_limit((1 << 31) - 1)  # characters; a memory limit, 131,072 by default


class DataRow(NamedTuple):
    """One row of a data set."""

    line_number: int  # of the row's first line in the file
    prompt: str  # empty if the row has no prompt column
    token_ids: str  # numbers separated by spaces; empty if the row has none
    answer: str
    info: Mapping[str, Any]  # empty if the row has none


def read_rows(source: str, *, prompt_column: str, answer_column: str) -> list[DataRow]:
    """Read all rows of a data set, in file order; other columns are ignored.

    `source` is the name of a shipped data set or a path. Every row needs an answer, and a prompt or
    `input_token_ids`: a list in JSONL, numbers separated by spaces in CSV. Raises TaskError for a
    file that is missing, empty or not UTF-8, a missing column, and a row that cannot be read.
    """
    path = _path(source)
    suffix = path.suffix.lower()
    parse = _json_records if suffix in JSONL_SUFFIXES else _csv_records
    try:
        is_parquet = suffix == PARQUET_SUFFIX
        records = _parquet_records(path) if is_parquet else parse(_read_text(path))
        rows = [_row(number, record, prompt_column, answer_column) for number, record in records]
    except ValueError as error:
        raise TaskError(f"'{source}' {error}") from None
    if not rows:
        raise TaskError(f"'{source}' has no rows; a data set needs at least one")
    return rows


def _path(source: str) -> Path:
    """The file of a shipped data set, or the given path."""
    if source in SHIPPED:
        return DATA_FOLDER / f"{source}.csv"
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, it never raises
    if not os.path.isfile(path):
        raise TaskError(
            f"no data set or file '{source}'{_suggestion(path)}; "
            f"choose one of {', '.join(SHIPPED)}, or give the path of a .csv, .jsonl or .parquet "
            "file"
        )
    if path.suffix.lower() not in (".csv", PARQUET_SUFFIX, *JSONL_SUFFIXES):
        raise TaskError(f"'{source}' is neither .csv, .jsonl nor .parquet; convert or rename it")
    return path


def _suggestion(path: Path) -> str:
    """', did you mean X?' for a similarly named data set or file next to `path`."""
    names = {name: name for name in SHIPPED}
    if os.path.isdir(path.parent):
        names |= {file.name: str(file) for file in path.parent.glob("*.*")}
    similar = difflib.get_close_matches(path.name, names, n=1)
    return f", did you mean '{names[similar[0]]}'?" if similar else ""


def _read_text(path: Path) -> str:
    """The file as text without a byte order mark; newlines are not converted.

    Raises ValueError for text that is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TaskError(f"cannot read '{path}': {error.strerror}; check its permissions") from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {number}: {error.reason}; save the file as UTF-8") from None


def _csv_records(text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield each record: the number of its first line, and texts by column name.

    The first record names the columns. Blank lines are skipped; quoted text may span lines. Raises
    ValueError for a line that cannot be read.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    number, header = 1, list[str]()
    try:
        for fields in reader:
            if not header:
                header = fields
                if twice := sorted({name for name in header if header.count(name) > 1}):
                    raise ValueError(f"line {number}: two columns are named '{twice[0]}'")
            elif fields:
                if len(fields) != len(header):
                    raise ValueError(
                        f"line {number}: {len(fields)} fields, but the header names {len(header)} "
                        "columns; put quotes around text with a comma in it"
                    )
                yield number, dict(zip(header, fields, strict=True))
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {number}: {error}; check the quotes of this row") from None


def _json_records(text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield the line number and the object of each line.

    Numbers stay text, so that 0.1 stays exact. Raises ValueError for a line that cannot be read.
    """
    # Only "\n" ends a line: JSON text may contain the other separators of str.splitlines.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_int=str, parse_float=str)
            if INFO_COLUMN in record:
                record[INFO_COLUMN] = json.loads(line)[INFO_COLUMN]  # its numbers are numbers
        except (ValueError, RecursionError) as error:
            reason = str(error).replace("line 1 ", "")  # json counts lines from the start of `line`
            remedy = "write one flat object on each line"
            raise ValueError(f"line {number}: not JSON ({reason}); {remedy}") from None
        if not isinstance(record, dict):
            reason = f"{line.strip():.40} is not an object"
            raise ValueError(f"line {number}: {reason}; write one object on each line")
        yield number, cast("dict[str, object]", record)


def _parquet_records(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield the number and the record of each row, with the types of `_json_records`.

    Raises ValueError for a file that cannot be read.
    """
    parquet = import_extra("pyarrow.parquet", extra="parquet", needed_by=f"'{path.name}'")
    try:
        table = parquet.read_table(path)
    except Exception as error:  # noqa: BLE001  pyarrow raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"cannot be read as Parquet ({reason}); write the file again") from None
    for number, row in enumerate(table.to_pylist(), start=1):
        try:
            text = json.dumps(
                row,
                default=lambda value: value.decode() if isinstance(value, bytes) else str(value),
            )
        except UnicodeDecodeError as error:
            raise ValueError(
                f"row {number}: bytes that are not UTF-8 text ({error.reason})"
            ) from None
        record = json.loads(text, parse_int=str, parse_float=str)
        yield number, record | ({INFO_COLUMN: row[INFO_COLUMN]} if INFO_COLUMN in row else {})


def _row(
    number: int, record: Mapping[str, object], prompt_column: str, answer_column: str
) -> DataRow:
    """The row of a record; ValueError for a missing column or a value that is not text."""
    prompts = [column for column in (prompt_column, TOKENS_COLUMN) if column in record]
    columns = [*(prompts or [prompt_column]), answer_column]
    for column in columns:
        if column not in record:
            names = (
                f"the columns are {', '.join(map(repr, record))}" if record else "the row is empty"
            )
            raise ValueError(f"line {number}: no column '{column}'; {names}")
    texts = {column: _text(record[column], column, number) for column in columns}
    return DataRow(
        number,
        texts.get(prompt_column, ""),
        texts.get(TOKENS_COLUMN, ""),
        texts[answer_column],
        _info(record.get(INFO_COLUMN), number),
    )


def _info(value: object, number: int) -> Mapping[str, Any]:
    """The object in the column `info`; empty for no value. Raises ValueError for another one."""
    if value is None or value == "":
        return {}
    try:
        parsed: object = json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        parsed = value
    if not isinstance(parsed, dict):
        raise ValueError(
            f"line {number}: column '{INFO_COLUMN}' is {value!r:.40}, which is not a JSON object"
        )
    return cast("dict[str, Any]", parsed)


def _text(value: object, column: str, number: int) -> str:
    """The text of a string, a JSON number (already text) or a list of token ids.

    Raises ValueError for other types, and for a lone surrogate such as the JSON escape \\ud800.
    """
    if column == TOKENS_COLUMN and isinstance(value, list):
        return " ".join(map(str, cast("list[object]", value)))
    place = f"line {number}: column '{column}'"
    if not isinstance(value, str):
        raise ValueError(f"{place} is {value!r:.40}; it must be text or a number")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place} has a lone surrogate {value!a:.40}") from None
    return value
