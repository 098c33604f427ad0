"""Admission of rollout groups to training: rejects duplicates and stale groups, counts outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from peralta_zmq.rollout import RolloutGroup

Outcome: TypeAlias = Literal[
    "trained", "no_signal", "stale", "abandoned", "filtered", "evaluated", "mismatched", "invalid",
    "lost",
]  # fmt: skip
AdmissionDecision: TypeAlias = Outcome | Literal["duplicate"]
OUTCOMES: tuple[str, ...] = get_args(Outcome)
ADMITTED = ("trained", "no_signal")  # in the batch; no_signal: all rewards of the group are equal
MAX_ABOVE = 1024  # settled sequences above a gap per sender; bounds memory when sequences jump
MAX_ABOVE_ALL = 1 << 17  # limit of the sum over all senders; about 100 bytes per sequence
MAX_SENDERS = 1 << 16  # generator starts in memory; the least recently active is dropped first


def staleness(group: RolloutGroup, *, step: int) -> int:
    """Optimizer steps between the oldest weights of the group and those that `step` updates."""
    return max(0, step - 1 - group.policy_step)


class Ledger:
    """The settled groups of each sender (one start of one generator), and their outcomes.

    Per sender, all sequences up to `settled(sender)` are settled, and some above a gap. Every
    settled group has exactly one outcome, so the outcomes sum to `total`.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        saved = saved or {"senders": {}, "outcomes": {}}
        senders: Mapping[str, tuple[int, list[int]]] = saved["senders"]
        self.outcomes: Counter[str] = Counter(saved["outcomes"])
        self._forgotten = int(saved.get("forgotten", 0))  # groups of senders dropped from memory
        # Both dicts are ordered by activity, the least recently active sender first; `_above` has
        # only senders with a gap.
        self._settled = {sender: settled for sender, (settled, _) in senders.items()}
        self._above = {sender: set(above) for sender, (_, above) in senders.items() if above}

    def settle(self, sender: str, sequence: int, outcome: str, *, min_sequence: int = 0) -> bool:
        """Settle a group with this outcome; False if it was settled before.

        The sender sends nothing below `min_sequence` any more: missing groups there are lost.
        """
        settled, above = self.settled(sender), self._above.get(sender, set())
        if sequence <= settled or sequence in above:
            return False
        self.outcomes[outcome] += 1
        above = above | {sequence}
        if len(above) > MAX_ABOVE:
            min_sequence = max(min_sequence, min(above))
        if min_sequence > settled + 1:
            passed = {number for number in above if number < min_sequence}
            self._count_lost(min_sequence - settled - 1 - len(passed))
            settled, above = min_sequence - 1, above - passed
        while settled + 1 in above:
            settled += 1
            above.remove(settled)
        self._settled.pop(sender, None)  # moves it to the end of the order
        self._settled[sender] = settled
        self._above.pop(sender, None)
        if above:
            self._above[sender] = above
        self._limit_memory()
        return True

    @property
    def made(self) -> int:
        """Groups that the senders have made, up to the highest sequence received from each."""
        return self._forgotten + sum(self.highest(sender) + 1 for sender in self._settled)

    def settled(self, sender: str) -> int:
        """The sequence up to which all groups are settled; -1 if none is."""
        return self._settled.get(sender, -1)

    def highest(self, sender: str) -> int:
        """The highest settled sequence; greater than `settled` if there is a gap."""
        return max(self._above.get(sender, ()), default=self.settled(sender))

    @property
    def senders(self) -> list[str]:
        """Senders in memory, the least recently active first."""
        return list(self._settled)

    @property
    def total(self) -> int:
        """Settled groups of all senders."""
        settled = sum(sequence + 1 for sequence in self._settled.values())
        return self._forgotten + settled + self._num_above()

    def saved(self) -> dict[str, Any]:
        """The ledger as JSON, for a checkpoint."""
        return {
            "senders": {
                sender: (settled, sorted(self._above.get(sender, ())))
                for sender, settled in self._settled.items()
            },
            "outcomes": dict(self.outcomes),
            "forgotten": self._forgotten,
        }

    def _num_above(self) -> int:
        return sum(map(len, self._above.values()))

    def _limit_memory(self) -> None:
        """Close the gaps of the least recent sender, or forget it, if a limit is exceeded."""
        if self._num_above() > MAX_ABOVE_ALL:
            oldest = next(iter(self._above))
            above = self._above.pop(oldest)
            self._count_lost(max(above) - self._settled[oldest] - len(above))
            self._settled[oldest] = max(above)
        if len(self._settled) > MAX_SENDERS:
            oldest = next(iter(self._settled))
            self._forgotten += self._settled.pop(oldest) + 1 + len(self._above.pop(oldest, ()))

    def _count_lost(self, count: int) -> None:
        if count:  # a zero would appear in checkpoints and metrics
            self.outcomes["lost"] += count


@dataclass(slots=True)
class Admission:
    """Decides which groups are trained, and records every decision in the ledger."""

    max_off_policy_steps: int
    online_difficulty_filtering: bool = False
    """Drop groups whose mean reward is exactly 0 or 1."""
    ledger: Ledger = field(default_factory=Ledger)
    abandoned: set[str] = field(default_factory=set[str])
    """weights_ids that a roll-back abandoned; groups sampled from them are not trained."""
    flagged: set[str] = field(default_factory=set[str])
    """Senders whose logprob mismatch is above the bound; their groups are not trained."""
    duplicates: int = 0

    def admit(self, group: RolloutGroup, *, step: int) -> AdmissionDecision:
        """Decide on the group for optimizer step `step`, and settle it in the ledger."""
        decision = self._decide(group, step)
        sequence, min_sequence = group.sequence, group.min_sequence
        if self.ledger.settle(group.sender, sequence, decision, min_sequence=min_sequence):
            return decision
        self.duplicates += 1
        return "duplicate"

    def _decide(self, group: RolloutGroup, step: int) -> AdmissionDecision:
        if not group.rollouts:
            return "invalid"  # the decoder rejected its content
        if group.newest_step >= step or group.weights_id in self.abandoned:
            return "abandoned"
        if group.evaluation_step >= 0:
            return "evaluated"
        if group.sender in self.flagged:
            return "mismatched"
        if staleness(group, step=step) > self.max_off_policy_steps:
            return "stale"
        if self.online_difficulty_filtering and group.mean_reward in (0.0, 1.0):
            return "filtered"
        return "trained" if group.has_signal else "no_signal"
