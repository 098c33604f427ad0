"""Sampling pace: limits how far a generator samples ahead of the trainer.

A policy step is the number of optimizer steps that the weights have had. A group is pending from
its start until an optimizer step consumes it or the trainer drops it.
"""

from __future__ import annotations

import math
import time

from peralta_zmq import wire

# Time since its last start after which a generator at its limit starts one more group:
STARVED_SECONDS = 0.25  # if the trainer waits for groups and has received all of this generator's
SILENCE_SECONDS = 30.0  # in any other case: announcements may be lost


class SamplingPacer:
    """Keeps a generator within `max_async_level` optimizer steps of the newest weights.

    The generators share the `groups_per_step` groups of an optimizer step equally. From its number
    of pending groups a generator computes which step will consume its next group, and starts that
    group if the step begins at most `max_async_level` steps after the generator's weights.

    A crashed generator or a lost announcement must not block the others for long. Therefore a
    generator at its limit starts one more group after `STARVED_SECONDS` or `SILENCE_SECONDS`.

    `oversampling_factor` scales `groups_per_step`. With `follow_step_size` (batches are counted in
    tokens) the number of groups in the newest optimizer step replaces `groups_per_step`.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_async_level: int,
        *,
        oversampling_factor: float = 1.0,
        follow_step_size: bool = False,
    ) -> None:
        self._groups_per_step, self._follow_step_size = groups_per_step, follow_step_size
        self._oversampling_factor = oversampling_factor
        self._max_async_level = max_async_level
        self._last_start = time.monotonic()

    def may_start(
        self,
        announcement: wire.Announcement | None,
        *,
        step: int,
        num_pending: int,
        num_undelivered: int,
    ) -> bool:
        """Whether a group sampled from the weights of policy step `step` may be started.

        `num_pending` counts this generator's pending groups, `num_undelivered` those of them that
        the trainer has not received. `announcement` is None before the first one.
        """
        announcement = announcement or wire.Announcement("")
        starved = announcement.waiting and not num_undelivered
        limit = STARVED_SECONDS if starved else SILENCE_SECONDS
        if time.monotonic() - self._last_start > limit:
            return True
        groups_per_step = self._groups_per_step
        if self._follow_step_size and announcement.groups_in_step:
            groups_per_step = announcement.groups_in_step
        num_generators = max(1, len(announcement.received))
        share = math.ceil(math.ceil(groups_per_step * self._oversampling_factor) / num_generators)
        newest = max(announcement.started_step, step)  # weights may come while announcements do not
        consuming_step = newest + num_pending // share
        return consuming_step - step <= self._max_async_level

    def record_start(self) -> None:
        """Restart the time limits: a group was started."""
        self._last_start = time.monotonic()
