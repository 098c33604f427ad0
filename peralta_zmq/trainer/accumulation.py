"""Computes full micro-batches of a step while its other groups still arrive.

A group is all rollouts of one problem; the batch of a step has a fixed size. While the trainer
waits for groups, it adds up the gradients of the micro-batches that the received groups fill
(`Learner.accumulate`), so that fewer are left when the last group arrives. A group in the batch is
never removed from it, and the weights change only when the batch is full. The journal records each
such micro-batch, so that a repeated step has the same micro-batches in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from peralta_zmq.atomic_files import failpoint
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.journal import ACCUMULATED, encode_number
from peralta_zmq.trainer.ranks import PolicyLearner


class GradientAccumulation:
    """Adds gradients of the collector's batch; `seconds` is the time for the current step."""

    def __init__(self, learner: PolicyLearner, collector: BatchCollector) -> None:
        self._learner, self._collector = learner, collector
        self.seconds = 0.0

    def begin_step(self) -> None:
        """Repeat what an earlier session has computed of the batch, according to the journal."""
        self.seconds, collector = 0.0, self._collector
        if sizes := collector.accumulated_sizes:
            started = time.monotonic()
            repeat_micro_batches(self._learner, collector.batch, sizes)
            self.seconds = time.monotonic() - started
            collector.accumulated_sizes = []

    def compute(self) -> float:
        """Compute a micro-batch if the batch fills one; returns the seconds it took, or 0."""
        started, collector, learner = time.monotonic(), self._collector, self._learner
        learner.add_groups(collector.batch)
        if not learner.has_full_micro_batch:
            return 0.0
        num_groups, step = len(collector.batch), learner.step + 1
        collector.journal.begin_commit()  # writes in a thread, meanwhile
        collector.acknowledgements.publish(step - 1, started_step=step - 1)  # not waiting
        computing_since = time.monotonic()
        learner.accumulate()
        self.seconds += time.monotonic() - computing_since
        failpoint("trainer.accumulated")  # a test can kill the process here
        collector.commit()
        collector.journal.append(step, encode_number(num_groups), ACCUMULATED)
        return time.monotonic() - started


def repeat_micro_batches(
    learner: PolicyLearner, groups: Sequence[RolloutGroup], sizes: Sequence[int]
) -> None:
    """Compute the first micro-batches of a step as an earlier session did.

    `sizes` are its ACCUMULATED records in the journal: how many of the groups were there at each.
    """
    for num_groups in sizes:
        learner.add_groups(groups[:num_groups])
        learner.accumulate()
