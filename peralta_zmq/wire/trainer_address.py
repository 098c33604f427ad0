"""The trainer's address in a shared folder, for clusters that choose the trainer's machine.

Each start of the trainer adds a file with its address and the id of its run, and removes the older
files: a running trainer whose file is missing has been replaced. A generator reads the newest file
at its start, and again while the trainer is silent. The port of an old address may belong to
another trainer: refused connections and announcements of another run count as silence. Every start
writes a new name: over NFS, SMB or sshfs a changed file is visible late.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from peralta_zmq.addresses import listen, with_port
from peralta_zmq.atomic_files import read_chunks, replace_file
from peralta_zmq.errors import ConfigError, OutageError, WireError, failure_text
from peralta_zmq.wire.connection import ClientConnection
from peralta_zmq.wire.rollout_sockets import interface_address, next_port

NUM_PORTS = 4  # consecutive ports of a trainer
FILE_NAME = re.compile(r"trainer_(\d{8})-[0-9a-f]{8}\.address")
CONTENT = re.compile(r"(tcp://[^\s/]+:\d{1,5}) (\S+)\n")
logger = logging.getLogger(__name__)


class AddressFile:
    """The address file of a started trainer, which a later start of the run removes.

    The earlier trainer detects it with `check`. Use with `closing`.
    """

    def __init__(self, folder: Path | None, host: str, port: int, run_id: str) -> None:
        """With `folder` None, no method does anything."""
        self._folder = folder
        self._address = f"tcp://{with_port(host, port)}"
        self._run_id = run_id
        self._file: Path | None = None  # None until it is written

    def write(self) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        numbered = _numbered_files(self._folder)
        name = f"trainer_{max(numbered, default=0) + 1:08}-{os.urandom(4).hex()}.address"
        replace_file(self._folder / name, f"{self._address} {self._run_id}\n".encode())
        self._file = self._folder / name
        for older in numbered.values():
            older.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise WireError if another trainer has removed the file, OutageError for a bad folder."""
        if self._file is None:
            return
        try:
            os.utime(self._file)  # an NFS client may answer a stat from its cache
        except FileNotFoundError:
            if not self._file.parent.is_dir():
                raise OutageError(f"{self._file.parent} is gone; is it mounted?") from None
            raise WireError(
                f"another trainer continues run {self._run_id}; this one ends, because it was "
                "suspended or could not be reached for long"
            ) from None
        except OSError as error:
            raise OutageError(f"{self._file} cannot be used: {failure_text(error)}") from error

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)


def read_address(folder: Path) -> tuple[str, str] | None:
    """The newest address in `folder` and the id of its run, if there is one. Raises OSError."""
    with suppress(FileNotFoundError, ValueError):  # ValueError: no files, or not ASCII
        files = _numbered_files(folder)
        newest = files[max(files)]
        text = next(read_chunks(newest.parent, newest.name), b"")[:512].decode("ascii")
        if match := CONTENT.fullmatch(text):
            return match[1], match[2]
    return None


def find_trainer(
    address: str,
    folder: Path | None,
    *,
    report: Callable[[str], None] = logger.info,
    poll_seconds: float = 1.0,
    report_seconds: float = 5.0,
) -> TrainerAddress:
    """The trainer at `address`; with a folder, at the address that a trainer writes to it.

    Waits for the first address in the folder.
    """
    if folder is None:
        return TrainerAddress(address)
    started = reported = time.monotonic()
    while True:
        reason = "is the folder shared with the trainer's machine?"
        try:
            if newest := read_address(folder):
                return TrainerAddress(*newest, folder)
        except OSError as error:
            reason = f"it cannot be read: {failure_text(error, folder)}"
        now = time.monotonic()
        if now - reported > report_seconds:
            reported = now
            report(
                f"waiting for a trainer to write its address to {folder} ({now - started:.0f} s); "
                f"{reason}"
            )
        time.sleep(poll_seconds)


class TrainerAddress:
    """The trainer's current address, and the connections of a generator to it."""

    def __init__(
        self,
        address: str,
        run_id: str = "",
        folder: Path | None = None,
        *,
        poll_seconds: float = 1.0,  # between two listings of the folder
    ) -> None:
        """`folder` has newer addresses; None = the address does not change."""
        self.current = address
        self._run_id = run_id
        self._folder = folder
        self._poll_seconds = poll_seconds
        self._polled_at = time.monotonic()
        self._connections: list[tuple[ClientConnection, int]] = []

    def add(self, connection: ClientConnection, *, port_offset: int = 0) -> None:
        """Keep a connection connected to the current address."""
        connection.raises_refusals = self._folder is None
        self._connections.append((connection, port_offset))

    def has_run(self, run_id: str) -> bool:
        return self._folder is None or run_id == self._run_id

    def poll(self, *, silent_seconds: float) -> None:
        """Connect to the newest address if the trainer has been silent; call this often."""
        now = time.monotonic()
        if self._folder is None or silent_seconds < 3.0:  # announcements are a second apart
            return
        if now - self._polled_at < self._poll_seconds:
            return
        self._polled_at = now
        newest = None
        with suppress(OSError):  # unreadable for now
            newest = read_address(self._folder)
        if newest is None or newest == (self.current, self._run_id):
            return
        address, self._run_id = newest
        logger.info("the trainer has moved: from=%s to=%s", self.current, address)
        self.current = address
        for connection, port_offset in self._connections:
            connection.move(next_port(address, port_offset))


def first_free_port(host: str, port: int) -> int:
    """The first of NUM_PORTS free consecutive ports from `port` on; `port` if there are none."""
    for first in range(port, min(port + 100 * NUM_PORTS, 65_533), NUM_PORTS):
        if all(_is_free(host, first + offset) for offset in range(NUM_PORTS)):
            return first
    return port


def _is_free(host: str, port: int) -> bool:
    try:
        with listen(interface_address(host), port, host_setting="wire.bind"):
            return True
    except (OSError, ConfigError):
        return False


def _numbered_files(folder: Path) -> dict[int, Path]:
    matches = map(FILE_NAME.fullmatch, (path.name for path in folder.iterdir()))
    return {int(match[1]): folder / match[0] for match in matches if match}
