"""Groups that were sent and are not yet known to be safe with the trainer.

Knows sequences, frames and announcements; knows nothing of sockets.
"""

from __future__ import annotations

import time

from peralta_zmq.wire.announcements import Announcement

RESEND_SECONDS = 2.0  # for an announcement to tell of what was just sent again
STILL_SECONDS = 5.0  # in which a trainer that waits hears of something, if it is on its way


class Outbox:
    """Keeps the frames of one sender until they are durable; bounded, the oldest goes first."""

    def __init__(self, sender: str, *, limit: int = 64) -> None:
        self.lost = 0  # groups given up because the outbox was full
        self.resent = 0  # groups sent again
        self.sender, self._limit = sender, limit
        self._frames: dict[int, bytes] = {}  # by sequence, ascending
        self._next = 0
        self._received = -1  # all up to this sequence have come to the trainer
        self._trainer = b""  # the start of the trainer that we last heard
        self._resent_at = float("-inf")
        self._heard: Announcement | None = None  # the last one
        self._still_since = float("-inf")  # nothing has come, and nothing was added
        self._mark = 0, 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def in_flight(self) -> int:
        """Groups on their way: kept, and not known to have come."""
        return sum(sequence > self._received for sequence in self._frames)

    @property
    def min_sequence(self) -> int:
        """Nothing below this sequence will be sent again."""
        return next(iter(self._frames), self._next)

    def has_room(self, under_way: int) -> bool:
        """Whether one more can be kept, beside so many that are still being made."""
        return len(self._frames) + under_way < self._limit

    def add(self, sequence: int, frame: bytes) -> int | None:
        """Keep a frame; sequences ascend. Returns the sequence given up for it, if there is one."""
        lost = None
        if len(self._frames) == self._limit:
            lost = self.min_sequence
            del self._frames[lost]
            self.lost += 1
        self._frames[sequence] = frame
        self._next = sequence + 1
        return lost

    def skip(self, sequence: int) -> None:
        """There will be no frame for this one."""
        self._next = sequence + 1

    def frames_to_resend(self, heard: Announcement | None) -> list[bytes]:
        """Forget what `heard` says is durable; returns the frames to send again now, in order.

        A restarted trainer has lost all that was in its sockets; one that has seen a later group
        than it has received without a gap has lost something between; one that waits, and goes on
        saying so, has lost the last ones.
        """
        if heard is None:
            return []
        restarted = self._trainer not in (b"", heard.incarnation)
        self._trainer = heard.incarnation
        self._settle(heard, restarted)
        if self._is_still(heard) or restarted:
            return self._again(self._next)
        if time.monotonic() - self._resent_at < RESEND_SECONDS:
            return []
        return self._again(heard.highest_received.get(self.sender, -1))

    def _is_still(self, heard: Announcement) -> bool:
        """Whether the trainer has waited long for what we have sent, as it said just now."""
        now, before, mark = time.monotonic(), self._mark, (self._received, self._next)
        news, self._heard, self._mark = heard is not self._heard, heard, mark
        if mark != before or not heard.waiting or now - self._resent_at < STILL_SECONDS:
            self._still_since = now
        return news and now - self._still_since > STILL_SECONDS

    def _settle(self, heard: Announcement, restarted: bool) -> None:
        durable = heard.durable.get(self.sender, -1)
        known = -1 if restarted else self._received  # what a dead trainer had received is lost
        self._received = max(known, durable, heard.received.get(self.sender, -1))
        self._frames = {number: each for number, each in self._frames.items() if number > durable}

    def _again(self, below: int) -> list[bytes]:
        frames = [each for number, each in self._frames.items()
                  if self._received < number < below]  # fmt: skip
        if frames:
            self._resent_at = time.monotonic()
            self.resent += len(frames)
        return frames
