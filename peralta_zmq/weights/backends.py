"""Storage backends of the weight store: their interface, and the backend for folders."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import psutil

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import About, Content, CorruptError, Manifest
from peralta_zmq.errors import StoreError
from peralta_zmq.weights.locks import FolderLocks

PROBE_PREFIX = "doctor-"  # beginning of a probe file's name
# Errors of a rename that no retry helps against; others are those of a disk or NAS that is failing.
CANNOT_RENAME = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EPERM}
MAX_SMALL_FILE = 256 << 10  # bytes; a manifest that lists 1,000 files is smaller


class StorageBackend(Protocol):
    """Folders of immutable files, one level deep. Every method may raise OSError."""

    address: str  # folder or URL
    locks: FolderLocks  # files with which processes coordinate

    def names(self) -> list[str]:
        """Names of all folders and files in the store, including those of other programs."""
        ...

    def path(self, name: str) -> Path:
        """Path of a folder in the store.

        Path(name) if the store is not a folder of this machine.
        """
        ...

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """The bytes of FILE or FOLDER/FILE from offset `start`, in chunks."""
        ...

    def write_folder(self, name: str, files: Mapping[str, Content], about: About) -> Manifest:
        """Write a folder atomically: its files, then manifest.json, then STABLE with its hash.

        `about` is a mapping with further fields of the manifest, or a function that returns it and
        is called after the files are written.
        """
        ...

    def write_file(self, name: str, content: bytes) -> None:
        """Write one small file atomically."""

    def remove(self, name: str) -> None:
        """Remove a folder; no error if it is missing or cannot be removed."""

    def prepare(self) -> None:
        """Create the store if needed and check that it can be written."""

    def free_bytes(self) -> int:
        """Free space for new versions, in bytes."""
        ...


def read_small(backend: StorageBackend, path: str, *, limit: int = MAX_SMALL_FILE) -> bytes:
    """The content of a small file. Raises CorruptError if it exceeds `limit` bytes."""
    content = bytearray()
    for chunk in backend.read(path):
        content += chunk
        if len(content) > limit:
            raise CorruptError(f"{path} has more than {limit} bytes")
    return bytes(content)


class LocalBackend:
    """A local folder or a mounted NAS; it may be slow, full, read-only or missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = str(folder)
        self.locks = FolderLocks(folder)

    def names(self) -> list[str]:
        return os.listdir(self.folder)

    def path(self, name: str) -> Path:
        return self.folder / name

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """A regular file in chunks, from offset `start`.

        Not through mmap: if a NAS removes a mapped file, reading the mapping raises SIGBUS.
        """
        return atomic_files.read_chunks(self.folder, *path.split("/"), start=start)

    def write_folder(self, name: str, files: Mapping[str, Content], about: About) -> Manifest:
        return atomic_files.write_folder(self.folder / name, files, about)

    def write_file(self, name: str, content: bytes) -> None:
        atomic_files.replace_file(self.folder / name, content)

    def remove(self, name: str) -> None:
        """Rename the folder, then delete it, so that no reader opens a partly removed folder."""
        atomic_files.remove_folder(self.folder / name)

    def prepare(self) -> None:
        """Create the folder.

        Raises StoreError if its file system cannot rename folders, OSError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".tmp-probe-{atomic_files.PROCESS_TAG}"
        renamed = self.folder / f".trash-probe-{atomic_files.PROCESS_TAG}"
        probe.mkdir(exist_ok=True)
        try:
            probe.rename(renamed)
        except OSError as error:
            if error.errno not in CANNOT_RENAME:
                raise
            raise StoreError(
                f"weights folder {self.folder} is on a file system that cannot rename folders "
                f"({error.strerror}); choose another with --weights.dir"
            ) from None
        finally:
            for folder in (probe, renamed):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def free_bytes(self) -> int:
        space = os.statvfs(self.folder)
        return space.f_bavail * space.f_frsize


class ProbeFile:
    """A file by which bin/doctor checks that two machines have mounted the same folder.

    Use with `closing`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self) -> str:
        """Remove all probe files, create one with a new name, and return the name."""
        self.close()
        name = f"{PROBE_PREFIX}{os.urandom(4).hex()}"
        atomic_files.replace_file(self._folder / name, b"")
        return name

    def close(self) -> None:
        """Remove all probe files in the folder, including those of other processes."""
        with contextlib.suppress(OSError):
            for file in self._folder.glob(f"{PROBE_PREFIX}*"):
                file.unlink(missing_ok=True)


def filesystem_of(folder: Path) -> str:
    """Type of the folder's file system, e.g. ext4 or nfs4; '' if unknown."""
    types = dict[str, str]()  # by mount point; the latest mount hides earlier ones
    with contextlib.suppress(OSError):
        types = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    path = folder.absolute()
    mount_points = (str(parent) for parent in (path, *path.parents) if str(parent) in types)
    return types.get(next(mount_points, ""), "")
