"""Storage backends of the weight store: a folder, a trainer's weight server, an object store."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import psutil
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from peralta_zmq import atomic_files
from peralta_zmq.addresses import host_and_port
from peralta_zmq.atomic_files import About, Content, CorruptError, Manifest
from peralta_zmq.errors import StoreError, import_extra
from peralta_zmq.weights.locks import FolderLocks

PROBE_PREFIX = "doctor-"  # beginning of a probe file's name


class StorageBackend(Protocol):
    """Folders of immutable files, one level deep. Every method may raise OSError."""

    address: str  # folder or URL
    locks: FolderLocks  # files with which processes coordinate

    def names(self) -> list[str]:
        """Names of all folders and files, including those of other programs."""
        ...

    def path(self, name: str) -> Path:
        """Path of a folder in the store; Path(name) if the store is no folder of this machine."""
        ...

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """The bytes of FILE or FOLDER/FILE from offset `start`, in chunks."""
        ...

    def write_folder(self, name: str, files: Mapping[str, Content], about: About) -> Manifest:
        """Write a folder atomically: its files, then manifest.json, then STABLE with its hash.

        If `about` is a function, it is called after the files are written.
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


def read_small(backend: StorageBackend, path: str, *, limit: int = 256 << 10) -> bytes:
    """The content of a small file. Raises CorruptError if it exceeds `limit` bytes.

    A manifest that lists 1,000 files is smaller than the default.
    """
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
        """Not through mmap: if a NAS removes a mapped file, reading raises SIGBUS."""
        return atomic_files.read_chunks(self.folder, *path.split("/"), start=start)

    def write_folder(self, name: str, files: Mapping[str, Content], about: About) -> Manifest:
        return atomic_files.write_folder(self.folder / name, files, about)

    def write_file(self, name: str, content: bytes) -> None:
        atomic_files.replace_file(self.folder / name, content)

    def remove(self, name: str) -> None:
        atomic_files.remove_folder(self.folder / name)

    def prepare(self) -> None:
        """Create the folder, and rename one in it, as a version is renamed. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        probe = self.folder / f".tmp-probe-{atomic_files.PROCESS_TAG}"
        renamed = self.folder / f".trash-probe-{atomic_files.PROCESS_TAG}"
        probe.mkdir(exist_ok=True)
        try:
            probe.rename(renamed)
        finally:
            for folder in (probe, renamed):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def free_bytes(self) -> int:
        space = os.statvfs(self.folder)
        return space.f_bavail * space.f_frsize


class HttpBackend:
    """Client of a trainer's weight server (server.py), for machines without a shared folder."""

    def __init__(self, address: str, *, token: str | None = None) -> None:
        self._host, self._port = host_and_port(address, option="weights.dir", default_port=80)
        self.address = address
        self.locks = FolderLocks(None)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def names(self) -> list[str]:
        try:
            listing = read_small(self, "", limit=16 << 20)  # bytes; a million versions
            return list(map(str, atomic_files.parse_json(listing)))
        except (ValueError, TypeError):
            raise OSError(f"{self.address} does not list versions; is it a trainer?") from None

    def path(self, name: str) -> Path:
        return Path(name)

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """Raises ConnectionError or TimeoutError if the caller can resume, else OSError."""
        headers = self._headers | ({"Range": f"bytes={start}-"} if start else {})
        connection = http.client.HTTPConnection(self._host, self._port, timeout=20.0)
        with contextlib.closing(connection):
            try:
                connection.request("GET", f"/{path}", headers=headers)
                response = connection.getresponse()
                self._check_status(response.status, path, start)
                while chunk := response.read(atomic_files.CHUNK):
                    yield chunk
                if response.length:  # bytes still missing; read(n) returns b"" without an error
                    raise ConnectionError(f"{self.address}: the connection ended early")
            except (http.client.HTTPException, ValueError) as error:  # ValueError: a chunk below 0
                raise ConnectionError(f"{self.address}: {type(error).__name__}") from None

    def _check_status(self, status: int, path: str, start: int) -> None:
        if status == HTTPStatus.NOT_FOUND:
            raise FileNotFoundError(path)
        if status == HTTPStatus.UNAUTHORIZED:
            raise PermissionError(f"{self.address} requires the password in security.token_file")
        if status != (HTTPStatus.PARTIAL_CONTENT if start else HTTPStatus.OK):
            raise OSError(f"{self.address} returned HTTP status {status} for {path}")

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        """Raise StoreError; replaces the methods that only a trainer calls, to publish."""
        raise StoreError(f"{self.address} is read-only; a trainer publishes to a folder")

    write_folder = write_file = remove = prepare = free_bytes = _refuse


class ObjectStoreBackend:
    """Store at s3://BUCKET/PREFIX, with the extra `s3` (obstore).

    A version is complete when STABLE, written last, exists. Credentials and endpoint are taken from
    the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT. Two
    trainers must not use the same prefix, because there is no publisher lock; without read marks,
    `weights.keep_seconds` must be long enough for the slowest reader.
    """

    def __init__(self, address: str) -> None:
        self._obstore = import_extra("obstore", extra="s3", needed_by=f"weights.dir '{address}'")
        is_plain_http = os.environ.get("AWS_ENDPOINT", "").startswith("http://")
        self._bucket: Any = self._obstore.store.from_url(
            address, client_options={"allow_http": is_plain_http, "timeout": "60s"}
        )
        self.address = address
        self.locks = FolderLocks(None)

    def names(self) -> list[str]:
        """Names of the folders; objects at the top level are not listed."""
        with self._as_os_error():
            listing: Any = self._obstore.list_with_delimiter(self._bucket)
            return [str(prefix).rpartition("/")[2] for prefix in listing["common_prefixes"]]

    def path(self, name: str) -> Path:
        return Path(name)

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        options = {"range": {"offset": start}} if start else None
        with self._as_os_error():
            result: Any = self._obstore.get(self._bucket, path, options=options)
            for chunk in result.stream(min_chunk_size=atomic_files.CHUNK):
                yield bytes(chunk)

    def write_folder(self, name: str, files: Mapping[str, Content], about: About) -> Manifest:
        written = {file: self._put(f"{name}/{file}", content) for file, content in files.items()}
        manifest, text = atomic_files.describe(written, about)
        self._put(f"{name}/{atomic_files.MANIFEST}", text)
        self._put(f"{name}/{atomic_files.STABLE}", manifest.digest.encode())
        return manifest

    def write_file(self, name: str, content: bytes) -> None:
        self._put(name, content)

    def remove(self, name: str) -> None:
        """Delete a folder, STABLE first: readers skip a folder without it."""
        with contextlib.suppress(OSError), self._as_os_error():
            pages = self._obstore.list(self._bucket, f"{name}/")
            paths = [entry["path"] for page in pages for entry in page]
            for path in sorted(paths, key=lambda path: not path.endswith(atomic_files.STABLE)):
                self._obstore.delete(self._bucket, path)

    def prepare(self) -> None:
        self.names()

    def free_bytes(self) -> int:
        return 1 << 62  # free bytes

    def _put(self, path: str, content: Content) -> tuple[int, str]:
        sha256 = hashlib.sha256()
        size = 0

        def chunks() -> Iterator[bytes]:
            nonlocal size
            for chunk in atomic_files.chunks_of(content):
                sha256.update(chunk)
                size += len(chunk)
                yield bytes(chunk)

        with self._as_os_error():
            self._obstore.put(self._bucket, path, chunks(), chunk_size=8 << 20)  # bytes of a part
        return size, sha256.hexdigest()

    @contextlib.contextmanager
    def _as_os_error(self) -> Generator[None, None, None]:
        """Convert obstore's exceptions to OSError with a one-line message."""
        try:
            yield
        except FileNotFoundError:
            raise
        except self._obstore.exceptions.BaseError as error:
            raise OSError(" ".join(str(error).split())[:200]) from None


def open_backend(address: str, *, token: str | None = None) -> StorageBackend:
    """Open a folder, http://HOST:PORT with the password `token`, or s3://BUCKET/PREFIX.

    Raises ConfigError for another scheme, or if the library for S3 is not installed.
    """
    if "://" not in address:
        return LocalBackend(Path(address).expanduser())
    if address.startswith("s3://"):
        return ObjectStoreBackend(address)
    return HttpBackend(address, token=token)


class ProbeFile:
    """A file by which bin/doctor checks that two machines share a folder. Use with `closing`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self) -> str:
        """Remove all probe files, create one with a new name, and return the name."""
        self.close()
        name = f"{PROBE_PREFIX}{os.urandom(4).hex()}"
        atomic_files.replace_file(self._folder / name, b"")
        return name

    def close(self) -> None:
        with contextlib.suppress(OSError):
            for file in self._folder.glob(f"{PROBE_PREFIX}*"):
                file.unlink(missing_ok=True)


class FolderWatcher:
    """Calls `on_change`, in its own thread, when a name appears in a folder; if given, only `name`.

    Changes by another machine on a NAS cause no event, so callers must also poll. Use with
    `closing`. Raises OSError if the folder does not exist.
    """

    def __init__(self, folder: Path, on_change: Callable[[], None], *, name: str = "") -> None:
        self.folder = folder
        self._stat = os.stat(folder)
        self._observer = Observer()
        self._observer.schedule(_NewNames(on_change, name), str(folder))
        try:
            self._observer.start()
        except OSError:
            self._observer.stop()  # its threads, and their descriptors
            raise

    def is_current(self) -> bool:
        """False if the path now leads to another folder, e.g. after a mount."""
        with contextlib.suppress(OSError):
            return os.path.samestat(self._stat, os.stat(self.folder))
        return True

    def close(self) -> None:
        """Stop the thread; waits at most 1 s: an unresponsive mount may block it."""
        self._observer.stop()
        self._observer.join(timeout=1.0)


class _NewNames(FileSystemEventHandler):
    def __init__(self, on_change: Callable[[], None], name: str) -> None:
        self._on_change = on_change
        self._name = name

    def on_moved(self, event: FileSystemEvent) -> None:
        self._report(event.dest_path)  # a version gets its name by a rename

    def on_created(self, event: FileSystemEvent) -> None:
        self._report(event.src_path)

    def _report(self, path: bytes | str) -> None:
        name = Path(os.fsdecode(path)).name
        # Hidden names are locks and temporary folders.
        if name == self._name or not (self._name or name.startswith(".")):
            self._on_change()


def filesystem_of(folder: Path) -> str:
    """Type of the folder's file system, e.g. ext4 or nfs4; '' if unknown."""
    types = dict[str, str]()  # by mount point; the latest mount hides earlier ones
    with contextlib.suppress(OSError):
        types = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    path = folder.absolute()
    mount_points = (str(parent) for parent in (path, *path.parents) if str(parent) in types)
    return types.get(next(mount_points, ""), "")
