"""Which samples the generators draw: sample ranges, and problems that are too easy or too hard.

The sample index numbers the samples of the whole run and determines the problem. One sender alone
draws the indices of a sample range. Its status asks for a range; the trainer writes the grant to
the journal, then announces it until a status confirms it. The rest of the ranges of a sender that
ends is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from peralta_zmq.config import Config
from peralta_zmq.environments.curriculum import DifficultyPools
from peralta_zmq.learning.admission import ADMITTED
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer.generator_registry import Sender
from peralta_zmq.trainer.journal import DroppedGroup

MAX_SAMPLES_AHEAD = 1 << 20  # a larger jump of the sample index is invalid and ignored


class SampleRanges:
    def __init__(self) -> None:
        self.next_index = 0  # greater than every sample index that was granted or drawn

    def advance(self, next_index: int) -> None:
        """Do not grant sample indices below `next_index`; ignores a jump that is too large."""
        if next_index <= self.next_index + MAX_SAMPLES_AHEAD:
            self.next_index = max(self.next_index, next_index)

    def requests(self, senders: Iterable[Sender]) -> list[Sender]:
        """Process the new statuses of senders; returns the senders that ask for a range."""
        requesting = list[Sender]()
        for sender in senders:
            assert sender.status is not None
            self.advance(sender.status.next_sample_index)
            if sender.status.next_sample_index >= sender.sample_range.stop:
                sender.sample_range = range(0)
            # A status without the sender's newest range was sent before the range arrived.
            if sender.status.needs_range and not sender.sample_range:
                requesting.append(sender)
        return requesting

    def grant(self, senders: Iterable[Sender], num_samples: int) -> None:
        for sender in senders:
            sender.sample_range = range(self.next_index, self.next_index + num_samples)
            self.next_index += num_samples


@dataclass(slots=True)
class Curriculum:
    """Difficulty pools and sample ranges, which received groups update."""

    pools: DifficultyPools
    run_log: RunLog
    ranges: SampleRanges = field(default_factory=SampleRanges)

    def update(self, group: RolloutGroup | DroppedGroup, outcome: str) -> None:
        """Update the state with one group, just received or read from the journal."""
        if group.sample_index is not None:
            self.ranges.advance(group.sample_index + 1)
        if outcome in (*ADMITTED, "filtered"):
            num_returned = self.pools.update(group.problem_id, group.mean_reward)
            if num_returned and self.run_log.event("pool_refilled", problems=num_returned):
                self.run_log.note(
                    "no problem is left between curriculum.hard_threshold and easy_threshold; "
                    f"all {num_returned} are sampled again"
                )


def range_size(
    config: Config, *, groups_in_step: int, num_generators: int, fraction_in_use: float
) -> int:
    """Samples of a range: a generator's share of max_async_level + 1 weight versions."""
    groups = max(config.groups_per_step, groups_in_step)
    num_steps = (config.train.max_async_level + 1) * config.weights.interval
    share = math.ceil(groups / max(1, num_generators)) * num_steps
    # A smaller range would need too many journal commits.
    return min(1 << 16, math.ceil(max(16, share) / max(fraction_in_use, 1e-6)))
