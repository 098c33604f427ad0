"""Sample leases: the trainer divides the samples of a run between the generators.

A sample is one draw of a problem. Samples are numbered through the whole run; the sample index
determines the problem (environments/curriculum.py). A sample lease is a range of sample indices
that one sender, a start of a generator, alone draws. The status of a sender asks for a lease; the
trainer writes the grant to the journal and then announces it until a status of the sender shows
that it arrived. Every status and announcement holds all of this, so the next one makes up for a
lost one. The rest of the leases of a sender that ends is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from peralta_zmq.config import Config
from peralta_zmq.trainer.generator_registry import Sender

MAX_SAMPLES_AHEAD = 1 << 20  # a larger jump of the sample index is invalid and ignored
MIN_LEASE, MAX_LEASE = 16, 1 << 16  # samples; a smaller one would need too many journal commits


class SampleLeases:
    """The sample leases that the trainer grants."""

    def __init__(self) -> None:
        self.next_index = 0  # greater than every sample index that was leased or drawn

    def advance(self, next_index: int) -> None:
        """Do not lease sample indices below `next_index`; ignores a jump that is too large."""
        if next_index <= self.next_index + MAX_SAMPLES_AHEAD:
            self.next_index = max(self.next_index, next_index)

    def requests(self, senders: Iterable[Sender]) -> list[Sender]:
        """Process the new statuses of senders; returns the senders that ask for a lease.

        A status that does not confirm the sender's newest lease was sent before the lease arrived:
        it asks for the same lease.
        """
        requesting = list[Sender]()
        for sender in senders:
            assert sender.status is not None
            self.advance(sender.status.next_sample_index)
            if sender.status.next_sample_index >= sender.lease.stop:
                sender.lease = range(0)
            if sender.status.needs_lease and not sender.lease:
                requesting.append(sender)
        return requesting

    def grant(self, senders: Iterable[Sender], num_samples: int) -> None:
        """Lease the next `num_samples` samples to each sender."""
        for sender in senders:
            sender.lease = range(self.next_index, self.next_index + num_samples)
            self.next_index += num_samples


def lease_size(
    config: Config, *, groups_in_step: int, num_generators: int, fraction_in_use: float
) -> int:
    """Number of samples of a lease.

    A generator asks for a lease when it begins its last one. The trainer reads no status during a
    step, so one lease has all samples that a generator may draw until the trainer begins the next
    step: its share of `max_async_level` + 1 weight versions (generator/pacing.py). It is larger if
    only a fraction of the problems is in use, because the others are skipped. `groups_in_step` is
    the number of groups in the newest step, 0 if there is none.
    """
    groups = max(config.groups_per_step, groups_in_step) * config.curriculum.oversampling_factor
    num_steps = (config.train.max_async_level + 1) * config.weights.interval
    share = math.ceil(groups / max(1, num_generators)) * num_steps
    return min(MAX_LEASE, math.ceil(max(MIN_LEASE, share) / max(fraction_in_use, 1e-6)))
