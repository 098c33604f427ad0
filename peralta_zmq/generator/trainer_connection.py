"""The generator's connection to the trainer: announcements in, groups and status reports out.

A group is one message with all rollouts of one problem. An incarnation is the 8 random bytes that a
generator draws at its start and for each run that it samples for; `sequence` numbers the groups of
one incarnation from 0. The trainer acknowledges a group twice: `received` = it is in the trainer's
memory; `durable` = it is in the journal on the trainer's disk, or needed no longer. Until a group
is durable the outbox keeps it, so that it can be sent again after a crash of the trainer.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field

from peralta_zmq import wire
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import WireError
from peralta_zmq.generator.pacing import SILENCE_SECONDS
from peralta_zmq.generator.weight_sync import LOG_SECONDS, ServedWeights
from peralta_zmq.rollout import RolloutGroup, sender_of

RESEND_SECONDS = 2.0  # between two resends: the acknowledgement of the first must have time to come
IDLE_SECONDS = 5.0  # a trainer that waits and receives nothing for this time has lost groups
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sockets:
    """The three sockets to the trainer."""

    announcements: wire.AnnouncementSubscriber
    rollouts: wire.RolloutSender
    statuses: wire.GeneratorStatusSender


@dataclass(slots=True)
class Throughput:
    """Counts since the previous status report."""

    num_tokens: int = 0
    idle_seconds: float = 0.0  # time in which the pacer allowed no group
    queue_seconds: float = 0.0  # time spent waiting for room in the send queue
    started: float = field(default_factory=time.monotonic)


class TrainerConnection:
    """Exchanges messages with the trainer and keeps groups until they are durable.

    Announcements of another run than the one whose weights are in use are ignored, except that
    they trigger a poll for newer weights.
    """

    def __init__(
        self,
        sockets: Sockets,
        weights: ServedWeights,
        *,
        name: str,
        incarnation: bytes,
        worker_info: dict[str, str],
        outbox_limit: int,
        max_steps: int,
    ) -> None:
        self._sockets, self._weights = sockets, weights
        self.name, self._worker_info = name, worker_info
        self._outbox_limit, self._max_steps = outbox_limit, max_steps
        self.throughput = Throughput()
        self.num_unscored = 0  # groups dropped because a reward failed
        self.is_run_complete = False
        self._silence_logged = time.monotonic()
        self.start_run(incarnation)

    def start_run(self, incarnation: bytes | None = None) -> None:
        """Begin a run: drop all groups of the previous one and count from 0 again."""
        self.incarnation = incarnation or os.urandom(8)
        self.outbox = Outbox(sender_of(self.name, self.incarnation), limit=self._outbox_limit)

    @property
    def announcement(self) -> wire.Announcement | None:
        """The newest announcement; None before the first and if it belongs to another run."""
        latest = self._sockets.announcements.latest
        return latest if latest and latest.run_id == self._weights.version.run_id else None

    def send(self, group: RolloutGroup) -> None:
        """Send a group; the outbox keeps it until it is durable.

        A group that cannot be encoded is dropped, and `min_sequence` of the next group tells the
        trainer not to wait for it.
        """
        newest = f" newest={group.newest_step}" if group.newest_step > group.policy_step else ""
        evaluated = f" evaluation_step={step}" if (step := group.evaluation_step) >= 0 else ""
        identity = f"{group.sender}/{group.sequence}"
        facts = f"step={group.policy_step} weights_id={group.weights_id}{newest}{evaluated}"
        logger.debug("made group=%s %s", identity, facts)
        failpoint("generator.made")
        try:
            frame = wire.encode_group(group)
        except WireError as error:
            logger.warning("lost group=%s reason=%s", identity, error)
            self.outbox.skip()
            return
        self.outbox.add(frame)
        self.throughput.num_tokens += sum(rollout.num_generated for rollout in group.rollouts)
        self._send_frame(frame)
        failpoint("generator.sent")

    def exchange(self, *, timeout: float = 0.0) -> wire.Announcement | None:
        """Send a due status report, receive announcements, and resend the groups that were lost.

        Returns the property `announcement`, after waiting up to `timeout` seconds for a new one.
        """
        announcement = self._receive(timeout)
        if announcement is not None:
            for frame in self.outbox.frames_to_resend(announcement):
                if not self.is_run_complete:
                    self._send_frame(frame)
        return announcement

    def report_when_due(self) -> None:
        """Send a status report if the previous one is old enough."""
        if self._sockets.statuses.due:
            self.report()

    def report(self, *, last: bool = False) -> None:
        """Send a status report; `last` announces that no group will follow."""
        counts, self.throughput = self.throughput, Throughput()
        seconds = max(self.throughput.started - counts.started, 1e-3)
        blocked = counts.idle_seconds + counts.queue_seconds
        self._sockets.statuses.send(
            wire.GeneratorStatus(
                run_id=self._weights.version.run_id,
                generator_id=self.name,
                incarnation=self.incarnation,
                made=self.outbox.next_sequence,
                lost=self.outbox.num_lost,
                resent=self.outbox.num_resent,
                unscored=self.num_unscored,
                step=self._weights.version.step,
                tokens_per_s=counts.num_tokens / seconds,
                blocked_frac=min(1.0, blocked / seconds),
                queue_frac=min(1.0, counts.queue_seconds / seconds),
                reload_s=self._weights.reload_seconds,
                wants_keyframe=self._weights.needs_keyframe,
                last=last,
                worker_info=self._worker_info,
            )
        )

    def _send_frame(self, frame: bytes) -> None:
        """Wait for room in the send queue, unless the run completes first."""
        started = logged = time.monotonic()
        while not self._sockets.rollouts.send(frame, timeout=0.2):
            self._receive(0.0)
            if self.is_run_complete:
                return
            if time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                logger.info("waiting for the trainer to take a group (%.0f s)", logged - started)
        self.throughput.queue_seconds += time.monotonic() - started

    def _receive(self, timeout: float) -> wire.Announcement | None:
        self.report_when_due()
        latest = self._sockets.announcements.receive(timeout=timeout)
        self._check_silence()
        if latest is not None:
            self._weights.poll_for(latest)
        announcement = self.announcement
        if announcement is not None and announcement.done:
            self.is_run_complete = True
        return announcement

    def _check_silence(self) -> None:
        """Log that no announcement arrives; after the last optimizer step the run is then complete.

        The trainer exits soon after its final announcement, so a generator may miss it.
        """
        now, received = time.monotonic(), self._sockets.announcements.received_at
        if now - max(received, self._silence_logged) <= SILENCE_SECONDS:
            return
        self._silence_logged = now
        logger.info(
            "no announcement from the trainer for %.0f s; keeping finished groups until it returns",
            SILENCE_SECONDS,
        )
        if self._weights.version.step >= self._max_steps:
            self.is_run_complete = True


class Outbox:
    """The encoded groups (frames) of one incarnation that are not durable, at most `limit`."""

    def __init__(self, sender: str, *, limit: int = 64) -> None:
        self.sender, self._limit = sender, limit  # sender: 'NAME/INCARNATION', as in announcements
        self.next_sequence = 0  # of the next group; also the number of groups made
        self.num_lost = 0  # groups dropped because the outbox was full
        self.num_resent = 0  # groups sent again
        self._frames: dict[int, bytes] = {}  # by sequence, ascending
        self._num_consumed = 0  # groups in started optimizer steps, or dropped by the trainer
        self._received = -1  # the trainer has received all groups up to this sequence
        self._trainer = b""  # incarnation of the trainer in the newest announcement
        self._announcement: wire.Announcement | None = None  # the newest
        self._progress = 0, 0  # _received and next_sequence at the newest announcement
        self._idle_since = float("-inf")  # monotonic seconds; no progress since then
        self._resent_at = float("-inf")  # monotonic seconds of the latest resend

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def num_undelivered(self) -> int:
        """Number of groups in the outbox that the trainer has not received."""
        return sum(sequence > self._received for sequence in self._frames)

    @property
    def num_pending(self) -> int:
        """Number of groups made that no optimizer step has consumed and the trainer not dropped.

        Keeps the last known value while announcements do not list this sender.
        """
        return self.next_sequence - self._num_consumed

    @property
    def min_sequence(self) -> int:
        """No group below this sequence will be sent again."""
        return next(iter(self._frames), self.next_sequence)

    def has_room(self, num_unfinished: int) -> bool:
        """Whether one more group fits, besides the unfinished ones in the engine."""
        return len(self._frames) + num_unfinished < self._limit

    def add(self, frame: bytes) -> None:
        """Keep the frame of the next sequence; a full outbox drops its oldest frame."""
        if len(self._frames) == self._limit:
            oldest = self.min_sequence
            del self._frames[oldest]
            self.num_lost += 1
            logger.warning("lost group=%s/%d reason=outbox", self.sender, oldest)
        self._frames[self.next_sequence] = frame
        self.next_sequence += 1

    def skip(self) -> None:
        """Leave the next sequence without a group."""
        self.next_sequence += 1

    def frames_to_resend(self, announcement: wire.Announcement) -> list[bytes]:
        """Drop the frames that are durable; returns the frames to send again now, in order.

        Groups are lost if the trainer restarts (those in its sockets), if it has received a later
        group (those before it), or if it waits for groups and receives none (the last ones).
        """
        restarted = self._trainer not in (b"", announcement.incarnation)
        self._trainer = announcement.incarnation
        self._acknowledge(announcement, restarted)
        if self._is_idle(announcement) or restarted:
            return self._resend(self.next_sequence)
        if time.monotonic() - self._resent_at < RESEND_SECONDS:
            return []
        return self._resend(announcement.highest_received.get(self.sender, -1))

    def _acknowledge(self, announcement: wire.Announcement, restarted: bool) -> None:
        durable = announcement.durable.get(self.sender, -1)
        before = -1 if restarted else self._received  # a restart loses what was only received
        self._received = max(before, durable, announcement.received.get(self.sender, -1))
        self._frames = {number: frame for number, frame in self._frames.items() if number > durable}
        if self.sender in announcement.consumed:
            self._num_consumed = announcement.consumed[self.sender] + 1

    def _is_idle(self, announcement: wire.Announcement) -> bool:
        """Whether this is a new announcement of a trainer that waits and receives nothing."""
        now, progress = time.monotonic(), (self._received, self.next_sequence)
        changed, self._progress = progress != self._progress, progress
        is_new, self._announcement = announcement is not self._announcement, announcement
        if changed or not announcement.waiting or now - self._resent_at < IDLE_SECONDS:
            self._idle_since = now
        return is_new and now - self._idle_since > IDLE_SECONDS

    def _resend(self, below: int) -> list[bytes]:
        """The frames with a sequence below `below` that the trainer has not received."""
        frames = [
            frame for sequence, frame in self._frames.items() if self._received < sequence < below
        ]
        if frames:
            self._resent_at = time.monotonic()
            self.num_resent += len(frames)
        return frames
