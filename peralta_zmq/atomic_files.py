"""Files and folders that appear whole: written beside, fsynced, renamed, and checked when read.

A finished folder holds its files, `manifest.json` that names their sizes and hashes, and `STABLE`
with the manifest's hash, written last. Also whether somebody holds a file's lock. Knows bytes and
paths; knows nothing of what they mean.
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
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from peralta_zmq.failpoints import failpoint

MANIFEST, STABLE = "manifest.json", "STABLE"
CHUNK = 1 << 20
BOOT = os.urandom(4).hex()  # two machines on one NAS may have equal process ids
RENAME_DELAYS = (0.05, 0.2, 0.5)  # seconds
About: TypeAlias = Mapping[str, Any]
Content: TypeAlias = "bytes | Iterable[bytes | memoryview]"
STEP_NAME = re.compile(r"step_\d{6,8}")
MALFORMED = (
    ValueError, KeyError, TypeError, AttributeError,
    OverflowError,  # "bytes": 1e999
    RecursionError,  # a hundred thousand brackets
)  # fmt: skip
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
MAX_NAME = 128  # bytes of the name of a run or a generator, which names files too


class CorruptError(ValueError):
    """A folder or file is not what its manifest says; the message names which and why."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished folder says of itself."""

    digest: str  # sha256 of manifest.json, hex
    about: dict[str, Any]  # the writer's own fields
    files: dict[str, tuple[int, str]]  # name -> (bytes, sha256 hex)


def write_folder(
    final: Path, files: Mapping[str, Content], about: About | Callable[[], About]
) -> Manifest:
    """Write a folder that is either absent or complete; the rename is the commit point.

    A file may be an iterable of buffers, and `about` a function called once all are written.
    Raises OSError, after removing what was begun; a failed fsync is never tried again.
    """
    parent = os.open(final.parent, os.O_RDONLY)  # once it is out there may be no free descriptor
    try:
        manifest = _write_aside(final, files, about)
        os.fsync(parent)
    finally:
        os.close(parent)
    return manifest


def _write_aside(
    final: Path, files: Mapping[str, Content], about: About | Callable[[], About]
) -> Manifest:
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}-{BOOT}")
    shutil.rmtree(temporary, ignore_errors=True)
    failpoint("atomic_files.cleared")
    os.mkdir(temporary)
    failpoint("atomic_files.begun")
    try:
        written = {name: _write(temporary / name, content) for name, content in files.items()}
        failpoint("atomic_files.written")
        manifest, text = describe(written, about() if callable(about) else about)
        _write(temporary / MANIFEST, text)
        failpoint("atomic_files.described")
        _write(temporary / STABLE, manifest.digest.encode())
        failpoint("atomic_files.marked")
        sync_folder(temporary)
        failpoint("atomic_files.synced")
        _rename(temporary, final)
    except BaseException:  # what fills a file may fail too
        _discard(temporary)
        raise
    failpoint("atomic_files.renamed")
    return manifest


def describe(
    written: Mapping[str, tuple[int, str]], about: Mapping[str, Any]
) -> tuple[Manifest, bytes]:
    """The manifest of files of these sizes and hashes, and its text."""
    text = json.dumps({**about, "files": _listed(written)}, indent=1).encode()
    return Manifest(hashlib.sha256(text).hexdigest(), dict(about), dict(written)), text


def replace_file(path: Path, content: bytes) -> None:
    """Write a single file whole, over an older one if there is one.

    Raises OSError, after removing what was begun.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}-{BOOT}")
    temporary.unlink(missing_ok=True)
    try:
        _write(temporary, content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder. Raises CorruptError; OSError when it is not there."""
    text = (folder / MANIFEST).read_bytes()
    return parse_manifest(text, stable=(folder / STABLE).read_bytes(), where=str(folder))


def parse_manifest(text: bytes, *, stable: bytes, where: str) -> Manifest:
    """The manifest with this text, if STABLE agrees with it. Raises CorruptError."""
    digest = hashlib.sha256(text).hexdigest()
    if stable.strip() != digest.encode():
        raise CorruptError(f"{where}: STABLE does not match {MANIFEST}")
    try:
        about = cast("dict[str, Any]", json.loads(text))
        files = {str(each["name"]): (int(each["bytes"]), str(each["sha256"]))
                 for each in about.pop("files")}  # fmt: skip
    except MALFORMED as error:
        raise CorruptError(f"{where}: {MANIFEST} cannot be read ({error})") from None
    if strange := [name for name in files if not PLAIN_NAME.fullmatch(name)]:
        raise CorruptError(f"{where}: {strange[0]!r} is not a plain file name")
    return Manifest(digest, about, files)


def read_verified(folder: Path, name: str, manifest: Manifest) -> Iterator[bytes]:
    """The bytes of a file in chunks; CorruptError at the end if they are not the promised ones."""
    return verified(read_chunks(folder / name), str(folder / name), manifest.files[name])


def verified(chunks: Iterable[bytes], where: str, promised: tuple[int, str]) -> Iterator[bytes]:
    """The same chunks; CorruptError as soon as they are not the promised bytes and sha256."""
    size, digest = promised
    read, hashed = 0, hashlib.sha256()
    for chunk in chunks:
        read += len(chunk)
        hashed.update(chunk)
        if read > size:
            break
        yield chunk
    if (read, hashed.hexdigest()) != (size, digest):
        raise CorruptError(f"{where}: not the {size} bytes that its manifest names")


def read_chunks(path: Path, *, start: int = 0) -> Iterator[bytes]:
    """The bytes of a file from `start` on. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.lseek(descriptor, start, os.SEEK_SET)
        while chunk := os.read(descriptor, CHUNK):
            yield chunk
    finally:
        with contextlib.suppress(OSError):  # a reader has nothing to lose
            os.close(descriptor)


def steps_in(folder: Path) -> dict[int, Path]:
    """Step folders by number, ascending; other names are ignored."""
    with contextlib.suppress(FileNotFoundError):
        names = [name for name in os.listdir(folder) if STEP_NAME.fullmatch(name)]
        return {number: folder / name for number, name in sorted((int(n[5:]), n) for n in names)}
    return {}


def remove_folder(folder: Path) -> None:
    """Take a folder out of sight first, then delete it; where it cannot be renamed it stays."""
    trash = folder.with_name(f".trash-{folder.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Delete what killed writers left half-done; only for the folder's one writer."""
    for pattern in (".tmp-*", ".trash-*"):
        for left in folder.glob(pattern):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def is_held(lock: Path) -> bool | None:
    """Whether a process holds the flock of a file; None when there is no file, or no telling.

    On a share that does not pass locks on, those of other machines are not seen.
    """
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: Content) -> tuple[int, str]:
    """Through one descriptor of our own, which only its fsync can vouch for."""
    written, hashed = 0, hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        failpoint("atomic_files.opened")
        for chunk in chunks_of(content):
            hashed.update(chunk)
            written += _write_all(descriptor, chunk)
            failpoint("atomic_files.chunk")
        _sync(descriptor)
    finally:
        os.close(descriptor)
    return written, hashed.hexdigest()


def chunks_of(content: Content) -> Iterator[memoryview]:
    """The content as flat buffers of at most CHUNK bytes."""
    for buffer in (content,) if isinstance(content, bytes) else content:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def _write_all(descriptor: int, chunk: memoryview) -> int:
    done = 0
    while done < len(chunk):
        done += os.write(descriptor, chunk[done:])
    return done


def _rename(source: Path, target: Path) -> None:
    """A scanner or a NAS may hold a new folder for a moment: EACCES and EBUSY pass."""
    for delay in RENAME_DELAYS:
        try:
            return os.rename(source, target)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EBUSY):
                raise
            time.sleep(delay)
    os.rename(source, target)


def _discard(folder: Path) -> None:
    """NFS keeps a deleted file under another name until its last write has been answered."""
    for delay in RENAME_DELAYS:
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(delay)


def _sync(descriptor: int) -> None:
    if sys.platform == "darwin":  # fsync there leaves the data in the drive's cache
        import fcntl

        with contextlib.suppress(OSError):  # a network mount may not offer it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def _listed(written: Mapping[str, tuple[int, str]]) -> Iterable[dict[str, Any]]:
    return [{"name": name, "bytes": size, "sha256": digest}
            for name, (size, digest) in written.items()]  # fmt: skip
