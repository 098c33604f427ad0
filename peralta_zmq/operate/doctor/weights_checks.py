"""Checks of the weights folder or URL: same on all machines, writable, large, fast."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from peralta_zmq import addresses, atomic_files
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate.doctor.checks import Check

if TYPE_CHECKING:
    from peralta_zmq.weights.backends import StorageBackend
    from peralta_zmq.weights.store import WeightStore

SAMPLE_BYTES = 32 << 20  # size of a file that is written for a measurement
NOT_READABLE = "mount it again, or give this user the right to read it"  # remedy


def check_folder(folder: Path, *, role: str) -> Check:
    """Check that the folder can be listed; on the trainer's machine it may be missing."""
    from peralta_zmq.weights.backends import filesystem_of

    filesystem = filesystem_of(folder) or "unknown"
    try:
        os.listdir(folder)
    except FileNotFoundError:
        if role == "trainer":
            parent = nearest_folder(folder)
            remedy = "if it is on a NAS, mount the NAS first" if folder.is_absolute() else ""
            detail = f"{folder} will be created in {parent} (file system {filesystem})"
            return Check(True, detail, remedy)
        detail = f"{folder} does not exist"
        return Check(False, detail, "mount it here, or set weights.dir to its path on this machine")
    except OSError as error:
        detail = f"{folder} cannot be listed ({error.strerror})"
        return Check(False, detail, NOT_READABLE)
    return Check(True, f"{folder} exists (file system {filesystem})")


def check_writing(folder: Path) -> Check:
    """Check that this user can write, fsync and rename in the folder, or its nearest parent."""
    parent = nearest_folder(folder)
    content = os.urandom(SAMPLE_BYTES)
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=parent) as work:
            created = Path(work) / "created"
            atomic_files.write_folder(created, {"sample": content}, {})
            seconds = time.monotonic() - started
            created.rename(Path(work) / "renamed")
    except OSError as error:
        detail = f"{parent} cannot be written ({error.strerror or error})"
        remedy = "give this user write permission, free some space, or choose another weights.dir"
        return Check(False, detail, remedy)
    speed = SAMPLE_BYTES / seconds / 1e6
    return Check(True, f"write, fsync and rename work, {speed:.0f} MB/s")


def check_owner(folder: Path, run: Path, *, is_running: bool) -> Check:
    """Check that the weights belong to the run in folder `run`, and no other trainer publishes.

    If this run's trainer is running (`is_running`), the lock of the folder is that trainer's.
    """
    store = _open_store(str(folder))
    owner = store.run_id
    run_id = _open_store(str(run)).run_id  # RUN.json of a run folder has it too
    if owner and owner != run_id:
        detail = f"{folder} belongs to run {owner}, not to {run_id or run}"
        return Check(False, detail, "choose another folder with weights.dir, or delete this one")
    with tempfile.TemporaryFile(dir=folder) as file:
        now = os.fstat(file.fileno()).st_mtime  # by the clock of the folder's file system
    holder = None if is_running else store.backend.locks.holder(now)
    if holder:
        detail = f"another trainer ({holder}) publishes to {folder}"
        remedy = "stop it; if it has already ended, wait 30 s, or choose another weights.dir"
        return Check(False, detail, remedy)
    return Check(True, f"belongs to run {owner}" if owner else "belongs to no run yet")


def check_space(folder: Path, model_bytes: int | None, *, num_models: int) -> Check:
    """Check the free space for `num_models` models; `model_bytes` None = not known."""
    parent = nearest_folder(folder)
    free = shutil.disk_usage(parent).free
    detail = f"{free >> 20} MiB free in {parent}"
    if model_bytes is None:
        return Check(True, f"{detail}, size of the model not known yet")
    needed = num_models * model_bytes
    detail += f", {num_models} models need {max(1, needed >> 20)} MiB"
    remedy = "free some space, or choose another folder" if free < needed else ""
    return Check(free >= needed, detail, remedy)


def check_visible(
    folder: Path, create_file: Callable[[], str], *, timeout_seconds: float = 30.0
) -> Check:
    """Check that a file which `create_file` creates on the trainer's machine appears here."""
    from peralta_zmq.weights.backends import FolderWatcher

    event_times: SimpleQueue[float] = SimpleQueue()  # monotonic seconds
    with closing(FolderWatcher(folder, lambda: event_times.put(time.monotonic()))):
        name = create_file()
        started = time.monotonic()
        while name not in os.listdir(folder):
            if time.monotonic() - started > timeout_seconds:
                remedy = "it is another folder: mount the same one, and set weights.dir to it"
                detail = (
                    f"{name}, which the trainer's machine created in its weights folder, does not "
                    f"appear in {folder} within {timeout_seconds:.0f} s"
                )
                return Check(False, detail, remedy)
            time.sleep(0.02)
        seconds = time.monotonic() - started
        try:
            event_seconds = max(0.0, event_times.get(timeout=2.0) - started)
            event = f"by event {event_seconds:.2f} s"
        except Empty:
            event = "no event"
    times = f"{seconds:.2f} s by polling, {event}"
    return Check(True, f"the same folder as the trainer's; a new file appears after {times}")


def check_address(address: str, token_file: str | None, run_id: str) -> Check:
    """Check that weights at a URL can be listed and belong to `run_id` (empty = any)."""
    store = _open_store(address, token_file)
    try:
        names = store.backend.names()
        owner = store.run_id
    except PermissionError as error:
        return Check(False, str(error), "set it to a file with the password of the trainer")
    except OSError as error:
        detail = f"{address} does not answer ({error.strerror or error})"
        return Check(False, detail, "start the trainer with weights.serve_port, or set weights.dir")
    if run_id and owner and owner != run_id:
        detail = f"{address} has the weights of run {owner}, not {run_id}"
        return Check(False, detail, "set weights.dir to where this trainer publishes")
    return Check(True, f"{address} answers and lists {len(names)} entries")


def check_speed(
    location: Path | str, model_bytes: int | None, token_file: str | None = None
) -> Check:
    """Measure how fast the newest version, or a sample file, is read. Raises OSError."""
    store = _open_store(str(location), token_file)
    folder = location if isinstance(location, Path) else None
    if version := store.newest():
        files = version.manifest.files
        largest = max(files, key=lambda name: files[name][0])  # by size
        num_bytes, seconds = _read(store.backend, f"{version.folder.name}/{largest}", folder)
        source = "of the newest version"
    elif (folder is None or folder.is_dir()) and (version_numbers := store.numbers()):
        # Versions exist, but none is readable, complete and of this run.
        detail = f"no version can be read in {store.address}, the newest is {version_numbers[-1]}"
        remedy = "start the trainer, which publishes the newest version again"
        if store.last_error:
            return Check(False, store.last_error, f"{NOT_READABLE}, or {remedy}")
        return Check(False, detail, remedy)
    elif folder is not None and os.access(folder, os.W_OK):
        sample = folder / f"doctor-read-{atomic_files.PROCESS_TAG}"
        try:
            atomic_files.replace_file(sample, os.urandom(SAMPLE_BYTES))
            num_bytes, seconds = _read(store.backend, sample.name, folder)
        finally:
            sample.unlink(missing_ok=True)
        source = "of a sample file"
    else:
        return Check(True, f"nothing to read yet in {store.address}")
    speed = num_bytes / max(seconds, 1e-6)
    load = f"; a whole model takes {model_bytes / speed:.1f} s" if model_bytes else ""
    return Check(True, f"{speed / 1e6:.0f} MB/s, reading {num_bytes / 1e6:.1f} MB {source}{load}")


def model_bytes_of(config: Config) -> int | None:
    """Bytes of a published model; None if the model is not on this machine."""
    from peralta_zmq import models
    from peralta_zmq.weights.tensor_set import FileTensors

    num_parameters = 0
    try:
        for path in models.model_folder(config.model.name).glob("*.safetensors"):
            specs = FileTensors(path).specs.values()
            num_parameters += sum(math.prod(spec.shape) for spec in specs)
    except (ConfigError, OSError, ValueError):
        return None
    return num_parameters * (4 if config.weights.dtype == "float32" else 2)


def nearest_folder(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _open_store(address: str, token_file: str | None = None) -> WeightStore:
    from peralta_zmq.weights.store import WeightStore

    return WeightStore.open(address, token=addresses.read_private_token(token_file))


def _read(backend: StorageBackend, path: str, folder: Path | None) -> tuple[int, float]:
    """Read a file of the store, up to about 256 MiB; returns bytes and seconds.

    A file in `folder` is first dropped from the page cache, where that is possible.
    """
    if folder is not None and hasattr(os, "posix_fadvise"):
        with os.fdopen(atomic_files.open_regular(folder / path), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.monotonic()
    num_bytes = 0
    for chunk in backend.read(path):
        num_bytes += len(chunk)
        if num_bytes >= 256 << 20:
            break
    return num_bytes, time.monotonic() - started
