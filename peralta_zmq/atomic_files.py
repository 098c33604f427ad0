"""Atomic files and folders: written under a temporary name, fsynced, renamed, verified on reading.

A complete folder has its files, `manifest.json` with their sizes and hashes, and `STABLE`, written
last, with the hash of the manifest. Also file locks and failpoints: named places where a test can
kill the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

MANIFEST, STABLE = "manifest.json", "STABLE"
CHUNK = 1 << 20  # bytes read or written at a time
# Part of temporary names: processes on two machines may share a NAS and have equal process ids.
PROCESS_TAG = os.urandom(4).hex()
RETRY_DELAYS = (0.05, 0.2, 0.5)  # seconds before each retry of a rename or a removal
# Seconds before the first retry during the outage of a disk or a NAS; doubled at each retry up to
# the longest delay. So a weight version is published within 10 s after an outage: 2 s to write it.
FIRST_OUTAGE_DELAY, LONGEST_OUTAGE_DELAY = 1.0, 8.0
# Errors of an fsync of a folder on a file system without it.
CANNOT_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
# Fields of a manifest other than `files`, or a function that returns them after writing the files.
About: TypeAlias = "Mapping[str, Any] | Callable[[], Mapping[str, Any]]"
Content: TypeAlias = "bytes | Iterable[bytes | memoryview]"  # content of a file, whole or in pieces
STEP_NAME = re.compile(r"step_\d{6,8}")  # name of a folder or file, without suffix
# Exceptions that reading fields from untrusted JSON may raise: OverflowError comes from int(1e999),
# RecursionError from deeply nested brackets.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
# File name that is not hidden and has no path separator: a name in a manifest from another machine
# must not lead to another folder.
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# The same, or a file in the only sub-folder that a complete folder may have.
PLAIN_PATH = re.compile(rf"(?:additional_chat_templates/)?{PLAIN_NAME.pattern}")
MAX_COMPANION = 36 << 20  # bytes of a config or tokenizer file in a complete folder
MAX_COMPANIONS = 64 << 20  # bytes of all of them together
MAX_REASON = 250  # letters of a reason in a status: at most 1,000 bytes
MAX_NAME = 128  # bytes of the name of a run or a generator, which is also a file name
FAILPOINT_VARIABLE = "PERALTA_FAILPOINT"


class CorruptError(ValueError):
    """A folder or file does not match its manifest."""


@dataclass(frozen=True, slots=True)
class Manifest:
    digest: str  # sha256 of manifest.json, hex
    about: dict[str, Any]  # all fields except `files`
    files: dict[str, tuple[int, str]]  # name -> (bytes, sha256 hex)


def write_folder(final: Path, files: Mapping[str, Content], about: About) -> Manifest:
    """Write the folder `final`; a rename makes it visible when it is complete.

    Raises OSError, after removing the partial folder. A failed fsync is not repeated: the second
    call may succeed without having written the data.
    """
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}-{PROCESS_TAG}")
    folders = sorted({temporary, *((temporary / name).parent for name in files)})
    parent = os.open(final.parent, os.O_RDONLY)  # now, so that it cannot fail after the rename
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        failpoint("atomic_files.cleared")
        for folder in folders:
            os.mkdir(folder)
        failpoint("atomic_files.begun")
        written = {name: _write(temporary / name, content) for name, content in files.items()}
        failpoint("atomic_files.written")
        manifest, text = describe(written, about)
        _write(temporary / MANIFEST, text)
        failpoint("atomic_files.described")
        _write(temporary / STABLE, manifest.digest.encode())
        failpoint("atomic_files.marked")
        for folder in folders:
            sync_folder(folder)
        failpoint("atomic_files.synced")
        _rename(temporary, final)
        failpoint("atomic_files.renamed")
        _sync_folder(parent)
    except BaseException:  # an iterable in `files` may raise anything
        _discard(temporary)  # does nothing after the rename
        raise
    finally:
        os.close(parent)
    return manifest


def describe(written: Mapping[str, tuple[int, str]], about: About) -> tuple[Manifest, bytes]:
    """The manifest and its text, from the size and sha256 of each file."""
    entries = [
        {"name": name, "bytes": size, "sha256": digest} for name, (size, digest) in written.items()
    ]
    fields = dict(about() if callable(about) else about)
    text = json.dumps({**fields, "files": entries}, indent=1).encode()
    return Manifest(hashlib.sha256(text).hexdigest(), fields, dict(written)), text


def replace_file(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write or replace one file atomically. Raises OSError, after removing the partial file."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}-{PROCESS_TAG}")
    temporary.unlink(missing_ok=True)
    try:
        _write(temporary, content, mode)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises OSError if a file is missing, CorruptError if damaged."""
    text = (folder / MANIFEST).read_bytes()
    return parse_manifest(text, stable=(folder / STABLE).read_bytes(), where=str(folder))


def parse_manifest(text: bytes, *, stable: bytes, where: str) -> Manifest:
    """Parse manifest.json. Raises CorruptError if malformed, or if `stable` is not its hash."""
    digest = hashlib.sha256(text).hexdigest()
    if stable.strip() != digest.encode():
        raise CorruptError(f"{where}: STABLE does not match {MANIFEST}")
    try:
        about = parse_object(text)
        files = {
            str(entry["name"]): (int(entry["bytes"]), str(entry["sha256"]))
            for entry in about.pop("files")
        }
    except MALFORMED as error:
        raise CorruptError(f"{where}: {MANIFEST} cannot be read ({error})") from None
    if invalid := [name for name in files if not PLAIN_PATH.fullmatch(name)]:
        raise CorruptError(f"{where}: {invalid[0]!r} is not a plain file name")
    return Manifest(digest, about, files)


def parse_json(content: str | bytes) -> Any:
    """The value of JSON from another machine; ValueError if it is invalid or nested too deeply."""
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    level = [[value]]
    for _ in range(101):  # far below the recursion limit of Python
        values = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for row in values for each in row if isinstance(each, (dict, list))]
    if level:
        raise ValueError("more than 100 levels of arrays and objects")
    return value


def parse_object(content: str | bytes) -> dict[str, Any]:
    """The JSON object in a file from another machine. Raises ValueError, as `parse_json`."""
    value = parse_json(content)
    json.dumps(value, ensure_ascii=False).encode()
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_verified(folder: Path, name: str, manifest: Manifest) -> Iterator[bytes]:
    """A file of a folder, in chunks. Raises CorruptError after the last one if it is damaged."""
    return verified(read_chunks(folder / name), str(folder / name), manifest.files[name])


def verified(chunks: Iterable[bytes], where: str, expected: tuple[int, str]) -> Iterator[bytes]:
    """Yield the chunks; at the end, raise CorruptError unless size and sha256 are `expected`."""
    size, digest = expected
    num_read = 0
    sha256 = hashlib.sha256()
    for chunk in chunks:
        num_read += len(chunk)
        sha256.update(chunk)
        if num_read > size:
            break
        yield chunk
    if (num_read, sha256.hexdigest()) != (size, digest):
        raise CorruptError(f"{where}: size or sha256 differs from its manifest ({size} bytes)")


def read_chunks(path: Path, *names: str, start: int = 0) -> Iterator[bytes]:
    """The bytes of a file from offset `start`, in chunks; opened by `open_regular`."""
    descriptor = open_regular(path, *names)
    try:
        os.lseek(descriptor, start, os.SEEK_SET)
        while chunk := os.read(descriptor, CHUNK):
            yield chunk
    finally:
        os.close(descriptor)


def open_regular(path: Path, *names: str) -> int:
    """Open the file `path` joined with `names` for reading.

    A symbolic link in `names` is not followed: anyone who can write to `path` could make this
    process serve other files. Raises FileNotFoundError for it and for a file that is not regular,
    or OSError.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK  # O_NONBLOCK: opening a named pipe would block
    descriptor = os.open(path, flags)
    opened = path
    for name in names:
        parent = descriptor
        opened = opened / name
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):  # a link, or not in a folder
                raise FileNotFoundError(name) from None
            error.filename = str(opened)  # not `name` alone
            raise
        finally:
            os.close(parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(str(path.joinpath(*names)))
    return descriptor


def steps_in(folder: Path, *, suffix: str = "") -> dict[int, Path]:
    """Step number -> path of folders step_N, or of files step_N + `suffix`, in ascending order."""
    try:
        stems = {Path(name).stem for name in os.listdir(folder) if Path(name).suffix == suffix}
    except FileNotFoundError:
        return {}
    numbers = sorted((int(stem[5:]), stem) for stem in stems if STEP_NAME.fullmatch(stem))
    return {number: folder / f"{stem}{suffix}" for number, stem in numbers}


def remove_folder(folder: Path) -> None:
    """Rename a folder, then delete it, so that it is never visible in part. Ignores errors."""
    trash = folder.with_name(f".trash-{folder.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        os.rename(folder, trash)
    _delete(trash)


def sweep(folder: Path) -> None:
    """Delete the temporary files and folders that killed processes left in a folder."""
    for path in (*folder.glob(".tmp-*"), *folder.glob(".trash-*")):
        if os.path.isdir(path):  # Path.is_dir raises an error for some symbolic links
            _delete(path)
        else:
            path.unlink(missing_ok=True)


def _delete(folder: Path) -> None:
    with contextlib.suppress(RecursionError):  # folders nested 1,000 levels deep
        shutil.rmtree(folder, ignore_errors=True)


def is_held(lock: Path) -> bool | None:
    """Whether a process has locked a file (flock); None if the file is missing or unreadable."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _sync_folder(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


def _write(path: Path, content: Content, mode: int = 0o644) -> tuple[int, str]:
    """Write a new file and fsync it; return its size and sha256.

    Not reopened for the fsync: a NAS reports write errors only to the descriptor that wrote.
    """
    size = 0
    sha256 = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        failpoint("atomic_files.opened")
        for chunk in chunks_of(content):
            sha256.update(chunk)
            size += len(chunk)
            while chunk:  # a call may write only a part
                chunk = chunk[os.write(descriptor, chunk) :]
            failpoint("atomic_files.chunk")
        _sync(descriptor)
    finally:
        os.close(descriptor)
    return size, sha256.hexdigest()


def chunks_of(content: Content) -> Iterator[memoryview]:
    for buffer in (content,) if isinstance(content, bytes) else content:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def _rename(source: Path, target: Path) -> None:
    """Rename, with retries: a virus scanner or a NAS may hold a new folder for a moment."""
    for delay in RETRY_DELAYS:
        try:
            return os.rename(source, target)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EBUSY):
                raise
            time.sleep(delay)
    os.rename(source, target)


def _discard(folder: Path) -> None:
    """Remove a folder, with retries: NFS keeps a deleted open file for a moment, renamed."""
    for delay in RETRY_DELAYS:
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(delay)


def _sync(descriptor: int) -> None:
    """Fsync an open file, on macOS with F_FULLFSYNC if the file system supports it."""
    if sys.platform == "darwin":  # fsync on macOS leaves the data in the drive's cache
        with contextlib.suppress(OSError):  # not supported by some network mounts
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def parse_failpoints(text: str) -> dict[str, int]:
    """Parse 'journal.synced:2,send' to {'journal.synced': 2, 'send': 1}. Raises ValueError."""
    counts: dict[str, int] = {}
    for entry in filter(None, text.split(",")):
        name, _, count = entry.partition(":")
        counts[name] = int(count or 1)
        if counts[name] < 1:
            raise ValueError(f"{FAILPOINT_VARIABLE}: the count in {entry!r} must be at least 1")
    return counts


failpoints = parse_failpoints(os.environ.get(FAILPOINT_VARIABLE, ""))  # calls until the kill


def failpoint(name: str) -> None:
    """Kill this process (SIGKILL) if the environment variable PERALTA_FAILPOINT has this name.

    `PERALTA_FAILPOINT=publish.visible:3` kills at the third call; commas separate several names.
    """
    if name not in failpoints:
        return
    failpoints[name] -= 1
    if failpoints[name] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
