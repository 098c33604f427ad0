"""Outbox: groups that were sent and are not yet durable at the trainer, and when to resend them."""

from __future__ import annotations

import time

from peralta_zmq.wire.announcements import Announcement

RESEND_SECONDS = 2.0  # minimum interval of resending: an announcement must have time to arrive
IDLE_SECONDS = 5.0  # a trainer that waits and receives nothing for this time has lost groups


class Outbox:
    """Keeps the frames of one sender until they are durable, at most `limit` of them."""

    def __init__(self, sender: str, *, limit: int = 64) -> None:
        self.lost = 0  # groups dropped because the outbox was full
        self.resent = 0  # groups sent again
        self.sender, self._limit = sender, limit
        self._frames: dict[int, bytes] = {}  # by sequence, ascending
        self._next = 0  # sequence
        self._received = -1  # the trainer received all groups up to this sequence
        self._trainer = b""  # incarnation of the latest announcement
        self._resent_at = float("-inf")  # monotonic seconds
        self._announcement: Announcement | None = None  # the latest
        self._idle_since = float("-inf")  # nothing was received or added since then
        self._progress = 0, 0  # _received and _next at the latest announcement

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def in_flight(self) -> int:
        """Number of groups that the trainer has not acknowledged as received."""
        return sum(sequence > self._received for sequence in self._frames)

    @property
    def min_sequence(self) -> int:
        """No group below this sequence will be sent again."""
        return next(iter(self._frames), self._next)

    def has_room(self, in_progress: int) -> bool:
        """Whether a group can be kept in addition to `in_progress` unfinished ones."""
        return len(self._frames) + in_progress < self._limit

    def add(self, sequence: int, frame: bytes) -> int | None:
        """Keep a frame; sequences ascend. Returns the sequence that a full outbox dropped."""
        dropped = None
        if len(self._frames) == self._limit:
            dropped = self.min_sequence
            del self._frames[dropped]
            self.lost += 1
        self._frames[sequence] = frame
        self._next = sequence + 1
        return dropped

    def skip(self, sequence: int) -> None:
        """Record that this sequence has no frame."""
        self._next = sequence + 1

    def frames_to_resend(self, announcement: Announcement | None) -> list[bytes]:
        """Drop the frames that are durable; returns the frames to send again now, in order.

        Groups were lost if the trainer restarted (those in its sockets), if it received a later
        group (those before it), or if it keeps waiting for groups (the last ones).
        """
        if announcement is None:
            return []
        restarted = self._trainer not in (b"", announcement.incarnation)
        self._trainer = announcement.incarnation
        self._acknowledge(announcement, restarted)
        if self._is_idle(announcement) or restarted:
            return self._resend(self._next)
        if time.monotonic() - self._resent_at < RESEND_SECONDS:
            return []
        return self._resend(announcement.highest_received.get(self.sender, -1))

    def _acknowledge(self, announcement: Announcement, restarted: bool) -> None:
        durable = announcement.durable.get(self.sender, -1)
        before = -1 if restarted else self._received  # a restart loses what was only received
        self._received = max(before, durable, announcement.received.get(self.sender, -1))
        self._frames = {number: frame for number, frame in self._frames.items() if number > durable}

    def _is_idle(self, announcement: Announcement) -> bool:
        """Whether this is a new announcement of a trainer that waits and receives nothing."""
        now, progress = time.monotonic(), (self._received, self._next)
        changed, self._progress = progress != self._progress, progress
        is_new, self._announcement = announcement is not self._announcement, announcement
        if changed or not announcement.waiting or now - self._resent_at < IDLE_SECONDS:
            self._idle_since = now
        return is_new and now - self._idle_since > IDLE_SECONDS

    def _resend(self, below: int) -> list[bytes]:
        frames = [
            frame for sequence, frame in self._frames.items() if self._received < sequence < below
        ]
        if frames:
            self._resent_at = time.monotonic()
            self.resent += len(frames)
        return frames
