"""A local or mounted folder as a place for versions. Knows files; knows nothing of weights."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import About, Content, Manifest
from peralta_zmq.errors import StoreError

LEASE, READING = ".lease-", ".reading-"
LEASE_SECONDS = 30.0  # touched every 10 s; a holder unseen for longer is dead
READING_SECONDS = 3600.0  # a reader that died leaves its mark behind


class LocalBackend:
    """The folder; it may be mounted from a NAS, slow, full, read-only, or gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = str(folder)
        self._lease = folder / f"{LEASE}{os.getpid()}-{atomic_files.BOOT}"
        self._leased = False

    def names(self) -> list[str]:
        """What lies in the folder."""
        return os.listdir(self.folder)

    def path(self, name: str) -> Path:
        """folder/NAME."""
        return self.folder / name

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """A file in chunks; never through a mapping, which dies when the NAS removes it."""
        return atomic_files.read_chunks(self.folder / path, start=start)

    def write_whole(
        self, name: str, files: Mapping[str, Content], about: About | Callable[[], About]
    ) -> Manifest:
        """By a rename."""
        return atomic_files.write_folder(self.folder / name, files, about)

    def write_file(self, name: str, content: bytes) -> None:
        """By a rename."""
        atomic_files.replace_file(self.folder / name, content)

    def remove(self, name: str) -> None:
        """Out of sight first."""
        atomic_files.remove_folder(self.folder / name)

    def prepare(self) -> None:
        """Raises StoreError when folders cannot be renamed here; OSError when it is read-only."""
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".tmp-probe-{atomic_files.BOOT}"
        moved = self.folder / f".trash-probe-{atomic_files.BOOT}"
        os.makedirs(probe, exist_ok=True)
        try:
            os.rename(probe, moved)
        except OSError as error:
            shutil.rmtree(probe, ignore_errors=True)
            raise StoreError(
                f"weights folder {self.folder} lies on a file system that cannot rename folders "
                f"({error.strerror}); choose another with --weights.dir"
            ) from None
        atomic_files.sweep(self.folder)

    def lease(self, holder: str) -> str | None:
        """By a file that the holder touches; its age is told by the clock of the file system."""
        text = {"host": socket.gethostname(), "pid": os.getpid(), "holder": holder}
        atomic_files.replace_file(self._lease, json.dumps(text).encode())
        self._leased = True
        now = self._lease.stat().st_mtime
        for other in self._other_leases():
            if found := _holder_of(other, now):
                self.release()
                return found
            other.unlink(missing_ok=True)
        return None

    def holder(self, now: float) -> str | None:
        """Who else works here, at this time by the clock of the file system. Changes nothing."""
        return next(filter(None, (_holder_of(each, now) for each in self._other_leases())), None)

    def _other_leases(self) -> list[Path]:
        found = sorted(self.folder.glob(f"{LEASE}*"))
        return [each for each in found if each.name != self._lease.name]

    def release(self) -> None:
        """Let the next trainer in at once."""
        if self._leased:
            with contextlib.suppress(OSError):
                self._lease.unlink(missing_ok=True)

    def touch(self) -> None:
        """The lease, and the folder: its new time makes NFS clients list it afresh."""
        if self._leased:
            os.utime(self._lease)
        os.utime(self.folder)

    def free_bytes(self) -> int:
        """What an ordinary user may still write."""
        space = os.statvfs(self.folder)
        return space.f_bavail * space.f_frsize

    @contextlib.contextmanager
    def reading(self, name: str) -> Generator[None, None, None]:
        """A mark beside the folder, where we may write."""
        mark = self.folder / f"{READING}{name}-{os.getpid()}-{atomic_files.BOOT}"
        with contextlib.suppress(OSError):
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT, 0o644))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(mark)

    def being_read(self) -> set[str]:
        """Folders with a mark that is not too old."""
        marks = [name for name in self.names() if name.startswith(READING)]
        read: set[str] = set()
        for mark in marks:
            with contextlib.suppress(OSError):
                now = os.stat(self._lease).st_mtime if self._leased else 0.0
                if now - os.stat(self.folder / mark).st_mtime < READING_SECONDS:
                    read.add(mark.removeprefix(READING).split("-")[0])
                else:
                    os.unlink(self.folder / mark)
        return read


def _holder_of(lease: Path, now: float) -> str | None:
    with contextlib.suppress(FileNotFoundError, *atomic_files.MALFORMED):
        said = cast("dict[str, Any]", json.loads(lease.read_bytes()))
        if now - lease.stat().st_mtime < LEASE_SECONDS and _lives(said):
            return f"pid {said['pid']} on {said['host']}"
    return None


def _lives(said: Mapping[str, Any]) -> bool:
    """False for a process of this machine that has ended, or is this very one."""
    if said["host"] != socket.gethostname():
        return True
    pid = int(said["pid"])
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
