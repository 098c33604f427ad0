"""The rows of data sets: CSV, JSONL and Parquet files, and folders of the library datasets.

A row has a column for the prompt, a text or a chat, and one for the answer. The column
`input_token_ids` may hold the tokens of the prompt instead, and `info` an object for the reward
functions: in CSV, and in a text of Parquet, as JSON.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from peralta_zmq.errors import TaskError, choices_text, import_extra
from peralta_zmq.rollout import Message, Role

DATA_FOLDER = Path(__file__).parent / "data"
SHIPPED = tuple(sorted(file.stem for file in DATA_FOLDER.glob("*.csv")))  # names of data sets
TOKENS_COLUMN = "input_token_ids"
INFO_COLUMN = "info"
MESSAGE = ("role", "content")  # keys of a message
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
csv.field_size_limit((1 << 31) - 1)  # characters; a memory limit, 131,072 by default


class Record(NamedTuple):
    line_number: int  # first line of the row in the file
    values: Mapping[str, Any]  # by column
    texts: Mapping[str, Any]  # the same with numbers as text, so that 0.1 stays exact

    def text(self, column: str) -> str:
        """The text or number of a column, or token ids separated by spaces.

        Raises ValueError for another value, and for a lone surrogate.
        """
        value = self.texts[column]
        if column == TOKENS_COLUMN and isinstance(value, list):
            return " ".join(map(str, cast("list[object]", value)))
        place = f"line {self.line_number}: column '{column}'"
        if not isinstance(value, str):
            raise ValueError(f"{place} is {value!r:.40}; it must be text or a number")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{place} has a lone surrogate {value!a:.40}") from None
        return value


class DataRow(NamedTuple):
    line_number: int
    prompt: str  # empty if the row has no text as prompt
    token_ids: str  # numbers separated by spaces; empty if the row has none
    messages: tuple[Message, ...]  # the prompt, if it is a chat
    answer: str = ""
    info: Mapping[str, Any] = {}


def read_rows(source: str, *, prompt_column: str, answer_column: str) -> list[DataRow]:
    """Read all rows of a data set, in file order; other columns are ignored.

    `source` is the name of a shipped data set or a path. Every row needs an answer, and a prompt or
    `input_token_ids`. Raises TaskError.
    """
    rows: list[DataRow] = []
    try:
        for record in read_records(source):
            row = row_of(record, prompt_column)
            if answer_column not in record.values:
                raise missing_column(record, answer_column, setting="data.answer_column")
            rows.append(row._replace(answer=record.text(answer_column), info=_info(record)))
        return rows
    except ValueError as error:
        raise TaskError(f"'{source}' {error}") from None


def read_records(source: str, split: str = "train") -> list[Record]:
    """Read all records of a data set, in file order; `split` is that of a folder.

    Raises TaskError for a file that is missing, empty or not UTF-8, or with a damaged record.
    """
    path = _path(source)
    try:
        records = [*_records(path, split)]
    except ValueError as error:
        raise TaskError(f"'{source}' {error}") from None
    if not records:
        raise TaskError(f"'{source}' has no rows; a data set needs at least one")
    return records


def folder_splits(source: str) -> list[str]:
    """Names of the splits in a folder that datasets.DatasetDict.save_to_disk made; else empty."""
    file = Path(os.path.expanduser(source)) / "dataset_dict.json"
    try:
        return list(map(str, json.loads(file.read_text("utf-8"))["splits"]))
    except OSError:
        return []
    except (ValueError, KeyError, TypeError):
        raise TaskError(f"'{file}' is damaged; save the data set again") from None


def _records(path: Path, split: str) -> Iterator[Record]:
    suffix = path.suffix.lower()
    if path.is_dir():
        return _folder_records(path / split if folder_splits(str(path)) else path)
    if suffix == PARQUET_SUFFIX:
        parquet = import_extra("pyarrow.parquet", extra="parquet", needed_by=f"'{path.name}'")
        return _table_records(lambda: [parquet.read_table(path)])
    if suffix in JSONL_SUFFIXES:
        return _json_records(_read_text(path))
    return _csv_records(_read_text(path))


def _path(source: str) -> Path:
    if source in SHIPPED:
        return DATA_FOLDER / f"{source}.csv"
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, it never raises
    if any(os.path.isfile(path / name) for name in ("dataset_dict.json", "state.json")):
        return path
    if not os.path.isfile(path):
        raise TaskError(
            f"no data set or file '{source}'; {choices_text('choose one of', source, SHIPPED)}, or "
            "give the path of a .csv, .jsonl or .parquet file, or of a folder that datasets' "
            "save_to_disk made"
        )
    if path.suffix.lower() not in (".csv", PARQUET_SUFFIX, *JSONL_SUFFIXES):
        raise TaskError(f"'{source}' is neither .csv, .jsonl nor .parquet; convert or rename it")
    return path


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise TaskError(f"cannot read '{path}': {error.strerror}; check its permissions") from None
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {number}: {error.reason}; save the file as UTF-8") from None


def _csv_records(text: str) -> Iterator[Record]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    number = 1
    header = list[str]()
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
                record = dict(zip(header, fields, strict=True))
                yield Record(number, record, record)
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {number}: {error}; check the quotes of this row") from None


def _json_records(text: str) -> Iterator[Record]:
    # Only "\n" ends a line: JSON text may contain the other separators of str.splitlines.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            texts: object = json.loads(line, parse_int=str, parse_float=str)
            values: object = json.loads(
                line, parse_int=_whole_number, object_pairs_hook=_unique_keys
            )
        except (ValueError, RecursionError) as error:
            reason = str(error).replace("line 1 ", "")  # json counts lines from the start of `line`
            remedy = "write one flat object on each line"
            raise ValueError(f"line {number}: not JSON ({reason}); {remedy}") from None
        if not isinstance(texts, dict):
            reason = f"{line.strip():.40} is not an object"
            raise ValueError(f"line {number}: {reason}; write one object on each line")
        yield Record(number, cast("dict[str, Any]", values), cast("dict[str, Any]", texts))


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two values have the name '{twice}'")
    return values


def _whole_number(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:  # more digits than Python converts
        return float(digits)


def _folder_records(folder: Path) -> Iterator[Record]:
    pyarrow = import_extra("pyarrow", extra="parquet", needed_by=f"'{folder.name}'")

    def read() -> list[Any]:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        tables: list[Any] = []
        for file in state["_data_files"]:
            with pyarrow.memory_map(str(folder / file["filename"])) as source:
                tables.append(pyarrow.ipc.open_stream(source).read_all())
        return tables

    return _table_records(read)


def _table_records(read: Callable[[], list[Any]]) -> Iterator[Record]:
    try:
        rows = [row for table in read() for row in table.to_pylist()]
    except Exception as error:  # noqa: BLE001  pyarrow raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"cannot be read as a table ({reason}); write it again") from None

    def as_text(value: object) -> str:  # of bytes, dates and decimal numbers
        return value.decode() if isinstance(value, bytes) else str(value)

    for number, row in enumerate(rows, start=1):
        try:
            text = json.dumps(row, default=as_text)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"row {number}: bytes that are not UTF-8 text ({error.reason})"
            ) from None
        yield Record(number, json.loads(text), json.loads(text, parse_int=str, parse_float=str))


def row_of(record: Record, prompt_column: str) -> DataRow:
    """The prompt of a record; ValueError if it is missing, or not a text, number or chat."""
    number = record.line_number
    prompts = [column for column in (prompt_column, TOKENS_COLUMN) if column in record.values]
    if not prompts:
        raise missing_column(record, prompt_column, setting="data.prompt_column")
    messages: tuple[Message, ...] = ()
    if isinstance(chat := record.values.get(prompt_column), list):
        messages = _messages(cast("list[Any]", chat), number)
        prompts.remove(prompt_column)
    texts = {column: record.text(column) for column in prompts}
    return DataRow(number, texts.get(prompt_column, ""), texts.get(TOKENS_COLUMN, ""), messages)


def missing_column(record: Record, column: str, *, setting: str) -> ValueError:
    names = ", ".join(map(repr, record.values))
    names = f"the columns are {names}; name one with {setting}" if names else "the row is empty"
    return ValueError(f"line {record.line_number}: no column '{column}'; {names}")


def _messages(chat: Sequence[Any], number: int) -> tuple[Message, ...]:
    messages: list[Message] = []
    for message in chat:
        role, content = (message.get(key) if isinstance(message, dict) else None for key in MESSAGE)
        if isinstance(content, list):  # parts, which may be images
            parts = cast("list[Any]", content)
            texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
            content = "".join(map(str, texts)) if None not in texts else None
        if role not in get_args(Role) or not isinstance(content, str):
            raise ValueError(
                f"line {number}: the prompt has {message!r:.40}; each message needs a role "
                f"({', '.join(get_args(Role))}) and a text as content"
            )
        messages.append(Message(cast(Role, role), content))
    if not messages or messages[-1].role == "assistant":
        raise ValueError(f"line {number}: the prompt does not end with a message of the user")
    return tuple(messages)


def _info(record: Record) -> Mapping[str, Any]:
    value: object = record.values.get(INFO_COLUMN)
    if value is None or value == "":
        return {}
    try:
        parsed: object = json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        parsed = value
    if not isinstance(parsed, dict):
        raise ValueError(
            f"line {record.line_number}: column '{INFO_COLUMN}' is {value!r:.40}, which is not a "
            "JSON object"
        )
    return cast("dict[str, Any]", parsed)
