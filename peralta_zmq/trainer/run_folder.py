"""The folder of a run: one trainer at a time, and nothing left of a run that was refused."""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from peralta_zmq import build
from peralta_zmq.config import RESOLVED
from peralta_zmq.errors import ConfigError

LOCK = "lock"
GLANCE_SECONDS = 0.1  # a page or a doctor who looks whether it is held, holds it for less


def lock(folder: Path) -> IO[bytes]:
    """The lock of a run folder, held while the file is open. Raises ConfigError when it is held."""
    opened = (folder / LOCK).open("ab")
    for patience in (GLANCE_SECONDS, 0.0):
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return opened
        except BlockingIOError:
            time.sleep(patience)
    opened.close()
    raise ConfigError(f"another trainer works in {folder}; stop it, or choose another --run.name")


def remove_new(folder: Path) -> None:
    """Take back what opening a new run wrote before it was refused."""
    for name in (build.IDENTITY, RESOLVED, LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # the supervisor's logs may be there
        folder.rmdir()
