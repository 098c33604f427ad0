"""Which rollout groups are trained, and the outcome of each group.

Summary, metrics, events and samples.jsonl give five reasons why a group is not trained.
`Admission.admit` records one outcome; a group that has one is settled.

    reason       outcomes in the ledger
    no signal    no_signal: in the batch, but all rewards are equal; most advantages are then 0
    too old      stale: sampled from weights that are more than `max_off_policy_steps` steps old;
                 abandoned: from weights that a roll-back has undone, or after the last step
    filtered     filtered: mean reward exactly 0 or 1, with `online_difficulty_filtering`
    invalid      invalid: the decoder refused the rollouts
    lost         lost: it never arrived, and its sender will not send it again

Completions of held-out problems are `evaluated`. A group that arrives after it has been settled,
even as lost, is a duplicate: it is dropped and counted.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from peralta_zmq.rollout import RolloutGroup

Admitted: TypeAlias = Literal["trained", "no_signal"]  # in the batch
Dropped: TypeAlias = Literal["stale", "abandoned", "filtered", "evaluated", "invalid", "lost"]
Outcome: TypeAlias = Admitted | Dropped
AdmissionDecision: TypeAlias = Outcome | Literal["duplicate"]
ADMITTED: tuple[str, ...] = get_args(Admitted)
OUTCOMES: tuple[str, ...] = (*ADMITTED, *get_args(Dropped))
# Largest valid jump of a sender's group number. A sender that drops groups, after a roll-back or
# with a full outbox, skips fewer numbers. A larger jump would distort the count of lost groups.
MAX_JUMP = 1 << 20


@dataclass(slots=True)
class Admission:
    """Decides which groups are trained, and records every decision in the ledger."""

    max_off_policy_steps: int  # train.max_off_policy_steps, or 0 if train.max_async_level is 0
    online_difficulty_filtering: bool = False
    ledger: Ledger = field(default_factory=lambda: Ledger())
    abandoned: set[str] = field(default_factory=set[str])
    """`weights_id` of the weight versions that a roll-back of the run has undone."""
    is_over: bool = False  # the last step is taken, so that no group is trained any more
    duplicates: int = 0  # groups that arrived when they were settled

    def admit(self, group: RolloutGroup, *, step: int) -> AdmissionDecision:
        """Decide whether step `step` trains the group, and settle it with the outcome."""
        decision = self._decide(group, step)
        is_new = self.ledger.settle(
            group.sender, group.group_number, decision, min_group_number=group.min_group_number
        )
        self.duplicates += not is_new
        return decision if is_new else "duplicate"

    def _decide(self, group: RolloutGroup, step: int) -> Outcome:
        # The newest weights now are those of `step` - 1. A group sampled from later weights was
        # sampled before the run was rolled back.
        is_abandoned = group.newest_step >= step or group.weights_id in self.abandoned
        is_evaluated = group.evaluation_step is not None
        conditions: dict[Outcome, bool] = {
            "invalid": not group.rollouts,
            "abandoned": is_abandoned or (self.is_over and not is_evaluated),
            "evaluated": is_evaluated,
            "stale": staleness(group, step=step) > self.max_off_policy_steps,
            "filtered": self.online_difficulty_filtering and group.mean_reward in (0.0, 1.0),
            "no_signal": not group.has_signal,
            "trained": True,
        }
        return next(outcome for outcome, holds in conditions.items() if holds)


def staleness(group: RolloutGroup, *, step: int) -> int:
    """Age, at `step`, of the oldest weights that sampled the group; 0 for those of `step` - 1."""
    return max(0, step - 1 - group.policy_step)


class Ledger:
    """The settled groups of each sender, and the number of groups with each outcome.

    All groups of a sender up to group number `settled(sender)` are settled, and perhaps some later
    ones, above a gap: groups that have not arrived. Every settled group has exactly one outcome,
    so the outcomes sum to `total`. In memory are at most `max_senders` senders, and settled groups
    above gaps (100 bytes each): `max_above` of all senders, `max_above_of_sender` of one.
    """

    def __init__(
        self,
        saved: Mapping[str, Any] | None = None,
        *,
        max_senders: int = 1 << 16,
        max_above: int = 1 << 17,
        max_above_of_sender: int = 1024,
    ) -> None:
        self._max_senders = max_senders
        self._max_above = max_above
        self._max_above_of_sender = max_above_of_sender
        saved = saved or {"senders": {}, "outcomes": {}, "forgotten": 0}
        senders: Mapping[str, tuple[int, list[int]]] = saved["senders"]
        self.outcomes: Counter[str] = Counter(saved["outcomes"])
        self._forgotten = int(saved["forgotten"])  # settled groups of senders dropped from memory
        # Two dicts by sender, the least recently active sender first: the number up to which all
        # groups are settled, and the settled numbers above a gap (only for senders with a gap).
        self._settled = {sender: settled for sender, (settled, _) in senders.items()}
        self._above = {sender: set(above) for sender, (_, above) in senders.items() if above}
        self._num_above = sum(map(len, self._above.values()))

    def settle(
        self, sender: str, group_number: int, outcome: str, *, min_group_number: int = 0
    ) -> bool:
        """Record the outcome of a group; returns False, and changes nothing, for a duplicate.

        The sender never sends groups below `min_group_number` again, so those that have not arrived
        become lost.
        """
        settled = self.settled(sender)
        above = self._above.get(sender, set())
        if group_number <= settled or group_number in above:
            return False
        self.outcomes[outcome] += 1
        above = above | {group_number}
        if len(above) > self._max_above_of_sender:  # close the first gap
            min_group_number = max(min_group_number, min(above))
        if min_group_number > settled + 1:
            passed = {number for number in above if number < min_group_number}
            self._count_lost(min_group_number - settled - 1 - len(passed))
            settled = min_group_number - 1
            above = above - passed
        while settled + 1 in above:
            settled += 1
            above.remove(settled)
        self._settled.pop(sender, None)  # to re-insert it as the most recently active
        self._settled[sender] = settled
        self._pop_above(sender)
        if above:
            self._num_above += len(above)
            self._above[sender] = above
        self._limit_memory()
        return True

    def is_plausible(self, sender: str, group_number: int) -> bool:
        return group_number - self.highest(sender) <= MAX_JUMP

    @property
    def made(self) -> int:
        """Number of groups produced by all senders, by their highest group numbers."""
        return self._forgotten + sum(self.highest(sender) + 1 for sender in self._settled)

    def settled(self, sender: str) -> int:
        """The group_number up to which all of the sender's groups are settled, or -1."""
        return self._settled.get(sender, -1)

    def highest(self, sender: str) -> int:
        """The sender's highest settled group_number; greater than `settled` if there is a gap."""
        return max(self._above.get(sender, ()), default=self.settled(sender))

    @property
    def settled_by_sender(self) -> dict[str, int]:
        """`settled` of each sender in memory, the least recently active first."""
        return dict(self._settled)

    @property
    def total(self) -> int:
        """Number of settled groups of all senders."""
        settled = sum(group_number + 1 for group_number in self._settled.values())
        return self._forgotten + settled + self._num_above

    def saved(self) -> dict[str, Any]:
        """The ledger as JSON, for a checkpoint."""
        assert self.total == sum(self.outcomes.values()), "every settled group has one outcome"
        return {
            "senders": {
                sender: (settled, sorted(self._above.get(sender, ())))
                for sender, settled in self._settled.items()
            },
            "outcomes": dict(self.outcomes),
            "forgotten": self._forgotten,
        }

    def copy(self) -> Ledger:
        """An independent copy; much faster than `saved`."""
        ledger = copy.copy(self)
        ledger.outcomes = self.outcomes.copy()
        # Both share the sets in `_above`: `settle` replaces a set instead of changing it.
        ledger._settled = self._settled.copy()
        ledger._above = self._above.copy()
        return ledger

    def _pop_above(self, sender: str) -> set[int]:
        above = self._above.pop(sender, set())
        self._num_above -= len(above)
        return above

    def _limit_memory(self) -> None:
        """Above a limit, close the gaps of the least recently active sender, or forget it."""
        if self._num_above > self._max_above:
            oldest = next(iter(self._above))
            above = self._pop_above(oldest)
            self._count_lost(max(above) - self._settled[oldest] - len(above))
            self._settled[oldest] = max(above)
        if len(self._settled) > self._max_senders:
            oldest = next(iter(self._settled))
            self._forgotten += self._settled.pop(oldest) + 1 + len(self._pop_above(oldest))

    def _count_lost(self, count: int) -> None:
        if count:  # a zero would appear in checkpoints and metrics
            self.outcomes["lost"] += count
