"""The files of one run, followed: what is known of it at this moment.

Knows the names of a run's files; knows nothing of pages. Reads only what was added, and of a big
file a part at a time.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from peralta_zmq.atomic_files import is_held
from peralta_zmq.observe.dashboard.follow import Tail
from peralta_zmq.observe.dashboard.table import Table
from peralta_zmq.observe.metrics import EVALUATIONS, EVENTS, METRICS, SAMPLES, Row, number

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG, SUMMARY = "config.toml", "summary.json"
LOCK = "lock"  # the trainer holds it
NUM_ROWS = 64  # newest rows kept as they are, for the verdict and the cards
NUM_EVENTS, NUM_SAMPLES = 400, 200
SAMPLES_BYTES = 16 << 20  # of the samples' and the events' file, the end
QUIET = ("publish", "drop")  # one for every step or group: their own deque
SMALL_BYTES = 1 << 20  # of a file that is read whole
PATIENCE_SECONDS = 0.8  # of one look, when there is much to read


def open_runs(folders: Sequence[Path], *, live: bool = False) -> list[RunFiles]:
    """The runs of these folders, each by a name of its own: as many parts of its path as differ."""
    paths = [folder.resolve().parts for folder in folders]
    names = [path[-1] for path in paths]
    for size in range(2, max(map(len, paths), default=0) + 1):
        if len(set(names)) == len(set(paths)):
            break
        names = ["/".join(path[-size:]) for path in paths]
    return [RunFiles(*each, live=live) for each in zip(folders, names, strict=True)]


class RunFiles:
    """What the files of `folder` say. `live` when the trainer is this very process."""

    def __init__(self, folder: Path, name: str = "", *, live: bool = False) -> None:
        self.folder, self.live = folder, live
        self.name = name or folder.resolve().name
        self._metrics = Tail(folder / METRICS)
        self._numbers = count(1)  # of samples
        self._known: dict[str, tuple[int, dict[str, Any]]] = {}  # small files by name
        self._replaced = 0
        self._forget()

    @property
    def generation(self) -> str:
        """Changes when what was sent before does not hold any more."""
        first = self.table.steps[0] if self.table.steps else -1
        return f"{first:g}-{self._first_time:.3f}-{self._replaced}-{self.table.rewinds}"

    @property
    def loading(self) -> bool:
        """Whether there is more in the files than is read by now."""
        return self._metrics.pending > 0

    @property
    def last(self) -> Row:
        """The newest row of metrics; empty before the first step."""
        return self.rows[-1] if self.rows else {}

    @property
    def newest_time(self) -> float:
        """Unix seconds of the newest sign of life; NaN when there is none."""
        rows = [self.last, *list(self.events)[-1:], *list(self.quiet_events)[-1:]]
        moments = [number(row, "time") for row in rows]
        return max((each for each in moments if math.isfinite(each)), default=math.nan)

    def is_held(self) -> bool | None:
        """Whether a trainer works in the folder, as far as this machine sees; None: no telling."""
        return True if self.live else is_held(self.folder / LOCK)

    def refresh(self, *, patience: float = PATIENCE_SECONDS) -> None:
        """Read what was added; at most about `patience` seconds of it."""
        ends = time.monotonic() + patience
        self._read_metrics(ends)
        for row in self._added(self._evaluations, self.evaluations):
            self.evaluations[number(row, "step")] = row
        for row in self._added(self._events, self.events, self.quiet_events):
            (self.quiet_events if row.get("event") in QUIET else self.events).append(row)
        while True:
            added = self._added(self._samples, self.samples)
            self.samples.extend((next(self._numbers), row) for row in added)
            if not self._samples.pending or time.monotonic() > ends:
                return

    def config(self) -> Mapping[str, Any]:
        """The settings of the run by section; empty when there are none to read."""
        return self._parsed(CONFIG, tomllib.loads)

    def summary(self) -> Mapping[str, Any]:
        """What the run has come to; empty while it has not."""
        return self._parsed(SUMMARY, json.loads)

    def _parsed(self, name: str, parse: Callable[[str], Any]) -> Mapping[str, Any]:
        """A small file, read anew only when it has changed."""
        path = self.folder / name
        try:
            status = path.stat()
            stamp = status.st_mtime_ns
            if status.st_size > SMALL_BYTES:
                return {}
            if self._known.get(name, (0, {}))[0] != stamp:
                found = parse(path.read_text("utf-8"))
                self._known[name] = (stamp, found if isinstance(found, dict) else {})
        except (OSError, ValueError, RecursionError):
            return {}
        return self._known[name][1]

    def _read_metrics(self, ends: float) -> None:
        while True:
            rows, replaced = self._metrics.read()
            if replaced:
                self._replaced += 1
                self._forget()
            self.table.extend(rows)
            for row in rows:
                self._first_time = self._first_time or number(row, "time", 0.0)
                self._keep(row)
            if not self._metrics.pending or time.monotonic() > ends:
                return

    def _added(self, tail: Tail, *known: deque[Any] | dict[Any, Any]) -> list[Row]:
        """The next rows of a file; `known`, of the one that it has replaced, is emptied first."""
        rows, replaced = tail.read()
        if replaced:
            self._replaced += 1
            for each in known:
                each.clear()
        return rows

    def _keep(self, row: Row) -> None:
        while self.rows and number(self.rows[-1], "step") >= number(row, "step"):
            self.rows.pop()  # rolled back
        self.rows.append(row)

    def _forget(self) -> None:
        """The run has begun anew, so all its files are read from their beginning."""
        self.table, self._first_time = Table(), 0.0
        self.rows: deque[Row] = deque(maxlen=NUM_ROWS)
        self._evaluations = Tail(self.folder / EVALUATIONS)
        self._events = Tail(self.folder / EVENTS, max_bytes=SAMPLES_BYTES)
        self._samples = Tail(self.folder / SAMPLES, max_bytes=SAMPLES_BYTES)
        self.evaluations: dict[float, Row] = {}  # by step
        self.events: deque[Row] = deque(maxlen=NUM_EVENTS)
        self.quiet_events: deque[Row] = deque(maxlen=NUM_EVENTS)
        self.samples: deque[tuple[int, Row]] = deque(maxlen=NUM_SAMPLES)
