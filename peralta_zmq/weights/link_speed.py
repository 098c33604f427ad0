"""Whether a link can carry a run's weights. Knows numbers only."""

from __future__ import annotations

ENOUGH = 2  # slow versions one after the other; a keyframe among deltas may be slow alone


class LinkSpeedCheck:
    """Compares how long versions take to read with how fast they come; speaks up once."""

    def __init__(self) -> None:
        self._before: tuple[int, float] | None = None  # number, when it was noticed
        self._slow = 0  # versions in a row
        self._said = False

    def hear(
        self, number: int, *, noticed: float, size: int, megabytes_per_second: float
    ) -> str | None:
        """A version of `size` bytes was read; the verdict when it is time to give one.

        `noticed`: when it was first seen, monotonic seconds.
        """
        before, self._before = self._before, (number, noticed)
        if before is None or number <= before[0]:
            return None
        step_seconds = (noticed - before[1]) / (number - before[0])
        verdict = link_verdict(size, megabytes_per_second, step_seconds)
        self._slow = self._slow + 1 if verdict else 0
        if self._said or self._slow < ENOUGH:
            return None
        self._said = True
        return verdict


def link_verdict(
    bytes_per_version: float, megabytes_per_second: float, step_seconds: float
) -> str | None:
    """What to tell the person when versions come faster than the link carries them, else None."""
    takes = bytes_per_version / (megabytes_per_second * 1e6)
    if takes <= step_seconds:
        return None
    every = -(-takes // max(step_seconds, 1e-3))
    return (
        f"this link cannot keep up: a version of {bytes_per_version / 1e6:.1f} MB takes "
        f"{takes:.1f} s at {megabytes_per_second:.2f} MB/s, a step {step_seconds:.1f} s; this "
        f"generator serves about every {every:.0f}th version"
    )
