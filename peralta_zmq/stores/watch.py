"""Notice that a weights folder changed. Events are hints; a timer is the truth.

Knows a folder and a clock; knows nothing of versions.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer


class Watch:
    """`due()` is True when the folder should be listed again. Use with `closing`.

    An event makes it due at once where the file system tells (local disks); otherwise it is due
    every `poll_seconds`, so a silent NAS costs a bounded delay.
    """

    def __init__(self, folder: Path, *, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._changed = threading.Event()
        self._listed = float("-inf")
        self._observer = Observer()
        self._observer.schedule(_Notify(self._changed), str(folder))
        self._observer.start()

    def due(self, *, timeout: float = 0.0) -> bool:
        """Whether to list the folder now, waiting up to `timeout` seconds for a reason."""
        left = self._listed + self._poll_seconds - time.monotonic()
        if not self._changed.wait(max(0.0, min(timeout, left))) and left > timeout:
            return False
        self._changed.clear()
        self._listed = time.monotonic()
        return True

    def close(self) -> None:
        """Stop the observer's thread."""
        self._observer.stop()
        self._observer.join()


class _Notify(FileSystemEventHandler):
    def __init__(self, changed: threading.Event) -> None:
        self._changed = changed

    def on_moved(self, event: FileSystemEvent) -> None:
        self._changed.set()  # a version appears by a rename; our own reads raise other events

    def on_created(self, event: FileSystemEvent) -> None:
        self._changed.set()
