"""Who is admitted to training: nothing twice, nothing too old, and everything counted.

Knows sequences and steps; knows nothing of tensors or sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from peralta_zmq.rollout import RolloutGroup

MAX_ABOVE = 1024  # sequences remembered above a gap, so that a jump cannot fill memory


def staleness(group: RolloutGroup, *, step: int) -> int:
    """Optimizer steps between the weights that sampled the group and those that step changes."""
    return max(0, step - 1 - group.policy_step)


class Ledger:
    """Which groups of each sender are settled: all up to a sequence, and some above a gap."""

    def __init__(self, saved: Mapping[str, tuple[int, list[int]]] | None = None) -> None:
        self._settled: dict[str, int] = {}
        self._above: dict[str, set[int]] = {}
        for sender, (settled, above) in (saved or {}).items():
            self._settled[sender], self._above[sender] = settled, set(above)

    def settle(self, sender: str, sequence: int, *, floor: int = 0) -> bool:
        """Whether the group is new; it is settled from now on, and all below `floor` with it."""
        settled, above = self.settled(sender), self._above.setdefault(sender, set())
        if sequence <= settled or sequence in above:
            return False
        above.add(sequence)
        settled = max(settled, floor - 1)
        if len(above) > MAX_ABOVE:
            settled = max(settled, min(above))
        while settled + 1 in above:
            settled += 1
        self._settled[sender] = settled
        self._above[sender] = {number for number in above if number > settled}
        return True

    def settled(self, sender: str) -> int:
        """All groups up to this sequence are settled; -1 when none is."""
        return self._settled.get(sender, -1)

    def seen(self, sender: str) -> int:
        """The highest settled sequence; above `settled` when there is a gap between."""
        return max(self._above.get(sender, set()), default=self.settled(sender))

    def saved(self) -> dict[str, tuple[int, list[int]]]:
        """As JSON, for a checkpoint."""
        return {each: (self._settled[each], sorted(self._above[each])) for each in self._settled}


@dataclass(slots=True)
class Admission:
    """Decides which groups may be trained."""

    max_off_policy_steps: int
    ledger: Ledger = field(default_factory=Ledger)
    dropped: Counter[str] = field(default_factory=Counter[str])

    def admit(self, group: RolloutGroup, *, step: int) -> bool:
        """Whether the group may be trained in optimizer step `step`; a refusal is counted."""
        if not self.ledger.settle(group.sender, group.sequence, floor=group.floor):
            self.dropped["duplicate"] += 1
            return False
        if staleness(group, step=step) > self.max_off_policy_steps:
            self.dropped["stale"] += 1
            return False
        return True
