"""JSON-lines files of a run folder: append rows, read rows, get numbers of a row.

metrics.jsonl   one row for each training step: metric name -> number
events.jsonl    start, resume, a generator that joins or leaves, published weights, ...
samples.jsonl   one group (all rollouts of one problem) of each step
eval.jsonl      one row for each evaluation on held-out problems

`read_toml` reads the settings of a run and data files of this package.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO, TypeAlias, cast

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Row: TypeAlias = dict[str, object]

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
SAMPLES, EVALUATIONS = "samples.jsonl", "eval.jsonl"
LOCK = "lock"  # file in the run folder that the trainer keeps locked
logger = logging.getLogger(__name__)


class JsonLines:
    """Append-only JSON-lines file; opening it truncates an incomplete last line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._is_torn = False  # True after a short write (full disk): the last line is incomplete
        _truncate_torn_line(self._file)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one line, unbuffered; NaN and infinities become null.

        A failed write (logged) or a short write (full disk, not logged) loses this row only.
        """
        line = json.dumps(nan_to_null(row)).encode() + b"\n"
        line = b"\n" + line if self._is_torn else line
        try:
            self._is_torn = self._file.write(line) < len(line)
        except OSError as error:
            logger.warning("row not written to %s: %s", self._file.name, error.strerror)

    def append_event(self, event: str, **fields: object) -> Row:
        """Append `{"time": now in unix seconds, "event": event, **fields}` and return it."""
        row: Row = {"time": time.time(), "event": event, **fields}
        self.append(row)
        return row

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """Return all complete rows, oldest first; none if the file does not exist."""
    return parse_rows(path.read_bytes()) if path.exists() else []


def parse_rows(block: bytes) -> list[Row]:
    """Parse the lines of `block`; lines that are not a JSON object are skipped.

    A short write to a full disk leaves the beginning of a row as a line of its own.
    """
    rows: list[Row] = []
    for line in block.split(b"\n")[:-1]:  # the last part has no newline yet
        with suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                rows.append(cast("Row", row))
    return rows


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises OSError or ValueError."""
    return tomllib.loads(path.read_text("utf-8"))


def number(row: Mapping[str, object], key: str, default: float = math.nan) -> float:
    """Return a field as a finite float; `default` if this is not possible."""
    value = row.get(key)
    if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max:  # not NaN, not inf
        return float(value)
    return default


def generator_numbers(row: Mapping[str, object], metric: str) -> dict[str, float]:
    """Return the values of `gen/NAME/METRIC` in a row, by NAME; NaN for a null."""
    prefix, suffix = "gen/", f"/{metric}"
    keys = [key for key in row if key.startswith(prefix) and key.endswith(suffix)]
    return {key[len(prefix) : -len(suffix)]: number(row, key) for key in keys}


def finite_mean(values: Iterable[float], *, default: float = math.nan) -> float:
    """Return the mean of the finite values; `default` if there are none.

    Also returns `default` if the sum of the values is too large for a float.
    """
    finite = [value for value in values if math.isfinite(value)]
    try:
        return fmean(finite) if finite else default
    except OverflowError:
        return default


def format_number(value: float, spec: str, unit: str = "") -> str:
    """Format a number with a spec such as ",.2f" or ".0%"; a dash if it is not finite."""
    return f"{value:{spec}}{unit}" if math.isfinite(value) else "-"


def nan_to_null(content: Any) -> Any:
    """Return a deep copy with None for each NaN and infinity, which JSON lacks."""
    return json.loads(json.dumps(content), parse_constant=lambda name: None)


def _truncate_torn_line(file: BinaryIO) -> None:
    if size := file.seek(0, os.SEEK_END):
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        # Truncating a complete file to `size` could delete a row that another process just added.
        if end < size:
            file.truncate(end)
