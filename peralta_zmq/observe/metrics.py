"""JSON-lines files of a run folder: append rows, read rows, get numbers of a row.

metrics.jsonl   one row for each training step: metric name -> number
events.jsonl    start, resume, a generator that joins or leaves, published weights, ...
samples.jsonl   one row for each sampled group
eval.jsonl      one row for each evaluation on held-out problems
answers.jsonl   one row for each held-out problem of an evaluation, with the answers
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from peralta_zmq.atomic_files import replace_file

Row: TypeAlias = dict[str, object]
Content = TypeVar("Content")

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SAMPLES = "samples.jsonl"
EVALUATIONS = "eval.jsonl"
ANSWERS = "answers.jsonl"
CONFIG_HISTORY = "config_history.jsonl"  # settings that a resumed run has changed
LOCK = "lock"  # file in the run folder that the trainer keeps locked
logger = logging.getLogger(__name__)


class JsonLines:
    """Append-only JSON-lines file; opening it truncates an incomplete last line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab+", buffering=0)
        self._is_torn = False  # True after a short write (full disk): the last line is incomplete
        _truncate_torn_line(self._file)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one line, unbuffered; a failed or short write (full disk) loses this row only."""
        line = json.dumps(nan_to_null(row)).encode() + b"\n"
        line = b"\n" + line if self._is_torn else line
        try:
            self._is_torn = self._file.write(line) < len(line)
        except OSError as error:
            logger.warning("row not written to %s: %s", self._file.name, error.strerror)

    def append_event(self, event: str, **fields: object) -> Row:
        """Append `{"time": unix seconds, "event": event, **fields}` and return it."""
        row: Row = {"time": time.time(), "event": event, **fields}
        self.append(row)
        return row

    def trim(self, max_bytes: int) -> None:
        """Replace a file of more than `max_bytes` by the rows of the first step and the newest
        rows, each up to a quarter of `max_bytes`. After a failure, the file keeps all rows.
        """
        try:
            if os.fstat(self._file.fileno()).st_size <= max_bytes:
                return
            lines = [line + b"\n" for line in self._path.read_bytes().split(b"\n")[:-1]]
            step = _step_of(next(iter(lines), b""))
            first = takewhile(lambda line: _step_of(line) == step, lines)
            head = first_within(max_bytes // 4, first, len)
            tail = first_within(max_bytes // 4, reversed(lines[len(head) :]), len)[::-1]
            replace_file(self._path, b"".join([*head, *tail]))
            replaced = self._path.open("ab+", buffering=0)
        except OSError as error:
            logger.warning("%s not made smaller: %s", self._path, error.strerror)
            return
        self._file.close()
        self._file = replaced
        self._is_torn = False

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """All complete rows, oldest first; none if the file does not exist."""
    return parse_rows(path.read_bytes()) if path.exists() else []


def parse_rows(block: bytes) -> list[Row]:
    """Parse the lines of `block`; lines that are no JSON object, as on a full disk, are skipped."""
    rows: list[Row] = []
    for line in block.split(b"\n")[:-1]:  # the last part has no newline yet
        with suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                rows.append(cast("Row", row))
    return rows


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text("utf-8"))


def number(row: Mapping[str, object], key: str, default: float = math.nan) -> float:
    """A field as a finite float; `default` if this is not possible."""
    value = row.get(key)
    if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max:  # not NaN, not inf
        return float(value)
    return default


def generator_numbers(row: Mapping[str, object], metric: str) -> dict[str, float]:
    """The values of `gen/NAME/METRIC` in a row, by NAME; NaN for a null."""
    prefix = "gen/"
    suffix = f"/{metric}"
    keys = [key for key in row if key.startswith(prefix) and key.endswith(suffix)]
    return {key[len(prefix) : -len(suffix)]: number(row, key) for key in keys}


def finite_mean(values: Iterable[float], *, default: float = math.nan) -> float:
    """The mean of the finite values; `default` if there is none, or their sum is too large."""
    finite = [value for value in values if math.isfinite(value)]
    try:
        return fmean(finite) if finite else default
    except OverflowError:
        return default


def format_number(value: float, spec: str, unit: str = "") -> str:
    """Format a number with a spec such as ",.2f" or ".0%"; a dash if it is not finite."""
    return f"{value:{spec}}{unit}" if math.isfinite(value) else "-"


def format_rate(value: float) -> str:
    """Format a number per second; a small one keeps two digits, so that it is not rounded to 0."""
    return format_number(value, ",.0f" if abs(value) >= 9.5 or value == 0 else ".2g")


def nan_to_null(content: Any) -> Any:
    """A deep copy with None for each NaN and infinity, which JSON lacks."""
    return json.loads(json.dumps(content), parse_constant=lambda name: None)


def _step_of(line: bytes) -> object:
    return next((row.get("step") for row in parse_rows(line)), None)


def first_within(
    max_size: int, contents: Iterable[Content], size_of: Callable[[Content], int]
) -> list[Content]:
    """The first contents whose sizes together are at most `max_size`."""
    kept: list[Content] = []
    for content in contents:
        max_size -= size_of(content)
        if max_size < 0:
            break
        kept.append(content)
    return kept


def _truncate_torn_line(file: BinaryIO) -> None:
    # Not mapped: if a NAS loses the file, reading a mapping raises SIGBUS.
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = file.seek(max(0, end - (1 << 16)))
        if newline := file.read(end - start).rfind(b"\n") + 1:
            end = start + newline
            break
        end = start
    # Truncating a complete file to `size` could delete a row that another process just added.
    if end < size:
        file.truncate(end)
