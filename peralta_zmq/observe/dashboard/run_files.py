"""Incremental reading of a run folder, and the status of the run.

The trainer may be on another machine, and replaces the files when a run is started again.
"""

from __future__ import annotations

import json
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from peralta_zmq.atomic_files import is_held
from peralta_zmq.observe import metrics
from peralta_zmq.observe.dashboard.charts import Evaluation, Table
from peralta_zmq.observe.metrics import (
    ANSWERS,
    EVALUATIONS,
    EVENTS,
    LOCK,
    METRICS,
    SAMPLES,
    Row,
    number,
)
from peralta_zmq.observe.run_state import newest_session, stall_limit

CONFIG = "config.toml"
FREQUENT_EVENTS = ("publish", "drop")  # kept separately, so that they do not displace other events
# Bytes that are read from the end of a file; earlier rows of a longer file are ignored.
MAX_BYTES = {
    **{METRICS: 512 << 20, EVALUATIONS: 512 << 20, EVENTS: 16 << 20},
    **{SAMPLES: 128 << 20, ANSWERS: 128 << 20},
}
# Statuses of a run whose trainer ended regularly, and of a run without a known running trainer.
ENDED = {"finished", "stopped"}
NOT_RUNNING = {*ENDED, "crashed", "silent"}


def runs_in(folder: Path) -> list[Path]:
    """The folder if it is that of a run, otherwise the run folders in it, by name."""
    if _is_run(folder):
        return [folder]
    try:
        return sorted(filter(_is_run, folder.iterdir()))
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (METRICS, EVENTS, CONFIG))


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of folders; paths relative to a common parent if two names are equal."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) < len(set(paths)):
        common = os.path.commonpath(paths)
        names = [str(path.relative_to(common)) for path in paths]
    return names


class RunList:
    """The runs in `folders`: run folders, or folders to which run folders may be added.

    `runs` only grows, so that the number of a run stays the same. With `live`, this process is the
    trainer of the runs in `folders`.
    """

    def __init__(self, folders: Sequence[Path], *, live: bool = False) -> None:
        self.runs = [RunFiles(folder, live=True) for folder in folders if live]
        self._folders = () if live else folders
        self.find()

    def find(self) -> None:
        known = {run.folder for run in self.runs}
        found = (folder for parent in self._folders for folder in runs_in(parent))
        if added := [RunFiles(folder) for folder in dict.fromkeys(found) if folder not in known]:
            self.runs += added
            for run, name in zip(self.runs, _names([run.folder for run in self.runs]), strict=True):
                run.name = name

    def refresh(self, *, seconds: float = 0.8) -> None:
        """Read added lines of all runs for about `seconds`; the next call continues."""
        deadline = time.monotonic() + seconds
        for run in self.runs:
            if (remaining := deadline - time.monotonic()) > 0.0:
                run.refresh(seconds=remaining)


class RunFiles:
    """Contents of a run folder; `live` is True if this process is the trainer of the run."""

    def __init__(self, folder: Path, *, live: bool = False) -> None:
        self.folder = folder
        self.live = live
        self.name = folder.resolve().name
        self._num_resets = 0
        self._reset()

    def _reset(self) -> None:
        self._tails = {name: Tail(self.folder / name, size) for name, size in MAX_BYTES.items()}
        self.table = Table()
        self.rows: deque[Row] = deque(maxlen=64)
        self.evaluations: dict[float, Evaluation] = {}  # on held-out problems, by step
        self.events: deque[Row] = deque(maxlen=400)
        self.frequent_events: deque[Row] = deque(maxlen=400)
        self.samples = RowIndex(self.folder / SAMPLES, self._tails[SAMPLES])
        self.answers = RowIndex(self.folder / ANSWERS, self._tails[ANSWERS])

    @property
    def generation(self) -> str:
        """Text that changes when data that a browser has becomes invalid."""
        first = f"{self.table.value('step', 0)}-{self.table.value('time', 0)}"
        return f"{first}-{self._num_resets}-{self.table.rewinds}"

    @property
    def loading(self) -> bool:
        """Whether metrics.jsonl may have rows that were not read yet."""
        return self._tails[METRICS].pending > 0

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

    def refresh(self, *, seconds: float = 0.8) -> None:
        """Read added lines for about `seconds`; all files from the start if one was replaced."""
        deadline = time.monotonic() + seconds
        if any(tail.is_replaced() for tail in self._tails.values()):
            self._num_resets += 1
            self._reset()
        while True:
            for row in self._tails[METRICS].read():
                self.table.append(row)
                while self.rows and number(self.rows[-1], "step") >= number(row, "step"):
                    self.rows.pop()  # undone by a roll-back
                self.rows.append(row)
            for row in self._tails[EVALUATIONS].read():
                self.evaluations[number(row, "step")] = Evaluation(
                    number(row, "accuracy"), number(row, "stderr"), number(row, "num_examples")
                )
            for row in self._tails[EVENTS].read():
                is_frequent = row.get("event") in FREQUENT_EVENTS
                (self.frequent_events if is_frequent else self.events).append(row)
            self.samples.refresh()
            self.answers.refresh()
            is_complete = not any(tail.pending for tail in self._tails.values())
            if is_complete or time.monotonic() > deadline:
                break

    def modified(self, name: str) -> float:
        """Unix seconds of the last change of a file; 0 if it cannot be read."""
        try:
            return (self.folder / name).stat().st_mtime
        except OSError:
            return 0.0

    def content(self, name: str) -> Mapping[str, Any]:
        """Content of config.toml or summary.json; {} if it cannot be read."""
        path = self.folder / name
        try:
            return _parse(path, path.stat().st_mtime_ns)
        except (OSError, ValueError):
            return {}


@lru_cache
def _parse(path: Path, mtime_ns: int) -> Mapping[str, Any]:
    """`mtime_ns` is part of the key of the cache."""
    return json.loads(path.read_bytes()) if path.suffix == ".json" else metrics.read_toml(path)


def status_of(run: RunFiles, *, now: float) -> str:
    """An Activity of a running trainer, or another status.

    "loading" (files not read yet), "empty" (no step yet), "stalled" (the trainer runs but takes no
    step), "silent" (no new data, and no way to check if the trainer runs), "crashed", "stopped" (by
    the user) or "finished".
    """
    if run.loading:
        return "loading"
    session = newest_session(list(run.events))
    if session.is_complete:
        return "finished"
    if session.is_over:
        return "stopped"
    seconds = now - run.newest_time
    is_stalled = seconds > stall_limit(number(run.last, "step_time", 0.0))
    # The trainer holds the lock while it runs; None if the lock cannot be read.
    is_running = not is_stalled or run.live or is_held(run.folder / LOCK)
    if not is_running:
        return "silent" if is_running is None else "crashed"
    activity = session.activity(run.last)
    if activity != "training":
        return activity
    return "empty" if not run.rows else "stalled" if is_stalled else "training"


class Tail:
    """Reader of a growing JSON-lines file that returns each complete line once.

    The first read starts at most `max_bytes` before the end.
    """

    def __init__(self, path: Path, max_bytes: int, *, block_bytes: int = 4 << 20) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._inode = -1
        self._offset = 0
        self.pending = 1  # bytes left for the next read(); 0 once the end was reached

    def is_replaced(self) -> bool:
        """Whether the path names another file than before, or the file was truncated."""
        try:
            stat = self._path.stat()
        except OSError:  # does not exist yet, or a network share is unavailable
            return False
        is_same = stat.st_ino == self._inode and stat.st_size >= self._offset
        return self._inode >= 0 and not is_same

    def read(self) -> list[Row]:
        return metrics.parse_rows(self.read_lines()[1])

    def read_lines(self) -> tuple[int, bytes]:
        """The next complete lines, of at most `block_bytes`, and their position."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if self._inode < 0:  # first read
                    self._inode = stat.st_ino
                    self._offset = max(0, stat.st_size - self._max_bytes)
                file.seek(self._offset)
                block = file.read(self._block_bytes)
        except OSError:  # does not exist yet, or a network share is unavailable
            self.pending = 0
            return 0, b""
        is_full = len(block) == self._block_bytes
        start = self._offset
        complete = block.rfind(b"\n") + 1  # size of the complete lines
        # A full block without a newline is part of a longer line, which is skipped.
        self._offset += len(block) if is_full and not complete else complete
        self.pending = max(0, stat.st_size - self._offset) if is_full else 0
        return start, block[:complete]


class RowIndex:
    """Positions of the rows of a growing JSON-lines file; the rows are read on request.

    `steps` has the step of each row; NaN if it has none.
    """

    def __init__(self, path: Path, tail: Tail) -> None:
        self.steps = array("d")
        self._path = path
        self._tail = tail
        self._positions = array("q")

    def refresh(self) -> None:
        position, lines = self._tail.read_lines()
        for line in lines.splitlines(keepends=True):
            for row in metrics.parse_rows(line):
                self.steps.append(number(row, "step"))
                self._positions.append(position)
            position += len(line)

    def read(self, index: int) -> Row:
        """A row; {} if the file was replaced since the last refresh."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._positions[index])
                return next(iter(metrics.parse_rows(file.readline())), {})
        except OSError:
            return {}
