"""Sampling pace: limits how far a generator samples ahead of the trainer."""

from __future__ import annotations

import math
import time

from peralta_zmq import wire

# Time since its last start after which a generator at its limit starts one more group:
STARVED_SECONDS = 0.25  # if the trainer waits for groups and has received all of ours
SILENCE_SECONDS = 30.0  # in any other case: announcements may be lost


class SamplingPacer:
    """Keeps a generator within `max_async_level` optimizer steps of the newest weights.

    A group may be started if the optimizer step that will consume it starts from weights at most
    that many steps newer than the generator's. It queues behind this generator's pending groups,
    which no step has consumed yet. So that a crashed sibling or a lost announcement does not block
    a generator for long, it starts one more group for a trainer that waits for groups and has
    received all of ours, and one every `SILENCE_SECONDS` in any other case.

    `oversampling_factor` scales `groups_per_step`. With `follow_step_size` the size of the newest
    step, as announced by the trainer, replaces `groups_per_step` (token-based batches).
    """

    def __init__(
        self,
        groups_per_step: int,
        max_async_level: int,
        *,
        oversampling_factor: float = 1.0,
        follow_step_size: bool = False,
    ) -> None:
        self._oversampling_factor = oversampling_factor
        self._follow_step_size = follow_step_size
        self._max_async_level = max_async_level
        self._groups_per_step = math.ceil(groups_per_step * oversampling_factor)
        self._last_start = time.monotonic()

    def may_start(
        self, announcement: wire.Announcement | None, *, step: int, pending: int, undelivered: int
    ) -> bool:
        """Whether a group sampled from the weights of `step` would be consumed in time.

        `pending` counts this generator's groups that no step has consumed, `undelivered` those of
        them that the trainer has not received. `announcement` is None before the first one.
        """
        if announcement is None:
            return self.allows(step=step, begun=step, pending=pending, generators=1, starved=False)
        if announcement.groups_in_step and self._follow_step_size:
            self._groups_per_step = math.ceil(
                announcement.groups_in_step * self._oversampling_factor
            )
        return self.allows(
            step=step,
            begun=announcement.started_step,
            pending=pending,
            generators=len(announcement.received),
            starved=announcement.waiting and not undelivered,
        )

    def allows(
        self, *, step: int, begun: int, pending: int, generators: int, starved: bool
    ) -> bool:
        """Whether a group may be started, computed from plain numbers.

        `begun` is the number of optimizer steps that the trainer has begun, `generators` the number
        of senders. `starved`: the trainer waits for groups and has received all of ours.
        """
        limit = STARVED_SECONDS if starved else SILENCE_SECONDS
        if time.monotonic() - self._last_start > limit:
            return True
        share = math.ceil(self._groups_per_step / max(1, generators))
        begun = max(begun, step)  # weights may arrive while announcements are lost
        return begun + pending // share - step <= self._max_async_level

    def record_start(self) -> None:
        """Restart the time limits: a group was started."""
        self._last_start = time.monotonic()
