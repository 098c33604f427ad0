"""Files and folders that appear whole: written beside, fsynced, renamed, and checked when read.

A finished folder holds its files, `manifest.json` that names their sizes and hashes, and `STABLE`
with the manifest's hash, written last. Knows bytes and paths; knows nothing of what they mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

MANIFEST, STABLE = "manifest.json", "STABLE"
CHUNK = 1 << 20
STEP_NAME = re.compile(r"step_\d{6,8}")
MALFORMED = (
    ValueError, KeyError, TypeError, AttributeError,
    OverflowError,  # "bytes": 1e999
    RecursionError,  # a hundred thousand brackets
)  # fmt: skip
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class CorruptError(ValueError):
    """A folder or file is not what its manifest says; the message names which and why."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished folder says of itself."""

    digest: str  # sha256 of manifest.json, hex
    about: dict[str, Any]  # the writer's own fields
    files: dict[str, tuple[int, str]]  # name -> (bytes, sha256 hex)


def write_folder(final: Path, files: Mapping[str, bytes], about: Mapping[str, Any]) -> Manifest:
    """Write a folder that is either absent or complete; the rename is the commit point.

    Raises OSError, after removing what was begun; a failed fsync is never tried again.
    """
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        written = {name: _write(temporary / name, content) for name, content in files.items()}
        text = json.dumps({**about, "files": _listed(written)}, indent=1).encode()
        digest = _write(temporary / MANIFEST, text)[1]
        _write(temporary / STABLE, digest.encode())
        sync_folder(temporary)
        os.rename(temporary, final)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(final.parent)
    return Manifest(digest, dict(about), written)


def replace_file(path: Path, content: bytes) -> None:
    """Write a single file whole, over an older one if there is one.

    Raises OSError, after removing what was begun.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
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
    digest = hashlib.sha256(text).hexdigest()
    if (folder / STABLE).read_text(encoding="ascii", errors="replace").strip() != digest:
        raise CorruptError(f"{folder}: STABLE does not match {MANIFEST}")
    try:
        about = cast("dict[str, Any]", json.loads(text))
        files = {str(each["name"]): (int(each["bytes"]), str(each["sha256"]))
                 for each in about.pop("files")}  # fmt: skip
    except MALFORMED as error:
        raise CorruptError(f"{folder}: {MANIFEST} cannot be read ({error})") from None
    if strange := [name for name in files if not PLAIN_NAME.fullmatch(name)]:
        raise CorruptError(f"{folder}: {strange[0]!r} is not a plain file name")
    return Manifest(digest, about, files)


def read_verified(folder: Path, name: str, manifest: Manifest) -> Iterator[bytes]:
    """The bytes of a file in chunks; CorruptError at the end if they are not the promised ones."""
    size, digest = manifest.files[name]
    read, hashed = 0, hashlib.sha256()
    with (folder / name).open("rb") as file:
        while chunk := file.read(CHUNK):
            read += len(chunk)
            hashed.update(chunk)
            yield chunk
    if (read, hashed.hexdigest()) != (size, digest):
        raise CorruptError(f"{folder / name}: not the {size} bytes that its manifest names")


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


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> tuple[int, str]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        _sync(file.fileno())
    return len(content), hashlib.sha256(content).hexdigest()


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
