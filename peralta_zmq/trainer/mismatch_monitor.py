"""Generators whose logprobs disagree with the trainer's: reported by name, set aside if asked.

Knows sums by sender and the run's books; knows nothing of tensors.
"""

from __future__ import annotations

from peralta_zmq.config import Config
from peralta_zmq.learning.admission import Admission
from peralta_zmq.learning.step_metrics import WINDOW, MismatchBySender, MismatchStatistics
from peralta_zmq.observe.run_log import RunLog


class LogprobMismatchMonitor:
    """`note` after each step, also one that is replayed; `judge` only after one that is new: what
    an earlier session admitted stays admitted.
    """

    def __init__(self, config: Config, books: RunLog, admission: Admission) -> None:
        self._bound = config.train.max_mismatch_kl
        self._sets_aside = config.train.on_mismatch == "drop"
        self._books, self._admission = books, admission
        self._trust = MismatchStatistics(bound=self._bound)

    def note(self, mismatch: MismatchBySender) -> None:
        """Take in what a step has shown of each sender."""
        self._trust.record(mismatch)

    def judge(self, *, step: int) -> None:
        """Report each start of a generator that is too far off, once."""
        for sender in self._trust.flag_senders():
            name, _, incarnation = sender.rpartition("/")
            mean = self._trust.flagged[sender]
            self._books.event(
                "mismatch", generator=name, incarnation=incarnation, step=step, mismatch_kl=mean,
                dropped=self._sets_aside,
            )  # fmt: skip
            self._books.note(
                f"generator {name} disagrees with the trainer about logprobs: mismatch_kl "
                f"{mean:.3g} over its last {WINDOW} steps, bound {self._bound:g} "
                f"(train.max_mismatch_kl). {self._advice(name)}"
            )
            if self._sets_aside:
                self._admission.flagged.add(sender)

    def _advice(self, name: str) -> str:
        if self._sets_aside:
            return f"Its groups are set aside until {name} is started with another model.dtype"
        return "Start it with another model.dtype or device, or set train.on_mismatch = drop"
