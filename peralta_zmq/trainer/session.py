"""Resources of a trainer session: run folder, weights folder, sockets, stop flag.

A session is one start of the trainer. In an outage, a disk or a mounted folder of the run cannot be
used. The trainer of an existing run waits until it is over, also at the start of a session. The
first start of a new run fails instead, because the settings may be wrong.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar

from peralta_zmq import addresses, atomic_files, errors, models, wire
from peralta_zmq.addresses import with_port
from peralta_zmq.atomic_files import FIRST_OUTAGE_DELAY, LONGEST_OUTAGE_DELAY
from peralta_zmq.config import RESOLVED, Config, earlier_config, write_resolved
from peralta_zmq.config.resolved import REMEDY
from peralta_zmq.errors import ConfigError, JournalError, OutageError, StoreError, failure_text
from peralta_zmq.observe.metrics import LOCK
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.trackers import open_trackers
from peralta_zmq.trainer.journal import JOURNAL, Journal
from peralta_zmq.weights.backends import ProbeFile
from peralta_zmq.weights.store import WeightStore

IDENTITY = "RUN.json"  # the run's id, its weights folder, and properties of the tokenizer
Result = TypeVar("Result")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Session:
    """Objects that all parts of the trainer share during one session."""

    config: Config
    run_id: str
    run_log: RunLog
    announcer: ProgressAnnouncer
    address_file: wire.AddressFile
    stop: StopSignal

    @property
    def folder(self) -> Path:
        return self.config.run_folder

    def check_address(self) -> None:
        """Raise WireError if another trainer continues the run; wait if that is unknown."""
        self.wait_out(self.address_file.check)

    def wait_out(self, operation: Callable[[], Result]) -> Result:
        """As the function `wait_out`; reports the outage in terminal and events.jsonl."""

        def report(text: str) -> None:
            self.announcer.publish(waiting=False)  # the trainer reads no groups meanwhile
            self.run_log.event("outage", reason=text)
            self.run_log.note(text)

        return wait_out(operation, folder=self.folder, stop=self.stop, report=report)


class StopSignal:
    """Sets `requested` on SIGINT or SIGTERM; a second signal of the same kind ends the process."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a stop is requested."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.requested:
            time.sleep(0.1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # the next one ends the process
        self.requested = True


class ProgressAnnouncer:
    """Publishes announcements, from any thread."""

    def __init__(
        self, publisher: wire.AnnouncementPublisher, announcement: wire.Announcement
    ) -> None:
        self.announcement = announcement
        self._publisher = publisher
        self._lock = threading.Lock()

    def publish(self, **fields: Any) -> None:
        with self._lock:
            self.announcement = replace(self.announcement, **fields)
            self._publisher.publish(self.announcement)


# Outages.


def wait_out(
    operation: Callable[[], Result],
    *,
    folder: Path,
    stop: StopSignal,
    report: Callable[[str], None] = logger.warning,
) -> Result:
    """Retry `operation` while it raises OutageError or OSError; return its result.

    Raises OutageError if a stop is requested during the outage, and ConfigError if waiting does not
    end it.
    """
    started = time.monotonic()
    delay = FIRST_OUTAGE_DELAY
    reported_at = float("-inf")
    while True:
        try:
            result = operation()
        except (OutageError, OSError) as error:
            text = str(error)
            cause = error.__cause__
            if isinstance(error, OSError):
                cause = error
                text = f"{error.filename or folder} cannot be used: {failure_text(error, folder)}"
            now = time.monotonic()
            if errors.is_permanent(cause):
                raise ConfigError(text) from None
            if stop.requested:
                raise OutageError(text) from None
            if now - reported_at > 30.0:
                reported_at = now
                report(f"{text}. Waiting, nothing is lost")
        else:
            if reported_at > 0.0:
                report(f"the outage is over after {time.monotonic() - started:.0f} s")
            return result
        stop.pause(delay)
        delay = min(LONGEST_OUTAGE_DELAY, 2 * delay)


# The run folder, its identity and its claim on the weights folder.


@dataclass(frozen=True, slots=True)
class RunIdentity:
    run_id: str
    is_new: bool  # `run_id` is not from RUN.json
    previous_config: Config  # settings of the last session of the run; of a new run, its own
    lock: IO[bytes] | None = None  # lock of the run folder if it is locked already
    tokenizer: str | None = None  # models.tokenizer_identity


def identify_run(config: Config, stack: ExitStack, stop: StopSignal) -> RunIdentity:
    """Read the identity of the run, or choose a new one. Raises ConfigError.

    With wire.address_dir, a cluster may start a second trainer while the first one starts a new
    run. Therefore the folder of a new run is then locked first, until `stack` closes.
    """
    folder = config.run_folder

    def read() -> tuple[str | None, Config]:
        return known_run_id(folder), earlier_config(config, folder)

    locked = None
    (known_id, previous) = wait_out(read, folder=folder, stop=stop)
    if known_id is None and config.address_folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable_error(folder, error) from None
        locked = stack.enter_context(wait_out(lambda: _lock(config), folder=folder, stop=stop))
        known_id, previous = wait_out(read, folder=folder, stop=stop)
    run_id = known_id or f"{config.run.name}-{uuid.uuid4().hex[:8]}"
    return RunIdentity(run_id, known_id is None, previous, locked)


def open_run_folder(
    config: Config,
    stack: ExitStack,
    store: WeightStore,
    identity: RunIdentity,
    address_file: wire.AddressFile,
    stop: StopSignal,
) -> tuple[RunLog, Journal]:
    """Lock the run folder, claim the weights folder, open the run log and the journal.

    For a new run, raises ConfigError or StoreError if the folders cannot be used; after StoreError
    the new files are removed. Raises ConfigError if the run was made with another tokenizer.
    """
    folder = config.run_folder

    def waiting(operation: Callable[[], Result]) -> Result:
        return wait_out(operation, folder=folder, stop=stop)

    try:
        if identity.is_new:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(config, identity))
        else:
            stack.enter_context(waiting(lambda: _locked(config, identity)))
        waiting(lambda: _claim_weights(store, config, identity))
    except StoreError:
        if identity.is_new:
            for name in (IDENTITY, RESOLVED, LOCK):
                (folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # not empty: for example, it has logs of the supervisor
                folder.rmdir()
        raise
    except OSError as error:  # only for a new run: `waiting` raises OutageError
        raise _unwritable_error(folder, error) from None
    waiting(address_file.write)  # an earlier trainer then writes no more records
    trackers = open_trackers(
        config.run.report_to,
        folder=folder,
        run_id=identity.run_id,
        project=os.environ.get("WANDB_PROJECT") or "peralta_zmq",
        settings=config.model_dump(mode="json"),
    )
    journal = stack.enter_context(
        closing(waiting(lambda: Journal(folder / JOURNAL, before_write=address_file.check)))
    )
    run_log = waiting(
        lambda: RunLog(
            folder, run=config.run.name, max_steps=config.train.max_steps, trackers=trackers
        )
    )
    return stack.enter_context(run_log), journal


def _unwritable_error(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run folder {folder} cannot be written ({failure_text(error)}); "
        "choose another with --run.dir"
    )


def _locked(config: Config, identity: RunIdentity) -> IO[bytes]:
    """Lock the run folder until the returned file is closed; write RUN.json and config.toml.

    Raises OutageError if RUN.json of an existing run is missing: the disk was unmounted. Raises
    ConfigError (with wire.address_dir, OutageError) if another trainer has the lock.
    """
    folder = config.run_folder
    if not identity.is_new and not (folder / IDENTITY).exists():
        raise OutageError(f"{IDENTITY} in run folder {folder} is gone; is it mounted?")
    with ExitStack() as stack:
        locked = identity.lock or stack.enter_context(_lock(config))
        # Before the claim of the weights folder: the run_id must survive a kill right after it.
        if identity.is_new:
            if known_run_id(folder) is not None:
                raise _in_use_error(folder)
            write_identity(folder, run_id=identity.run_id, weights=None)
        check_tokenizer(config, identity.tokenizer)
        if not (folder / RESOLVED).exists():  # an earlier start may have been killed before this
            write_resolved(config, folder)
        stack.pop_all()  # without an error, the lock stays
    return locked


def check_tokenizer(config: Config, identity: str | None) -> None:
    """Raise ConfigError if the run was made with another tokenizer."""
    known = _read_identity(config.run_folder, "tokenizer")
    if changes := models.tokenizer_changes(known, identity):
        raise ConfigError(
            f"files of model.name {config.model.name} have changed since run folder "
            f"{config.run_folder} was made: {changes}; put them back, or {REMEDY}"
        )


def _lock(config: Config) -> IO[bytes]:
    """Lock the run folder; OutageError if another trainer of a cluster has the lock."""
    try:
        return lock(config.run_folder)
    except ConfigError as error:
        # A cluster may start a job again while its processes on a lost machine still run.
        if config.address_folder is not None:
            raise OutageError(str(error)) from None
        raise


def lock(folder: Path) -> IO[bytes]:
    """Lock a run folder until the returned file is closed. Raises ConfigError."""
    opened = (folder / LOCK).open("ab")
    for wait_seconds in (0.1, 0.0):  # dashboard and bin/doctor hold it for less, to test it
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return opened
        except BlockingIOError:
            time.sleep(wait_seconds)
    opened.close()
    raise _in_use_error(folder)


def _in_use_error(folder: Path) -> ConfigError:
    return ConfigError(f"another trainer uses {folder}; stop it, or choose another --run.name")


def known_run_id(folder: Path) -> str | None:
    """The run's id in RUN.json; None for a new run. Raises OSError or JournalError."""
    return _read_identity(folder, "run_id")


def write_identity(
    folder: Path, *, run_id: str, weights: str | None, tokenizer: str | None = None
) -> None:
    """Write RUN.json; `weights` is the address of the claimed weights folder. Raises OSError."""
    text = json.dumps({"run_id": run_id, "weights": weights, "tokenizer": tokenizer}) + "\n"
    atomic_files.replace_file(folder / IDENTITY, text.encode())


def _read_identity(folder: Path, field: str) -> str | None:
    file = folder / IDENTITY
    try:
        value = atomic_files.parse_object(file.read_bytes())[field]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError) as error:
        raise JournalError(
            f"{file} cannot be read ({error}); put a copy back: the run_id in it is that of "
            "manifest.json in each checkpoint"
        ) from None
    return None if value is None else str(value)


def _claim_weights(store: WeightStore, config: Config, identity: RunIdentity) -> None:
    """Claim the weights folder for the run. Raises StoreError if another run has it."""
    folder = config.run_folder
    run_id = identity.run_id
    is_known = _read_identity(folder, "weights") == store.address
    # If a known folder of weights.dir is missing, its file system is not mounted. The default
    # folder is created again, because users delete it to free space.
    store.claim(run_id, known=is_known, create=not (is_known and config.weights.dir))
    if not is_known:
        write_identity(folder, run_id=run_id, weights=store.address, tokenizer=identity.tokenizer)


# Sockets and dashboard.


def open_authenticator(
    config: Config, stack: ExitStack, stop: StopSignal, *, is_new: bool
) -> wire.Authenticator:
    """Accept the holders of the keys; waits while those of an existing run cannot be read.

    Raises OutageError for those of a new run, and WireError if a key cannot be used.
    """

    def start() -> wire.Authenticator:
        return wire.Authenticator(config.keys_folder)

    authenticator = start() if is_new else wait_out(start, folder=config.run_folder, stop=stop)
    return stack.enter_context(closing(authenticator))


def open_sockets(
    config: Config,
    stack: ExitStack,
    run_id: str,
    limits: wire.GroupLimits,
    train_set_digest: bytes,
    authenticator: wire.Authenticator,
) -> tuple[wire.RolloutReceiver, wire.GeneratorStatusReceiver, ProgressAnnouncer, wire.AddressFile]:
    """Bind the four ports from wire.port on, or the first free ones. WireError if one is in use."""
    bind = config.wire.bind
    port = config.wire.port
    if config.address_folder is not None:  # generators find any port
        port = wire.first_free_port(bind, port)
    address = f"tcp://{with_port(bind, port)}"
    receiver = wire.RolloutReceiver(
        address, run_id=run_id, limits=limits, authenticator=authenticator
    )
    stack.enter_context(closing(receiver))
    publisher = wire.AnnouncementPublisher(wire.next_port(address), authenticator=authenticator)
    stack.enter_context(closing(publisher))
    statuses = wire.GeneratorStatusReceiver(
        wire.next_port(address, 2), run_id=run_id, authenticator=authenticator
    )
    stack.enter_context(closing(statuses))
    info = wire.ProbeReply(config.run.name, run_id=run_id)
    create = None
    if "://" not in config.weights_address:  # a folder, not a bucket
        create = stack.enter_context(closing(ProbeFile(config.weights_folder))).create
    probes = wire.ProbeServer(
        wire.next_port(address, 3), info, create_file=create, authenticator=authenticator
    )
    stack.enter_context(closing(probes))
    announcement = wire.Announcement(
        run_id,
        incarnation=os.urandom(8),
        train_set_digest=train_set_digest,
        max_group_bytes=limits.max_bytes,
    )
    address_file = wire.AddressFile(config.address_folder, config.wire.host, port, run_id)
    stack.enter_context(closing(address_file))
    return receiver, statuses, ProgressAnnouncer(publisher, announcement), address_file


def open_dashboard(config: Config, stack: ExitStack, run_log: RunLog) -> None:
    """Serve the dashboard in a thread; report a failure and continue without it."""
    settings = config.dashboard
    if settings.port is None:
        return
    try:
        from peralta_zmq.observe.dashboard.app import Dashboard

        token = addresses.read_private_token(settings.token_file, option="dashboard.token_file")
        dashboard = Dashboard(
            [config.run_folder], host=settings.host, port=settings.port, token=token, live=True
        )
        stack.enter_context(closing(dashboard))
        dashboard.server.start()
    except Exception as error:  # noqa: BLE001 - no failure of the dashboard may stop the training
        reason = error if isinstance(error, ConfigError) else repr(error)
        run_log.note(f"no dashboard: {reason}")
        return
    for line in dashboard.banner:
        run_log.note(line)
