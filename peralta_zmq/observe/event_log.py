"""events.jsonl of a run, with bounds on the events that messages from other machines cause.

A client can cause such events without end: with groups that are dropped, with many starts of one
generator, and, without keys, under any number of names. In LIMITS each of these events has a number
of lines per minute and generator; further events of the generator are only counted, and its first
line of the next minute has their number, `count`. All lines of one such event together take at most
MAX_BYTES in a run. A line without `count` stands for one event.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peralta_zmq.observe.metrics import JsonLines, Row

# Event -> lines per minute and generator. A generator that restarts every few seconds stays below.
FREQUENT = ("join", "leave", "worker_info", "silent", "mismatch")
LIMITS = {"drop": 1, "last_report": 100, **dict.fromkeys(FREQUENT, 10)}
MINUTE = 60.0  # seconds
MAX_BYTES = 4 << 20  # of the lines of one event in a run; about 30,000 joins
MAX_COUNTS = 4096  # generators that are counted separately; all others are counted together
NUM_EVENTS = 1000  # newest events kept in memory for the verdict
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Count:
    """Events of one kind and generator in the current minute."""

    num_lines: int = 0
    num_omitted: int = 0  # events without a line
    newest: Mapping[str, object] = field(default_factory=dict[str, object])  # omitted event


class EventLog:
    """Appends to events.jsonl. Use with `with`; `newest` has the newest lines, oldest first.

    `rows` are the lines that `file` has already.
    """

    def __init__(self, file: JsonLines, rows: Sequence[Row]) -> None:
        self.newest = deque(rows, maxlen=NUM_EVENTS)
        self._file = file
        self._num_bytes: Counter[str] = Counter()  # by event
        for row in rows:
            if (event := str(row.get("event"))) in LIMITS:
                self._num_bytes[event] += len(json.dumps(row))
        self._counts: dict[tuple[str, str, object], _Count] = {}
        self._minute_end = time.monotonic() + MINUTE

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.flush(at_end=True)

    def append(self, event: str, **fields: object) -> bool:
        """Write a line; False if a limit is reached, so that the event is only counted."""
        if event not in LIMITS:
            self._write(event, fields)
            return True
        self.flush()
        generator = fields.get("generator") or str(fields.get("sender")).rpartition("/")[0]
        key = event, str(generator), fields.get("outcome")
        if key not in self._counts and len(self._counts) >= MAX_COUNTS:
            key = event, "", None
        count = self._counts.setdefault(key, _Count())
        if count.num_lines < LIMITS[event]:
            count.num_lines += 1
            return self._write_limited(event, fields)
        count.num_omitted, count.newest = count.num_omitted + 1, fields
        return False

    def flush(self, *, at_end: bool = False) -> None:
        """Write a line for the omitted events of each generator if the minute is over."""
        if time.monotonic() < self._minute_end and not at_end:
            return
        self._minute_end = time.monotonic() + MINUTE
        counts, self._counts = self._counts, {}
        for key, count in counts.items():
            if count.num_omitted:
                self._counts[key] = _Count(num_lines=1)
                self._write_limited(key[0], {**count.newest, "count": count.num_omitted})

    def _write_limited(self, event: str, fields: Mapping[str, object]) -> bool:
        if self._num_bytes[event] >= MAX_BYTES:
            return False
        self._num_bytes[event] += len(json.dumps(self._write(event, fields)))
        if self._num_bytes[event] >= MAX_BYTES:
            self._write("limit_reached", {"of": event, "bytes": MAX_BYTES})
            logger.warning("no more lines in events.jsonl: event=%s bytes=%d", event, MAX_BYTES)
        return True

    def _write(self, event: str, fields: Mapping[str, object]) -> Row:
        row = self._file.append_event(event, **fields)
        self.newest.append(row)
        return row
