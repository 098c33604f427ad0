"""Places where a test may kill the process: `PERALTA_FAILPOINT=publish.renamed:3`.

The process dies of SIGKILL when it comes to that place for the third time. Several are separated
by commas. Without the variable a place costs one dictionary lookup.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "PERALTA_FAILPOINT"


def parse(text: str) -> dict[str, int]:
    """'journal.synced:2,send' -> {'journal.synced': 2, 'send': 1}. Raises ValueError."""
    planned: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        name, _, count = item.partition(":")
        planned[name] = int(count or 1)
        if planned[name] < 1:
            raise ValueError(f"{VARIABLE}: {item!r} counts from 1")
    return planned


_left = parse(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> None:
    """Die here if the environment says so; `name` is ROOM.MOMENT, unique in the package."""
    if name not in _left:
        return
    _left[name] -= 1
    if _left[name] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
