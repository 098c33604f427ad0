"""The generators that work for the trainer: liveness, reported statistics, logprob mismatch.

A sender is one start of a generator, `NAME/INCARNATION`; the incarnation is random bytes that each
start draws. A sender is live from its first valid group or status until nothing was received from
it for 30 s; the number of live senders is limited, in all and by name. The logprob mismatch is
the difference between the logprobs that a generator sent and those that the trainer computes for
the same tokens and weights; a large one means wrong weights or kernels.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from peralta_zmq import wire
from peralta_zmq.learning.admission import Admission, Ledger
from peralta_zmq.learning.step_metrics import WINDOW, MismatchStatistics
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.terminal import worker_info_text
from peralta_zmq.trainer.session import Session

SILENCE_SECONDS = 30.0  # without a message until a sender is not live any more
REPORT_SECONDS = 60.0  # between two reports of one silent connection
SAME_NAME_SECONDS = 2.0  # shorter than the restart of a generator with the same name
FINAL_STATUS_SECONDS = 2.0  # timeout for the final statuses at the end of a run
# Bounds on the memory that invented sender names can fill.
MAX_LIVE = 4096  # live senders; more are not registered
MAX_STARTS = 16  # live senders of one name, enough for a restart every two seconds
MAX_FINAL_STATUSES = 1 << 16  # senders whose final status is kept
# Fields of a generator's status that become metrics.
STATISTICS = ("tokens_per_s", "blocked_frac", "queue_frac", "reload_s", "step", "unscored")


class GeneratorRegistry:
    """Registers senders and their newest status; records when they join and leave.

    `statuses` has the newest status by sender, also of senders that are not live any more;
    `connections` detects silent connections of live senders.
    """

    def __init__(
        self,
        receiver: wire.GeneratorStatusReceiver,
        run_log: RunLog,
        trainer_info: Mapping[str, str],
    ) -> None:
        """`trainer_info` describes this machine, to report how a generator's machine differs."""
        self.statuses: dict[str, wire.GeneratorStatus] = {}
        self.connections = SilentConnections(run_log)
        # A generator cannot load the newest weights from a delta and needs a whole version.
        self.keyframe_requested = False
        # Sender of a final status -> groups that it has made, also those of earlier sessions.
        self.num_made = dict(run_log.last_reports)
        self._receiver, self._run_log, self._trainer_info = receiver, run_log, trainer_info
        self._last_message: dict[str, float] = {}  # live sender -> monotonic seconds
        # The clock of liveness stops here while the trainer computes and receives nothing.
        self._received_until = time.monotonic()
        self._with_info: set[str] = set()  # live senders whose worker info is recorded
        self._with_group: set[str] = set()  # live senders that have sent a group

    def receive_status(self, *, step: int, timeout: float = 0.0) -> None:
        """Process the statuses that have arrived; wait up to `timeout` seconds for the first."""
        received = self._receiver.receive(timeout=timeout)
        if received:
            self._update(received, step=step)
        if self._receiver.is_empty:
            self._received_until = time.monotonic()

    def _update(self, received: Mapping[str, wire.GeneratorStatus], *, step: int) -> None:
        for sender, status in received.items():
            before = self.statuses.pop(sender, None)
            if not self.mark_alive(sender, step=step, worker_info=status.worker_info):
                continue
            self.statuses[sender] = status  # at the end
            if len(self.statuses) > MAX_LIVE:
                del self.statuses[next(iter(self.statuses))]
            self.connections.add_status(status, before, step=step)
            # One keyframe per request: a generator that has not loaded it yet repeats the flag.
            if status.wants_keyframe and not (before and before.wants_keyframe):
                self.keyframe_requested = True
            if status.last:
                self._record_final(sender, status.made)

    def wait_for_final_statuses(self, *, step: int) -> None:
        """Wait for the status that each live generator sends when it learns that the run ended."""
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
        """Register a message of a sender; record its join and its worker info once.

        `worker_info` describes the sender's machine. It comes with the status, which may arrive
        after the first group; a message without it is a group. Returns False for a new sender above
        a limit, which is not registered before other senders have left. But a group replaces a
        start of the same name that has sent none: statuses under the name of a generator must not
        keep its next start out.
        """
        name, fields = sender.rpartition("/")[0], {**_sender_fields(sender), "step": step}
        if sender not in self._last_message:
            starts = {s: at for s, at in self._last_message.items() if s.startswith(f"{name}/")}
            if len(starts) >= MAX_STARTS:
                without_group = starts.keys() - self._with_group
                if worker_info is not None or not without_group:
                    return False
                self._remove(min(without_group, key=starts.__getitem__))
            if len(self._last_message) >= MAX_LIVE:
                return False
            latest = max(starts.values(), default=float("-inf"))
            is_same_name = self._received_until - latest < SAME_NAME_SECONDS
            if self._run_log.event("join", **fields) and is_same_name:
                self._run_log.note(
                    f"two generators are called {name}; if both run, give one --generator.name"
                )
        if worker_info and sender not in self._with_info:
            self._with_info.add(sender)
            if self._run_log.event("worker_info", **fields, worker_info=dict(worker_info)):
                self._run_log.note(worker_info_text(name, worker_info, trainer=self._trainer_info))
        self._last_message[sender] = time.monotonic()
        if worker_info is None:
            self._with_group.add(sender)
            self.connections.add_group(sender, step=step)
        return True

    def is_live(self, sender: str) -> bool:
        """Whether a valid group or status of the sender was received recently."""
        return sender in self._last_message

    def _record_final(self, sender: str, made: int) -> None:
        is_known = sender in self._last_message and sender not in self.num_made
        if is_known and len(self.num_made) < MAX_FINAL_STATUSES:
            self.num_made[sender] = made
            self._run_log.event("last_report", **_sender_fields(sender), made=made)

    def live(self) -> list[str]:
        """Senders with a message in the last SILENCE_SECONDS; removes the silent ones."""
        for sender, received_at in list(self._last_message.items()):
            if self._received_until - received_at >= SILENCE_SECONDS:
                self._remove(sender)
        return list(self._last_message)

    def _remove(self, sender: str) -> None:
        del self._last_message[sender]
        self._with_info.discard(sender)
        self._with_group.discard(sender)
        self.connections.forget(sender)
        self._run_log.event("leave", **_sender_fields(sender))

    def metrics(self, row: Mapping[str, float]) -> dict[str, float]:
        """gen/NAME/STATISTIC of every live generator, from its newest status.

        `row` has gen/NAME/step of the trained groups; the larger of the two steps is returned.
        """
        metrics = dict[str, float]()
        for sender in self.live():
            if status := self.statuses.get(sender):
                prefix = f"gen/{status.generator_id}/"
                metrics |= {prefix + name: getattr(status, name) for name in STATISTICS}
                metrics[f"{prefix}step"] = max(status.step, row.get(f"{prefix}step", status.step))
        return metrics

    def num_outstanding(self, ledger: Ledger) -> int:
        """Groups made after the highest sequence received from each sender, if plausible."""
        made = self.num_made | {sender: status.made for sender, status in self.statuses.items()}
        return sum(
            max(0, num - ledger.highest(sender) - 1)
            for sender, num in made.items()
            if ledger.is_plausible(sender, num - 1)
        )


class SilentConnections:
    """Detects and reports that one connection of a live sender is silent while others work."""

    def __init__(self, run_log: RunLog) -> None:
        self._run_log = run_log
        # Sender -> monotonic seconds of the first and of the newest group since its last status.
        self._groups: dict[str, tuple[float, float]] = {}
        # Sender -> connection -> monotonic seconds of the newest report.
        self._reported: dict[str, dict[str, float]] = {}

    def add_group(self, sender: str, *, step: int) -> None:
        """Record that a group of a sender arrived; report if its statuses do not."""
        now = time.monotonic()
        first, _ = self._groups.get(sender, (now, now))
        self._groups[sender] = first, now
        if now - first >= wire.SILENT_SECONDS:
            self._report(sender, "status", step=step)

    def add_status(
        self, status: wire.GeneratorStatus, before: wire.GeneratorStatus | None, *, step: int
    ) -> None:
        """Record that a status arrived; report the silent connections that it names."""
        self._groups.pop(status.sender, None)
        if before and status.announcement_reconnects > before.announcement_reconnects:
            self._report(status.sender, "announcements", step=step)
        if before and status.rollout_reconnects > before.rollout_reconnects:
            self._report(status.sender, "rollouts", step=step)

    def without_status(self) -> dict[str, int]:
        """Senders whose groups arrive without a status for long, with the time in seconds."""
        return {
            sender: int(newest - first)
            for sender, (first, newest) in self._groups.items()
            if newest - first >= wire.SILENT_SECONDS
        }

    def forget(self, sender: str) -> None:
        """Remove a sender that is not live any more."""
        self._groups.pop(sender, None)
        self._reported.pop(sender, None)

    def _report(self, sender: str, connection: str, *, step: int) -> None:
        reported, now = self._reported.setdefault(sender, {}), time.monotonic()
        if now - reported.get(connection, float("-inf")) < REPORT_SECONDS:
            return
        reported[connection] = now
        fields = _sender_fields(sender)
        if self._run_log.event("silent", **fields, connection=connection, step=step):
            self._run_log.note(
                f"generator {fields['generator']}: no {connection} for {wire.SILENT_SECONDS:.0f} s "
                "while its other connections work; it connects again"
            )


def report_mismatches(
    statistics: MismatchStatistics, session: Session, admission: Admission, *, step: int
) -> None:
    """Report each sender above train.max_mismatch_kl once; drop its groups if configured.

    Call it after new steps only, not after steps that a restart trains again: groups that an
    earlier session admitted stay admitted.
    """
    settings, run_log = session.config.train, session.run_log
    drops = settings.on_mismatch == "drop"
    for sender, mean in statistics.flag_senders().items():
        fields, name = _sender_fields(sender), sender.rpartition("/")[0]
        run_log.event("mismatch", **fields, step=step, mismatch_kl=mean, dropped=drops)
        remedy = "Start it with another model.dtype or device, or set train.on_mismatch = drop"
        if drops:
            admission.flagged.add(sender)
            remedy = f"Its groups are dropped until {name} is started with another model.dtype"
        run_log.note(
            f"generator {name} disagrees with the trainer about logprobs: mismatch_kl {mean:.3g} "
            f"over its last {WINDOW} steps, bound {settings.max_mismatch_kl:g} "
            f"(train.max_mismatch_kl). {remedy}"
        )


def _sender_fields(sender: str) -> dict[str, str]:
    """The fields of an event that identify a sender."""
    name, _, incarnation = sender.rpartition("/")
    return {"generator": name, "incarnation": incarnation}
