"""The generators of the run: liveness, reported statistics, logprob mismatch.

A sender is one incarnation of a generator, `NAME/INCARNATION`; an incarnation is a random id of the
start. A generator sends groups (all rollouts of one problem) and statuses (messages with its
counters and rates). A sender is live from its first valid group or status until the trainer has
received nothing from it for 30 s. The number of live senders is limited, in total and per name.

The logprob mismatch is the difference between the logprobs that a generator sent and the logprobs
that the trainer computes for the same tokens and weights. A large mismatch means that the generator
uses wrong weights or kernels.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from peralta_zmq import wire
from peralta_zmq.learning.admission import Admission, Ledger
from peralta_zmq.learning.step_metrics import WINDOW, MismatchStatistics
from peralta_zmq.observe.run_log import RunLog
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
MAX_LIVE = 4096  # live senders
MAX_STARTS = 16  # live senders of one name: each is live for 30 s, so a restart every 2 s is fine
MAX_IN_METRICS = 64  # generators in a row of metrics.jsonl, which is written in each step
MAX_FINAL_STATUSES = 1 << 16  # senders whose final status is kept
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


class GeneratorRegistry:
    """Registers senders and their newest status; records when senders join and leave.

    `statuses` has the newest status of each sender, also of senders that are no longer live.
    `connections` detects silent connections of live senders.
    """

    def __init__(
        self,
        receiver: wire.GeneratorStatusReceiver,
        run_log: RunLog,
        trainer_info: Mapping[str, str],
    ) -> None:
        """`trainer_info` has device and dtype of this machine, to compare generators with."""
        self.statuses: dict[str, wire.GeneratorStatus] = {}
        self.connections = SilentConnections(run_log)
        # Sender of a final status -> groups made. Includes senders of earlier trainer sessions.
        self.num_made = dict(run_log.final_statuses)
        self._receiver, self._run_log, self._trainer_info = receiver, run_log, trainer_info
        # True if a generator cannot apply the newest delta: it needs a keyframe (all weights).
        self._keyframe_requested = False
        self._next_keyframe = float("-inf")  # monotonic seconds: no requested one before this time
        # Live sender -> monotonic seconds; the least recently active sender is first. And the same
        # senders by name, in the same order.
        self._last_message: dict[str, float] = {}
        self._starts: dict[str, dict[str, None]] = {}
        # Monotonic seconds when the queue was last empty. Liveness is measured up to this time:
        # during a training step the trainer receives nothing, so senders only seem silent.
        self._received_until = time.monotonic()
        self._with_info: set[str] = set()  # live senders whose worker info is recorded
        # Live senders that have sent a group, in the order of their first groups.
        self._with_group: dict[str, None] = {}

    def receive_status(self, *, step: int, timeout: float = 0.0) -> dict[str, wire.GeneratorStatus]:
        """Process arrived statuses; wait up to `timeout` seconds for the first.

        Returns the newest status of each sender from which one arrived.
        """
        received = self._receiver.receive(timeout=timeout)
        accepted = self._update(received, step=step) if received else {}
        if self._receiver.is_empty:
            self._received_until = time.monotonic()
        return accepted

    def _update(
        self, received: Mapping[str, wire.GeneratorStatus], *, step: int
    ) -> dict[str, wire.GeneratorStatus]:
        """Process one newest status per sender; returns those of registered senders."""
        accepted: dict[str, wire.GeneratorStatus] = {}
        for sender, status in received.items():
            before = self.statuses.pop(sender, None)
            if not self.mark_alive(sender, step=step, worker_info=status.worker_info):
                continue
            accepted[sender] = status
            self.statuses[sender] = status  # inserted last: the oldest status is first
            if len(self.statuses) > MAX_LIVE:
                del self.statuses[next(iter(self.statuses))]
            self.connections.add_status(status, before, step=step)
            # A generator repeats the flag until it has loaded the keyframe: count it only once.
            if status.wants_keyframe and not (before and before.wants_keyframe):
                self._keyframe_requested = True
            if status.last:
                self._record_final(sender, status.made)
        return accepted

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
        while self._last_message.keys() - self.num_made.keys():
            timeout = deadline - time.monotonic()
            if timeout <= 0.0:
                return
            self.receive_status(step=step, timeout=timeout)

    def mark_alive(
        self, sender: str, *, step: int, worker_info: Mapping[str, str] | None = None
    ) -> bool:
        """Register that a message of a sender arrived; record new senders.

        `worker_info` describes the sender's machine; it is recorded once for each sender. A status
        has it; for a group it is None. The limits are MAX_LIVE senders, and MAX_STARTS of one name.
        At a limit, a new sender with a group replaces another sender, so that forged messages
        cannot keep a generator out. A new sender with a status is refused: the result is False.
        """
        name = sender.rpartition("/")[0]
        if sender not in self._last_message:
            starts = self._starts.get(name, {})
            if len(starts) >= MAX_STARTS or len(self._last_message) >= MAX_LIVE:
                if worker_info is not None:
                    return False
                self._remove_one(starts if len(starts) >= MAX_STARTS else self._last_message)
            self._record_join(sender, step=step)
        if worker_info and sender not in self._with_info:
            self._with_info.add(sender)
            fields, info = _sender_fields(sender), dict(worker_info)
            if self._run_log.event("worker_info", **fields, step=step, worker_info=info):
                self._run_log.note(worker_info_text(name, info, trainer=self._trainer_info))
        self._last_message.pop(sender, None)  # to re-insert it as the most recently active
        self._last_message[sender] = time.monotonic()
        starts = self._starts.setdefault(name, {})
        starts.pop(sender, None)
        starts[sender] = None
        if worker_info is None:
            self._with_group[sender] = None
            self.connections.add_group(sender, step=step)
        return True

    def _remove_one(self, senders: Collection[str]) -> None:
        """Remove the least recently active of `senders`; one that has sent no group first."""
        without_group = (sender for sender in senders if sender not in self._with_group)
        self._remove(next(without_group, next(iter(senders))))

    def _record_join(self, sender: str, *, step: int) -> None:
        """Record a new sender; report a second generator of the same name."""
        fields = _sender_fields(sender)
        name = fields["generator"]
        times = [self._last_message[start] for start in self._starts.get(name, ())]
        is_same_name = bool(times) and self._received_until - times[-1] < SAME_NAME_SECONDS
        if self._run_log.event("join", **fields, step=step) and is_same_name:
            self._run_log.note(
                f"two generators are called {name}; "
                "if both run, start one with another --generator.name"
            )

    def is_live(self, sender: str) -> bool:
        """Whether a valid group or status of the sender was received recently."""
        return sender in self._last_message

    def _record_final(self, sender: str, made: int) -> None:
        """Record once how many groups a live sender made in total."""
        is_first = sender in self._last_message and sender not in self.num_made
        if is_first and len(self.num_made) < MAX_FINAL_STATUSES:
            self.num_made[sender] = made
            self._run_log.event("final_status", **_sender_fields(sender), made=made)

    def live(self) -> list[str]:
        """Remove senders without a message in LIVE_SECONDS; return all others."""
        for sender, received_at in list(self._last_message.items()):
            if self._received_until - received_at >= LIVE_SECONDS:
                self._remove(sender)
        return list(self._last_message)

    def _remove(self, sender: str) -> None:
        fields = _sender_fields(sender)
        name = fields["generator"]
        del self._last_message[sender], self._starts[name][sender]
        if not self._starts[name]:
            del self._starts[name]
        self._with_info.discard(sender)
        self._with_group.pop(sender, None)
        self.connections.remove(sender)
        self._run_log.event("leave", **fields)

    def metrics(self, row: Mapping[str, float]) -> dict[str, float]:
        """Metrics gen/NAME/STATISTIC of live generators, from their newest statuses.

        Of at most MAX_IN_METRICS senders; those that have sent a group come first. gen/NAME/step is
        the step of the generator's weights. `row` has the step of its trained groups under the same
        name; the larger step is returned.
        """
        metrics = dict[str, float]()
        live = self.live()
        senders = [*self._with_group, *(each for each in live if each not in self._with_group)]
        for sender in senders[:MAX_IN_METRICS]:
            if status := self.statuses.get(sender):
                prefix = f"gen/{status.generator_id}/"
                metrics |= {prefix + name: getattr(status, name) for name in STATISTICS}
                metrics[f"{prefix}step"] = max(status.step, row.get(f"{prefix}step", status.step))
        return metrics

    def num_outstanding(self, ledger: Ledger) -> int:
        """Number of groups that senders made after the last group received from each.

        Ignores reports of implausibly many groups.
        """
        made = self.num_made | {sender: status.made for sender, status in self.statuses.items()}
        return sum(
            max(0, num_made - 1 - ledger.highest(sender))  # num_made - 1 is the newest sequence
            for sender, num_made in made.items()
            if ledger.is_plausible(sender, num_made - 1)
        )


class SilentConnections:
    """Reports when one connection of a live sender is silent while others work.

    A generator has three connections to the trainer: for rollouts (groups), for announcements and
    for statuses. A connection is silent if nothing arrives on it for wire.SILENT_SECONDS. That a
    sender's statuses do not arrive is noticed from its groups. Between two groups without a status
    at most half of SILENT_SECONDS count, because the generator may have been away, for instance
    asleep.
    """

    def __init__(self, run_log: RunLog) -> None:
        self._run_log = run_log
        # Sender -> seconds with groups but no status, monotonic seconds of the newest group.
        self._groups: dict[str, tuple[float, float]] = {}
        # The same for up to MAX_LIVE senders that have left, and may send groups again.
        self._past_groups: dict[str, tuple[float, float]] = {}
        # Sender -> connection -> monotonic seconds when it was last reported as silent.
        self._reported: dict[str, dict[str, float]] = {}

    def add_group(self, sender: str, *, step: int) -> None:
        """Record that a group of a sender arrived; report if the sender's statuses do not."""
        now = time.monotonic()
        past = self._past_groups.pop(sender, (0.0, now))
        seconds, newest = self._groups.get(sender, past)
        seconds += min(now - newest, wire.SILENT_SECONDS / 2)
        self._groups[sender] = seconds, now
        if seconds >= wire.SILENT_SECONDS:
            self._report(sender, "status", step=step)

    def add_status(
        self, status: wire.GeneratorStatus, before: wire.GeneratorStatus | None, *, step: int
    ) -> None:
        """Record that a status arrived; report connections that it says were silent.

        The status counts how often the generator reconnected a silent connection.
        """
        self._groups.pop(status.sender, None)
        self._past_groups.pop(status.sender, None)
        if before and status.announcement_reconnects > before.announcement_reconnects:
            self._report(status.sender, "announcements", step=step)
        if before and status.rollout_reconnects > before.rollout_reconnects:
            self._report(status.sender, "rollouts", step=step)

    def without_status(self) -> dict[str, int]:
        """By live sender: seconds with groups but no status, if at least SILENT_SECONDS."""
        return {
            sender: int(seconds)
            for sender, (seconds, _) in self._groups.items()
            if seconds >= wire.SILENT_SECONDS
        }

    def remove(self, sender: str) -> None:
        """Remove a sender that is no longer live."""
        self._reported.pop(sender, None)
        if sender in self._groups:
            self._past_groups[sender] = self._groups.pop(sender)
            if len(self._past_groups) > MAX_LIVE:
                del self._past_groups[next(iter(self._past_groups))]

    def _report(self, sender: str, connection: str, *, step: int) -> None:
        """Report a silent connection, at most once in REPORT_SECONDS."""
        reported, now = self._reported.setdefault(sender, {}), time.monotonic()
        if now - reported.get(connection, float("-inf")) < REPORT_SECONDS:
            return
        reported[connection] = now
        fields = _sender_fields(sender)
        if self._run_log.event("silent", **fields, connection=connection, step=step):
            self._run_log.note(
                f"generator {fields['generator']}: no {connection} for {wire.SILENT_SECONDS:.0f} s "
                "while its other connections work; the generator reconnects"
            )


def report_mismatches(
    statistics: MismatchStatistics, session: Session, admission: Admission, *, step: int
) -> None:
    """Report each sender above train.max_mismatch_kl once; drop its groups if set.

    Not called for steps that a restart trains again: their groups stay in the batch.
    """
    settings, run_log = session.config.train, session.run_log
    drops = settings.on_mismatch == "drop"
    for sender, mean in statistics.flag_senders().items():
        fields, name = _sender_fields(sender), sender.rpartition("/")[0]
        event = {"step": step, "mismatch_kl": mean, "dropped": drops}
        is_logged = run_log.event("mismatch", **fields, **event)
        remedy = "Start it with another model.dtype or device, or set train.on_mismatch = drop"
        if drops:
            admission.flagged.add(sender)
            remedy = f"Its groups are dropped until {name} is started with another model.dtype"
        if is_logged:
            run_log.note(
                f"the logprobs of generator {name} differ from the trainer's: mismatch_kl "
                f"{mean:.3g} over its last {WINDOW} steps, bound {settings.max_mismatch_kl:g} "
                f"(train.max_mismatch_kl). {remedy}"
            )


def _sender_fields(sender: str) -> dict[str, str]:
    """The fields that identify a sender in an event of the run log."""
    name, _, incarnation = sender.rpartition("/")
    return {"generator": name, "incarnation": incarnation}
