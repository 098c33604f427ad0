"""The generators of the run: liveness, reported statistics, logprob mismatch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from peralta_zmq import wire
from peralta_zmq.learning.admission import Ledger
from peralta_zmq.learning.step_metrics import MismatchStatistics
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.run_state import STORE_ERROR
from peralta_zmq.observe.terminal import worker_info_text
from peralta_zmq.trainer.session import Session

# Fields of a generator's status that become metrics.
STATISTICS = (
    "tokens_per_s",
    "blocked_frac",
    "queue_frac",
    "reload_s",
    "step",
    "unscored",
    "aborted",
    "resumed",
    "branched",
)


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """Times in seconds, and limits on the memory that a client with invented names can fill."""

    silent_seconds: float = wire.SILENT_SECONDS
    live_seconds: float = 30.0  # a sender without a message for this time is no longer live
    report_seconds: float = 60.0  # interval of reports of the same silent connection
    final_status_seconds: float = 2.0  # timeout for the final statuses at the end of a run
    keyframe_seconds: float = 30.0  # between two requested keyframes; one serves all generators
    max_starts: int = 16  # live senders of one name: in live_seconds, a restart every 2 s is fine
    max_live: int = 4096  # live senders, and senders that have left
    max_in_metrics: int = 64  # generators in a row of metrics.jsonl, which is written in each step
    max_final_statuses: int = 1 << 16  # senders whose final status is kept


@dataclass(slots=True)
class Sender:
    """A start of a generator; `id` is NAME/INCARNATION. Times are monotonic seconds."""

    id: str
    last_message: float = 0.0
    first_group: float = math.inf  # infinite before the first
    status: wire.GeneratorStatus | None = None  # the newest
    has_worker_info: bool = False  # the run log has it
    sample_range: range = range(0)  # the sample range that no status has confirmed; empty = none
    newest_group: float | None = None  # None: no group since the newest status
    seconds_without_status: float = 0.0  # while groups arrived
    reported: dict[str, float] = field(default_factory=dict[str, float])
    """Connection -> time when it was last reported as silent."""

    @property
    def name(self) -> str:
        return self.id.rpartition("/")[0]

    @property
    def event_fields(self) -> dict[str, str]:
        return {"generator": self.name, "incarnation": self.id.rpartition("/")[2]}


class GeneratorRegistry:
    """Registers senders; records when they join and leave, and what they report.

    A generator has three connections: for groups, announcements and statuses. A connection is
    silent if nothing arrives on it for `silent_seconds` while the others work. A status counts the
    reconnections of the first two.
    """

    def __init__(
        self,
        receiver: wire.GeneratorStatusReceiver,
        run_log: RunLog,
        trainer_info: Mapping[str, str],
        limits: RegistryLimits = RegistryLimits(),
    ) -> None:
        """`trainer_info` has device and dtype of this machine, to compare generators with."""
        self.limits = limits
        # Sender of a final status -> groups made. Includes senders of earlier trainer sessions.
        self.num_made = dict(run_log.final_statuses)
        self._receiver = receiver
        self._run_log = run_log
        self._trainer_info = trainer_info
        self._live: dict[str, Sender] = {}  # by id; the least recently active sender is first
        self._starts: dict[str, dict[str, Sender]] = {}  # the same by name, in the same order
        self._past: dict[str, Sender] = {}  # senders that have left, and may send again
        self._keyframe_requested = False  # a generator cannot apply the newest delta
        self._next_keyframe = float("-inf")  # monotonic seconds: no requested one before this time
        # Monotonic seconds when the queue was last empty. Liveness is measured up to this time:
        # during a training step the trainer receives nothing, so senders only seem silent.
        self._received_until = time.monotonic()

    def receive_status(self, *, step: int, timeout: float = 0.0) -> list[Sender]:
        """Process arrived statuses, after up to `timeout` seconds; returns their senders."""
        received = self._receiver.receive(timeout=timeout).values()
        senders = [self.add_status(status, step=step) for status in received]
        if self._receiver.is_empty:
            self._received_until = time.monotonic()
        return [sender for sender in senders if sender is not None]

    def add_status(self, status: wire.GeneratorStatus, *, step: int) -> Sender | None:
        """Process a status; None if a limit of senders refuses a new one."""
        sender = self._mark_alive(status.sender, step=step, has_group=False)
        if sender is None:
            return None
        before = sender.status
        sender.status = status
        sender.newest_group = None
        sender.seconds_without_status = 0.0
        if status.worker_info and not sender.has_worker_info:
            sender.has_worker_info = True
            event = {**sender.event_fields, "step": step, "worker_info": status.worker_info}
            if self._run_log.event("worker_info", **event):
                info = worker_info_text(sender.name, status.worker_info, trainer=self._trainer_info)
                self._run_log.note(info)
        if before and status.announcement_reconnects > before.announcement_reconnects:
            self._report_silent(sender, "announcements", step=step)
        if before and status.rollout_reconnects > before.rollout_reconnects:
            self._report_silent(sender, "rollouts", step=step)
        reason = status.store_error
        if reason != (before.store_error if before else ""):
            event = {**sender.event_fields, "reason": reason, "step": step}
            if self._run_log.event(STORE_ERROR, **event) and reason:
                self._run_log.note(f"generator {sender.name} cannot read the weights: {reason}")
        # A generator repeats the flag until it has loaded the keyframe: count it only once.
        if status.wants_keyframe and not (before and before.wants_keyframe):
            self._keyframe_requested = True
        is_new_final = status.last and sender.id not in self.num_made
        if is_new_final and len(self.num_made) < self.limits.max_final_statuses:
            self.num_made[sender.id] = status.made
            self._run_log.event("final_status", **sender.event_fields, made=status.made)
        return sender

    def add_group(self, sender_id: str, *, step: int) -> None:
        """Register that a group of a sender arrived.

        At a limit, a new sender with a group replaces another sender, so that forged messages
        cannot keep a generator out.
        """
        sender = self._mark_alive(sender_id, step=step, has_group=True)
        assert sender is not None
        now = time.monotonic()
        sender.first_group = min(sender.first_group, now)
        if sender.newest_group is not None:
            seconds = now - sender.newest_group
            # Not all of a longer time: the generator may have been asleep.
            sender.seconds_without_status += min(seconds, self.limits.silent_seconds / 2)
        sender.newest_group = now
        if sender.seconds_without_status >= self.limits.silent_seconds:
            self._report_silent(sender, "status", step=step)

    def _mark_alive(self, sender_id: str, *, step: int, has_group: bool) -> Sender | None:
        """The sender as the most recently active one; None for a new one that is refused."""
        name = sender_id.rpartition("/")[0]
        sender = self._live.get(sender_id)
        if sender is None:
            starts = self._starts.get(name, {})
            has_many_starts = len(starts) >= self.limits.max_starts
            if has_many_starts or len(self._live) >= self.limits.max_live:
                if not has_group:
                    return None
                candidates = (starts if has_many_starts else self._live).values()
                # The least recently active one; one that has sent no group first.
                without_group = (each for each in candidates if each.first_group == math.inf)
                self._remove(next(without_group, next(iter(candidates))))
            sender = self._join(sender_id, step=step)
        sender.last_message = time.monotonic()
        for senders in (self._live, self._starts.setdefault(name, {})):
            senders.pop(sender_id, None)  # to re-insert it as the last one
            senders[sender_id] = sender
        return sender

    def _join(self, sender_id: str, *, step: int) -> Sender:
        """Record a new sender; report a second generator of the same name."""
        past = self._past.pop(sender_id, Sender(sender_id))
        sender = Sender(
            sender_id,
            status=past.status,
            newest_group=past.newest_group,
            seconds_without_status=past.seconds_without_status,
        )
        others = [*self._starts.get(sender.name, {}).values()]
        # A restart of one generator takes longer.
        is_same_name = bool(others) and self._received_until - others[-1].last_message < 2.0
        if self._run_log.event("join", **sender.event_fields, step=step) and is_same_name:
            self._run_log.note(
                f"two generators are called {sender.name}; "
                "if both run, start one with another --generator.name"
            )
        return sender

    def _remove(self, sender: Sender) -> None:
        starts = self._starts[sender.name]
        del self._live[sender.id], starts[sender.id]
        if not starts:
            del self._starts[sender.name]
        self._past[sender.id] = sender
        if len(self._past) > self.limits.max_live:
            del self._past[next(iter(self._past))]
        self._run_log.event("leave", **sender.event_fields)

    def remove_silent(self) -> None:
        """Remove senders without a message in live_seconds."""
        for sender in [*self._live.values()]:
            if self._received_until - sender.last_message >= self.limits.live_seconds:
                self._remove(sender)

    @property
    def live(self) -> list[Sender]:
        """The least recently active sender is first."""
        return [*self._live.values()]

    def is_live(self, sender_id: str) -> bool:
        return sender_id in self._live

    def without_status(self, sender: Sender) -> int:
        """Seconds in which groups of the sender came, but no status; 0 below `silent_seconds`."""
        seconds = sender.seconds_without_status
        return int(seconds) if seconds >= self.limits.silent_seconds else 0

    def _report_silent(self, sender: Sender, connection: str, *, step: int) -> None:
        now = time.monotonic()
        if now - sender.reported.get(connection, float("-inf")) < self.limits.report_seconds:
            return
        sender.reported[connection] = now
        if self._run_log.event("silent", **sender.event_fields, connection=connection, step=step):
            self._run_log.note(
                f"generator {sender.name}: no {connection} for {self.limits.silent_seconds:.0f} s "
                "while its other connections work; the generator reconnects"
            )

    @property
    def keyframe_due(self) -> bool:
        """Whether a keyframe is requested, and the last one is old enough."""
        return self._keyframe_requested and time.monotonic() >= self._next_keyframe

    def take_keyframe_request(self) -> bool:
        """Remove the request and return True if a keyframe is due; the caller then publishes it."""
        if not self.keyframe_due:
            return False
        self._keyframe_requested = False
        self._next_keyframe = time.monotonic() + self.limits.keyframe_seconds
        return True

    def wait_for_final_statuses(self, *, step: int) -> None:
        """Wait for the status that each live generator sends at the end of the run."""
        deadline = time.monotonic() + self.limits.final_status_seconds
        self.remove_silent()  # they send no final status
        self.receive_status(step=step)
        while self._live.keys() - self.num_made.keys():
            timeout = deadline - time.monotonic()
            if timeout <= 0.0:
                return
            self.receive_status(step=step, timeout=timeout)

    def metrics(self, row: Mapping[str, float]) -> dict[str, float]:
        """Metrics gen/NAME/STATISTIC of live generators, from their newest statuses.

        `row` has the step of the trained groups as gen/NAME/step; the larger step is returned.
        Senders with a group come first, because the number is limited.
        """
        metrics = dict[str, float]()
        senders = sorted(self.live, key=lambda sender: sender.first_group)
        for sender in senders[: self.limits.max_in_metrics]:
            if status := sender.status:
                prefix = f"gen/{sender.name}/"
                metrics |= {prefix + name: getattr(status, name) for name in STATISTICS}
                metrics[f"{prefix}step"] = max(status.step, row.get(f"{prefix}step", status.step))
        return metrics

    def num_outstanding(self, ledger: Ledger) -> int:
        """Number of groups that senders made after the last received one."""
        senders = [*self._past.values(), *self._live.values()]
        statuses = {sender.id: sender.status.made for sender in senders if sender.status}
        return sum(
            max(0, num_made - 1 - ledger.highest(sender))  # num_made - 1 is the newest group_number
            for sender, num_made in (self.num_made | statuses).items()
            if ledger.is_plausible(sender, num_made - 1)
        )


def report_mismatches(statistics: MismatchStatistics, session: Session, *, step: int) -> None:
    """Report each sender above the bound of the mismatch once."""
    bound = statistics.bound
    run_log = session.run_log
    for sender_id, mean in statistics.flag_senders().items():
        sender = Sender(sender_id)
        initial = statistics.initial(sender_id)
        event = {"step": step, "mismatch_kl": mean, "initial_kl": initial}
        is_logged = run_log.event("mismatch", **sender.event_fields, **event)
        remedy = "Start it with another model.dtype or device"
        if initial <= 0.25 * bound:
            remedy = f"It was {initial:.2g} in its first step: lower train.learning_rate"
        if is_logged:
            run_log.note(
                f"the logprobs of generator {sender.name} differ from the trainer's: mismatch_kl "
                f"{mean:.3g} over its last {statistics.window} steps, bound {bound:g}. {remedy}"
            )
