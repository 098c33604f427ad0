"""Batch collection: receive groups until a batch is full, and journal each group.

A group is all rollouts of one problem, sent in one message (a frame). A sender is one incarnation
of a generator. It numbers its groups 0, 1, ...: the sequence. The states of a group:

    received  read from the socket, decoded and validated
    settled   it has an outcome, such as "trained" or "stale" (learning/admission.py), by which it
              is either admitted to the batch or dropped; the ledger counts the outcomes
    durable   the journal (a write-ahead log) on disk has its frame, or the outcome of a dropped one
    consumed  its training step has begun; a dropped group is consumed at once

A received group is settled and journaled at once, except duplicates and refused groups. A group
that will never arrive is settled as "lost" and then acknowledged like a received one. A commit
makes many groups durable with one fsync. Announcements acknowledge to each sender which of its
groups are received, durable and consumed.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peralta_zmq import wire
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.config import Config, files_given
from peralta_zmq.environments.curriculum import DifficultyPools
from peralta_zmq.errors import WireError, program_name
from peralta_zmq.learning import admission as admissions
from peralta_zmq.learning.admission import ADMITTED, Admission, AdmissionDecision
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer.evaluation import EvaluationCoordinator
from peralta_zmq.trainer.generator_registry import GeneratorRegistry
from peralta_zmq.trainer.journal import DROPPED, LEASED, DroppedGroup, Journal, encode_number
from peralta_zmq.trainer.sample_leases import SampleLeases, lease_size
from peralta_zmq.trainer.session import ProgressAnnouncer, Session

# A commit is due after this number of groups or seconds, whichever comes first. Larger limits save
# fsyncs, but each generator must keep its groups longer, because it may have to resend every group
# that is not durable yet.
COMMIT_GROUPS, COMMIT_SECONDS = 32, 0.5
RECEIVE_SECONDS = 0.005  # wait for a group; an announcement may follow each wait
# An announcement is a message to all n live senders and lists all of them, so its cost is O(n^2).
# Those that only acknowledge groups are ACKNOWLEDGE_FACTOR * n^2 seconds apart: 20 ms for n = 100.
ACKNOWLEDGE_FACTOR, MAX_ACKNOWLEDGE_SECONDS = 2e-6, 1.0
WARNING_SECONDS = 20.0  # interval of warnings while no group arrives, or only mismatched ones
SUPPLY_STEPS = 4  # newest steps whose groups show which generators supply the run
# Dropped groups in the journal of one step, which can take long: a sender must not fill the disk
# or the memory of a restart. After a restart, further ones count as lost.
MAX_DROPPED = 1 << 16
MAX_SUPPLIERS = 1024  # suppliers named in an announcement, which has a maximum size


class BatchCollector:
    """Collects the batch of one training step at a time.

    Attributes: `batch` holds the groups admitted so far, `accumulated_sizes` the ACCUMULATED
    records that were read from the journal with it. `journal_seconds` is the time spent on journal
    commits for the current step. `session` has the settings and the run log.
    """

    def __init__(
        self,
        session: Session,
        receiver: wire.RolloutReceiver,
        journal: Journal,
        generators: GeneratorRegistry,
        pools: DifficultyPools,
        evaluations: EvaluationCoordinator,
    ) -> None:
        train, curriculum = session.config.train, session.config.curriculum
        self.batch: list[RolloutGroup] = []
        self.accumulated_sizes: list[int] = []
        self.journal_seconds = 0.0
        self.journal = journal
        self.admission = Admission(
            train.staleness_limit,
            online_difficulty_filtering=curriculum.online_difficulty_filtering,
        )
        self.curriculum = Curriculum(pools, session.run_log)
        self.acknowledgements = Acknowledgements(
            session.announcer, self.admission, generators, self.curriculum
        )
        self.session, self._receiver = session, receiver
        self._generators, self._evaluations = generators, evaluations
        self._size = 0  # of the batch, in rollouts or tokens (see step_size)
        self._num_dropped = 0  # groups dropped since the newest batch was taken

    @property
    def is_full(self) -> bool:
        """True if the batch is large enough for a step."""
        return self._size >= step_size(self.session.config)

    def collect(
        self,
        step: int,
        between_groups: Callable[[bool], None],
        compute: Callable[[], float] = lambda: 0.0,
    ) -> tuple[list[RolloutGroup], int]:
        """Receive groups until the batch of `step` is full; return it and the queue depth.

        The queue depth is the number of groups that were received before the queue was empty for
        the first time. Returns no groups if a stop is requested. The last journal commit continues
        in the background while the step computes; the caller must call `commit`, which waits for
        its end. `between_groups` is called before each receive, with True if the last receive that
        waited timed out. `compute` is called when the queue is empty; it returns its seconds, or 0.
        """
        depth, queued, idle, self.journal_seconds = 0, True, False, 0.0
        last_group = last_warning = time.monotonic()
        while not self.is_full:
            self.lease_samples(step)
            between_groups(idle)
            if self.session.stop.requested:
                return [], depth
            received = self._receiver.receive(timeout=RECEIVE_SECONDS)
            if received is None:
                self._commit_and_acknowledge_if_due(step)
                queued = False
                if seconds := compute():  # groups may have arrived meanwhile
                    last_group, last_warning = last_group + seconds, last_warning + seconds
                    continue
                timeout = 0.2 if self._generators.statuses else 0.02  # a first status asks for work
                received = self._receiver.receive(timeout=timeout)
            idle = received is None
            if received is None:
                self.commit()
                if (now := time.monotonic()) - last_warning >= WARNING_SECONDS:
                    last_warning = now
                    self._warn_without_rollouts(now - last_group)
                continue
            depth += queued
            group, frame = received
            if self.add(group, frame, step=step) != "mismatched":
                last_group = last_warning = time.monotonic()
        self.journal.begin_commit()
        groups = self.take_batch()
        self.acknowledgements.publish(step - 1, started_step=step)
        return groups, depth

    def lease_samples(self, step: int) -> bool:
        """Receive statuses, and grant a sample lease to each sender that asks for one.

        Returns True if a lease was granted. It is in the journal of `step` before it is announced,
        so that a restarted trainer does not grant its samples again.
        """
        leases = self.curriculum.leases
        senders = leases.requests(self._generators.receive_status(step=step))
        if not senders:
            return False
        sizes, suppliers = self.curriculum.pools.sizes(), self.acknowledgements.suppliers
        num_samples = lease_size(
            self.session.config,
            groups_in_step=self.acknowledgements.groups_in_step,
            num_generators=len(suppliers or self._generators.live()),
            fraction_in_use=sizes["normal"] / max(1, sum(sizes.values())),
        )
        leases.grant(senders, num_samples)
        self.journal.append(step, encode_number(leases.next_index), LEASED)
        self.commit()
        return True

    def take_batch(self) -> list[RolloutGroup]:
        """Return the batch for the step that begins now, and start an empty batch."""
        groups, self.batch, self._size, self._num_dropped = self.batch, [], 0, 0
        self.acknowledgements.begin_step(groups)
        return groups

    def add(self, group: RolloutGroup, frame: bytes, *, step: int) -> AdmissionDecision:
        """Admit a received group to the batch or drop it; journal the group or the drop.

        Two kinds of groups are ignored after they are counted as refused: those with an
        implausibly large sequence, and those with invalid rollouts from an unknown sender.
        """
        failpoint("trainer.received")  # a test can kill the process here
        sender, ledger = group.sender, self.admission.ledger
        if not ledger.is_plausible(sender, group.sequence):
            self._receiver.refuse(WireError(f"sequence jumps by more than {admissions.MAX_JUMP}"))
            return "invalid"
        if group.rollouts:
            self._generators.mark_alive(sender, step=step)
        elif not (self._generators.is_live(sender) or ledger.highest(sender) >= 0):
            # The decoder removed the rollouts because they are invalid; the receiver has counted
            # the group as refused.
            return "invalid"
        decision = self.admission.admit(group, step=step)
        if decision in ADMITTED:
            self.journal.append(step, frame)  # durable after the next commit
            self.batch.append(group)
            self._size += size_of(self.session.config, group)
            self.curriculum.update(group, decision)
        elif decision != "duplicate":
            self._drop(group, decision, step=step)
        self._commit_and_acknowledge_if_due(step)
        return decision

    def _drop(self, group: RolloutGroup, reason: AdmissionDecision, *, step: int) -> None:
        """Record a dropped group in run log, curriculum, counts and journal."""
        sender, sequence = group.sender, group.sequence
        if reason == "evaluated":  # completions of a held-out problem
            self._evaluations.receive(group)
        elif reason != "filtered":
            age = admissions.staleness(group, step=step)
            fields = {"sender": sender, "sequence": sequence, "outcome": reason}
            self.session.run_log.event("drop", **fields, step=step, staleness=age)
        self.curriculum.update(group, reason)
        self.acknowledgements.add_consumed(sender)
        dropped = DroppedGroup.of(group, reason)
        # A restart needs the problem of a filtered group to update the difficulty pools again.
        if reason == "filtered" and group.problem_id in self.curriculum.pools:
            dropped = replace(dropped, problem_id=group.problem_id, mean_reward=group.mean_reward)
        self._num_dropped += 1
        if self._num_dropped <= MAX_DROPPED:
            self.journal.append(step, dropped.encode(), DROPPED)

    def _commit_and_acknowledge_if_due(self, step: int) -> None:
        if self.journal.num_waiting >= COMMIT_GROUPS or self.journal.waited >= COMMIT_SECONDS:
            self.commit()
        if time.monotonic() >= self.acknowledgements.next_publish:
            self.acknowledgements.publish(step - 1, started_step=step - 1, waiting=not self.is_full)

    def commit(self) -> None:
        """Make all journaled groups durable; report and retry if the disk fails.

        Raises OutageError if a stop is requested during the retries.
        """
        started = time.monotonic()
        if self.session.wait_out(self.journal.commit):  # False if no record was waiting
            self.acknowledgements.mark_durable()
            self.journal_seconds += time.monotonic() - started

    def restore_batch(self, groups: list[RolloutGroup], sizes: Sequence[int] = ()) -> None:
        """Replace the batch, and `accumulated_sizes`, by what was read from the journal."""
        self.batch, self.accumulated_sizes = groups, [*sizes]
        self._size = sum(size_of(self.session.config, group) for group in groups)
        self.acknowledgements.mark_durable()

    def abandon_batch(self) -> None:
        """Drop the groups that were read from the journal for a step that has not begun."""
        for group in self.batch:
            outcome = "trained" if group.has_signal else "no_signal"
            self.admission.ledger.change_outcome(outcome, "abandoned")
            self.acknowledgements.add_consumed(group.sender)
        self.restore_batch([])

    def state(self) -> dict[str, Any]:
        """Duplicates and curriculum as JSON, for a checkpoint, which also has the ledger."""
        return {
            "duplicates": self.admission.duplicates,
            "pools": self.curriculum.pools.saved(),
            "next_sample_index": self.curriculum.leases.next_index,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the ledger, and what `state` returned, from a checkpoint."""
        self.admission.ledger = admissions.Ledger(state["ledger"])
        self.admission.duplicates = state["duplicates"]
        self.curriculum.pools.restore(state["pools"])
        self.curriculum.leases.next_index = state["next_sample_index"]
        self.acknowledgements.begin_step([])

    def accounting(self) -> dict[str, int]:
        """Number of groups by outcome.

        `made` counts all groups that generators made, `in_flight` those without an outcome yet.
        `duplicates` counts groups that were received again; `made` does not include them.
        """
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
        """Number of dropped groups by reason since the run began, and sizes of the pools.

        `dropped/invalid` counts refused messages, since the last start of the trainer.
        """
        outcomes, pools = self.admission.ledger.outcomes, self.curriculum.pools
        reasons = ("stale", "abandoned", "lost", "filtered", "mismatched")
        return {
            **{f"dropped/{reason}": outcomes[reason] for reason in reasons},
            "dropped/duplicate": self.admission.duplicates,
            "dropped/invalid": sum(self._receiver.refused.values()),
            **{f"curriculum/{pool}": size for pool, size in pools.sizes().items() if pools.active},
        }

    def _warn_without_rollouts(self, seconds: float) -> None:
        """Warn that for `seconds` no group arrived, or only mismatched ones."""
        dropped = sorted({sender.rpartition("/")[0] for sender in self.admission.flagged})
        self.session.run_log.note(no_rollouts_text(seconds, self._receiver.address, dropped))


@dataclass(slots=True)
class Curriculum:
    """Difficulty pools and sample leases, which received groups update.

    The sample index numbers all groups that the run samples. It determines the problem. Leases
    divide the indices between the generators. Difficulty pools hold the problems that are excluded
    from sampling because they are too easy or too hard.
    """

    pools: DifficultyPools
    run_log: RunLog
    leases: SampleLeases = field(default_factory=SampleLeases)

    def update(self, group: RolloutGroup | DroppedGroup, outcome: str) -> None:
        """Update the state with one group, just received or read from the journal."""
        self.leases.advance(group.sample_index + 1)
        if outcome in (*ADMITTED, "filtered"):
            num_returned = self.pools.update(group.problem_id, group.mean_reward)
            if num_returned and self.run_log.event("pool_refilled", problems=num_returned):
                self.run_log.note(
                    "no problem is left between curriculum.hard_threshold and easy_threshold; "
                    f"all {num_returned} are sampled again"
                )


@dataclass(slots=True)
class Acknowledgements:
    """Announces which groups of each live sender are received, durable and consumed.

    The table in the module's docstring defines these states.
    """

    announcer: ProgressAnnouncer
    admission: Admission
    generators: GeneratorRegistry
    curriculum: Curriculum
    durable: dict[str, int] = field(default_factory=dict[str, int])
    """Sender -> sequence up to which all its groups are durable."""
    consumed: dict[str, int] = field(default_factory=dict[str, int])
    """Sender -> number of its consumed groups, minus 1; -1 = none. A number, not a sequence,
    because a group can be dropped, and so consumed, before earlier groups."""
    groups_in_step: int = 0  # groups in the batch of the newest step
    supplied: deque[Counter[str]] = field(default_factory=lambda: deque(maxlen=SUPPLY_STEPS))
    """For each of the newest steps: generator -> number of its groups in the batch."""
    next_publish: float = 0.0  # monotonic seconds: earliest time of the next announcement

    def publish(
        self, step: int, *, started_step: int, waiting: bool = False, done: bool = False
    ) -> None:
        """Announce the trainer's progress, and acknowledge the groups of all live senders.

        `step` is the newest completed step, `started_step` the newest started step. `waiting` means
        that the trainer waits for groups, `done` that the run is complete.
        """
        ledger, live = self.admission.ledger, self.generators.live()
        leases = self.curriculum.leases.unconfirmed(live)
        self.announcer.publish(
            step=step,
            started_step=started_step,
            received={sender: ledger.settled(sender) for sender in live},
            durable={sender: self.durable.get(sender, -1) for sender in live},
            highest_received={sender: ledger.highest(sender) for sender in live},
            consumed={sender: self.consumed.get(sender, -1) for sender in live},
            suppliers=dict(self.suppliers.most_common(MAX_SUPPLIERS)),
            without_status=self.generators.connections.without_status(),
            waiting=waiting,
            done=done,
            groups_in_step=self.groups_in_step,
            next_sample_index=self.curriculum.leases.next_index,
            lease_starts={sender: lease.start for sender, lease in leases.items()},
            lease_ends={sender: lease.stop for sender, lease in leases.items()},
            excluded=self.curriculum.pools.excluded,
        )
        seconds = min(MAX_ACKNOWLEDGE_SECONDS, ACKNOWLEDGE_FACTOR * len(live) ** 2)
        self.next_publish = time.monotonic() + seconds

    @property
    def suppliers(self) -> Counter[str]:
        """Number of groups of each generator in the batches of the newest steps."""
        return sum(self.supplied, Counter[str]())

    def begin_step(self, groups: Sequence[RolloutGroup]) -> None:
        """Count the groups of each sender up to the first missing one as consumed.

        `groups` is the batch of the step that begins.
        """
        self.consumed = self.admission.ledger.settled_by_sender
        self.groups_in_step = len(groups)
        self.supplied.append(Counter(group.generator_id for group in groups))

    def add_consumed(self, sender: str) -> None:
        """Count one dropped group as consumed."""
        self.consumed[sender] = self.consumed.get(sender, -1) + 1

    def mark_durable(self) -> None:
        """Count the groups of each sender up to the first missing one as durable."""
        self.durable = self.admission.ledger.settled_by_sender


def no_rollouts_text(seconds: float, address: str, dropped: Sequence[str]) -> str:
    """Text of the warning that no group arrives, or only mismatched ones.

    `dropped` has the names of generators whose groups are dropped for their logprob mismatch.
    """
    names = ", ".join(dropped)
    others = f", except dropped ones of {names} (logprob mismatch)" if dropped else ""
    start = f"Start a generator: {program_name('generator')}{files_given()}"
    return f"no rollouts for {seconds:.0f} s on {address}{others}. {start}"


def step_size(config: Config) -> int:
    """Batch size of a step: train.token_batch_size in tokens if set, else in rollouts."""
    return config.train.token_batch_size or config.train.batch_size


def size_of(config: Config, group: RolloutGroup) -> int:
    """Size of a group in the unit of `step_size`: rollouts, or tokens with the prompt."""
    if config.train.token_batch_size is None:
        return len(group.rollouts)
    return sum(len(rollout.token_ids) for rollout in group.rollouts)
