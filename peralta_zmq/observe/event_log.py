"""events.jsonl of a run, with limits on the events that other machines can cause.

A generator may restart again and again: beyond LIMITS lines per minute and generator, events are
only counted, and after the minute one line has the fields of the newest one and their number as
`count`. A client without keys can use any number of names: all lines of one event in a run together
take at most `max_bytes`.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peralta_zmq.observe.metrics import JsonLines, Row

FREQUENT = ("join", "leave", "worker_info", "silent", "mismatch", "store_error")
# Event -> lines per minute, generator and, for a drop, outcome. A generator may restart every 6 s
# without omitted lines.
LIMITS = {
    **dict.fromkeys(FREQUENT, 10),
    **dict.fromkeys(("exclude", "skip"), 600),  # at most one per step
    **{"drop": 1, "final_status": 100, "pool_refilled": 10},
}
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Count:
    """Counter of one event of one generator in the current minute."""

    num_lines: int = 0  # lines written
    num_omitted: int = 0  # events without a line
    newest: Mapping[str, object] = field(default_factory=dict[str, object])  # newest omitted event


class EventLog:
    """Writer of events.jsonl. Use with `with`.

    `rows` are the lines already in `file`. `newest` has the newest `num_newest` lines, oldest
    first. Beyond `max_counts` counters in a minute, generators share one counter per event.
    """

    def __init__(
        self,
        file: JsonLines,
        rows: Sequence[Row],
        *,
        max_bytes: int = 4 << 20,  # about 30,000 joins
        max_counts: int = 4096,
        num_newest: int = 1000,
    ) -> None:
        self.newest = deque(rows, maxlen=num_newest)
        self._file = file
        self._max_bytes = max_bytes
        self._max_counts = max_counts
        self._num_bytes: Counter[str] = Counter()  # event -> size of its lines in this run
        for row in rows:
            if (event := str(row.get("event"))) in LIMITS:
                self._num_bytes[event] += len(json.dumps(row))
        # Key: event, generator, outcome (of a drop; otherwise None).
        self._counts: dict[tuple[str, str, object], _Count] = {}
        self._minute_end = time.monotonic() + 60.0

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.flush(at_end=True)

    def append(self, event: str, **fields: object) -> bool:
        """Write a line; False if a limit is reached."""
        if event not in LIMITS:
            self._write(event, fields)
            return True
        self.flush()
        # A drop has the field `sender` (NAME/INCARNATION), and an outcome, instead of `generator`.
        generator = fields.get("generator") or str(fields.get("sender")).rpartition("/")[0]
        key = event, str(generator), fields.get("outcome")
        if key not in self._counts and len(self._counts) >= self._max_counts:
            key = event, "", None  # shared by further generators
        count = self._counts.setdefault(key, _Count())
        if count.num_lines < LIMITS[event]:
            count.num_lines += 1
            return self._write_limited(event, fields)
        count.num_omitted += 1
        count.newest = fields
        return False

    def flush(self, *, at_end: bool = False) -> None:
        """Write a line for the omitted events of each generator, if the minute is over."""
        if time.monotonic() < self._minute_end and not at_end:
            return
        self._minute_end = time.monotonic() + 60.0
        counts = self._counts
        self._counts = {}
        for key, count in counts.items():
            if count.num_omitted:
                self._counts[key] = _Count(num_lines=1)  # the line counts for the new minute
                self._write_limited(key[0], {**count.newest, "count": count.num_omitted})

    def _write_limited(self, event: str, fields: Mapping[str, object]) -> bool:
        """Write a line; False if the event's lines have `max_bytes`."""
        if self._num_bytes[event] >= self._max_bytes:
            return False
        self._num_bytes[event] += len(json.dumps(self._write(event, fields)))
        if self._num_bytes[event] >= self._max_bytes:
            self._write("limit_reached", {"of": event, "bytes": self._max_bytes})
            logger.warning(
                "no more lines in events.jsonl: event=%s bytes=%d", event, self._max_bytes
            )
        return True

    def _write(self, event: str, fields: Mapping[str, object]) -> Row:
        row = self._file.append_event(event, **fields)
        self.newest.append(row)
        return row
