"""When a generator may begin a further group. Knows numbers and the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

HUNGRY_SECONDS = 0.25  # a generator that is ahead waits so long for a trainer that waits too
SILENT_SECONDS = 30.0  # and so long for one that is not heard


@dataclass(slots=True)
class SamplingPacer:
    """Keeps all generators within `max_async_level` steps of the newest weights.

    A group is begun when the step that will take it changes weights at most so many steps newer
    than ours; it lands behind the groups under way: made, but in no step yet. Nobody waits long
    for a dead sibling or a lost announcement: a trainer that waits for groups and has all of ours
    gets one more, and so does one that is not heard.
    """

    groups_per_step: int
    max_async_level: int
    last_made: float = field(default_factory=time.monotonic)

    def allows(
        self, *, step: int, begun: int, under_way: int, generators: int, hungry: bool
    ) -> bool:
        """Whether a further group from the weights of `step` would be used in time.

        `begun`: steps begun by the trainer. `under_way`: our groups that are in none of them.
        `hungry`: the trainer waits, and has all that we made, so somebody else owes it groups.
        """
        if time.monotonic() - self.last_made > (HUNGRY_SECONDS if hungry else SILENT_SECONDS):
            return True
        share = -(-self.groups_per_step // max(1, generators))
        begun = max(begun, step)  # weights may come while announcements are cut off
        return begun + under_way // share - step <= self.max_async_level

    def count(self) -> None:
        """A group was begun."""
        self.last_made = time.monotonic()
