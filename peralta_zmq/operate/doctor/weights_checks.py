"""Checks of the weights folder: the same on both machines, safe to write, fast enough.

The trainer publishes weight versions (step_00000042/) into this folder, which is usually on a NAS,
and generators load them from there, or from a URL.
"""

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

from peralta_zmq import atomic_files
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate.doctor.checks import Check

if TYPE_CHECKING:
    from peralta_zmq.weights.backends import StorageBackend
    from peralta_zmq.weights.store import WeightStore

NUM_VERSIONS, NUM_REPLICAS = 3, 2  # models that must fit into the weights folder and a local copy
SAMPLE_BYTES = 32 << 20  # written and read for a measurement
MAX_READ_BYTES = 256 << 20  # of a published version
VISIBLE_SECONDS = 30.0  # time limit for a file of the trainer's machine to appear here
EVENT_SECONDS = 2.0  # time limit for the file system event of that file after it appeared
LIST_SECONDS = 0.02  # between two listings of the folder
NOT_WRITABLE = "give this user write permission, free some space, or choose another weights.dir"
OTHER_FOLDER = "it is another folder: mount the same one, and set weights.dir to it"


def check_folder(folder: Path, *, role: str) -> Check:
    """Check that the folder can be listed; the trainer creates a missing one later."""
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
        return Check(False, detail, "mount it again, or give this user the right to read it")
    return Check(True, f"{folder} exists (file system {filesystem})")


def check_writing(folder: Path, *, num_bytes: int = SAMPLE_BYTES) -> Check:
    """Check that the folder, or its nearest parent, lets this user write, fsync and rename."""
    parent = nearest_folder(folder)
    content, started = os.urandom(num_bytes), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=parent) as work:
            created = Path(work) / "created"
            atomic_files.write_folder(created, {"sample": content}, {})
            seconds = time.monotonic() - started
            created.rename(Path(work) / "renamed")
    except OSError as error:
        detail = f"{parent} cannot be written ({error.strerror or error})"
        return Check(False, detail, NOT_WRITABLE)
    speed = num_bytes / seconds / 1e6
    return Check(True, f"write, fsync and rename work, {speed:.0f} MB/s")


def check_owner(folder: Path, run: Path, *, trainer_runs: bool) -> Check:
    """Check that the weights belong to the run in folder `run`, and no other trainer publishes.

    A trainer that publishes holds the lease of the weights folder; with `trainer_runs` that is the
    trainer of this run. Raises OSError.
    """
    store = _open_store(str(folder))
    # The run folder has a file RUN.json with the run's id, like a weights folder.
    owner, run_id = store.run_id, _open_store(str(run)).run_id
    if owner and owner != run_id:
        detail = f"{folder} belongs to run {owner}, not to {run_id or run}"
        return Check(False, detail, "choose another folder with weights.dir, or delete this one")
    holder = None if trainer_runs else store.backend.leases.holder(_folder_time(folder))
    if holder:
        detail = f"another trainer ({holder}) publishes to {folder}"
        remedy = "stop it; if it has already ended, wait 30 s, or choose another weights.dir"
        return Check(False, detail, remedy)
    return Check(True, f"belongs to run {owner}" if owner else "belongs to no run yet")


def check_space(folder: Path, model_bytes: int | None, num_models: int = NUM_VERSIONS) -> Check:
    """Check the free space for `num_models` models of `model_bytes` (None = size not known)."""
    parent = nearest_folder(folder)
    free = shutil.disk_usage(parent).free
    detail = f"{free >> 20} MiB free in {parent}"
    if model_bytes is None:
        return Check(True, f"{detail}, size of the model not known yet")
    needed = num_models * model_bytes
    detail += f", {num_models} models need {max(1, needed >> 20)} MiB"
    remedy = "free some space, or choose another folder" if free < needed else ""
    return Check(free >= needed, detail, remedy)


def check_visible(folder: Path, create_file: Callable[[], str]) -> Check:
    """Check that a file created by the trainer's machine appears here, by polling and by event.

    `create_file` makes the trainer's machine create a file in the folder, and returns its name.
    """
    from peralta_zmq.weights.backends import FolderWatcher

    event_times: SimpleQueue[float] = SimpleQueue()  # monotonic seconds
    with closing(FolderWatcher(folder, lambda: event_times.put(time.monotonic()))):
        name = create_file()
        started = time.monotonic()
        while name not in os.listdir(folder):
            if time.monotonic() - started > VISIBLE_SECONDS:
                detail = (
                    f"{name}, which the trainer's machine created in its weights folder, does not "
                    f"appear in {folder} within {VISIBLE_SECONDS:.0f} s"
                )
                return Check(False, detail, OTHER_FOLDER)
            time.sleep(LIST_SECONDS)
        seconds = time.monotonic() - started
        try:
            event_seconds = max(0.0, event_times.get(timeout=EVENT_SECONDS) - started)
            event = f"by event {event_seconds:.2f} s"
        except Empty:
            event = "no event"
    times = f"{seconds:.2f} s by polling, {event}"
    return Check(True, f"the same folder as the trainer's; a new file appears after {times}")


def check_address(address: str, token_file: str | None, run_id: str) -> Check:
    """Check that weights behind a URL can be listed and belong to the trainer's run, if known.

    Raises ConfigError for a token file or an address.
    """
    store = _open_store(address, token_file)
    try:
        names, owner = store.backend.names(), store.run_id
    except OSError as error:
        detail = f"{address} does not answer ({error.strerror or error})"
        return Check(False, detail, "start the trainer with weights.serve_port, or set weights.dir")
    if run_id and owner and owner != run_id:
        detail = f"{address} has the weights of run {owner}, not {run_id}"
        return Check(False, detail, "set weights.dir to where this trainer publishes")
    return Check(True, f"{address} answers, {len(names)} names")


def check_future_address(address: str, token_file: str | None, port: int) -> Check:
    """Check the URL of weights that the trainer will serve once it runs.

    Raises ConfigError for a token file or an address.
    """
    _open_store(address, token_file)
    detail = f"{address} cannot be checked before the trainer runs"
    served = f"it will serve them on its port {port} (weights.serve_port)"
    return Check(True, detail, f"{served}: is that port open in its firewall?")


def check_speed(
    location: Path | str, model_bytes: int | None, token_file: str | None = None
) -> Check:
    """Measure how fast the newest version is read, and so how long a generator takes to load it.

    In a folder without a version a sample file is written and read, if that is permitted. Raises
    OSError for a folder that cannot be listed.
    """
    store = _open_store(str(location), token_file)
    folder = location if isinstance(location, Path) else None
    if version := store.newest():
        files = version.manifest.files
        largest = max(files, key=lambda name: files[name][0])
        num_bytes, seconds = _read(store.backend, f"{version.folder.name}/{largest}", folder)
        source = "of the newest version"
    elif (folder is None or folder.is_dir()) and (numbers := store.numbers()):
        detail = f"no version can be read in {store.address}, the newest is {numbers[-1]}"
        return Check(False, detail, "start the trainer, which publishes the newest one again")
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
    """Bytes of a published model, from the headers of its safetensors files.

    None if the model is not on this machine.
    """
    from peralta_zmq import models
    from peralta_zmq.weights.tensor_set import MappedTensors

    num_numbers = 0
    try:
        for path in models.model_folder(config.model.name).glob("*.safetensors"):
            specs = MappedTensors(path).specs.values()
            num_numbers += sum(math.prod(spec.shape) for spec in specs)
    except (ConfigError, OSError, ValueError):
        return None
    return num_numbers * (4 if config.weights.dtype == "float32" else 2)


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _open_store(address: str, token_file: str | None = None) -> WeightStore:
    from peralta_zmq.weights.store import WeightStore

    return WeightStore.open(address, token=atomic_files.read_private_token(token_file))


def _folder_time(folder: Path) -> float:
    """Unix seconds by the clock of the folder's file system, which a NAS has of its own."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _read(backend: StorageBackend, path: str, folder: Path | None) -> tuple[int, float]:
    """Read up to MAX_READ_BYTES of a file; returns the number of bytes and seconds.

    The file is dropped from the page cache first, where the system permits that.
    """
    if folder is not None and hasattr(os, "posix_fadvise"):
        with os.fdopen(atomic_files.open_regular(folder / path), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started, num_bytes = time.monotonic(), 0
    for chunk in backend.read(path):
        num_bytes += len(chunk)
        if num_bytes >= MAX_READ_BYTES:
            break
    return num_bytes, time.monotonic() - started
