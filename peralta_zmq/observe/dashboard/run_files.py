"""Incremental reading of a run folder: only what was added, in bounded parts."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

from peralta_zmq.atomic_files import is_held
from peralta_zmq.observe.dashboard.charts import Table
from peralta_zmq.observe.metrics import (
    EVALUATIONS,
    EVENTS,
    METRICS,
    SAMPLES,
    Row,
    number,
    parse_row,
)
from peralta_zmq.observe.report import SUMMARY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG = "config.toml"
LOCK = "lock"  # held by the trainer
NUM_ROWS = 64  # newest rows kept for the verdict and the cards
NUM_EVENTS, NUM_SAMPLES = 400, 200
FREQUENT_EVENTS = ("publish", "drop")  # kept apart, so that they do not displace the others
BLOCK = 4 << 20  # bytes of one read; longer lines are skipped
MAX_METRICS_BYTES, MAX_OTHER_BYTES = 512 << 20, 16 << 20  # of longer files only the end is read
MAX_SMALL_BYTES = 1 << 20  # of config.toml and summary.json
REFRESH_SECONDS = 0.8  # after which refresh() leaves the remaining data for the next call


def open_runs(folders: Sequence[Path], *, live: bool = False) -> list[RunFiles]:
    """The runs in `folders`, named by as many trailing path components as make names unique."""
    paths = [folder.resolve().parts for folder in folders]
    names = [path[-1] for path in paths]
    for size in range(2, max(map(len, paths), default=0) + 1):
        if len(set(names)) == len(set(paths)):
            break
        names = ["/".join(path[-size:]) for path in paths]
    return [RunFiles(*run, live=live) for run in zip(folders, names, strict=True)]


class RunFiles:
    """Contents of a run folder. `live` is True if the trainer is this process."""

    def __init__(self, folder: Path, name: str = "", *, live: bool = False) -> None:
        self.folder, self.live = folder, live
        self.name = name or folder.resolve().name
        self._metrics = Tail(folder / METRICS, max_bytes=MAX_METRICS_BYTES)
        self._sample_numbers = count(1)
        self._parsed: dict[str, tuple[int, dict[str, Any]]] = {}  # name -> mtime, content
        self._num_replaced = 0
        self._reset()

    def _reset(self) -> None:
        """Start over, because the run was deleted and started again."""
        self.table, self._first_time = Table(), 0.0
        self.rows: deque[Row] = deque(maxlen=NUM_ROWS)
        self._evaluations = Tail(self.folder / EVALUATIONS, max_bytes=MAX_METRICS_BYTES)
        self._events = Tail(self.folder / EVENTS, max_bytes=MAX_OTHER_BYTES)
        self._samples = Tail(self.folder / SAMPLES, max_bytes=MAX_OTHER_BYTES)
        self.evaluations: dict[float, Row] = {}  # by step
        self.events: deque[Row] = deque(maxlen=NUM_EVENTS)
        self.frequent_events: deque[Row] = deque(maxlen=NUM_EVENTS)
        self.samples: deque[tuple[int, Row]] = deque(maxlen=NUM_SAMPLES)  # with running numbers

    @property
    def generation(self) -> str:
        """Changes when data sent earlier is no longer valid."""
        first = self.table.steps[0] if self.table.steps else -1
        return f"{first:g}-{self._first_time:.3f}-{self._num_replaced}-{self.table.rewinds}"

    @property
    def loading(self) -> bool:
        """Whether metrics.jsonl has more rows than were read."""
        return self._metrics.pending > 0

    @property
    def last(self) -> Row:
        """The newest row of metrics; empty before the first step."""
        return self.rows[-1] if self.rows else {}

    @property
    def newest_time(self) -> float:
        """Unix seconds of the newest row or event; NaN if there is none."""
        newest = [self.last, *list(self.events)[-1:], *list(self.frequent_events)[-1:]]
        times = [number(row, "time") for row in newest]
        return max((time for time in times if math.isfinite(time)), default=math.nan)

    def is_held(self) -> bool | None:
        """Whether a trainer holds the folder's lock; None if this machine cannot know."""
        return True if self.live else is_held(self.folder / LOCK)

    def refresh(self, *, seconds: float = REFRESH_SECONDS) -> None:
        """Read what was added, for about `seconds` at most."""
        deadline = time.monotonic() + seconds
        while True:
            self._read_metrics()
            if not self._metrics.pending or time.monotonic() > deadline:
                break
        for row in self._read(self._evaluations, self.evaluations):
            self.evaluations[number(row, "step")] = row
        for row in self._read(self._events, self.events, self.frequent_events):
            is_frequent = row.get("event") in FREQUENT_EVENTS
            (self.frequent_events if is_frequent else self.events).append(row)
        while True:
            rows = self._read(self._samples, self.samples)
            self.samples.extend((next(self._sample_numbers), row) for row in rows)
            if not self._samples.pending or time.monotonic() > deadline:
                break

    def config(self) -> Mapping[str, Any]:
        """Settings of the run by section; empty if they cannot be read."""
        return self._parse(CONFIG, tomllib.loads)

    def summary(self) -> Mapping[str, Any]:
        """The summary of a completed run; else empty."""
        return self._parse(SUMMARY, json.loads)

    def _parse(self, name: str, parse: Callable[[str], Any]) -> Mapping[str, Any]:
        """Content of a small file, parsed when it has changed."""
        path = self.folder / name
        try:
            status = path.stat()
            if status.st_size > MAX_SMALL_BYTES:
                return {}
            if self._parsed.get(name, (0, {}))[0] != status.st_mtime_ns:
                content = parse(path.read_text("utf-8"))
                content = content if isinstance(content, dict) else {}
                self._parsed[name] = (status.st_mtime_ns, content)
        except (OSError, ValueError, RecursionError):
            return {}
        return self._parsed[name][1]

    def _read_metrics(self) -> None:
        rows, is_replaced = self._metrics.read()
        if is_replaced:
            self._num_replaced += 1
            self._reset()
        self.table.extend(rows)
        for row in rows:
            self._first_time = self._first_time or number(row, "time", 0.0)
            while self.rows and number(self.rows[-1], "step") >= number(row, "step"):
                self.rows.pop()  # undone by a roll-back
            self.rows.append(row)

    def _read(self, tail: Tail, *collections: deque[Any] | dict[Any, Any]) -> list[Row]:
        """The next rows of a file; clears the collections if the file was replaced."""
        rows, is_replaced = tail.read()
        if is_replaced:
            self._num_replaced += 1
            for collection in collections:
                collection.clear()
        return rows


class Tail:
    """Reads each complete line of a growing JSON-lines file once; detects a replaced file."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._inode, self._offset = -1, 0
        self.pending = 0  # bytes left for the next read

    def read(self) -> tuple[list[Row], bool]:
        """The next rows, and whether the file is another one than before."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_replaced = self._open(status)
                file.seek(self._offset)
                block = file.read(BLOCK)
        except OSError:  # does not exist yet, or a share is unavailable
            self.pending = 0
            return [], False
        is_full = len(block) == BLOCK
        complete = block.rfind(b"\n") + 1
        self._offset += BLOCK if is_full and not complete else complete
        self.pending = max(0, status.st_size - self._offset) if is_full else 0
        return _parse_rows(block[:complete]), is_replaced

    def _open(self, status: os.stat_result) -> bool:
        """Choose the offset in a new file; True if it replaces an earlier one."""
        if status.st_ino == self._inode and status.st_size >= self._offset:
            return False
        is_replaced = self._inode >= 0
        self._inode, self._offset = status.st_ino, max(0, status.st_size - self._max_bytes)
        return is_replaced


def _parse_rows(block: bytes) -> list[Row]:
    lines = [line for line in block.split(b"\n") if line]
    try:  # one call for all lines takes 60 % of the time
        values: list[object] = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines):
        values = [parse_row(line) for line in lines]
    return [cast("Row", row) for row in values if isinstance(row, dict)]
