"""Which versions may go, and when. Knows numbers, parents and a clock; reads no weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from peralta_zmq.failpoints import failpoint
from peralta_zmq.weights.backends import StorageBackend
from peralta_zmq.weights.version import Version, name_of

MAX_WAITING = 64  # versions that are only kept for those who might still read them
SLOW_LOADS = 3.0  # times the slowest load we saw


class Pruner:
    """Remembers since when a version is spare, and how long others took to read one."""

    def __init__(self, place: StorageBackend) -> None:
        self._place = place
        self._parents: dict[int, int | None] = {}
        self._spare_since: dict[int, float] = {}  # monotonic seconds
        self._reading_since: dict[str, float] = {}
        self._slowest = 0.0

    def note(self, version: Version) -> None:
        """A version was published."""
        is_delta = version.kind == "delta"
        self._parents[version.number] = version.parent if is_delta else None

    def prune(
        self,
        numbers: Sequence[int],
        keep_last: int,
        keep_interval: int | None,
        keep_seconds: float,
        parent_of: Callable[[int], int | None],
    ) -> None:
        """Remove what nobody needs: not the newest, not every `keep_interval`-th, nothing that one
        of these is made from, nothing young (a slow reader may be at it), nothing being read.
        """
        now = time.monotonic()
        read = self._watch_readers(now)
        patience = max(keep_seconds, SLOW_LOADS * self._slowest)
        kept = {*numbers[-keep_last:]}
        kept |= {number for number in numbers if keep_interval and number % keep_interval == 0}
        needed = self._with_parents(kept, parent_of)
        spare = [number for number in numbers if number not in needed]
        self._spare_since = {each: self._spare_since.get(each, now) for each in spare}
        for place, number in enumerate(reversed(spare)):
            old = now - self._spare_since[number] >= patience
            if (old or place >= MAX_WAITING) and name_of(number) not in read:
                failpoint("prune.remove")
                self._place.remove(name_of(number))

    def _with_parents(
        self, kept: Iterable[int], parent_of: Callable[[int], int | None]
    ) -> set[int]:
        needed: set[int] = set()
        for start in kept:
            number: int | None = start
            while number is not None and number not in needed:
                needed.add(number)
                if number not in self._parents:
                    self._parents[number] = parent_of(number)
                number = self._parents[number]
        return needed

    def _watch_readers(self, now: float) -> set[str]:
        read = self._place.being_read()
        for name in self._reading_since.keys() - read:
            self._slowest = max(self._slowest, now - self._reading_since[name])
        self._reading_since = {name: self._reading_since.get(name, now) for name in read}
        return read
