"""Publisher lock and read marks: files that coordinate processes in a weights folder.

Locks and marks expire, because a killed process leaves its files behind. The clocks of two machines
may differ, so the age of a file is the difference between its mtime and that of a file that was
just written to the same folder. The clock of the NAS can be set back, so a lock also expires when a
process sees no renewal for LOCK_SECONDS.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

import psutil

from peralta_zmq.atomic_files import MALFORMED, PROCESS_TAG, read_chunks, replace_file, sweep

LOCK, READ_MARK = ".lock-", ".reading-"  # beginnings of the file names
LOCK_SECONDS = 30.0  # until a lock that is not renewed expires; trainers renew every 10 s


class FolderLocks:
    """The lock and the read marks that this process creates in a folder.

    With `folder` None (HTTP and object stores) `acquire` always succeeds and `reading` marks
    nothing. Every method may raise OSError.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock: Path | None = None  # file of this process's lock
        # Lock of another process -> its mtime, and when this process first read this mtime, in
        # monotonic seconds.
        self._mtimes: dict[Path, tuple[float, float]] = {}

    def acquire(self) -> str | None:
        """Acquire the publisher lock and clean up; returns None, or the trainer that has it."""
        if self._folder is None:
            return None
        self._lock = self._folder / f"{LOCK}{os.getpid()}-{PROCESS_TAG}"
        pid = os.getpid()
        owner = {"host": socket.gethostname(), "pid": pid, "started": _start_of(pid)}
        owner["pid_space"] = _pid_space()
        replace_file(self._lock, json.dumps(owner).encode())
        if holder := self.holder(now=self._lock.stat().st_mtime):
            self._lock.unlink(missing_ok=True)
            return holder
        for expired in self._other_locks(self._folder):
            expired.unlink(missing_ok=True)
        sweep(self._folder)
        return None

    def confirm(self) -> str | None:
        """Renew the acquired lock; returns None, or the trainer that took it over.

        Another trainer removes a lock that has expired, for example while this machine slept.
        """
        if self._lock is None:
            return None
        try:
            os.utime(self._lock)
        except FileNotFoundError:
            return self.acquire()
        return None

    def holder(self, now: float) -> str | None:
        """The other process that has a valid lock, as 'pid 7 on HOST', or None.

        `now` is the mtime of a file in the folder that was just written.
        """
        for lock in self._other_locks(self._folder) if self._folder else ():
            with contextlib.suppress(FileNotFoundError, *MALFORMED):
                if not self._is_renewed(lock, now):
                    continue
                # Anyone with write access to the folder can write a large lock.
                text = next(read_chunks(lock.parent, lock.name), b"")[:4096]
                owner = cast("dict[str, Any]", json.loads(text))
                if _may_be_running(owner):
                    return f"pid {owner['pid']} on {owner['host']}"
        return None

    def _is_renewed(self, lock: Path, now: float) -> bool:
        mtime = lock.lstat().st_mtime
        read_at = time.monotonic()
        if self._mtimes.get(lock, (None, 0.0))[0] != mtime:
            self._mtimes[lock] = mtime, read_at
        unchanged_seconds = read_at - self._mtimes[lock][1]
        return max(now - mtime, unchanged_seconds) < LOCK_SECONDS

    def _other_locks(self, folder: Path) -> list[Path]:
        files = sorted(folder.glob(f"{LOCK}*"))
        return [file for file in files if file != self._lock and not os.path.isdir(file)]

    def renew(self) -> None:
        """Renew the lock. The mtime of the folder makes NFS clients list it again."""
        if lock := self._lock:
            os.utime(lock)
            os.utime(lock.parent)

    def release(self) -> None:
        if self._lock:
            with contextlib.suppress(OSError):
                self._lock.unlink(missing_ok=True)
        self._lock = None

    @contextlib.contextmanager
    def reading(self, name: str) -> Generator[None, None, None]:
        """Mark a version as being read during the block, if the store is writable."""
        if self._folder is None:
            yield
            return
        mark = self._folder / f"{READ_MARK}{name}-{os.urandom(4).hex()}"
        with contextlib.suppress(OSError):
            mark.touch(0o644)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                mark.unlink()

    def being_read(self) -> set[str]:
        """Names of the folders with a valid mark; removes expired marks.

        The mtime of this process's lock is the current time; without it no mark is expired.
        """
        marked = set[str]()
        now = 0.0
        if self._lock:
            with contextlib.suppress(OSError):
                now = self._lock.stat().st_mtime
        for mark in self._folder.glob(f"{READ_MARK}*") if self._folder else ():
            with contextlib.suppress(OSError):  # the mark was removed meanwhile
                if now - mark.stat().st_mtime < 3600.0:  # seconds until a mark expires
                    marked.add(mark.name.removeprefix(READ_MARK).split("-")[0])
                else:
                    mark.unlink()
        return marked


def _may_be_running(owner: Mapping[str, Any]) -> bool:
    pid = int(owner["pid"])
    if owner.get("pid_space") != _pid_space():
        return True
    try:
        os.kill(pid, 0)  # only checks whether the process exists
        return pid != os.getpid() and owner["started"] == _start_of(pid)
    except PermissionError:  # it belongs to another user
        return True
    except (ProcessLookupError, FileNotFoundError):
        return False


def _pid_space() -> str:
    """What all processes among which a pid is unique have in common.

    On Linux the boot and the PID namespace: in each container, pid 1 is another process.
    """
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _start_of(pid: int) -> float:
    """When a process started; distinguishes it from a later one with the same pid.

    On Linux in clock ticks since the boot, because psutil computes a time from the clock. Raises
    PermissionError, and ProcessLookupError or FileNotFoundError if the process has ended.
    """
    if sys.platform == "linux":
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return float(stat.rpartition(")")[2].split()[19])  # proc(5): field 22
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        raise ProcessLookupError(pid) from None
    except psutil.AccessDenied:
        raise PermissionError(pid) from None
