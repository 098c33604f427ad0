"""Failpoints: named places in the code where a test can kill the process.

`PERALTA_FAILPOINT=publish.visible:3` sends SIGKILL to the process the third time it reaches
`failpoint("publish.visible")`. Several are separated by commas. Without the variable a failpoint
costs one dictionary lookup.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "PERALTA_FAILPOINT"


def parse(text: str) -> dict[str, int]:
    """'journal.synced:2,send' -> {'journal.synced': 2, 'send': 1}. Raises ValueError."""
    counts: dict[str, int] = {}
    for entry in filter(None, text.split(",")):
        name, _, count = entry.partition(":")
        counts[name] = int(count or 1)
        if counts[name] < 1:
            raise ValueError(f"{VARIABLE}: the count in {entry!r} must be at least 1")
    return counts


_remaining = parse(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """Kill the process if the environment variable asks for it; `name` is PART.MOMENT."""
    if name not in _remaining:
        return
    _remaining[name] -= 1
    if _remaining[name] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
