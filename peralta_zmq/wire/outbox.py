"""Groups that were sent and are not yet known to be safe with the trainer.

Knows sequences, frames and announcements; knows nothing of sockets.
"""

from __future__ import annotations

import time

from peralta_zmq.wire.messages import Announcement

RESEND_SECONDS = 2.0  # for an announcement to tell of what was just sent again


class Outbox:
    """Keeps the frames of one sender until they are settled; bounded, the oldest goes first."""

    def __init__(self, sender: str, *, limit: int = 64) -> None:
        self.lost = 0  # frames given up because the outbox was full
        self._sender, self._limit = sender, limit
        self._frames: dict[int, bytes] = {}  # by sequence, ascending
        self._next = 0
        self._trainer = b""  # the start of the trainer that we last heard
        self._resent = float("-inf")

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def floor(self) -> int:
        """Nothing below this sequence will be sent again."""
        return next(iter(self._frames), self._next)

    def add(self, sequence: int, frame: bytes) -> None:
        """Keep a frame; sequences ascend."""
        if len(self._frames) == self._limit:
            del self._frames[self.floor]
            self.lost += 1
        self._frames[sequence] = frame
        self._next = sequence + 1

    def lost_on_the_way(self, heard: Announcement | None) -> list[bytes]:
        """Forget what `heard` settles; returns the frames to send again now, in order.

        A restarted trainer has lost all that was in its sockets; one that has seen a later group
        than it has settled has lost something between.
        """
        if heard is None:
            return []
        settled = heard.durable.get(self._sender, -1)
        self._frames = {number: each for number, each in self._frames.items() if number > settled}
        restarted = self._trainer not in (b"", heard.boot)
        self._trainer = heard.boot
        seen = self._next if restarted else heard.seen.get(self._sender, -1)
        if not restarted and time.monotonic() - self._resent < RESEND_SECONDS:
            return []
        again = [each for number, each in self._frames.items() if number < seen]
        if again:
            self._resent = time.monotonic()
        return again
