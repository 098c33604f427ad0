"""Publishing lease and read marks: files that coordinate processes in a weights folder.

A trainer holds the publishing lease, so that no second trainer publishes to the folder. A process
that reads a version marks it, so that the trainer does not remove it meanwhile. Leases and marks
expire, because a killed process leaves its files behind. The clocks of two machines may differ, so
the age of a file is the difference between its mtime and that of a file that was just written to
the same folder. The clock of the NAS can be set back, so that mtimes are in the future. Therefore a
lease also expires when a process that checks it repeatedly sees no renewal for LEASE_SECONDS.
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

LEASE, READ_MARK = ".lease-", ".reading-"  # beginnings of the file names
LEASE_SECONDS = 30.0  # until a lease that is not renewed expires; trainers renew every 10 s
READ_MARK_SECONDS = 3600.0  # until a read mark expires
MAX_LEASE = 4096  # bytes of a lease; anyone with write access to the folder can write leases


class FolderLeases:
    """The lease and the read marks that this process creates in a folder.

    `folder` is None for HTTP and object stores, which have no such files: `acquire` then always
    succeeds and `reading` marks nothing. Every method may raise OSError.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lease: Path | None = None  # file of this process's lease
        # Lease of another process -> its mtime, and when this process first read this mtime, in
        # monotonic seconds.
        self._mtimes: dict[Path, tuple[float, float]] = {}

    def acquire(self) -> str | None:
        """Acquire the publishing lease; returns None, or the trainer that has it already.

        Only the holder may write versions. The new holder therefore also removes expired leases and
        the temporary files of killed processes.
        """
        if self._folder is None:
            return None
        self._lease = self._folder / f"{LEASE}{os.getpid()}-{PROCESS_TAG}"
        pid = os.getpid()
        owner = {"host": socket.gethostname(), "pid": pid, "started": _start_of(pid)}
        owner["pid_space"] = _pid_space()
        replace_file(self._lease, json.dumps(owner).encode())
        if holder := self.holder(now=self._lease.stat().st_mtime):
            self._lease.unlink(missing_ok=True)
            return holder
        for expired in self._other_leases(self._folder):
            expired.unlink(missing_ok=True)
        sweep(self._folder)
        return None

    def confirm(self) -> str | None:
        """Renew the acquired lease; returns None, or the trainer that took it over.

        Another trainer removes this lease once it has expired, for example while this machine
        slept. If no trainer has a lease now, this process acquires it again.
        """
        if self._lease is None:
            return None
        try:
            os.utime(self._lease)
        except FileNotFoundError:
            return self.acquire()
        return None

    def holder(self, now: float) -> str | None:
        """The other process that has a valid lease, as 'pid 7 on HOST', or None.

        `now` is the mtime of a file in the folder that was just written, in seconds.
        """
        for lease in self._other_leases(self._folder) if self._folder else ():
            with contextlib.suppress(FileNotFoundError, *MALFORMED):
                if not self._is_renewed(lease, now):
                    continue
                text = next(read_chunks(lease.parent, lease.name), b"")[:MAX_LEASE]
                owner = cast("dict[str, Any]", json.loads(text))
                if _may_be_running(owner):
                    return f"pid {owner['pid']} on {owner['host']}"
        return None

    def _is_renewed(self, lease: Path, now: float) -> bool:
        """Whether a lease was renewed within LEASE_SECONDS, by mtimes and by the local clock.

        `now` as in `holder`. The local clock is monotonic.
        """
        mtime, read_at = lease.lstat().st_mtime, time.monotonic()
        if self._mtimes.get(lease, (None, 0.0))[0] != mtime:
            self._mtimes[lease] = mtime, read_at
        unchanged_seconds = read_at - self._mtimes[lease][1]
        return max(now - mtime, unchanged_seconds) < LEASE_SECONDS

    def _other_leases(self, folder: Path) -> list[Path]:
        """Files of the leases of other processes, valid or expired."""
        files = sorted(folder.glob(f"{LEASE}*"))
        return [file for file in files if file != self._lease and not os.path.isdir(file)]

    def renew(self) -> None:
        """Renew the lease by setting its mtime.

        Also sets the mtime of the folder, because NFS clients then list the folder again.
        """
        if lease := self._lease:
            os.utime(lease)
            os.utime(lease.parent)

    def release(self) -> None:
        """Release the lease, so that another trainer need not wait until it expires."""
        if self._lease:
            with contextlib.suppress(OSError):
                self._lease.unlink(missing_ok=True)
        self._lease = None

    @contextlib.contextmanager
    def reading(self, name: str) -> Generator[None, None, None]:
        """Mark a version's folder as being read during the block, if the store is writable."""
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

        The mtime of this process's lease is the current time. Without the lease no mark is expired.
        """
        marked, now = set[str](), 0.0  # 0: no mark is expired
        if self._lease:
            with contextlib.suppress(OSError):
                now = self._lease.stat().st_mtime
        for mark in self._folder.glob(f"{READ_MARK}*") if self._folder else ():
            with contextlib.suppress(OSError):  # the mark was removed meanwhile
                if now - mark.stat().st_mtime < READ_MARK_SECONDS:
                    marked.add(mark.name.removeprefix(READ_MARK).split("-")[0])
                else:
                    mark.unlink()
        return marked


def _may_be_running(owner: Mapping[str, Any]) -> bool:
    """Whether the owner of a lease is another process, which may still be running.

    False only for this process and for processes of this machine that have ended. The start time
    distinguishes a process from a later one with the same pid.
    """
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

    On Linux the boot and the PID namespace. The host name does not suffice: containers on several
    machines can have the same, such as the pods of a StatefulSet, and in each pid 1 is another
    process.
    """
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _start_of(pid: int) -> float:
    """When a process started, independent of later changes of the clock.

    On Linux the result is in clock ticks since the boot, because psutil computes a time from the
    clock, which may be set while the process runs. Elsewhere it is the system's record, in seconds.
    Raises PermissionError, and ProcessLookupError or FileNotFoundError if the process has ended.
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
