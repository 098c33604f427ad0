"""Samples: the training problems that one generator draws, in order.

A sample is one draw of a problem. A sample index is a position in the run's shuffled sequence of
problems, which all generators share; it determines the problem. A sample lease is a range of sample
indices that the trainer assigns to this generator alone. The static share is every `count`-th
sample index, from the settings generator.index and generator.count.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from peralta_zmq import wire
from peralta_zmq.config import Config
from peralta_zmq.environments.curriculum import (
    ProblemSampler,
    assigned_samples,
    is_in_bitmap,
    static_share,
)
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Problem

# Seconds without a lease, in which the trainer waits for groups, before the static share is drawn.
LEASE_TIMEOUT = 30.0
MAX_PERIOD = 5.0  # seconds between two announcements of a waiting trainer, at most
logger = logging.getLogger(__name__)


class HeldLeases:
    """The sample leases of one sender (a start of a generator), which draws them in order."""

    def __init__(self) -> None:
        self.next_index = 0  # greater than every sample index that was leased or drawn
        self.is_requested = False  # a status has asked for the lease after the newest one
        self._leases: deque[range] = deque()  # without the drawn samples

    @property
    def needs_lease(self) -> bool:
        """Whether there is no lease to follow the one in use.

        The trainer takes up to a training step to grant it.
        """
        return len(self._leases) < 2

    def add(self, lease: range) -> None:
        """Add a lease, unless it was added before: the trainer repeats it until confirmed.

        Leaves out samples below `next_index`, which may have been drawn without a lease.
        """
        if lease.stop > self.next_index:
            self._leases.append(range(max(lease.start, self.next_index), lease.stop))
            self.next_index = lease.stop
            self.is_requested = False

    def draw(self) -> int | None:
        """The next sample index; None if all leased samples are drawn."""
        if not self._leases:
            return None
        lease = self._leases.popleft()
        if lease[1:]:
            self._leases.appendleft(lease[1:])
        return lease.start

    def record_drawn(self, sample_index: int) -> None:
        """Record a sample that was drawn without a lease."""
        self.next_index = max(self.next_index, sample_index + 1)


def sample_problems(
    config: Config,
    environments: Environments,
    leases: HeldLeases,
    *,
    announcement: Callable[[], wire.Announcement | None],
) -> Iterator[Problem | None]:
    """This generator's endless sequence of training problems in one run.

    None while it waits for a lease. `announcement` returns the newest announcement, None before the
    first. Raises ConfigError if the trainer has other problems.
    """
    digest = environments.digest

    def excluded(position: int) -> bool:
        """Whether the trainer excludes this problem."""
        newest = announcement()
        if newest is not None and newest.train_set_digest not in (b"", digest):
            raise ConfigError(
                f"generator {config.generator.full_name} has other training problems than the "
                "trainer; use its [data], [[env]], model, engine.max_model_len and "
                "sampling.max_completion_length"
            )
        return newest is not None and is_in_bitmap(newest.excluded, position)

    sizes = list(environments.sizes.values())
    sampler = ProblemSampler(sizes, seed=config.run.seed, ratios=config.curriculum.env_ratios)
    sample_indices = _sample_indices(config, leases, announcement)
    for sample in assigned_samples(sampler, sample_indices, excluded=excluded):
        if sample is None:
            yield None
        else:
            sample_index, position = sample
            yield replace(environments.problems[position], sample_index=sample_index)


def _sample_indices(
    config: Config, leases: HeldLeases, announcement: Callable[[], wire.Announcement | None]
) -> Iterator[int | None]:
    """Yield the leased sample indices; None while there is no lease.

    The static share replaces the leases while the trainer grants none, and after LEASE_TIMEOUT
    without one. It starts at the next sample index that the trainer announces.
    """
    share: Iterator[int] | None = None
    # Seconds in which the trainer waited for groups, by announcements up to `last`.
    waited, last, last_at = 0.0, announcement(), time.monotonic()
    while True:
        if (sample_index := leases.draw()) is not None:
            share, waited = None, 0.0
            yield sample_index
            continue
        newest, now = announcement(), time.monotonic()
        if newest is not last:
            if newest is not None and newest.waiting:
                waited += min(now - last_at, MAX_PERIOD)  # the trainer may have been away
            last, last_at = newest, now
        if newest is None or (newest.grants_leases and waited <= LEASE_TIMEOUT):
            yield None
            continue
        if share is None:
            index, count = config.generator.index, config.generator.count
            share = static_share(index=index, count=count, start=newest.next_sample_index)
            logger.warning(
                "no sample lease from the trainer; sampling share %d of %d, as generator.index and "
                "count say: without different numbers, generators sample the same problems",
                index,
                count,
            )
        sample_index = next(share)
        leases.record_drawn(sample_index)
        yield sample_index
