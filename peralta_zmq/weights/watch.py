"""Notice that a weights folder changed. Events are hints; a listing is the truth.

Knows a folder and whom to tell; knows nothing of versions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserver

MOUNTS = Path("/proc/mounts")
REMOTE = ("nfs", "cifs", "smb", "9p", "fuse.", "afs", "ceph", "glusterfs", "lustre")


class Watch:
    """Calls `changed` from a thread of its own when a name appears in the folder.

    Use with `closing`. Raises OSError when the folder is not there.
    """

    def __init__(self, folder: Path, changed: Callable[[], None], *, poll_seconds: float) -> None:
        self._seen = os.stat(folder)
        self._observer = _observer(folder, poll_seconds)
        self._observer.schedule(_Notify(changed), str(folder))
        self._observer.start()

    def sees(self, folder: Path) -> bool:
        """Whether the folder of this name is still the one that is watched, or none at all."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self._seen, os.stat(folder))
        return True

    def close(self) -> None:
        """Stop the observer's thread; one that hangs in a dead mount is left behind."""
        self._observer.stop()
        self._observer.join(timeout=1.0)


def _observer(folder: Path, poll_seconds: float) -> BaseObserver:
    return PollingObserver(timeout=poll_seconds) if is_remote(folder) else Observer()


def is_remote(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether the folder's file system changes without the kernel's knowing (Linux only)."""
    return kind_of(folder, mounts).startswith(REMOTE)


def kind_of(folder: Path, mounts: Path = MOUNTS) -> str:
    """The type of the folder's file system, ext4 or nfs4 for example; '' where nothing tells."""
    try:
        lines = mounts.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    here = str(folder.absolute())
    kinds = {
        len(point): kind
        for point, kind in (_mount(line) for line in lines)
        if here == point or here.startswith(point.rstrip("/") + "/")
    }
    return kinds[max(kinds)] if kinds else ""


def _mount(line: str) -> tuple[str, str]:
    """Mount point and type; blanks in the path are written as \\040."""
    _, point, kind, *_ = line.split(" ")
    return point.replace("\\040", " "), kind


class _Notify(FileSystemEventHandler):
    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def on_moved(self, event: FileSystemEvent) -> None:
        self._changed()  # a version appears by a rename; our own reads raise other events

    def on_created(self, event: FileSystemEvent) -> None:
        if not Path(str(event.src_path)).name.startswith("."):  # our own marks
            self._changed()
