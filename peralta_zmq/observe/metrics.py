"""Rows of JSON in a file, one whole line each: metrics.jsonl, events.jsonl, samples.jsonl.

Knows lines and files; knows nothing of training. A line that a crash tore is never read as a row.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeAlias, cast

Row: TypeAlias = dict[str, object]

METRICS, EVENTS, SAMPLES = "metrics.jsonl", "events.jsonl", "samples.jsonl"
logger = logging.getLogger(__name__)
BLOCK = 1 << 16  # bytes read at a time when a torn line is looked for


class JsonLines:
    """An append-only file of rows; opening it cuts off a last line that a crash left torn."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._torn = False  # a full disk took half a line
        _cut_torn_line(self._file)

    def append(self, row: Mapping[str, object]) -> None:
        """Write one line and hand it to the system at once; NaN and infinities become null.

        A disk that refuses costs the line, not the run.
        """
        line = json.dumps(finite(row), allow_nan=False).encode() + b"\n"
        start = b"\n" if self._torn else b""
        try:
            self._torn = self._file.write(start + line) < len(start + line)
        except OSError as error:
            logger.warning("row not written to %s: %s", self._file.name, error.strerror)

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


class Events:
    """What happened beside the steps: starts, resumes, joins, drops, restarts."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def record(self, event: str, **fields: object) -> Row:
        """Append `{"time": now in unix seconds, "event": event, **fields}`, and return it."""
        row: Row = {"time": time.time(), "event": event, **fields}
        self._lines.append(row)
        return row

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines.__exit__(kind, error, trace)


def read_rows(path: Path) -> list[Row]:
    """Every whole row, oldest first; none when the file is not there."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return list(_rows(content.split(b"\n")[:-1]))  # what follows the last newline is torn


def last_step(path: Path) -> int | None:
    """`step` of the newest row that has one; None for an empty or absent file."""
    steps = (row.get("step") for row in reversed(read_rows(path)))
    return next((step for step in steps if isinstance(step, int)), None)


def number(row: Mapping[str, object], key: str, default: float = math.nan) -> float:
    """A field as a number; `default` when it is absent, null or no number."""
    value = row.get(key)
    try:
        return float(value) if isinstance(value, (int, float)) else default
    except OverflowError:  # an integer of more than 308 digits
        return default


def _rows(lines: Sequence[bytes]) -> Iterator[Row]:
    for line in lines:
        try:
            row: object = json.loads(line)
        except ValueError:  # a full disk can tear a line that others follow
            continue
        if isinstance(row, dict):
            yield cast("Row", row)


def _cut_torn_line(file: BinaryIO) -> None:
    size = end = file.seek(0, os.SEEK_END)
    keep = 0
    while end > 0 and keep == 0:
        start = max(0, end - BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        keep, end = (start + newline + 1 if newline >= 0 else 0), start
    if keep < size:  # another process may be appending: leave a sound file alone
        file.truncate(keep)


def finite(value: object) -> object:
    """JSON has no NaN and no infinity: they become null, however deep."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, object]", value)
        return {key: finite(field) for key, field in fields.items()}
    if isinstance(value, (list, tuple)):
        return [finite(element) for element in cast("Sequence[object]", value)]
    return value
