"""Connection of a generator to the trainer: groups, statuses, announcements.

A group is all rollouts of one problem, sent as one message (frame). A status is a message with the
counters of the generator. An incarnation is the 8 random bytes that a generator draws at its start
and for each new run; `sequence` numbers the groups of one incarnation from 0.

Announcements are the trainer's messages about its progress, about one per second. They report how
far the trainer is with the groups of each sender:

    received   in the trainer's memory; otherwise it is unreceived
    durable    in the journal on the trainer's disk, which records dropped groups, too
    consumed   the trainer has begun its training step, or has dropped it

The outbox keeps a group until it is durable, so that the generator can send it again after a crash
of the trainer. Announcements also grant sample leases, for which the statuses ask: ranges of sample
indices, the positions in the run's shuffled order of problems, that no other generator draws.
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
from peralta_zmq.generator.samples import HeldLeases
from peralta_zmq.generator.weight_sync import REPORT_SECONDS, ServedWeights
from peralta_zmq.observe.terminal import WaitReport
from peralta_zmq.rollout import RolloutGroup, sender_of

SLOWEST_LINK = 125_000  # bytes/s (1 Mbit/s) of the slowest link; a large group takes seconds
RESEND_SECONDS = 2.0  # between two resends, so that the first can be acknowledged
LOST_SECONDS = 5.0  # send groups again if the trainer has not received one for so long
MEASURED_SECONDS = 1.0  # shortest interval of Throughput: groups may end at almost the same time
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sockets:
    """The three sockets to the trainer, and the address to which they are connected."""

    announcements: wire.AnnouncementSubscriber
    rollouts: wire.RolloutSender
    statuses: wire.GeneratorStatusSender
    trainer: wire.TrainerAddress


@dataclass(slots=True)
class Throughput:
    """Counts of one interval of time; an interval ends at the first status after a finished group.

    So an interval of a slow generator covers the whole time of a group, not only that between two
    statuses.
    """

    num_tokens: int = 0  # generated tokens in finished groups
    idle_seconds: float = 0.0  # in which the engine was empty, because no group could be started
    queue_seconds: float = 0.0  # spent waiting for room in the send queue
    started: float = field(default_factory=time.monotonic)  # begin of the interval

    def plus(self, later: Throughput) -> Throughput:
        """Return the counts of this interval and the next one."""
        return Throughput(
            self.num_tokens + later.num_tokens,
            self.idle_seconds + later.idle_seconds,
            self.queue_seconds + later.queue_seconds,
            started=self.started,
        )


class TrainerConnection:
    """Exchanges messages with the trainer and keeps groups until they are durable.

    An announcement of another run than that of the weights in use only triggers a poll for newer
    weights; all else in it is ignored.
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
        self._finished: tuple[Throughput, float] | None = None  # the last interval, and its seconds
        self.num_unscored = 0  # groups dropped because a reward failed; counted by the caller
        # Both counted by the caller; see GeneratorStatus.
        self.num_aborted = self.num_resumed = 0
        self.is_run_complete = False
        self._started, self._silence_reported = time.monotonic(), float("-inf")
        self._silence, self._full_queue = WaitReport(logger.info), WaitReport(logger.info)
        self.start_run(incarnation)

    def start_run(self, incarnation: bytes | None = None) -> None:
        """Begin a run: drop groups and leases of the previous run and number new groups from 0.

        Without an `incarnation`, draw a new one.
        """
        self.incarnation = incarnation or os.urandom(8)
        self.leases = HeldLeases()
        self.outbox = Outbox(sender_of(self.name, self.incarnation), limit=self._outbox_limit)

    @property
    def announcement(self) -> wire.Announcement | None:
        """The newest announcement; None before the first, or if it is of another run."""
        latest = self._sockets.announcements.latest
        return latest if latest and latest.run_id == self._weights.version.run_id else None

    def send(self, group: RolloutGroup) -> None:
        """Send a group and keep it in the outbox until it is durable.

        A group that cannot be encoded is dropped. A later group tells the trainer so by its
        `min_sequence`, the oldest group that may still be sent.
        """
        newest = f" newest={group.newest_step}" if group.newest_step > group.policy_step else ""
        step = group.evaluation_step
        evaluated = "" if step is None else f" evaluation_step={step}"
        facts = f"step={group.policy_step} weights_id={group.weights_id}{newest}{evaluated}"
        logger.debug("made group=%s %s", group.name, facts)
        failpoint("generator.made")  # tests can crash the process here
        try:
            frame = wire.encode_group(group, max_bytes=self.outbox.max_group_bytes)
        except WireError as error:
            logger.warning("lost group=%s reason=%s", group.name, error)
            self.outbox.skip()
            return
        self.outbox.add(frame)
        self.throughput.num_tokens += sum(rollout.num_generated for rollout in group.rollouts)
        self._send_frame(frame)
        failpoint("generator.sent")

    def exchange(self, *, timeout: float = 0.0, is_idle: bool = False) -> None:
        """Send a due status, receive announcements, and resend groups that may not have arrived.

        Waits up to `timeout` seconds for a new announcement; if `is_idle`, because no group could
        be started.
        """
        started = time.monotonic()
        self._receive(timeout)
        if is_idle:
            self.throughput.idle_seconds += time.monotonic() - started
        if self.announcement is not None:
            for frame in self.outbox.frames_to_resend():
                if not self.is_run_complete:
                    self._send_frame(frame)

    def _send_status_when_due(self) -> None:
        """Send a status if one is due.

        It is due at regular intervals, when a trainer connects, and when a lease becomes necessary.
        """
        must_request = self.leases.needs_lease and not self.leases.is_requested
        if self._sockets.statuses.check_due() or must_request:
            self.send_status()

    def send_status(self, *, last: bool = False) -> None:
        """Send a status now; `last` tells the trainer that no group will follow."""
        counts, seconds = self._measure()
        blocked = counts.idle_seconds + counts.queue_seconds
        self.leases.is_requested |= self.leases.needs_lease
        self._sockets.statuses.send(
            wire.GeneratorStatus(
                run_id=self._weights.version.run_id,
                generator_id=self.name,
                incarnation=self.incarnation,
                made=self.outbox.next_sequence,
                lost=self.outbox.num_lost,
                resent=self.outbox.num_resent,
                unscored=self.num_unscored,
                aborted=self.num_aborted,
                resumed=self.num_resumed,
                step=self._weights.version.step,
                tokens_per_s=counts.num_tokens / seconds,
                blocked_frac=min(1.0, blocked / seconds),
                queue_frac=min(1.0, counts.queue_seconds / seconds),
                reload_s=self._weights.reload_seconds,
                wants_keyframe=self._weights.needs_keyframe,
                store_error=self._weights.store_error,
                announcement_reconnects=self._sockets.announcements.connection.num_reconnects,
                rollout_reconnects=self._sockets.rollouts.connection.num_reconnects,
                needs_lease=self.leases.needs_lease,
                next_sample_index=self.leases.next_index,
                last=last,
                worker_info=self._worker_info,
            )
        )

    def _measure(self) -> tuple[Throughput, float]:
        """Return the counts that the next status reports, and the seconds in which they arose.

        These are the counts of the last interval. If no group has finished since then, for longer
        than the interval was, the time since then is added.
        """
        counts = self.throughput
        seconds = max(time.monotonic() - counts.started, 1e-3)
        if counts.num_tokens and seconds >= MEASURED_SECONDS:
            self._finished, self.throughput = (counts, seconds), Throughput()
        elif self._finished is not None:
            finished, length = self._finished
            is_long = seconds > length
            return (finished.plus(counts), length + seconds) if is_long else self._finished
        return counts, seconds

    def _send_frame(self, frame: bytes) -> None:
        """Wait for room in the send queue and send a frame, unless the run completes."""
        started = reported = time.monotonic()
        while not self._sockets.rollouts.send(frame, timeout=0.2):
            self._receive(0.0)
            if self.is_run_complete:
                return
            if (now := time.monotonic()) - reported > REPORT_SECONDS:
                reported = now
                text = f"waiting for the trainer to take a group ({now - started:.0f} s)"
                self._full_queue.show(text)
        self._full_queue.hide()
        self.throughput.queue_seconds += time.monotonic() - started

    def _receive(self, timeout: float) -> None:
        """Like `exchange`, but without resending groups.

        Opens the connection for groups again if the trainer, although it could, has not received a
        group of this generator for some time (see Outbox.unreceived_seconds).
        """
        self._send_status_when_due()
        announcements = self._sockets.announcements
        latest = announcements.receive(timeout=timeout)
        silent_seconds = time.monotonic() - announcements.received_at
        self._sockets.trainer.poll(silent_seconds=silent_seconds)
        self._check_silence()
        if latest is not None:
            self._weights.poll_for(latest)
        announcement = self.announcement
        if announcement is not None:
            self.outbox.acknowledge(announcement)
            sender, starts = self.outbox.sender, announcement.lease_starts
            self.leases.add(range(starts.get(sender, 0), announcement.lease_ends.get(sender, 0)))
            rollouts = self._sockets.rollouts.connection
            if rollouts.reconnect_if_silent(self.outbox.unreceived_seconds):
                self.outbox.must_resend = True
            # Seconds in which the trainer has received groups of this generator, but no status.
            seconds = announcement.without_status.get(self.outbox.sender, 0)
            self._sockets.statuses.unreceived_seconds = seconds
            self.is_run_complete |= announcement.done

    def _check_silence(self) -> None:
        """Report if no announcement has arrived for SILENCE_SECONDS.

        The run then counts as complete if the weights come from the last training step: this
        process may miss the announcements of the end (`done`), which the trainer sends only shortly
        before it exits.
        """
        now = time.monotonic()
        seconds = now - max(self._sockets.announcements.received_at, self._started)
        if seconds <= SILENCE_SECONDS:
            return self._silence.hide()
        if now - self._silence_reported > REPORT_SECONDS:
            self._silence_reported = now
            self._silence.show(
                f"no announcement from the trainer for {seconds:.0f} s; keeping finished groups "
                "until it returns"
            )
        if self._weights.version.step >= self._max_steps:
            self.is_run_complete = True


class Outbox:
    """Up to `limit` encoded groups (frames) of one incarnation that are not durable."""

    def __init__(self, sender: str, *, limit: int = 64) -> None:
        self.sender, self._limit = sender, limit  # sender: 'NAME/INCARNATION', as in announcements
        self.next_sequence = 0  # of the next group; also the number of finished groups
        self.num_lost = 0  # groups dropped because the outbox was full or encoding failed
        self.num_resent = 0  # groups sent again
        self.must_resend = False  # send all frames again that the trainer has not received
        self._frames: dict[int, bytes] = {}  # by sequence, ascending
        self._num_consumed = 0  # groups in started training steps, or dropped by the trainer
        self._received = -1  # the trainer has received all groups up to this sequence; -1 = none
        self._announcement = wire.Announcement("")  # the newest
        self._announced_at = 0.0  # monotonic seconds of `_announcement`
        self._unreceived_seconds = 0.0  # see `acknowledge`
        self._resent_at = float("-inf")  # monotonic seconds of the latest resend

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def num_unreceived(self) -> int:
        """Number of groups in the outbox that the trainer has not received."""
        return sum(sequence > self._received for sequence in self._frames)

    @property
    def num_pending(self) -> int:
        """Number of finished groups that the trainer has not consumed.

        An announcement without this sender leaves the number of consumed groups unchanged.
        """
        return self.next_sequence - self._num_consumed

    @property
    def min_sequence(self) -> int:
        """Oldest sequence that may still be sent: lower ones are durable or lost."""
        return next(iter(self._frames), self.next_sequence)

    @property
    def max_group_bytes(self) -> int:
        """Size limit of the trainer for a frame."""
        return self._announcement.max_group_bytes

    @property
    def unreceived_seconds(self) -> float:
        """Seconds in which the trainer could have received a frame, but did not.

        Less the time that the oldest unreceived frame may take over the slowest link.
        """
        unreceived = (frame for number, frame in self._frames.items() if number > self._received)
        return self._unreceived_seconds - len(next(unreceived, b"")) / SLOWEST_LINK

    def has_room(self, num_unfinished: int) -> bool:
        """Whether one more group fits, besides `num_unfinished` groups in the engine."""
        return len(self._frames) + num_unfinished < self._limit

    def add(self, frame: bytes) -> None:
        """Keep the frame of the next sequence; a full outbox drops its oldest frame."""
        if len(self._frames) == self._limit:
            self._drop(self.min_sequence, "outbox")
        self._frames[self.next_sequence] = frame
        self.next_sequence += 1

    def skip(self) -> None:
        """Count a group that cannot be sent as lost; its sequence stays without a frame."""
        self.next_sequence += 1
        self.num_lost += 1

    def acknowledge(self, announcement: wire.Announcement) -> None:
        """Apply an announcement: remove durable frames, and those too large for the trainer.

        The trainer has read all groups that had arrived if it waits for groups, or has started a
        step since the previous announcement. If it has then received no further group of the
        outbox, the time since the previous announcement, at most a second, is added to
        `_unreceived_seconds`.
        """
        previous, self._announcement = self._announcement, announcement
        if announcement is previous:
            return
        # Like a generator, the trainer draws an incarnation at each start.
        restarted = previous.incarnation not in (b"", announcement.incarnation)
        self.must_resend |= restarted
        durable = announcement.durable.get(self.sender, -1)
        # A restart of the trainer loses groups that are not durable.
        known = -1 if restarted else self._received
        received = max(known, durable, announcement.received.get(self.sender, -1))
        now = time.monotonic()
        if received != self._received or not self.num_unreceived:
            self._unreceived_seconds = 0.0
        elif announcement.waiting or announcement.started_step != previous.started_step:
            self._unreceived_seconds += min(1.0, now - self._announced_at)
        self._received, self._announced_at = received, now
        self._frames = {number: frame for number, frame in self._frames.items() if number > durable}
        self._drop_larger(announcement.max_group_bytes)
        if self.sender in announcement.consumed:
            # An announcement has the number of consumed groups minus 1.
            self._num_consumed = announcement.consumed[self.sender] + 1

    def frames_to_resend(self) -> list[bytes]:
        """Count and return the frames to send again now, in order.

        All unreceived frames are sent again

        - if `must_resend` is set: the trainer has restarted, or the connection was opened again;
        - if the trainer has not received one for LOST_SECONDS although it could, at most once in
          this time.

        Otherwise, every RESEND_SECONDS, only those frames are sent again that are missing between
        frames that the trainer has received.
        """
        elapsed = time.monotonic() - self._resent_at
        if self.must_resend or min(elapsed, self.unreceived_seconds) > LOST_SECONDS:
            below = self.next_sequence
        elif elapsed >= RESEND_SECONDS:
            below = self._announcement.highest_received.get(self.sender, -1)
        else:
            return []
        self.must_resend = False
        frames = [
            frame for sequence, frame in self._frames.items() if self._received < sequence < below
        ]
        if frames:
            self._resent_at = time.monotonic()
            self.num_resent += len(frames)
        return frames

    def _drop_larger(self, max_bytes: int) -> None:
        """Drop frames larger than the trainer accepts; it may have had another limit before.

        For each of them it would close the connection, and acknowledge no later group.
        """
        for sequence, frame in list(self._frames.items()):
            if len(frame) > max_bytes:
                self._drop(sequence, f"{len(frame)} bytes; the trainer accepts {max_bytes}")

    def _drop(self, sequence: int, reason: str) -> None:
        """Count a frame as lost and remove it."""
        del self._frames[sequence]
        self.num_lost += 1
        logger.warning("lost group=%s/%d reason=%s", self.sender, sequence, reason)
