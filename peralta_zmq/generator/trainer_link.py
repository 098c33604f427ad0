"""Connection of a generator to the trainer: groups, statuses, announcements.

Announcements report how far the trainer is with the groups of each sender (collector.py defines
settled, durable and consumed). The outbox keeps a group until it is durable, so that it can be
sent again after a crash of the trainer. Statuses ask for sample ranges, which announcements grant.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field

from peralta_zmq import wire
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import WireError
from peralta_zmq.generator.weight_sync import REPORT_SECONDS, ServedWeights
from peralta_zmq.observe.terminal import WaitReport
from peralta_zmq.rollout import RolloutGroup, sender_of

SILENCE_SECONDS = 30.0  # without an announcement before it is reported
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sockets:
    announcements: wire.AnnouncementSubscriber
    rollouts: wire.RolloutSender
    statuses: wire.GeneratorStatusSender
    trainer: wire.TrainerAddress


@dataclass(slots=True)
class Throughput:
    """Counts of an interval of time, which ends at the first status after a finished group."""

    num_tokens: int = 0  # generated tokens in finished groups
    idle_seconds: float = 0.0  # time without a group in the engine, because none could start
    queue_seconds: float = 0.0  # the same, while finished groups waited for room in the send queue
    started: float = field(default_factory=time.monotonic)  # the beginning of the interval

    def plus(self, later: Throughput) -> Throughput:
        return Throughput(
            self.num_tokens + later.num_tokens,
            self.idle_seconds + later.idle_seconds,
            self.queue_seconds + later.queue_seconds,
            started=self.started,
        )


class TrainerLink:
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
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._sockets = sockets
        self._weights = weights
        self.name = name
        self._worker_info = worker_info
        self._outbox_limit = outbox_limit
        self._max_steps = max_steps
        self.silence_seconds = silence_seconds
        self.throughput = Throughput()
        self._finished: tuple[Throughput, float] | None = None  # the last interval, and its seconds
        # Counts of GeneratorStatus, which the callers increase.
        self.num_unscored = 0
        self.num_branched = 0
        self.num_aborted = 0
        self.num_resumed = 0
        self.is_run_complete = False
        self._started = time.monotonic()
        self._silence = WaitReport(logger.info)
        self._full_queue = WaitReport(logger.info)
        self._full_since: float | None = None  # monotonic seconds; None: the send queue has room
        self.start_run(incarnation)

    def start_run(self, incarnation: bytes | None = None) -> None:
        """Begin a run with a new incarnation: drop groups and sample ranges of the previous one."""
        self.incarnation = incarnation or os.urandom(8)
        self.ranges = HeldRanges()
        self.outbox = Outbox(sender_of(self.name, self.incarnation), limit=self._outbox_limit)

    @property
    def announcement(self) -> wire.Announcement | None:
        """The newest announcement; None before the first, or if it is of another run."""
        latest = self._sockets.announcements.latest
        return latest if latest and latest.run_id == self._weights.version.run_id else None

    def send(self, group: RolloutGroup) -> None:
        """Put a group into the outbox; one that cannot be encoded is dropped."""
        facts = f"step={group.policy_step} weights_id={group.weights_id}"
        if group.newest_step > group.policy_step:
            facts += f" newest={group.newest_step}"
        if group.evaluation_step is not None:
            facts += f" evaluation_step={group.evaluation_step}"
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

    def exchange(self, *, timeout: float = 0.0, is_idle: bool = False) -> None:
        """Send a due status and the groups that are due; receive announcements.

        All sockets of the running generator are served here. Waits up to `timeout` seconds for a
        new announcement; `is_idle`: because no group could be started.
        """
        started = time.monotonic()
        must_request = self.ranges.needs_range and not self.ranges.is_requested
        if self._sockets.statuses.check_due() or must_request:
            self.send_status()
        if self.announcement is not None:
            self.outbox.queue_lost()
        if not self.is_run_complete:
            self._send_groups()
        self._receive(timeout)
        if is_idle:
            seconds = time.monotonic() - started
            is_full = self._full_since is not None
            self.throughput.queue_seconds += seconds * is_full
            self.throughput.idle_seconds += seconds * (not is_full)

    def send_status(self, *, last: bool = False) -> None:
        """Send a status now; `last` tells the trainer that no group will follow."""
        counts, seconds = self._measure()
        blocked = counts.idle_seconds + counts.queue_seconds
        self.ranges.is_requested |= self.ranges.needs_range
        self._sockets.statuses.send(
            wire.GeneratorStatus(
                run_id=self._weights.version.run_id,
                generator_id=self.name,
                incarnation=self.incarnation,
                made=self.outbox.next_group_number,
                lost=self.outbox.num_lost,
                unscored=self.num_unscored,
                aborted=self.num_aborted,
                resumed=self.num_resumed,
                branched=self.num_branched,
                step=self._weights.version.step,
                tokens_per_s=counts.num_tokens / seconds,
                blocked_frac=min(1.0, blocked / seconds),
                queue_frac=min(1.0, counts.queue_seconds / seconds),
                reload_s=self._weights.reload_seconds,
                wants_keyframe=self._weights.subscriber.wants_keyframe,
                store_error=self._weights.subscriber.store_error,
                announcement_reconnects=self._sockets.announcements.connection.num_reconnects,
                rollout_reconnects=self._sockets.rollouts.connection.num_reconnects,
                needs_range=self.ranges.needs_range,
                next_sample_index=self.ranges.next_index,
                last=last,
                worker_info=self._worker_info,
            )
        )

    def _measure(self) -> tuple[Throughput, float]:
        """Return the counts of the last interval, and its seconds, for the next status.

        The time without a finished group since then is added once it is longer.
        """
        counts = self.throughput
        seconds = max(time.monotonic() - counts.started, 1e-3)
        if counts.num_tokens and seconds >= 1.0:  # groups may end at almost the same time
            self._finished = (counts, seconds)
            self.throughput = Throughput()
        elif self._finished is not None:
            finished, length = self._finished
            is_long = seconds > length
            return (finished.plus(counts), length + seconds) if is_long else self._finished
        return counts, seconds

    def _send_groups(self) -> None:
        """Send queued groups while the socket has room; it has none during a long step."""
        while (frame := self.outbox.next_frame()) is not None:
            # libzmq takes microseconds to empty a queue whose peer reads.
            timeout = 0.005 if self._full_since is None else 0.0
            if not self._sockets.rollouts.send(frame, timeout=timeout):
                now = time.monotonic()
                self._full_since = self._full_since or now
                seconds = now - self._full_since
                if seconds > REPORT_SECONDS:
                    text = f"waiting for the trainer to take a group ({seconds:.0f} s)"
                    self._full_queue.show(text)
                return
            self.outbox.mark_sent()
            self._full_since = None
            failpoint("generator.sent")
        self._full_since = None
        self._full_queue.hide()

    def _receive(self, timeout: float) -> None:
        """Receive announcements; open the connection for groups again if groups were lost."""
        announcements = self._sockets.announcements
        latest = announcements.receive(timeout=timeout)
        silent_seconds = time.monotonic() - announcements.received_at
        self._sockets.trainer.poll(silent_seconds=silent_seconds)
        self._check_silence()
        if latest is not None and latest.version is not None:
            self._weights.subscriber.notify(latest.version, latest.weights_id)
        announcement = self.announcement
        if announcement is None:
            return
        self.outbox.acknowledge(announcement)
        progress = announcement.progress_of(self.outbox.sender)
        self.ranges.add(range(progress.range_start, progress.range_stop))
        rollouts = self._sockets.rollouts.connection
        if rollouts.reconnect_if_silent(self.outbox.unreceived_seconds):
            self.outbox.must_resend = True
        self._sockets.statuses.unreceived_seconds = progress.without_status
        self.is_run_complete |= announcement.done

    def _check_silence(self) -> None:
        """Report a silent trainer; the run is complete if the weights are those of the last step.

        This process may miss the announcements of the end (`done`).
        """
        last = max(self._sockets.announcements.received_at, self._started)
        seconds = time.monotonic() - last
        if seconds <= self.silence_seconds:
            return self._silence.hide()
        self._silence.show(
            f"no announcement from the trainer for {seconds:.0f} s; keeping finished groups "
            "until it returns"
        )
        if self._weights.version.step >= self._max_steps:
            self.is_run_complete = True


class Outbox:
    """Up to `limit` encoded groups (frames) of one incarnation that are not durable."""

    def __init__(
        self,
        sender: str,
        *,
        limit: int = 64,
        resend_seconds: float = 2.0,  # between two resends, so that the first can be acknowledged
        lost_seconds: float = 5.0,  # until groups that the trainer does not receive are resent
    ) -> None:
        self.sender = sender  # 'NAME/INCARNATION', as in announcements
        self.next_group_number = 0  # also the number of finished groups
        self.num_lost = 0  # groups dropped: the outbox was full, or no valid frame
        self.must_resend = False  # send all frames again that the trainer has not received
        self._limit = limit
        self._resend_seconds = resend_seconds
        self._lost_seconds = lost_seconds
        self.frames: dict[int, bytes] = {}  # by group number, ascending
        self._queue: deque[int] = deque()  # numbers of the frames to send, ascending
        self._num_consumed = 0  # groups in started training steps, or dropped by the trainer
        self._num_received = 0  # the trainer has received all groups below this number
        self._announcement = wire.Announcement("")  # the newest
        self._announced_at = 0.0  # monotonic seconds of `_announcement`
        self._unreceived_seconds = 0.0  # see `acknowledge`
        self._resent_at = float("-inf")  # monotonic seconds of the latest resend

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def num_unreceived(self) -> int:
        return sum(number >= self._num_received for number in self.frames)

    @property
    def num_pending(self) -> int:
        """Number of finished groups that the trainer has not consumed, as far as is known."""
        return self.next_group_number - self._num_consumed

    @property
    def min_group_number(self) -> int:
        """Oldest group that may still be sent."""
        return next(iter(self.frames), self.next_group_number)

    @property
    def max_group_bytes(self) -> int:
        return self._announcement.max_group_bytes

    @property
    def unreceived_seconds(self) -> float:
        """Seconds in which the trainer could have received a frame, but did not.

        Less the time that the oldest one takes over a link of 1 Mbit/s.
        """
        unreceived = (
            frame for number, frame in self.frames.items() if number >= self._num_received
        )
        return self._unreceived_seconds - len(next(unreceived, b"")) / 125_000  # bytes/s

    def has_room(self, num_unfinished: int) -> bool:
        """Whether one more group fits, besides `num_unfinished` groups in the engine."""
        return len(self.frames) + num_unfinished < self._limit

    def add(self, frame: bytes) -> None:
        """Keep and queue the frame of the next group; a full outbox drops its oldest frame."""
        if len(self.frames) == self._limit:
            self._drop(self.min_group_number, "outbox")
        self.frames[self.next_group_number] = frame
        self._queue.append(self.next_group_number)
        self.next_group_number += 1

    def skip(self) -> None:
        """Count a group that cannot be sent as lost; its number stays without a frame."""
        self.next_group_number += 1
        self.num_lost += 1

    def next_frame(self) -> bytes | None:
        while self._queue and self._queue[0] not in self.frames:  # durable or dropped meanwhile
            self._queue.popleft()
        return self.frames[self._queue[0]] if self._queue else None

    def mark_sent(self) -> None:
        self._queue.popleft()

    def acknowledge(self, announcement: wire.Announcement) -> None:
        """Apply an announcement: remove durable frames, and those too large for the trainer.

        The trainer has read all groups that had arrived if it waits, or has started a step since
        the previous announcement. If it has then received no further group of the outbox, the time
        since the previous announcement, at most a second, counts as unreceived.
        """
        previous = self._announcement
        self._announcement = announcement
        if announcement is previous:
            return
        # Like a generator, the trainer draws an incarnation at each start.
        restarted = previous.incarnation not in (b"", announcement.incarnation)
        self.must_resend |= restarted
        progress = announcement.progress_of(self.sender)
        # A restart of the trainer loses groups that are not durable.
        num_known = 0 if restarted else self._num_received
        num_received = max(num_known, progress.durable, progress.settled)
        now = time.monotonic()
        if num_received != self._num_received or not self.num_unreceived:
            self._unreceived_seconds = 0.0
        elif announcement.waiting or announcement.started_step != previous.started_step:
            self._unreceived_seconds += min(1.0, now - self._announced_at)
        self._num_received = num_received
        self._announced_at = now
        self.frames = {
            number: frame for number, frame in self.frames.items() if number >= progress.durable
        }
        # The trainer would close the connection for a larger frame, and acknowledge no later one.
        for number, frame in list(self.frames.items()):
            if len(frame) > announcement.max_group_bytes:
                limit = announcement.max_group_bytes
                self._drop(number, f"{len(frame)} bytes; the trainer accepts {limit}")
        if self.sender in announcement.senders:
            self._num_consumed = progress.consumed

    def queue_lost(self) -> None:
        """Queue the frames that were probably lost, to be sent again.

        These are all unreceived frames if `must_resend` is set (the trainer has restarted, or the
        connection was opened again), or if the trainer has received none for `lost_seconds`
        although it could. Otherwise, every `resend_seconds`, those below the newest frame that it
        has received.
        """
        elapsed = time.monotonic() - self._resent_at
        if self.must_resend or min(elapsed, self.unreceived_seconds) > self._lost_seconds:
            below = self.next_group_number
        elif elapsed >= self._resend_seconds:
            below = self._announcement.progress_of(self.sender).settled_end - 1
        else:
            return
        self.must_resend = False
        lost = {number for number in self.frames if self._num_received <= number < below}
        if lost := lost.difference(self._queue):
            self._queue = deque(sorted(lost.union(self._queue)))
            self._resent_at = time.monotonic()

    def _drop(self, number: int, reason: str) -> None:
        del self.frames[number]
        self.num_lost += 1
        logger.warning("lost group=%s/%d reason=%s", self.sender, number, reason)


class HeldRanges:
    """The sample ranges of one start of a generator, which draws them in order."""

    def __init__(self) -> None:
        self.next_index = 0  # greater than every sample index that was granted or drawn
        self.is_requested = False  # a status has asked for the range after the newest one
        self._ranges: deque[range] = deque()  # without the drawn samples

    @property
    def needs_range(self) -> bool:
        """Whether no range follows the one in use. The trainer takes up to a step to grant it."""
        return len(self._ranges) < 2

    def add(self, samples: range) -> None:
        """Add a range, unless it was added before: the trainer repeats it until confirmed.

        Leaves out samples below `next_index`, which may have been drawn without a range.
        """
        if samples.stop > self.next_index:
            self._ranges.append(range(max(samples.start, self.next_index), samples.stop))
            self.next_index = samples.stop
            self.is_requested = False

    def draw(self) -> int | None:
        """The next sample index; None if all granted samples are drawn."""
        if not self._ranges:
            return None
        samples = self._ranges.popleft()
        if samples[1:]:
            self._ranges.appendleft(samples[1:])
        return samples.start

    def record_drawn(self, sample_index: int) -> None:
        self.next_index = max(self.next_index, sample_index + 1)
