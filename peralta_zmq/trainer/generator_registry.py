"""The generators of the run: liveness, reported statistics, logprob mismatch.

A sender is live from its first valid group or status until the trainer has received nothing from it
for 30 s. The number of live senders is limited, in total and per name.

The logprob mismatch is the difference between the logprobs that a generator sent and the logprobs
that the trainer computes for the same tokens. A large mismatch from the first step on means that
the generator uses wrong weights or kernels; one that grows, that updates change the policy too
much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from peralta_zmq import wire
from peralta_zmq.learning.admission import Admission, Ledger
from peralta_zmq.learning.step_metrics import WINDOW, MismatchStatistics
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.run_state import STORE_ERROR
from peralta_zmq.observe.terminal import worker_info_text
from peralta_zmq.trainer.session import Session

LIVE_SECONDS = 30.0  # a sender without a message for this time is no longer live
REPORT_SECONDS = 60.0  # interval of reports of the same silent connection
# Two senders of one name that send within this time are two running generators: a restart of one
# generator takes longer.
SAME_NAME_SECONDS = 2.0
FINAL_STATUS_SECONDS = 2.0  # timeout for the final statuses at the end of a run
# Shortest time between two requested keyframes. A client that requests one in every other status
# must not make the trainer write all weights each time. One keyframe serves all generators, and a
# generator rarely needs two in this time.
KEYFRAME_SECONDS = 30.0
# Limits on the memory that a client with invented sender names can fill.
MAX_LIVE = 4096  # live senders, and senders that have left
MAX_STARTS = 16  # live senders of one name: each is live for 30 s, so a restart every 2 s is fine
MAX_IN_METRICS = 64  # generators in a row of metrics.jsonl, which is written in each step
MAX_FINAL_STATUSES = 1 << 16  # senders whose final status is kept
SMALL = 0.25  # fraction of train.max_mismatch_kl: a first mismatch without a fault of the generator
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
)


@dataclass(slots=True)
class Sender:
    """A start of a generator; `id` is NAME/INCARNATION. Times are monotonic seconds."""

    id: str
    last_message: float = 0.0
    first_group: float = math.inf  # infinite before the first
    status: wire.GeneratorStatus | None = None  # the newest
    has_worker_info: bool = False  # the run log has it
    lease: range = range(0)  # the sample lease that no status has confirmed; empty = none
    newest_group: float | None = None  # since the newest status
    seconds_without_status: float = 0.0  # in which groups arrived
    reported: dict[str, float] = field(default_factory=dict[str, float])
    """Connection -> time when it was last reported as silent."""

    @property
    def name(self) -> str:
        """Name of the generator."""
        return self.id.rpartition("/")[0]

    @property
    def fields(self) -> dict[str, str]:
        """The fields that identify the sender in an event of the run log."""
        return {"generator": self.name, "incarnation": self.id.rpartition("/")[2]}


class GeneratorRegistry:
    """Registers senders; records when they join and leave, and what they report.

    A generator has three connections to the trainer: for rollouts (groups), for announcements and
    for statuses. A connection is silent if nothing arrives on it for wire.SILENT_SECONDS while the
    others work. A status counts how often the generator reconnected a silent connection. That
    statuses do not arrive is noticed from the groups of the sender. Between two groups without a
    status at most half of SILENT_SECONDS count, because the generator may have been away, for
    instance asleep.
    """

    def __init__(
        self,
        receiver: wire.GeneratorStatusReceiver,
        run_log: RunLog,
        trainer_info: Mapping[str, str],
    ) -> None:
        """`trainer_info` has device and dtype of this machine, to compare generators with."""
        self.has_status = False  # a status has arrived
        # Sender of a final status -> groups made. Includes senders of earlier trainer sessions.
        self.num_made = dict(run_log.final_statuses)
        self._receiver = receiver
        self._run_log = run_log
        self._trainer_info = trainer_info
        self._live: dict[str, Sender] = {}  # by id; the least recently active sender is first
        self._starts: dict[str, dict[str, Sender]] = {}  # the same by name, in the same order
        self._past: dict[str, Sender] = {}  # that have left, and may send again
        # True if a generator cannot apply the newest delta: it needs a keyframe (all weights).
        self._keyframe_requested = False
        self._next_keyframe = float("-inf")  # monotonic seconds: no requested one before this time
        # Monotonic seconds when the queue was last empty. Liveness is measured up to this time:
        # during a training step the trainer receives nothing, so senders only seem silent.
        self._received_until = time.monotonic()

    def receive_status(self, *, step: int, timeout: float = 0.0) -> list[Sender]:
        """Process arrived statuses; wait up to `timeout` seconds for the first.

        Returns the senders from which one arrived.
        """
        received = self._receiver.receive(timeout=timeout).values()
        senders = [self.add_status(status, step=step) for status in received]
        if self._receiver.is_empty:
            self._received_until = time.monotonic()
        return [sender for sender in senders if sender is not None]

    def add_status(self, status: wire.GeneratorStatus, *, step: int) -> Sender | None:
        """Process a status; None if a limit of senders refuses a new one.

        The limits are MAX_LIVE senders, and MAX_STARTS of one name.
        """
        sender = self._mark_alive(status.sender, step=step, has_group=False)
        if sender is None:
            return None
        before = sender.status
        sender.status = status
        self.has_status = True
        sender.newest_group = None
        sender.seconds_without_status = 0.0
        if status.worker_info and not sender.has_worker_info:
            sender.has_worker_info = True
            event = {**sender.fields, "step": step, "worker_info": status.worker_info}
            if self._run_log.event("worker_info", **event):
                info = worker_info_text(sender.name, status.worker_info, trainer=self._trainer_info)
                self._run_log.note(info)
        if before and status.announcement_reconnects > before.announcement_reconnects:
            self._report_silent(sender, "announcements", step=step)
        if before and status.rollout_reconnects > before.rollout_reconnects:
            self._report_silent(sender, "rollouts", step=step)
        self._report_store(sender, before.store_error if before else "", step=step)
        # A generator repeats the flag until it has loaded the keyframe: count it only once.
        if status.wants_keyframe and not (before and before.wants_keyframe):
            self._keyframe_requested = True
        is_new_final = status.last and sender.id not in self.num_made
        if is_new_final and len(self.num_made) < MAX_FINAL_STATUSES:
            self.num_made[sender.id] = status.made
            self._run_log.event("final_status", **sender.fields, made=status.made)
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
            sender.seconds_without_status += min(now - sender.newest_group, wire.SILENT_SECONDS / 2)
        sender.newest_group = now
        if sender.seconds_without_status >= wire.SILENT_SECONDS:
            self._report_silent(sender, "status", step=step)

    def _mark_alive(self, sender_id: str, *, step: int, has_group: bool) -> Sender | None:
        """The sender as the most recently active one; None for a new one that is refused."""
        name = sender_id.rpartition("/")[0]
        sender = self._live.get(sender_id)
        if sender is None:
            starts = self._starts.get(name, {})
            if len(starts) >= MAX_STARTS or len(self._live) >= MAX_LIVE:
                if not has_group:
                    return None
                candidates = starts if len(starts) >= MAX_STARTS else self._live
                self._remove_one(candidates)
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
        is_same_name = (
            bool(others) and self._received_until - others[-1].last_message < SAME_NAME_SECONDS
        )
        if self._run_log.event("join", **sender.fields, step=step) and is_same_name:
            self._run_log.note(
                f"two generators are called {sender.name}; "
                "if both run, start one with another --generator.name"
            )
        return sender

    def _remove_one(self, senders: Mapping[str, Sender]) -> None:
        """Remove the least recently active of `senders`; one that has sent no group first."""
        without_group = (sender for sender in senders.values() if sender.first_group == math.inf)
        self._remove(next(without_group, next(iter(senders.values()))))

    def _remove(self, sender: Sender) -> None:
        starts = self._starts[sender.name]
        del self._live[sender.id], starts[sender.id]
        if not starts:
            del self._starts[sender.name]
        self._past[sender.id] = sender
        if len(self._past) > MAX_LIVE:
            del self._past[next(iter(self._past))]
        self._run_log.event("leave", **sender.fields)

    def live(self) -> list[Sender]:
        """Remove senders without a message in LIVE_SECONDS; return all others."""
        for sender in [*self._live.values()]:
            if self._received_until - sender.last_message >= LIVE_SECONDS:
                self._remove(sender)
        return [*self._live.values()]

    def is_live(self, sender_id: str) -> bool:
        """Whether a valid group or status of the sender was received recently."""
        return sender_id in self._live

    def without_status(self) -> dict[str, int]:
        """Live senders with groups but no status for SILENT_SECONDS or more -> these seconds."""
        return {
            sender.id: int(sender.seconds_without_status)
            for sender in self._live.values()
            if sender.newest_group is not None
            and sender.seconds_without_status >= wire.SILENT_SECONDS
        }

    def _report_silent(self, sender: Sender, connection: str, *, step: int) -> None:
        """Report a silent connection, at most once in REPORT_SECONDS."""
        now = time.monotonic()
        if now - sender.reported.get(connection, float("-inf")) < REPORT_SECONDS:
            return
        sender.reported[connection] = now
        if self._run_log.event("silent", **sender.fields, connection=connection, step=step):
            self._run_log.note(
                f"generator {sender.name}: no {connection} for {wire.SILENT_SECONDS:.0f} s "
                "while its other connections work; the generator reconnects"
            )

    def _report_store(self, sender: Sender, reason_before: str, *, step: int) -> None:
        """Record why a generator cannot read new weights, and that it can again (no reason)."""
        reason = sender.status.store_error if sender.status else ""
        if reason == reason_before:
            return
        if self._run_log.event(STORE_ERROR, **sender.fields, reason=reason, step=step) and reason:
            self._run_log.note(f"generator {sender.name} cannot read the weights: {reason}")

    @property
    def keyframe_due(self) -> bool:
        """True if a keyframe is requested, and KEYFRAME_SECONDS have passed since the last one."""
        return self._keyframe_requested and time.monotonic() >= self._next_keyframe

    def take_keyframe_request(self) -> bool:
        """Remove the request and return True if a keyframe is due; the caller then publishes it."""
        if not self.keyframe_due:
            return False
        self._keyframe_requested = False
        self._next_keyframe = time.monotonic() + KEYFRAME_SECONDS
        return True

    def wait_for_final_statuses(self, *, step: int) -> None:
        """Wait up to FINAL_STATUS_SECONDS for the final status of each live generator.

        Generators send it when the trainer has announced that the run is complete.
        """
        deadline = time.monotonic() + FINAL_STATUS_SECONDS
        self.live()  # removes silent senders, which send no final status
        self.receive_status(step=step)
        while self._live.keys() - self.num_made.keys():
            timeout = deadline - time.monotonic()
            if timeout <= 0.0:
                return
            self.receive_status(step=step, timeout=timeout)

    def metrics(self, row: Mapping[str, float]) -> dict[str, float]:
        """Metrics gen/NAME/STATISTIC of live generators, from their newest statuses.

        Of at most MAX_IN_METRICS senders; those that have sent a group come first. gen/NAME/step is
        the step of the generator's weights. `row` has the step of its trained groups under the same
        name; the larger step is returned.
        """
        metrics = dict[str, float]()
        senders = sorted(self.live(), key=lambda sender: sender.first_group)
        for sender in senders[:MAX_IN_METRICS]:
            if status := sender.status:
                prefix = f"gen/{sender.name}/"
                metrics |= {prefix + name: getattr(status, name) for name in STATISTICS}
                metrics[f"{prefix}step"] = max(status.step, row.get(f"{prefix}step", status.step))
        return metrics

    def num_outstanding(self, ledger: Ledger) -> int:
        """Number of groups that senders made after the last group received from each.

        Ignores reports of implausibly many groups.
        """
        senders = [*self._past.values(), *self._live.values()]
        statuses = {sender.id: sender.status.made for sender in senders if sender.status}
        return sum(
            max(0, num_made - 1 - ledger.highest(sender))  # num_made - 1 is the newest sequence
            for sender, num_made in (self.num_made | statuses).items()
            if ledger.is_plausible(sender, num_made - 1)
        )


def report_mismatches(
    statistics: MismatchStatistics, session: Session, admission: Admission, *, step: int
) -> None:
    """Report each sender above train.max_mismatch_kl once; drop its groups if set.

    Not called for steps that a restart trains again: their groups stay in the batch.
    """
    settings = session.config.train
    run_log = session.run_log
    drops = settings.on_mismatch == "drop"
    for sender_id, mean in statistics.flag_senders().items():
        sender = Sender(sender_id)
        initial = statistics.initial(sender_id)
        event = {"step": step, "mismatch_kl": mean, "initial_kl": initial, "dropped": drops}
        is_logged = run_log.event("mismatch", **sender.fields, **event)
        remedy = "Start it with another model.dtype or device, or set train.on_mismatch = drop"
        if drops:
            admission.flagged.add(sender_id)
            remedy = (
                f"Its groups are dropped until {sender.name} is started with another model.dtype"
            )
        if initial <= SMALL * settings.max_mismatch_kl:
            remedy = f"It was {initial:.2g} in its first step: lower train.learning_rate"
            remedy += "; its groups are dropped until it is started again" if drops else ""
        if is_logged:
            run_log.note(
                f"the logprobs of generator {sender.name} differ from the trainer's: mismatch_kl "
                f"{mean:.3g} over its last {WINDOW} steps, bound {settings.max_mismatch_kl:g} "
                f"(train.max_mismatch_kl). {remedy}"
            )
