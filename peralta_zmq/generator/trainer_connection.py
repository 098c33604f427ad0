"""The generator's connection to the trainer: sends groups and statuses, receives announcements.

A group is all rollouts of one problem, sent as one message (frame). An incarnation is the 8 random
bytes that a generator draws at its start and for each new run; `sequence` numbers the groups of one
incarnation from 0. Announcements of the trainer acknowledge each group twice: as received, in the
trainer's memory, and later as durable, in the journal on the trainer's disk or dropped. The outbox
keeps a group until it is durable, so that it can be sent again after a crash of the trainer.
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

SLOWEST_LINK = 125_000  # bytes/s, 1 Mbit/s: a large group takes longer than SILENT_SECONDS there
RESEND_SECONDS = 2.0  # between two resends, as the acknowledgement of the first takes some time
IDLE_SECONDS = 5.0  # if the trainer waits and receives nothing for this time, groups were lost
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sockets:
    """The three sockets to the trainer."""

    announcements: wire.AnnouncementSubscriber
    rollouts: wire.RolloutSender
    statuses: wire.GeneratorStatusSender


@dataclass(slots=True)
class Throughput:
    """Counts since the previous status."""

    num_tokens: int = 0  # generated tokens of the groups made
    idle_seconds: float = 0.0  # with an empty engine, because no group might be started
    queue_seconds: float = 0.0  # spent waiting for room in the send queue
    started: float = field(default_factory=time.monotonic)  # time of the previous status


class TrainerConnection:
    """Exchanges messages with the trainer and keeps groups until they are durable.

    Announcements of a run other than that of the weights in use have one effect only: they trigger
    a poll for newer weights.
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
        self.num_unscored = 0  # groups dropped because a reward failed; counted by the caller
        self.is_run_complete = False
        self._silence_logged = time.monotonic()  # when the silence was logged, or the start
        self.start_run(incarnation)

    def start_run(self, incarnation: bytes | None = None) -> None:
        """Begin a run: drop all groups of the previous run and number new ones from 0.

        Without an `incarnation`, draw a new one.
        """
        self.incarnation = incarnation or os.urandom(8)
        self.outbox = Outbox(sender_of(self.name, self.incarnation), limit=self._outbox_limit)
        self._delivery = DeliveryTimer()

    @property
    def announcement(self) -> wire.Announcement | None:
        """The newest announcement; None if there is none, or if it is of another run."""
        latest = self._sockets.announcements.latest
        return latest if latest and latest.run_id == self._weights.version.run_id else None

    def send(self, group: RolloutGroup) -> None:
        """Send a group and keep it in the outbox until it is durable.

        A group that cannot be encoded is dropped; from the field `min_sequence` of the next group
        the trainer concludes that this one will not come.
        """
        newest = f" newest={group.newest_step}" if group.newest_step > group.policy_step else ""
        evaluated = f" evaluation_step={step}" if (step := group.evaluation_step) >= 0 else ""
        facts = f"step={group.policy_step} weights_id={group.weights_id}{newest}{evaluated}"
        logger.debug("made group=%s %s", group.name, facts)
        failpoint("generator.made")
        try:
            frame = wire.encode_group(group)
        except WireError as error:
            logger.warning("lost group=%s reason=%s", group.name, error)
            self.outbox.skip()
            return
        self.outbox.add(frame)
        self.throughput.num_tokens += sum(rollout.num_generated for rollout in group.rollouts)
        self._send_frame(frame)
        failpoint("generator.sent")

    def exchange(self, *, timeout: float = 0.0) -> wire.Announcement | None:
        """Send a status if one is due, receive announcements, and resend groups that were lost.

        Waits up to `timeout` seconds for a new announcement. Returns the property `announcement`.
        """
        announcement = self._receive(timeout)
        if announcement is not None:
            self._check_delivery(announcement)
            for frame in self.outbox.frames_to_resend(announcement):
                if not self.is_run_complete:
                    self._send_frame(frame)
        return announcement

    def report_when_due(self) -> None:
        """Send a status if one is due: at regular intervals, and when a trainer connects."""
        if self._sockets.statuses.due:
            self.report()

    def report(self, *, last: bool = False) -> None:
        """Send a status now; `last` tells the trainer that no group will follow."""
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
                announcement_reconnects=self._sockets.announcements.connection.num_reconnects,
                rollout_reconnects=self._sockets.rollouts.connection.num_reconnects,
                last=last,
                worker_info=self._worker_info,
            )
        )

    def _send_frame(self, frame: bytes) -> None:
        """Send a frame, after waiting for room in the send queue; give up if the run completes."""
        started = logged = time.monotonic()
        while not self._sockets.rollouts.send(frame, timeout=0.2):
            announcement = self._receive(0.0)
            if self.is_run_complete:
                return
            if announcement is not None:
                self._check_delivery(announcement)
            if time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                logger.info("waiting for the trainer to take a group (%.0f s)", logged - started)
        self.throughput.queue_seconds += time.monotonic() - started

    def _receive(self, timeout: float) -> wire.Announcement | None:
        """Like `exchange`, but without resending groups."""
        self.report_when_due()
        latest = self._sockets.announcements.receive(timeout=timeout)
        self._check_silence()
        if latest is not None:
            self._weights.poll_for(latest)
        announcement = self.announcement
        if announcement is not None:
            unreceived_seconds = announcement.without_status.get(self.outbox.sender, 0)
            self._sockets.statuses.unreceived_seconds = unreceived_seconds
            self.is_run_complete |= announcement.done
        return announcement

    def _check_delivery(self, announcement: wire.Announcement) -> None:
        """Connect again and resend all groups if none arrives although the trainer takes groups."""
        seconds = self._delivery.undelivered_seconds(announcement, self.outbox)
        if self._sockets.rollouts.connection.reconnect_if_silent(seconds):
            self.outbox.resend_all()

    def _check_silence(self) -> None:
        """Log if no announcement has arrived for SILENCE_SECONDS.

        The run then counts as complete if the last announcement said so, or the weights are those
        of the last training step: the trainer exits soon after its final announcements, so a
        generator may receive one or none of them.
        """
        announcements, version = self._sockets.announcements, self._weights.version
        now, received = time.monotonic(), announcements.received_at
        if now - max(received, self._silence_logged) <= SILENCE_SECONDS:
            return
        self._silence_logged = now
        logger.info(
            "no announcement from the trainer for %.0f s; keeping finished groups until it returns",
            SILENCE_SECONDS,
        )
        if version.step >= self._max_steps or announcements.complete_run == version.run_id:
            self.is_run_complete = True


class DeliveryTimer:
    """Measures for how long the trainer has received none of the groups that were sent to it.

    An announcement adds the time since the one before, at most a second, if the trainer waits for
    groups or has started a step in between: it has then read all groups that had arrived.
    """

    def __init__(self) -> None:
        self._announcement: wire.Announcement | None = None  # the newest
        self._announced_at = 0.0  # monotonic seconds of `_announcement`
        self._seconds = 0.0  # since the newest acknowledgement, while the trainer took groups

    def undelivered_seconds(self, announcement: wire.Announcement, outbox: Outbox) -> float:
        """The time for which none was received, without that which the oldest takes to arrive."""
        previous, self._announcement = self._announcement, announcement
        received = announcement.received.get(outbox.sender, -1)
        oldest = outbox.oldest_frame(above=received)
        if previous is not announcement:
            now = time.monotonic()
            elapsed, self._announced_at = min(1.0, now - self._announced_at), now
            before = previous.received.get(outbox.sender, -1) if previous else None
            if previous is None or before != received or not oldest:
                self._seconds = 0.0
            elif announcement.waiting or announcement.started_step != previous.started_step:
                self._seconds += elapsed
        return self._seconds - len(oldest) / SLOWEST_LINK


class Outbox:
    """The encoded groups (frames) of one incarnation that are not durable, at most `limit`."""

    def __init__(self, sender: str, *, limit: int = 64) -> None:
        self.sender, self._limit = sender, limit  # sender: 'NAME/INCARNATION', as in announcements
        self.next_sequence = 0  # of the next group; also the number of groups made
        self.num_lost = 0  # groups dropped: the outbox was full, or they could not be encoded
        self.num_resent = 0  # groups sent again
        self._frames: dict[int, bytes] = {}  # by sequence, ascending
        self._num_consumed = 0  # groups in started training steps, or dropped by the trainer
        self._received = -1  # the trainer has received all groups up to this sequence; -1 = none
        # Of the newest announcement: the trainer's incarnation, the announcement itself, and the
        # values of `_received` and `next_sequence` after it.
        self._trainer = b""
        self._announcement: wire.Announcement | None = None
        self._progress = 0, 0
        self._idle_since = float("-inf")  # monotonic seconds; the trainer waits, without progress
        self._resent_at = float("-inf")  # monotonic seconds of the latest resend
        self._must_resend = False  # all frames that the trainer has not received

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def num_undelivered(self) -> int:
        """Number of groups in the outbox that the trainer has not received."""
        return sum(sequence > self._received for sequence in self._frames)

    @property
    def num_pending(self) -> int:
        """Number of groups made that are neither in a started training step nor dropped.

        While announcements do not list this sender, new groups only increase the number.
        """
        return self.next_sequence - self._num_consumed

    @property
    def min_sequence(self) -> int:
        """The oldest sequence that may still be sent: all groups below are durable or lost."""
        return next(iter(self._frames), self.next_sequence)

    def has_room(self, num_unfinished: int) -> bool:
        """Whether one more group fits, besides `num_unfinished` groups in the engine."""
        return len(self._frames) + num_unfinished < self._limit

    def oldest_frame(self, *, above: int) -> bytes:
        """The frame of the oldest sequence higher than `above`; empty if there is none."""
        return next((frame for number, frame in self._frames.items() if number > above), b"")

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
        """Count a group that cannot be sent as lost; its sequence stays without a frame."""
        self.next_sequence += 1
        self.num_lost += 1

    def resend_all(self) -> None:
        """Let `frames_to_resend` return all frames that the trainer has not received."""
        self._must_resend = True

    def frames_to_resend(self, announcement: wire.Announcement) -> list[bytes]:
        """Remove the frames that are durable; returns the frames to send again now, in order.

        Frames that the trainer has not received were lost in one of four cases: the trainer has
        restarted or `resend_all` was called (all of them), it has received a later group (those
        before that group), or it waits for groups and has received none for IDLE_SECONDS (all of
        them).
        """
        restarted = self._trainer not in (b"", announcement.incarnation)
        self._trainer = announcement.incarnation
        self._acknowledge(announcement, restarted)
        if self._is_idle(announcement) or restarted or self._must_resend:
            self._must_resend = False
            return self._resend(self.next_sequence)
        if time.monotonic() - self._resent_at < RESEND_SECONDS:
            return []
        return self._resend(announcement.highest_received.get(self.sender, -1))

    def _acknowledge(self, announcement: wire.Announcement, restarted: bool) -> None:
        """Update what the trainer has received and consumed; remove frames that are durable."""
        durable = announcement.durable.get(self.sender, -1)
        before = -1 if restarted else self._received  # a restart loses groups that are not durable
        self._received = max(before, durable, announcement.received.get(self.sender, -1))
        self._frames = {number: frame for number, frame in self._frames.items() if number > durable}
        if self.sender in announcement.consumed:
            self._num_consumed = announcement.consumed[self.sender] + 1

    def _is_idle(self, announcement: wire.Announcement) -> bool:
        """Whether the trainer has waited for IDLE_SECONDS while no group was made or received.

        True at most once for each announcement.
        """
        now, progress = time.monotonic(), (self._received, self.next_sequence)
        changed, self._progress = progress != self._progress, progress
        is_new, self._announcement = announcement is not self._announcement, announcement
        if changed or not announcement.waiting or now - self._resent_at < IDLE_SECONDS:
            self._idle_since = now
        return is_new and now - self._idle_since > IDLE_SECONDS

    def _resend(self, below: int) -> list[bytes]:
        """Count and return the frames below sequence `below` that the trainer has not received."""
        frames = [
            frame for sequence, frame in self._frames.items() if self._received < sequence < below
        ]
        if frames:
            self._resent_at = time.monotonic()
            self.num_resent += len(frames)
        return frames
