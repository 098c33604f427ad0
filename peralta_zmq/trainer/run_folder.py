"""The run folder and the claim on the weights folder: lock, identity (RUN.json), settings."""

from __future__ import annotations

import fcntl
import json
import logging
import time
import uuid
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO

from peralta_zmq import atomic_files
from peralta_zmq.config import RESOLVED, Config, write_resolved
from peralta_zmq.errors import ConfigError, GoneError, JournalError, StoreError
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.trackers import open_trackers
from peralta_zmq.trainer.journal import Journal
from peralta_zmq.trainer.session import StopSignal
from peralta_zmq.weights.store import WeightStore

IDENTITY, LOCK = "RUN.json", "lock"
LOCK_RETRY_SECONDS = 0.1  # the dashboard and bin/doctor hold the lock for less when they test it
WARNING_SECONDS = 30.0  # interval of warnings that the weights folder is gone
logger = logging.getLogger(__name__)


def open_run_folder(
    config: Config, stack: ExitStack, store: WeightStore, run_id: str, stop: StopSignal
) -> tuple[RunLog, Journal]:
    """Lock the run folder, claim the weights folder, and open the run log and the journal.

    Raises ConfigError or StoreError, after removing a folder that this call created.
    """
    folder = config.run_folder
    is_new = not (folder / IDENTITY).exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(closing(lock(folder)))
        if is_new:  # before the claim: its run_id must survive a kill right after the claim
            write_identity(folder, run_id=run_id, weights=None)
        if not (folder / RESOLVED).exists():  # a start may be killed between the two writes
            write_resolved(config, folder)
        _claim_weights(store, config, run_id, stop)
    except StoreError:
        if is_new:
            _remove_new(folder)
        raise
    except OSError as error:
        raise ConfigError(
            f"run folder {folder} cannot be written ({error.strerror}); "
            "choose another with --run.dir"
        ) from None
    journal = stack.enter_context(closing(Journal(folder / "journal")))
    settings, max_steps = config.model_dump(mode="json"), config.train.max_steps
    trackers = open_trackers(config.run.report_to, folder=folder, run_id=run_id, settings=settings)
    run_log = RunLog(folder, run=config.run.name, max_steps=max_steps, trackers=trackers)
    return stack.enter_context(run_log), journal


def lock(folder: Path) -> IO[bytes]:
    """Lock a run folder until the returned file is closed. Raises ConfigError when it is locked."""
    opened = (folder / LOCK).open("ab")
    for wait_seconds in (LOCK_RETRY_SECONDS, 0.0):
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return opened
        except BlockingIOError:
            time.sleep(wait_seconds)
    opened.close()
    raise ConfigError(f"another trainer works in {folder}; stop it, or choose another --run.name")


def run_id_of(folder: Path, name: str) -> str:
    """The id of the run in `folder`, or a new one. Raises JournalError if RUN.json is damaged."""
    return _read_identity(folder, "run_id") or f"{name}-{uuid.uuid4().hex[:8]}"


def write_identity(folder: Path, *, run_id: str, weights: str | None) -> None:
    """Record the run's id and the weights folder it has published to. Raises OSError."""
    text = json.dumps({"run_id": run_id, "weights": weights}) + "\n"
    atomic_files.replace_file(folder / IDENTITY, text.encode())


def _read_identity(folder: Path, field: str) -> str | None:
    file = folder / IDENTITY
    try:
        value = json.loads(file.read_text("utf-8"))[field]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JournalError(
            f"{file} cannot be read ({error}); put a copy back: the run_id in it is that of "
            "manifest.json in each checkpoint"
        ) from None
    return None if value is None else str(value)


def _claim_weights(store: WeightStore, config: Config, run_id: str, stop: StopSignal) -> None:
    """Claim the weights folder; wait if the folder of earlier sessions is not mounted.

    A folder inside the run folder is created again instead: it is no mount, and users delete it
    to free space. Raises StoreError.
    """
    warned_at = float("-inf")
    recorded = _read_identity(config.run_folder, "weights")
    known = recorded == store.address and bool(config.weights.dir)
    while True:
        try:
            store.claim(run_id, known=known)
            break
        except GoneError as error:
            if time.monotonic() - warned_at > WARNING_SECONDS:
                warned_at = time.monotonic()
                logger.warning("%s. Waiting for it", error)
            stop.pause(1.0)
    if not known:
        write_identity(config.run_folder, run_id=run_id, weights=store.address)


def _remove_new(folder: Path) -> None:
    for name in (IDENTITY, RESOLVED, LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # the supervisor's logs may be in it
        folder.rmdir()
