"""Sampling pace: limits how far a generator samples ahead of the trainer.

A group is all rollouts of one problem. A group is pending from its start until it is consumed:
until the trainer begins its training step, or drops it. The policy step of weights is the number of
training steps that produced the weights. The staleness of a group is the number of training steps
between the one that produced its weights and the one that trains the group: 0 if the next step
trains it.
"""

from __future__ import annotations

import math
import time

from peralta_zmq import wire
from peralta_zmq.config import Config

# A generator at its limit starts one more group if its last start was longer ago, in seconds, than
STARVED_SECONDS = 0.25  # while the trainer waits for groups and has received all of this one
SILENCE_SECONDS = 30.0  # at any other time, because announcements may be lost


class SamplingPacer:
    """Keeps the expected staleness of a generator's groups within `max_async_level`.

    From its number of pending groups a generator computes in which training step its next group
    will be trained, and so the staleness of that group. It assumes that each of n generators
    supplies one n-th of the `groups_per_step` groups of a step.

    n is the number of suppliers: generators with groups in the batches of the newest steps. Only a
    generator that is not among them, for example because it has just started, takes the number of
    live generators instead, because others may begin to supply at the same time. So invented
    senders, whose groups are not trained, do not slow a supplier down.

    The limit counts weight versions. One is published after every `steps_per_version` training
    steps, so with more than 1 a group may be older, in steps, although no newer version exists.

    A crashed generator or a lost announcement must not block other generators for long. Therefore a
    generator at its limit starts a group every `STARVED_SECONDS` or `SILENCE_SECONDS`.

    `oversampling_factor` scales the expected number of groups. `follow_step_size` is for batches
    with a fixed number of tokens, and for groups of different sizes: the number of groups in the
    newest training step then replaces `groups_per_step`.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_async_level: int,
        *,
        name: str,  # of this generator
        steps_per_version: int = 1,
        oversampling_factor: float = 1.0,
        follow_step_size: bool = False,
    ) -> None:
        self._groups_per_step, self._follow_step_size = groups_per_step, follow_step_size
        self._name = name
        self._oversampling_factor = oversampling_factor
        self._max_async_level, self._steps_per_version = max_async_level, steps_per_version
        self._last_start = time.monotonic()
        self._counted: wire.Announcement | None = None  # `_num_generators` was counted from it
        self._num_generators = 1

    def may_start(
        self,
        announcement: wire.Announcement | None,
        *,
        step: int,
        num_pending: int,
        num_unreceived: int,
    ) -> bool:
        """Whether a group sampled from the weights of policy step `step` may be started.

        `num_pending` is the number of pending groups of this generator, and `num_unreceived` the
        number of its groups that the trainer has not received. `announcement` is the newest
        announcement of the trainer's progress; None before the first.
        """
        announcement = announcement or wire.Announcement("")  # default values: nothing has started
        starved = announcement.waiting and not num_unreceived
        limit = STARVED_SECONDS if starved else SILENCE_SECONDS
        if time.monotonic() - self._last_start > limit:
            return True
        groups_per_step = self._groups_per_step
        if self._follow_step_size and announcement.groups_in_step:
            groups_per_step = announcement.groups_in_step
        if announcement is not self._counted:  # only once: for 1,000 senders it takes 0.2 ms
            names = announcement.suppliers.keys()
            if self._name not in names:
                # A sender is NAME/INCARNATION; a generator that has restarted has several.
                names = {sender.split("/")[0] for sender in announcement.received}
            self._counted, self._num_generators = announcement, max(1, len(names))
        expected = math.ceil(groups_per_step * self._oversampling_factor)
        share = math.ceil(expected / self._num_generators)
        started_step = max(announcement.started_step, step)  # the announcement may be old
        # The steps taken before the group is trained: pending groups are consumed first.
        num_taken = started_step + num_pending // share
        staleness = num_taken // self._steps_per_version - step // self._steps_per_version
        return staleness <= self._max_async_level

    def record_start(self) -> None:
        """Record that a group was started, which restarts the time limits."""
        self._last_start = time.monotonic()


def outbox_limit(config: Config) -> int:
    """Maximum number of groups to keep for a trainer that does not acknowledge them.

    Enough for all training steps that could still consume the groups: the one in progress, those
    until the next weight version, and those of `max_async_level` further versions.
    """
    steps = (config.train.max_async_level + 1) * config.weights.interval + 1
    groups = steps * config.groups_per_step * config.curriculum.oversampling_factor
    return max(64, math.ceil(groups))
