"""Pruning: the trainer removes old weight versions after it has published a new one.

A version is a keyframe (all weights) or a delta, which needs its parent, an earlier version.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from peralta_zmq.atomic_files import failpoint
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import Version, folder_name

MAX_OBSOLETE_VERSIONS = 64  # kept for slow readers; the oldest beyond these are removed at once
# An obsolete version is kept for this many times the duration of the slowest load.
SLOWEST_LOAD_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class Retention:
    """Which versions are not obsolete, and for how long obsolete versions are kept."""

    last: int = 3  # number of newest versions, which are not obsolete
    interval: int | None = None  # multiples of this number are not obsolete either
    seconds: float = 0.0  # up to MAX_OBSOLETE_VERSIONS obsolete ones are kept at least this long


KEEP_LAST_THREE = Retention()


class Pruner:
    """Removes obsolete versions after slow readers had time to load them.

    Keeps the versions that `retention` selects, their parents back to a keyframe, and versions that
    are being read.
    """

    def __init__(self, store: WeightStore, retention: Retention) -> None:
        self._store, self._retention = store, retention
        self._parents: dict[int, int] = {}  # parent by version number; -1 for keyframes
        self._obsolete_since: dict[int, float] = {}  # monotonic seconds by version number
        self._reading_since: dict[str, float] = {}  # monotonic seconds by folder name
        self._slowest_load = 0.0  # seconds

    def prune(self, published: Version) -> None:
        """Remove old versions after the publication of a new one.

        Leaves folders with higher numbers, which are not of this run. Ignores OSError, because the
        next publication prunes again.
        """
        self._parents[published.number] = published.parent
        with contextlib.suppress(OSError):
            numbers = [number for number in self._store.numbers() if number <= published.number]
            for number in self._removable(numbers, time.monotonic()):
                failpoint("prune.remove")  # here a test can kill the process
                self._store.backend.remove(folder_name(number))
        failpoint("publish.pruned")

    def _removable(self, numbers: list[int], now: float) -> list[int]:
        """Numbers of the obsolete versions to remove now.

        Newest first, so that a delta is removed before its parent.
        """
        being_read = self._observe_readers(now)
        needed = self._needed(numbers)
        obsolete = [number for number in reversed(numbers) if number not in needed]
        known_since = self._obsolete_since
        self._obsolete_since = {number: known_since.get(number, now) for number in obsolete}
        keep_seconds = max(self._retention.seconds, SLOWEST_LOAD_FACTOR * self._slowest_load)
        return [
            number
            for rank, number in enumerate(obsolete)
            if (now - self._obsolete_since[number] >= keep_seconds or rank >= MAX_OBSOLETE_VERSIONS)
            and folder_name(number) not in being_read
        ]

    def _needed(self, numbers: list[int]) -> set[int]:
        """Numbers of the versions that the retention selects, and of their ancestors."""
        interval, needed = self._retention.interval, set[int]()
        at_interval = [number for number in numbers if interval and number % interval == 0]
        for selected in [*at_interval, *numbers[-self._retention.last :]]:
            number = selected
            while number >= 0 and number not in needed:
                needed.add(number)
                if number not in self._parents and (version := self._store.find(number)):
                    self._parents[number] = version.parent
                number = self._parents.get(number, -1)  # -1 for an unreadable version
        return needed

    def _observe_readers(self, now: float) -> set[str]:
        """Names of the folders that are being read; updates the duration of the slowest load."""
        names = self._store.backend.leases.being_read()
        for finished in self._reading_since.keys() - names:
            self._slowest_load = max(self._slowest_load, now - self._reading_since[finished])
        self._reading_since = {name: self._reading_since.get(name, now) for name in names}
        return names
