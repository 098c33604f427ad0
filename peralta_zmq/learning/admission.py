"""Who is admitted to training: nothing twice, nothing too old, and everything counted.

Knows sequences and steps; knows nothing of tensors or sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from peralta_zmq.rollout import RolloutGroup

AdmissionDecision: TypeAlias = Literal[
    "trained", "no_signal", "stale", "abandoned", "filtered", "evaluated", "mismatched", "invalid",
    "duplicate",
]  # fmt: skip
OUTCOMES = (
    "trained", "no_signal", "stale", "abandoned", "filtered", "evaluated", "mismatched", "invalid",
    "lost",
)  # fmt: skip
ADMITTED = ("trained", "no_signal")  # both belong to the batch; the latter has no signal
MAX_ABOVE = 1024  # sequences remembered above a gap, so that a jump cannot fill memory
MAX_ABOVE_ALL = 1 << 17  # and of all senders together; 100 bytes each
MAX_SENDERS = 1 << 16  # starts of generators remembered; the one longest unheard goes first


def staleness(group: RolloutGroup, *, step: int) -> int:
    """Optimizer steps between the weights that sampled the group and those that step changes."""
    return max(0, step - 1 - group.policy_step)


class Ledger:
    """Which groups of each sender are settled, and what became of all of them together.

    Settled are all up to a sequence, and some above a gap. Every settled group has exactly one
    outcome, so the outcomes add up to the settled sequences (`total`).
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        saved = saved or {"senders": {}, "outcomes": {}}
        self._settled: dict[str, int] = {}
        self._above: dict[str, set[int]] = {}  # of those with a gap, the longest unheard first
        self._forgotten = int(saved.get("forgotten", 0))  # groups of senders dropped from memory
        self.outcomes: Counter[str] = Counter(saved["outcomes"])
        for sender, (settled, above) in saved["senders"].items():
            self._settled[sender] = settled
            if above:
                self._above[sender] = set(above)
        self._num_above = sum(map(len, self._above.values()))

    def settle(self, sender: str, sequence: int, outcome: str, *, min_sequence: int = 0) -> bool:
        """Whether the group is new; it is settled from now on with this outcome.

        What is missing below `min_sequence` will never come: it is settled as lost.
        """
        settled, above = self.settled(sender), self._above.get(sender, set())
        if sequence <= settled or sequence in above:
            return False
        above = above | {sequence}
        self.outcomes[outcome] += 1
        jump = min(above) if len(above) > MAX_ABOVE else 0
        below = max(settled + 1, min_sequence, jump)  # everything under it is settled
        known = {number for number in above if number < below}
        if lost := below - settled - 1 - len(known):
            self.outcomes["lost"] += lost
        settled, above = below - 1, above - known
        while settled + 1 in above:
            settled += 1
            above.remove(settled)
        self._remember(sender, settled, above)
        return True

    @property
    def made(self) -> int:
        """Groups that all senders are known to have made."""
        return self._forgotten + sum(self.seen(sender) + 1 for sender in self._settled)

    def settled(self, sender: str) -> int:
        """All groups up to this sequence are settled; -1 when none is."""
        return self._settled.get(sender, -1)

    def seen(self, sender: str) -> int:
        """The highest settled sequence; above `settled` when there is a gap between."""
        return max(self._above.get(sender, set()), default=self.settled(sender))

    @property
    def senders(self) -> list[str]:
        """Every start of a generator that is remembered, the longest unheard first."""
        return list(self._settled)

    @property
    def total(self) -> int:
        """Settled groups of all senders."""
        settled = sum(each + 1 for each in self._settled.values())
        return self._forgotten + settled + self._num_above

    def saved(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        senders = {
            sender: (settled, sorted(self._above.get(sender, ())))
            for sender, settled in self._settled.items()
        }
        return {
            "senders": senders,
            "outcomes": dict(self.outcomes),
            "forgotten": self._forgotten,
        }

    def _remember(self, sender: str, settled: int, above: set[int]) -> None:
        self._settled.pop(sender, None)  # to the end of the order
        self._settled[sender] = settled
        self._num_above += len(above) - len(self._above.pop(sender, ()))
        if above:
            self._above[sender] = above
        if self._num_above > MAX_ABOVE_ALL:
            self._close_gaps(next(iter(self._above)))
        if len(self._settled) > MAX_SENDERS:
            oldest = next(iter(self._settled))
            gone = self._above.pop(oldest, ())
            self._num_above -= len(gone)
            self._forgotten += self._settled.pop(oldest) + 1 + len(gone)

    def _close_gaps(self, sender: str) -> None:
        """What is missing of this sender is settled as lost."""
        above = self._above.pop(sender)
        self._num_above -= len(above)
        self.outcomes["lost"] += max(above) - self._settled[sender] - len(above)
        self._settled[sender] = max(above)


@dataclass(slots=True)
class Admission:
    """Decides which groups may be trained."""

    max_off_policy_steps: int
    online_difficulty_filtering: bool = False
    """Drop groups whose mean reward is exactly 0 or 1."""
    ledger: Ledger = field(default_factory=Ledger)
    abandoned: set[str] = field(default_factory=set[str])
    """Ids of weights that a roll-back has left behind; what they sampled is not trained."""
    distrusted: set[str] = field(default_factory=set[str])
    """Senders whose logprobs are too far from ours; what they sample is not trained."""
    duplicates: int = 0

    def admit(self, group: RolloutGroup, *, step: int) -> AdmissionDecision:
        """What becomes of the group in optimizer step `step`; it is counted."""
        verdict = self._judge(group, step)
        if self.ledger.settle(
            group.sender, group.sequence, verdict, min_sequence=group.min_sequence
        ):
            return verdict
        self.duplicates += 1
        return "duplicate"

    def _judge(self, group: RolloutGroup, step: int) -> AdmissionDecision:
        if not group.rollouts:
            return "invalid"  # what it held was refused
        if group.newest_step >= step or group.weights_id in self.abandoned:
            return "abandoned"
        if group.evaluation_step >= 0:
            return "evaluated"
        if group.sender in self.distrusted:
            return "mismatched"
        if staleness(group, step=step) > self.max_off_policy_steps:
            return "stale"
        if self.online_difficulty_filtering and group.mean_reward in (0.0, 1.0):
            return "filtered"
        return "trained" if group.has_signal else "no_signal"
