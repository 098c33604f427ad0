"""The generator's connection to the trainer: announcements in, groups and status reports out."""

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
    """Exchanges messages with the trainer and keeps groups until they are acknowledged.

    Each run that the generator samples for has its own incarnation and sequence numbers.
    Announcements of other runs are ignored, except that they trigger a poll for newer weights.
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
        """Begin a run: drop the groups of the previous one."""
        self.incarnation = incarnation or os.urandom(8)
        self.num_made = 0  # groups; also the sequence number of the next one
        self._num_consumed = 0
        self.outbox = wire.Outbox(sender_of(self.name, self.incarnation), limit=self._outbox_limit)

    @property
    def announcement(self) -> wire.Announcement | None:
        """The newest announcement, unless it belongs to another run."""
        latest = self._sockets.announcements.latest
        return latest if latest and latest.run_id == self._weights.version.run_id else None

    @property
    def num_pending(self) -> int:
        """Groups made that no optimizer step has consumed or dropped yet.

        The last known number of consumed groups is kept while the trainer does not list us.
        """
        consumed = self.announcement.consumed if self.announcement else {}
        if self.outbox.sender in consumed:
            self._num_consumed = consumed[self.outbox.sender] + 1
        return self.num_made - self._num_consumed

    def receive(self, *, timeout: float = 0.0) -> wire.Announcement | None:
        """The newest announcement of our run, after waiting up to `timeout` seconds for one.

        Also sends the status report when it is due.
        """
        self.report_when_due()
        latest = self._sockets.announcements.receive(timeout=timeout)
        self._check_silence()
        if latest is not None:
            self._weights.hint(latest)
        announcement = self.announcement
        if announcement is not None and announcement.done:
            self.is_run_complete = True
        return announcement

    def _check_silence(self) -> None:
        now, received = time.monotonic(), self._sockets.announcements.received_at
        if now - max(received, self._silence_logged) <= SILENCE_SECONDS:
            return
        self._silence_logged = now
        logger.info(
            "no announcement from the trainer for %.0f s; keeping finished groups until it returns",
            SILENCE_SECONDS,
        )
        # The trainer exits soon after its final announcement, so a generator may miss it.
        if self._weights.version.step >= self._max_steps:
            self.is_run_complete = True

    def resend_lost(self) -> None:
        """Send again the groups that were lost according to the newest announcement."""
        for frame in self.outbox.frames_to_resend(self.announcement):
            if not self.is_run_complete:
                self._send_frame(frame)

    def send(self, group: RolloutGroup) -> None:
        """Send a group and keep it in the outbox until the trainer has stored it.

        A group that cannot be encoded is dropped; the next group's min_sequence reports the gap.
        """
        logger.debug(
            "made group=%s/%d step=%d weights_id=%s%s%s",
            group.sender, group.sequence, group.policy_step, group.weights_id,
            f" newest={group.newest_step}" if group.newest_step > group.policy_step else "",
            f" evaluation_step={group.evaluation_step}" if group.evaluation_step >= 0 else "",
        )  # fmt: skip
        failpoint("generator.made")
        self.num_made = group.sequence + 1
        try:
            frame = wire.encode_group(group)
        except WireError as error:
            logger.warning("lost group=%s/%d reason=%s", group.sender, group.sequence, error)
            self.outbox.skip(group.sequence)
            return
        lost = self.outbox.add(group.sequence, frame)
        if lost is not None:
            logger.warning("lost group=%s/%d reason=outbox", group.sender, lost)
        self.throughput.num_tokens += sum(rollout.num_generated for rollout in group.rollouts)
        self._send_frame(frame)
        failpoint("generator.sent")

    def _send_frame(self, frame: bytes) -> None:
        """Wait for room in the send queue, unless the run completes first."""
        started = logged = time.monotonic()
        while not self._sockets.rollouts.send(frame, timeout=0.2):
            self.receive()
            if self.is_run_complete:
                return
            if time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                logger.info("waiting for the trainer to take a group (%.0f s)", logged - started)
        self.throughput.queue_seconds += time.monotonic() - started

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
                made=self.num_made,
                lost=self.outbox.lost,
                resent=self.outbox.resent,
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
