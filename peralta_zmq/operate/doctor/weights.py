"""The weights folder: is it the same on both sides, is it safe to write, how soon and how fast.

Knows places and files; knows nothing of tensors or runs.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from peralta_zmq import atomic_files
from peralta_zmq.operate.doctor.check import Check

if TYPE_CHECKING:
    from peralta_zmq.weights.backends import StorageBackend

MIN_MODELS = 3  # that a weights folder must have room for
MIN_COPIES = 2  # and the folder of a generator's own copy
SAMPLE = 32 << 20  # bytes written and read for a measurement
MOST = 256 << 20  # bytes read of a published version
VISIBLE_SECONDS = 30.0  # until a file of the other side counts as never seen
EVENT_SECONDS = 2.0  # that an event may come after the file is seen
LOOK_SECONDS = 0.02
MIB = 1 << 20
Show = Callable[[], tuple[str, str]]  # lets the other side make a file: its name, or a problem


def check_there(folder: Path, *, role: str) -> Check:
    """The folder can be listed; before a run the trainer makes its own."""
    from peralta_zmq.weights.backends import filesystem_of

    kind = filesystem_of(folder) or "unknown"
    try:
        os.listdir(folder)
    except FileNotFoundError:
        parent = existing(folder)
        if role == "trainer":
            where = f"{folder} will be made in {parent} (file system {kind})"
            return Check("weights", True, where, "if it is on a NAS, mount that first"
                         if folder.is_absolute() else "")  # fmt: skip
        return Check("weights", False, f"{folder} does not exist",
                     "mount it here, or name it as this machine does with weights.dir")  # fmt: skip
    except OSError as error:
        return Check("weights", False, f"{folder} cannot be listed ({error.strerror})",
                     "mount it again, or give this user the right to read it")  # fmt: skip
    return Check("weights", True, f"{folder} is there (file system {kind})")


def check_writing(folder: Path, *, size: int = SAMPLE) -> Check:
    """Write, fsync and rename work, for files and for folders."""
    there = existing(folder)
    content, started = os.urandom(MIB) * (size // MIB), time.monotonic()
    name, moved = (
        there / f"doctor-{kind}-{atomic_files.PROCESS_TAG}" for kind in ("made", "moved")
    )
    try:
        atomic_files.write_folder(name, {"sample": content}, {})
        seconds = time.monotonic() - started
        os.rename(name, moved)
    except OSError as error:
        return Check("writing", False, f"{there} cannot be written ({error.strerror or error})",
                     "give this user the right to write there, free some space, or choose "
                     "another weights.dir")  # fmt: skip
    finally:
        for each in (name, moved):
            atomic_files.remove_folder(each)
    return Check("writing", True, f"write, fsync and rename work, {size / seconds / 1e6:.0f} MB/s")


def check_owner(folder: Path, run: Path, *, trains: bool) -> Check:
    """The weights here are those of the run in folder `run`, and no other trainer publishes here.

    `trains` says that the one of this run does already. Raises OSError.
    """
    from peralta_zmq.weights.backends import LocalBackend

    place = LocalBackend(folder)
    owner, ours = _owner(place), _owner(LocalBackend(run))
    if owner and owner != ours:
        return Check("owner", False, f"{folder} belongs to run {owner}, not to {ours or run}",
                     "choose another with weights.dir, or delete it")  # fmt: skip
    other = None if trains else place.lease_holder(_now_in(folder))
    if other:
        return Check("owner", False, f"another trainer ({other}) publishes to {folder}",
                     "stop it, wait 30 s if it is gone, or choose another weights.dir")  # fmt: skip
    return Check("owner", True, f"of run {owner}" if owner else "no run's yet")


def check_space(folder: Path, model_bytes: int | None, *, models: int = MIN_MODELS) -> Check:
    """Room for a few versions of the model."""
    there = existing(folder)
    space = os.statvfs(there)
    free = space.f_bavail * space.f_frsize
    if model_bytes is None:
        return Check("space", True, f"{free >> 20} MiB free in {there}, the model is not known yet")
    needed = models * model_bytes
    detail = f"{free >> 20} MiB free in {there}, {models} models need {max(1, needed >> 20)} MiB"
    if free < needed:
        return Check("space", False, detail, "free some, or choose another folder")
    return Check("space", True, detail)


def check_visible(
    folder: Path,
    show: Show,
    *,
    poll_seconds: float,
    patience: float = VISIBLE_SECONDS,
    event_patience: float = EVENT_SECONDS,
) -> Check:
    """A file that the other side makes appears here: by an event, and by looking."""
    from peralta_zmq.weights.backends import FolderWatcher

    came: list[float] = []
    noticed = threading.Event()

    def changed() -> None:
        came.append(time.monotonic())
        noticed.set()

    with closing(FolderWatcher(folder, changed, poll_seconds=poll_seconds)):
        name, problem = show()
        started = time.monotonic()
        if not name:
            return Check("visible", False, f"the trainer's machine: {problem}",
                         "see its own bin/doctor")  # fmt: skip
        while name not in os.listdir(folder):
            if time.monotonic() - started > patience:
                return Check(
                    "visible", False,
                    f"{name}, which the trainer's machine just made in its weights folder, does "
                    f"not appear in {folder} within {patience:.0f} s",
                    "it is another folder: mount the same one, and name it with weights.dir",
                )  # fmt: skip
            time.sleep(LOOK_SECONDS)
        looked = time.monotonic() - started
        noticed.wait(event_patience)
    event = f"by event {max(0.0, came[0] - started):.2f} s" if came else "no event comes"
    return Check("visible", True, f"the same folder as the trainer's; a new file is seen after "
                 f"{looked:.2f} s by looking, {event}")  # fmt: skip


def check_address(address: str, token_file: str | None, *, run_id: str) -> Check:
    """Weights behind a URL can be listed, and are of the trainer's run where that is known.

    Raises ConfigError for a token file or an address.
    """
    place = _place(address, token_file)
    try:
        names = place.names()
        owner = _owner(place)
    except OSError as error:
        return Check("weights", False, f"{address} does not answer ({error.strerror or error})",
                     "start the trainer with weights.serve_port, or set weights.dir")  # fmt: skip
    if run_id and owner and owner != run_id:
        return Check("weights", False, f"{address} has the weights of run {owner}, not {run_id}",
                     "set weights.dir to where this trainer publishes")  # fmt: skip
    return Check("weights", True, f"{address} answers, {len(names)} names")


def check_promised(address: str, token_file: str | None, *, port: int) -> Check:
    """Weights that the trainer will serve: before it runs nobody does.

    Raises ConfigError for a token file or an address.
    """
    _place(address, token_file)
    return Check("weights", True, f"{address} cannot be looked at before the trainer runs",
                 f"it will serve them on its port {port} (weights.serve_port): is that open "
                 "in its firewall?")  # fmt: skip


def check_speed(
    where: Path | str, model_bytes: int | None, *, token_file: str | None = None
) -> Check:
    """How fast the newest version is read, and how long a generator loads because of it.

    Without a version in a folder, a file of our own is written and read back, where we may.
    """
    place, folder = _place(str(where), token_file), where if isinstance(where, Path) else None
    newest = max(_versions(place), default=None)
    if newest is not None:
        try:
            files = _files_of(place, newest)
        except (OSError, *atomic_files.MALFORMED):
            return Check("speed", False, f"{newest} cannot be read in {place.address}",
                         "start the trainer: it publishes anew")  # fmt: skip
        largest = max(files, key=lambda name: files[name])
        read, seconds = _read(place, f"{newest}/{largest}", folder)
        kind = "of the newest version"
    elif folder is not None and folder.is_dir() and os.access(folder, os.W_OK):
        read, seconds = _read_own(place, folder)
        kind = "of our own"
    else:
        return Check("speed", True, f"nothing to read yet in {place.address}")
    speed = read / max(seconds, 1e-6)
    whole = f"; a whole model takes {model_bytes / speed:.1f} s" if model_bytes else ""
    what = f"{read / 1e6:.1f} MB {kind}"
    return Check("speed", True, f"{speed / 1e6:.0f} MB/s, reading {what}{whole}")


def model_bytes_of(folder: Path, *, dtype: str) -> int:
    """Bytes of a published model: what the safetensors files of a model folder hold, in `dtype`."""
    numbers = sum(_numbers_in(file) for file in folder.glob("*.safetensors"))
    return numbers * {"float32": 4}.get(dtype, 2)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _place(address: str, token_file: str | None) -> StorageBackend:
    from peralta_zmq.atomic_files import read_private_token
    from peralta_zmq.weights.backends import open_backend

    return open_backend(address, token=read_private_token(token_file))


def _versions(place: StorageBackend) -> list[str]:
    from peralta_zmq.weights.version import VERSION_NAME

    with suppress(FileNotFoundError):
        return [each for each in place.names() if VERSION_NAME.fullmatch(each)]
    return []


def _owner(place: StorageBackend) -> str:
    """The run whose weights these are; '' before there is one. Raises OSError."""
    from peralta_zmq.weights.version import RUN_FILE

    try:
        return str(json.loads(b"".join(place.read(RUN_FILE)))["run_id"])
    except (FileNotFoundError, *atomic_files.MALFORMED):
        return ""


def _read_own(place: StorageBackend, folder: Path) -> tuple[int, float]:
    name = f"doctor-read-{atomic_files.PROCESS_TAG}"
    try:
        atomic_files.replace_file(folder / name, os.urandom(MIB) * (SAMPLE // MIB))
        return _read(place, name, folder)
    finally:
        (folder / name).unlink(missing_ok=True)


def _now_in(folder: Path) -> float:
    """Unix seconds by the clock of the folder's file system."""
    file = folder / f".doctor-clock-{atomic_files.PROCESS_TAG}"
    try:
        atomic_files.replace_file(file, b"")
        return file.stat().st_mtime
    finally:
        file.unlink(missing_ok=True)


def _files_of(place: StorageBackend, name: str) -> dict[str, int]:
    """Name and bytes of each file of a version. Raises OSError or a MALFORMED."""
    said = cast(
        "dict[str, Any]", json.loads(b"".join(place.read(f"{name}/{atomic_files.MANIFEST}")))
    )
    return {str(each["name"]): int(each["bytes"]) for each in said["files"]}


def _read(place: StorageBackend, path: str, folder: Path | None) -> tuple[int, float]:
    """Bytes read and seconds taken, past the kernel's cache where that can be asked for."""
    with ExitStack() as stack:
        if folder is not None and hasattr(os, "posix_fadvise"):
            opened = stack.enter_context((folder / path).open("rb"))
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started, read = time.monotonic(), 0
        for chunk in place.read(path):
            read += len(chunk)
            if read >= MOST:
                break
        return read, time.monotonic() - started


def _numbers_in(file: Path) -> int:
    """Numbers in a safetensors file, by its header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = cast("dict[str, Any]", json.loads(opened.read(size)))
    return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
