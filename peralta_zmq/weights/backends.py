"""Storage of weight versions: the backend protocol, local or mounted folders, and watching them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

import psutil
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.polling import PollingObserver

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import About, Content, Manifest
from peralta_zmq.errors import ConfigError, StoreError

LEASE, READ_MARK, PROBE_FILE = ".lease-", ".reading-", "doctor-"
LEASE_SECONDS = 30.0  # until a lease that is not renewed expires; trainers renew every 10 s
READ_MARK_SECONDS = 3600.0  # until a mark is ignored: a killed reader does not remove its mark
REMOTE_FILESYSTEMS = ("nfs", "cifs", "smb", "9p", "fuse.", "afs", "ceph", "glusterfs", "lustre")


class StorageBackend(Protocol):
    """Folders of immutable files, one level deep. Every method may raise OSError."""

    address: str

    def names(self) -> list[str]:
        """Names at the top level, including files that other programs created."""
        ...

    def path(self, name: str) -> Path:
        """Path of a folder; only its name if the store is not on this machine."""
        ...

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """The bytes of FILE or FOLDER/FILE from offset `start`, in chunks."""
        ...

    def write_folder(
        self, name: str, files: Mapping[str, Content], about: About | Callable[[], About]
    ) -> Manifest:
        """Write a folder with its manifest atomically."""
        ...

    def write_file(self, name: str, content: bytes) -> None:
        """Write one small file atomically."""

    def remove(self, name: str) -> None:
        """Remove a folder; no error if it is missing or cannot be removed."""

    def prepare(self) -> None:
        """Create the store if needed, check that it supports publishing, remove temporary files."""

    def acquire_lease(self, run_id: str) -> str | None:
        """Acquire the publishing lease; returns the holder if another trainer has the lease."""
        ...

    def release_lease(self) -> None:
        """Release the lease, so that another trainer can publish without waiting for its end."""

    def renew_lease(self) -> None:
        """Renew the lease, and make NAS clients refresh their listing of the store."""

    def free_bytes(self) -> int:
        """Free space for new versions."""
        ...

    def reading(self, name: str) -> AbstractContextManager[None]:
        """Mark a folder as being read, where the backend supports it."""
        ...

    def being_read(self) -> set[str]:
        """Names of the folders that are marked as being read."""
        ...


def open_backend(address: str, *, token: str | None = None) -> StorageBackend:
    """Open a folder, http://HOST:PORT (weights.serve_port of a trainer) or s3://BUCKET/PREFIX.

    Raises ConfigError for another scheme, or if the library for the scheme is not installed.
    """
    scheme, separator, _ = address.partition("://")
    if not separator:
        return LocalBackend(Path(address).expanduser())
    if scheme == "http":
        from peralta_zmq.weights.http_backend import HttpBackend

        return HttpBackend(address, token=token)
    if scheme == "s3":
        from peralta_zmq.weights.object_store_backend import ObjectStoreBackend

        return ObjectStoreBackend(address)
    raise ConfigError(
        f"weights.dir '{address}' is neither a folder nor http://HOST:PORT nor s3://BUCKET/PREFIX"
    )


class LocalBackend:
    """A folder on this machine; it may be mounted from a NAS, slow, full, read-only or missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = str(folder)
        self._lease = folder / f"{LEASE}{os.getpid()}-{atomic_files.PROCESS_TAG}"
        self._leased = False

    def names(self) -> list[str]:
        """As `StorageBackend.names`."""
        return os.listdir(self.folder)

    def path(self, name: str) -> Path:
        """folder/NAME."""
        return self.folder / name

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """Read without mmap, which raises SIGBUS when the file is removed on a NAS."""
        return atomic_files.read_chunks(self.folder / path, start=start)

    def write_folder(
        self, name: str, files: Mapping[str, Content], about: About | Callable[[], About]
    ) -> Manifest:
        """Write to a temporary name, then rename."""
        return atomic_files.write_folder(self.folder / name, files, about)

    def write_file(self, name: str, content: bytes) -> None:
        """Write to a temporary name, then rename."""
        atomic_files.replace_file(self.folder / name, content)

    def remove(self, name: str) -> None:
        """Rename the folder first, so that no reader opens a partly removed folder."""
        atomic_files.remove_folder(self.folder / name)

    def prepare(self) -> None:
        """As `StorageBackend.prepare`. Raises StoreError if folders cannot be renamed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        source = self.folder / f".tmp-probe-{atomic_files.PROCESS_TAG}"
        os.makedirs(source, exist_ok=True)
        try:
            os.rename(source, self.folder / f".trash-probe-{atomic_files.PROCESS_TAG}")
        except OSError as error:
            shutil.rmtree(source, ignore_errors=True)
            raise StoreError(
                f"weights folder {self.folder} is on a file system that cannot rename folders "
                f"({error.strerror}); choose another with --weights.dir"
            ) from None
        atomic_files.sweep(self.folder)

    def acquire_lease(self, run_id: str) -> str | None:
        """The lease is a file; its age is its mtime by the clock of the file system."""
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "run_id": run_id}
        atomic_files.replace_file(self._lease, json.dumps(owner).encode())
        self._leased = True
        now = self._lease.stat().st_mtime
        if holder := self.lease_holder(now):
            self.release_lease()
            return holder
        for expired in self._other_leases():
            expired.unlink(missing_ok=True)
        return None

    def lease_holder(self, now: float) -> str | None:
        """Another process with a valid lease; `now` is the file system's Unix time in seconds."""
        return next(filter(None, (_holder_of(lease, now) for lease in self._other_leases())), None)

    def _other_leases(self) -> list[Path]:
        return [file for file in sorted(self.folder.glob(f"{LEASE}*")) if file != self._lease]

    def release_lease(self) -> None:
        """As `StorageBackend.release_lease`."""
        if self._leased:
            with contextlib.suppress(OSError):
                self._lease.unlink(missing_ok=True)

    def renew_lease(self) -> None:
        """Touch the lease, and the folder: NFS clients list it again when its mtime changes."""
        if self._leased:
            os.utime(self._lease)
        os.utime(self.folder)

    def free_bytes(self) -> int:
        """Bytes that are free for unprivileged users."""
        space = os.statvfs(self.folder)
        return space.f_bavail * space.f_frsize

    @contextlib.contextmanager
    def reading(self, name: str) -> Generator[None, None, None]:
        """Create a mark file for the duration of the block, if the store is writable."""
        mark = self.folder / f"{READ_MARK}{name}-{os.getpid()}-{atomic_files.PROCESS_TAG}"
        with contextlib.suppress(OSError):
            mark.touch(0o644)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                mark.unlink()

    def being_read(self) -> set[str]:
        """Folders with a mark younger than READ_MARK_SECONDS; removes older marks."""
        marked: set[str] = set()
        for mark in [name for name in self.names() if name.startswith(READ_MARK)]:
            with contextlib.suppress(OSError):
                now = os.stat(self._lease).st_mtime if self._leased else 0.0
                if now - os.stat(self.folder / mark).st_mtime < READ_MARK_SECONDS:
                    marked.add(mark.removeprefix(READ_MARK).split("-")[0])
                else:
                    os.unlink(self.folder / mark)
        return marked


def _holder_of(lease: Path, now: float) -> str | None:
    """'pid N on HOST' if the lease is valid, else None."""
    with contextlib.suppress(FileNotFoundError, *atomic_files.MALFORMED):
        owner = cast("dict[str, Any]", json.loads(lease.read_bytes()))
        if now - lease.stat().st_mtime < LEASE_SECONDS and _may_be_alive(owner):
            return f"pid {owner['pid']} on {owner['host']}"
    return None


def _may_be_alive(owner: Mapping[str, Any]) -> bool:
    """False for this process and for processes of this machine that no longer exist."""
    if owner["host"] != socket.gethostname():
        return True
    pid = int(owner["pid"])
    return pid != os.getpid() and psutil.pid_exists(pid)


class ProbeFile:
    """A file in a weights folder, to check whether another machine has the same folder mounted.

    Use with `closing`. Its name does not start with a dot, because watchers ignore such names.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self) -> str:
        """Replace the previous file by a new one; returns its name. Raises OSError."""
        self.close()
        name = f"{PROBE_FILE}{os.urandom(4).hex()}"
        atomic_files.replace_file(self._folder / name, b"")
        return name

    def close(self) -> None:
        """Remove all probe files, including those of killed processes."""
        with contextlib.suppress(OSError):
            for file in self._folder.glob(f"{PROBE_FILE}*"):
                file.unlink(missing_ok=True)


class FolderWatcher:
    """Calls `on_change`, in its own thread, when a name appears in a folder.

    Changes on a NAS may be missed, so callers must also poll. Use with `closing`. Raises OSError if
    the folder does not exist.
    """

    def __init__(self, folder: Path, on_change: Callable[[], None], *, poll_seconds: float) -> None:
        self._folder, self._stat = folder, os.stat(folder)
        remote = filesystem_of(folder).startswith(REMOTE_FILESYSTEMS)
        self._observer = PollingObserver(timeout=poll_seconds) if remote else Observer()
        self._observer.schedule(_NewNames(on_change), str(folder))
        self._observer.start()

    def is_current(self) -> bool:
        """False if the path now is another folder than the watched one, e.g. after a mount."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self._stat, os.stat(self._folder))
        return True

    def close(self) -> None:
        """Stop the thread; does not wait longer than 1 s, as an unresponsive mount may block it."""
        self._observer.stop()
        self._observer.join(timeout=1.0)


class _NewNames(FileSystemEventHandler):
    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def on_moved(self, event: FileSystemEvent) -> None:
        self._on_change()  # versions appear by a rename; other events, e.g. of reads, are ignored

    def on_created(self, event: FileSystemEvent) -> None:
        if not Path(str(event.src_path)).name.startswith("."):  # leases, marks, temporary folders
            self._on_change()


def filesystem_of(folder: Path) -> str:
    """Type of the folder's file system, e.g. ext4 or nfs4; '' if unknown."""
    types = dict[str, str]()  # by mount point; the latest mount hides earlier ones
    with contextlib.suppress(OSError):
        types = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    path = folder.absolute()
    mount_points = (str(parent) for parent in (path, *path.parents) if str(parent) in types)
    return types.get(next(mount_points, ""), "")
