"""A small new file in a weights folder, by which another machine sees that it is the same folder.

Knows files; knows nothing of versions. Its name starts with no dot: watchers pass over those.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from peralta_zmq import atomic_files

PREFIX = "doctor-"


class Probe:
    """Shows one file at a time in a folder. Use with `closing`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def show(self) -> str:
        """The name of a new file, written whole; the one before is removed. Raises OSError."""
        self.close()
        name = f"{PREFIX}{os.urandom(4).hex()}"
        atomic_files.replace_file(self._folder / name, b"")
        return name

    def close(self) -> None:
        """Remove what was shown, by whomever."""
        with contextlib.suppress(OSError):
            for file in self._folder.glob(f"{PREFIX}*"):
                file.unlink(missing_ok=True)
