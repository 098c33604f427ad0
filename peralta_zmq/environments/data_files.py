"""The records of data sets: CSV, JSONL and Parquet files, and folders of the library datasets."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from peralta_zmq.errors import TaskError, import_extra, nearest

DATA_FOLDER = Path(__file__).parent / "data"
SHIPPED = tuple(sorted(file.stem for file in DATA_FOLDER.glob("*.csv")))  # names of data sets
TOKENS_COLUMN = "input_token_ids"
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
csv.field_size_limit((1 << 31) - 1)  # characters; a memory limit, 131,072 by default


class Record(NamedTuple):
    line_number: int  # first line of the row in the file
    values: Mapping[str, Any]  # by column
    texts: Mapping[str, Any]  # the same with numbers as text, so that 0.1 stays exact
    source: str = ""  # the data set

    def text(self, column: str) -> str:
        """The text or number of a column, or token ids separated by spaces.

        Raises TaskError for another value, and for a lone surrogate.
        """
        value = self.texts[column]
        if column == TOKENS_COLUMN and isinstance(value, list):
            return " ".join(map(str, cast("list[object]", value)))
        if not isinstance(value, str):
            raise self.error(f"column '{column}' is {value!r:.40}; it must be text or a number")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(f"column '{column}' has a lone surrogate {value!a:.40}") from None
        return value

    def error(self, reason: str) -> TaskError:
        return TaskError(f"'{self.source}' line {self.line_number}: {reason}")

    def missing_column(self, column: str, *, setting: str) -> TaskError:
        names = ", ".join(map(repr, self.values))
        names = f"the columns are {names}; name one with {setting}" if names else "the row is empty"
        return self.error(f"no column '{column}'; {names}")


def read_records(source: str, split: str = "train") -> list[Record]:
    """Read all records of a data set, in file order; `split` is that of a folder.

    `source` is the name of a shipped data set or a path. Raises TaskError for a file that is
    missing, empty or not UTF-8, or with a damaged record.
    """
    path = _path(source)
    try:
        records = [each._replace(source=source) for each in _records(path, split)]
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
            f"no data set or file '{source}'{_suggestion(path)}; "
            f"choose one of {', '.join(SHIPPED)}, or give the path of a .csv, .jsonl or .parquet "
            "file, or of a folder that datasets' save_to_disk made"
        )
    if path.suffix.lower() not in (".csv", PARQUET_SUFFIX, *JSONL_SUFFIXES):
        raise TaskError(f"'{source}' is neither .csv, .jsonl nor .parquet; convert or rename it")
    return path


def _suggestion(path: Path) -> str:
    """', did you mean X?' for a similarly named data set or file next to `path`."""
    names = {name: name for name in SHIPPED}
    if os.path.isdir(path.parent):
        names |= {file.name: str(file) for file in path.parent.glob("*.*")}
    name = nearest(path.name, names)
    return f", did you mean '{names[name]}'?" if name else ""


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
