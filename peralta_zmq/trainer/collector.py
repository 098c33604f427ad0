"""Batch collection: receive groups until a batch is full, and journal each group.

The states of a group; announcements acknowledge all but the first to its sender:

    received  read from the socket, decoded and validated; or its sender has lost it
    settled   it has an outcome (learning/admission.py): admitted to the batch, or dropped
    durable   the journal on disk has its frame, or its outcome if it is dropped (see max_dropped)
    consumed  its training step has begun; a dropped group is consumed at once

A received group is settled and journaled at once, except duplicates, refused groups, and those that
wait for the next step. A commit makes many groups durable with one fsync.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peralta_zmq import wire
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.config import files_given
from peralta_zmq.environments.curriculum import DifficultyPools
from peralta_zmq.errors import WireError, program_name
from peralta_zmq.learning import admission as admissions
from peralta_zmq.learning.admission import ADMITTED, Admission, AdmissionDecision
from peralta_zmq.learning.optimizer import UpdateSettings
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import journal as journals
from peralta_zmq.trainer.evaluation import EvaluationCoordinator
from peralta_zmq.trainer.generator_registry import GeneratorRegistry, Sender
from peralta_zmq.trainer.journal import DroppedGroup, Journal
from peralta_zmq.trainer.sample_ranges import Curriculum, range_size
from peralta_zmq.trainer.session import ProgressAnnouncer, Session

MAX_SUPPLIERS = 1024  # suppliers named in an announcement, which has a maximum size


@dataclass(frozen=True, slots=True)
class CollectorLimits:
    """When a commit is due, and how many dropped groups of a step are kept."""

    # Larger limits save fsyncs, but each generator must keep its groups longer.
    commit_groups: int = 32
    commit_seconds: float = 0.5
    # In the journal: a sender must not fill the disk or the memory of a restart. After a restart,
    # further ones count as lost.
    max_dropped: int = 1 << 16
    max_shown: int = 32  # in samples.jsonl
    idle_seconds: float = 0.2  # wait for a group while there is nothing else to do


class BatchCollector:
    """Collects the batch of one training step at a time."""

    def __init__(
        self,
        session: Session,
        receiver: wire.RolloutReceiver,
        journal: Journal,
        generators: GeneratorRegistry,
        pools: DifficultyPools,
        evaluations: EvaluationCoordinator,
        limits: CollectorLimits = CollectorLimits(),
    ) -> None:
        self.batch: list[RolloutGroup] = []
        self.started_step = 0  # the current step once its batch is full
        self.queue_depth = 0  # groups received before the queue was first empty
        self.journal_seconds = 0.0
        self.dropped: list[tuple[RolloutGroup, str]] = []  # the first ones of the step
        self.journal = journal
        self.session = session
        self.limits = limits
        self.admission = Admission(
            session.config.train.staleness_limit,
            online_difficulty_filtering=session.config.curriculum.online_difficulty_filtering,
        )
        self.curriculum = Curriculum(pools, session.run_log)
        self.acknowledgements = Acknowledgements(
            session.announcer, self.admission, generators, self.curriculum
        )
        self.receiver = receiver
        self._generators = generators
        self.evaluations = evaluations
        self._num_dropped = 0  # groups dropped since the newest batch was taken
        self._is_queued = True  # the queue has not been empty since `groups` was called
        # Received during an evaluation, with their frames; `groups` adds them.
        self._kept: deque[tuple[RolloutGroup, bytes]] = deque()

    @property
    def is_full(self) -> bool:
        """True if the batch is large enough for a step."""
        num_rollouts = sum(len(group.rollouts) for group in self.batch)
        return num_rollouts >= self.session.config.train.batch_size

    def groups(self, step: int, update: UpdateSettings) -> Iterator[list[RolloutGroup]]:
        """Yield the groups of the batch of `step` as they arrive, until the batch is full.

        Yields an empty list if none arrives for a while. Ends earlier if a stop is requested; then
        `started_step` is not `step`. The journal records `update`, the numbers that the step is
        trained with. Its last commit continues in the background; the caller must call `commit`.
        """
        self.dropped = []
        self.journal_seconds = 0.0
        self.queue_depth = 0
        self._is_queued = True
        arrived = [*self.batch]
        last_group = last_warning = last_idle = time.monotonic()
        while not self.is_full:
            self.grant_ranges(step)
            if self.session.stop.requested:
                return
            received = self._receive(step, waits=not arrived)
            if received is not None:
                decision = self.add(*received, step=step)
                if decision in ADMITTED:
                    arrived.append(received[0])
                now = time.monotonic()
                last_group = last_warning = now
                if not arrived and now - last_idle >= 1.0:
                    last_idle = now
                    yield []  # however many groups are dropped
            elif arrived:
                if self.session.announcer.announcement.waiting:  # no longer: the caller may compute
                    self.acknowledgements.publish(step - 1, started_step=step - 1)
                yield arrived
                arrived = []
                last_group = last_warning = time.monotonic()
            else:
                self.commit()
                if (now := time.monotonic()) - last_warning >= 20.0:
                    last_warning = now
                    live = sorted({sender.name for sender in self._generators.live})
                    text = no_rollouts_text(now - last_group, self.receiver.address, live)
                    self.session.run_log.wait(text)
                yield []
        self.journal.append(step, journals.encode_update(update), journals.BEGUN)
        self.journal.begin_commit()
        self.take_batch()
        self.started_step = step
        self.acknowledgements.publish(step - 1, started_step=step)
        yield arrived

    def _receive(self, step: int, *, waits: bool) -> tuple[RolloutGroup, bytes] | None:
        received = self._kept.popleft() if self._kept else None
        received = received or self.receiver.receive(timeout=0.005)
        if received is not None:
            self.queue_depth += self._is_queued
            return received
        self._is_queued = False
        self._commit_and_acknowledge_if_due(step)
        if not waits:
            return None
        return self.receiver.receive(timeout=self.limits.idle_seconds)

    def serve(self, step: int) -> None:
        """Grant sample ranges and acknowledge groups between two computations of `step`."""
        if self.started_step < step:  # otherwise a commit is in progress
            self.grant_ranges(step)
            self._commit_and_acknowledge_if_due(step, is_computing=True)

    def grant_ranges(self, step: int) -> bool:
        """Receive statuses; journal, then grant a range to each sender that asks."""
        ranges = self.curriculum.ranges
        senders = ranges.requests(self._generators.receive_status(step=step))
        if not senders or self.admission.is_over:
            return False
        sizes = self.curriculum.pools.sizes()
        suppliers = self.acknowledgements.suppliers
        num_samples = range_size(
            self.session.config,
            groups_in_step=self.acknowledgements.groups_in_step,
            num_generators=len(suppliers or self._generators.live),
            fraction_in_use=sizes["normal"] / max(1, sum(sizes.values())),
        )
        ranges.grant(senders, num_samples)
        self.journal.append(step, journals.encode_number(ranges.next_index), journals.RANGES)
        self.commit()
        return True

    def receive_answers(self, step: int) -> None:
        """Receive the groups that have arrived during an evaluation before `step`.

        Training groups fill the batch of `step`; further ones wait for `groups`, or are dropped
        after the last step.
        """
        if self.grant_ranges(step):
            self.acknowledgements.publish(step - 1, started_step=step - 1)
        while len(self._kept) < 256:  # groups in memory
            if (received := self.receiver.receive(timeout=0.0)) is None:
                break
            is_for_training = received[0].evaluation_step is None
            if is_for_training and self.is_full and not self.admission.is_over:
                self._kept.append(received)
            else:
                self.add(*received, step=step)
        if self.journal.num_waiting:
            self._commit_and_acknowledge_if_due(step)

    def take_batch(self) -> list[RolloutGroup]:
        """Return the batch for the step that begins now, and start an empty batch."""
        groups = self.batch
        self.batch = []
        self._num_dropped = 0
        self.acknowledgements.begin_step(groups)
        return groups

    def add(self, group: RolloutGroup, frame: bytes, *, step: int) -> AdmissionDecision:
        """Admit a received group to the batch or drop it; journal the group or the drop.

        Groups with an implausible number, and invalid ones of an unknown sender, are only counted.
        """
        failpoint("trainer.received")  # a test can kill the process here
        sender = group.sender
        ledger = self.admission.ledger
        if not ledger.is_plausible(sender, group.group_number):
            reason = f"group number jumps by more than {admissions.MAX_JUMP}"
            self.receiver.refuse(WireError(reason))
            return "invalid"
        if group.rollouts:
            self._generators.add_group(sender, step=step)
        elif not (self._generators.is_live(sender) or ledger.highest(sender) >= 0):
            # The decoder removed the rollouts because they are invalid; the receiver has counted
            # the group as refused.
            return "invalid"
        decision = self.admission.admit(group, step=step)
        if decision in ADMITTED:
            self.journal.append(step, frame)  # durable after the next commit
            self.batch.append(group)
            self.curriculum.update(group, decision)
        elif decision != "duplicate":
            self._drop(group, decision, step=step)
        self._commit_and_acknowledge_if_due(step)
        return decision

    def _drop(self, group: RolloutGroup, reason: AdmissionDecision, *, step: int) -> None:
        sender = group.sender
        if reason == "evaluated":  # completions of a held-out problem
            self.evaluations.receive(group)
        elif reason != "filtered" and not self.admission.is_over:
            age = admissions.staleness(group, step=step)
            fields = {"sender": sender, "group_number": group.group_number, "outcome": reason}
            self.session.run_log.event("drop", **fields, step=step, staleness=age)
        if group.rollouts and reason != "evaluated" and len(self.dropped) < self.limits.max_shown:
            self.dropped.append((group, reason))
        self.curriculum.update(group, reason)
        if reason == "evaluated" or not self.admission.is_over:  # else the sender would make more
            self.acknowledgements.consumed[sender] += 1
        dropped = DroppedGroup.of(group, reason)
        # A restart needs the problem of a filtered group to update the difficulty pools again.
        if reason == "filtered" and group.problem_id in self.curriculum.pools:
            dropped = replace(dropped, problem_id=group.problem_id, mean_reward=group.mean_reward)
        self._num_dropped += 1
        if self._num_dropped <= self.limits.max_dropped:
            self.journal.append(step, dropped.encode(), journals.DROPPED)

    def _commit_and_acknowledge_if_due(self, step: int, *, is_computing: bool = False) -> None:
        if (
            self.journal.num_waiting >= self.limits.commit_groups
            or self.journal.waited >= self.limits.commit_seconds
        ):
            self.commit()
        if time.monotonic() >= self.acknowledgements.next_publish:
            is_waiting = not (self.is_full or self.admission.is_over or is_computing)
            self.acknowledgements.publish(step - 1, started_step=step - 1, waiting=is_waiting)

    def commit(self) -> None:
        """Make journaled groups durable; waits for a failing disk. OutageError on a stop."""
        started = time.monotonic()
        if self.session.wait_out(self.journal.commit):  # False if no record was waiting
            self.acknowledgements.mark_durable()
            self.journal_seconds += time.monotonic() - started

    def restore_batch(self, groups: list[RolloutGroup]) -> None:
        """Replace the batch by one that was read from the journal."""
        self.batch = groups
        self.acknowledgements.mark_durable()

    def state(self) -> dict[str, Any]:
        """Duplicates and curriculum as JSON, for a checkpoint, which also has the ledger."""
        return {
            "duplicates": self.admission.duplicates,
            "pools": self.curriculum.pools.saved(),
            "next_sample_index": self.curriculum.ranges.next_index,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the ledger, and what `state` returned, from a checkpoint."""
        self.admission.ledger = admissions.Ledger(state["ledger"])
        self.admission.duplicates = state["duplicates"]
        self.curriculum.pools.restore(state["pools"])
        self.curriculum.ranges.next_index = state["next_sample_index"]
        self.acknowledgements.begin_step([])

    def accounting(self) -> dict[str, int]:
        """Number of groups by outcome, of all that generators `made`, and of those `in_flight`."""
        ledger = self.admission.ledger
        made = ledger.made + self._generators.num_outstanding(ledger)
        # Not less than the number in the summary of an earlier session.
        made = max(made, self.session.run_log.made_before)
        return {
            "made": made,
            **{outcome: ledger.outcomes[outcome] for outcome in admissions.OUTCOMES},
            "in_flight": made - ledger.total,
            "duplicates": self.admission.duplicates,
        }

    def metrics(self) -> dict[str, float]:
        """Dropped groups by reason since the run began (invalid: since the start); pool sizes."""
        outcomes = self.admission.ledger.outcomes
        pools = self.curriculum.pools
        reasons = ("stale", "abandoned", "lost", "filtered")
        return {
            **{f"dropped/{reason}": outcomes[reason] for reason in reasons},
            "dropped/duplicate": self.admission.duplicates,
            "dropped/invalid": sum(self.receiver.refused.values()),
            **{f"curriculum/{pool}": size for pool, size in pools.sizes().items() if pools.active},
        }


@dataclass(slots=True)
class Acknowledgements:
    """Announces which groups of each live sender are settled, durable and consumed."""

    announcer: ProgressAnnouncer
    admission: Admission
    generators: GeneratorRegistry
    curriculum: Curriculum
    durable: dict[str, int] = field(default_factory=dict[str, int])
    """Sender -> number of its groups before the first one that is not durable."""
    consumed: Counter[str] = field(default_factory=Counter[str])
    """Sender -> number of its consumed groups; dropped ones can be later than others."""
    groups_in_step: int = 0  # groups in the batch of the newest step
    supplied: deque[Counter[str]] = field(default_factory=lambda: deque(maxlen=4))
    """For each of the newest steps: generator -> number of its groups in the batch."""
    next_publish: float = 0.0  # monotonic seconds: earliest time of the next announcement

    def publish(
        self, step: int, *, started_step: int, waiting: bool = False, done: bool = False
    ) -> None:
        """Announce the trainer's progress, and acknowledge the groups of all live senders."""
        self.generators.remove_silent()
        live = self.generators.live
        self.announcer.publish(
            step=step,
            started_step=started_step,
            senders={sender.id: self._progress_of(sender) for sender in live},
            suppliers=dict(self.suppliers.most_common(MAX_SUPPLIERS)),
            waiting=waiting,
            done=done,
            groups_in_step=self.groups_in_step,
            next_sample_index=self.curriculum.ranges.next_index,
            excluded=self.curriculum.pools.excluded,
        )
        # An announcement lists all n live senders for each of them, so it costs O(n^2): those that
        # only acknowledge groups are 20 ms apart for n = 100.
        self.next_publish = time.monotonic() + min(1.0, 2e-6 * len(live) ** 2)

    def _progress_of(self, sender: Sender) -> wire.SenderProgress:
        ledger = self.admission.ledger
        return wire.SenderProgress(
            settled=ledger.settled(sender.id) + 1,
            settled_end=ledger.highest(sender.id) + 1,
            durable=self.durable.get(sender.id, 0),
            consumed=self.consumed[sender.id],
            range_start=sender.sample_range.start,
            range_stop=sender.sample_range.stop,
            without_status=self.generators.without_status(sender),
        )

    @property
    def suppliers(self) -> Counter[str]:
        """Number of groups of each generator in the batches of the newest steps."""
        return sum(self.supplied, Counter[str]())

    def begin_step(self, groups: Sequence[RolloutGroup]) -> None:
        """Count the groups of each sender up to the first missing one as consumed."""
        self.consumed = Counter(self._settled())
        self.groups_in_step = len(groups)
        self.supplied.append(Counter(group.generator_id for group in groups))

    def mark_durable(self) -> None:
        """Count the groups of each sender up to the first missing one as durable."""
        self.durable = self._settled()

    def _settled(self) -> dict[str, int]:
        settled = self.admission.ledger.settled_by_sender
        return {sender: last + 1 for sender, last in settled.items()}


def no_rollouts_text(seconds: float, address: str, live: Sequence[str]) -> str:
    """Text of the warning that no group arrives; `live` are generators that send messages."""
    if live:
        return f"no rollouts for {seconds:.0f} s: no group of {', '.join(live)} is complete yet"
    start = f"Start a generator: {program_name('generator')}{files_given()}"
    return f"no rollouts for {seconds:.0f} s on {address}. {start}"
