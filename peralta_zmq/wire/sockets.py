"""The four sockets: rollouts from sender to receiver, announcements from announcer to listener.

Knows ZeroMQ and addresses; knows nothing of what a message says, save that it decodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import Counter
from pathlib import Path
from typing import cast

import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.wire.messages import (
    MAX_MESSAGE,
    Announcement,
    decode_announcement,
    decode_group,
    encode_announcement,
)

KERNEL_BUFFER = 16 << 10  # bytes; larger ones would queue dozens of groups past the HWM
MAX_REASONS = 100  # distinct refusals remembered, so that a hostile sender cannot fill memory
TCP_LISTEN = "0A"  # in /proc/net/tcp
logger = logging.getLogger(__name__)


class RolloutSender:
    """Pushes groups to the trainer; `send` says no when the queue is full. Use with `closing`."""

    def __init__(self, address: str, *, hwm: int = 1) -> None:
        self._socket = _open(zmq.PUSH, hwm=hwm)
        self._socket.connect(address)

    def send(self, frame: bytes, *, timeout: float) -> bool:
        """Queue one encoded group within `timeout` seconds, or return False."""
        if not _ready(self._socket, zmq.POLLOUT, timeout):
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def close(self, linger_seconds: float = 2.0) -> None:
        """Close, giving queued groups up to `linger_seconds` to leave."""
        self._socket.close(linger=int(linger_seconds * 1000))


class RolloutReceiver:
    """Binds the trainer's PULL socket and yields valid groups of its run. Use with `closing`."""

    def __init__(self, address: str, *, run_id: str, vocab_size: int, hwm: int = 1) -> None:
        self.refused: Counter[str] = Counter()  # reason -> messages
        self._run_id, self._vocab_size = run_id, vocab_size
        self._socket = _open(zmq.PULL, hwm=hwm)
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 60),
            (zmq.TCP_KEEPALIVE_INTVL, 15),
            (zmq.TCP_KEEPALIVE_CNT, 8),
        ):
            self._socket.setsockopt(option, value)
        self.address = _bind(self._socket, address)

    def receive(self, *, timeout: float) -> tuple[RolloutGroup, bytes] | None:
        """The next valid group with its frame, or None after `timeout` seconds or a bad one."""
        if not _ready(self._socket, zmq.POLLIN, timeout):
            return None
        parts = self._socket.recv_multipart()
        try:
            if len(parts) > 1:
                raise WireError(f"{len(parts)} frames instead of one")
            group = decode_group(parts[0], vocab_size=self._vocab_size)
            if group.run_id != self._run_id:
                raise WireError(f"group of another run, {group.run_id}")
        except WireError as error:
            self._refuse(error)
            return None
        return group, parts[0]

    def close(self) -> None:
        """Close at once; what lies in the queue is lost."""
        self._socket.close(linger=0)

    def _refuse(self, error: WireError) -> None:
        reason = str(error)[:80]
        if not self.refused[reason]:
            logger.warning("message refused: %s", reason)
        if len(self.refused) < MAX_REASONS or reason in self.refused:
            self.refused[reason] += 1
        else:
            self.refused["other"] += 1


class Announcer:
    """Publishes announcements on the port after the rollouts'. Use with `closing`."""

    def __init__(self, address: str) -> None:
        self._socket = _open(zmq.PUB, hwm=100)
        self.address = _bind(self._socket, address)

    def announce(self, announcement: Announcement) -> None:
        """Tell whoever listens; never blocks."""
        self._socket.send(encode_announcement(announcement))

    def close(self, linger_seconds: float = 0.5) -> None:
        """Close, giving the last announcement time to leave."""
        self._socket.close(linger=int(linger_seconds * 1000))


class Listener:
    """Hears the trainer's announcements. Use with `closing`."""

    def __init__(self, address: str) -> None:
        self.latest: Announcement | None = None
        self.heard_at = float("-inf")  # monotonic seconds
        self._socket = _open(zmq.SUB, hwm=100)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self._socket.subscribe(b"")
        self._socket.connect(address)

    def listen(self, *, timeout: float = 0.0) -> Announcement | None:
        """The newest announcement so far, after waiting up to `timeout` seconds for one."""
        while _ready(self._socket, zmq.POLLIN, timeout):
            timeout = 0.0
            try:
                self.latest = decode_announcement(self._socket.recv())
                self.heard_at = time.monotonic()
            except WireError as error:
                logger.warning("announcement refused: %s", error)
        return self.latest

    def close(self) -> None:
        """Close at once."""
        self._socket.close(linger=0)


def next_port(address: str) -> str:
    """Where the announcements are: tcp://HOST:5555 -> tcp://HOST:5556."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


def answers(address: str, *, timeout: float = 1.0) -> bool:
    """Whether anything accepts a TCP connection at tcp://HOST:PORT."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout):
            return True
    except OSError:
        return False


def _open(kind: int, *, hwm: int) -> zmq.Socket[bytes]:
    opened = zmq.Context.instance().socket(kind)
    for option, value in (
        (zmq.LINGER, 0), (zmq.SNDHWM, hwm), (zmq.RCVHWM, hwm), (zmq.MAXMSGSIZE, MAX_MESSAGE),
        (zmq.SNDBUF, KERNEL_BUFFER), (zmq.RCVBUF, KERNEL_BUFFER),
        (zmq.RECONNECT_IVL, 100), (zmq.RECONNECT_IVL_MAX, 5000),
    ):  # fmt: skip
        opened.setsockopt(option, value)
    return opened


def _ready(opened: zmq.Socket[bytes], event: int, timeout: float) -> bool:
    return bool(opened.poll(int(timeout * 1000), event))


def _bind(opened: zmq.Socket[bytes], address: str) -> str:
    try:
        opened.bind(address)
    except zmq.ZMQError as error:
        opened.close(linger=0)
        raise WireError(_bind_failure(address, error)) from None
    return cast(bytes, opened.getsockopt(zmq.LAST_ENDPOINT)).decode()


def _bind_failure(address: str, error: zmq.ZMQError) -> str:
    if error.errno != zmq.EADDRINUSE:
        return f"cannot listen on {address} ({error}); check wire.bind and wire.port"
    port = int(address.rpartition(":")[2])
    return (
        f"port {port} is in use by {_port_holder(port)}; "
        "stop it, or choose another with --wire.port"
    )


def _port_holder(port: int) -> str:
    """'pid 123 (python bin/trainer)' where /proc tells, else 'another process'."""
    sockets = {
        f"socket:[{columns[9]}]"
        for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()
        for columns in map(str.split, table.read_text().splitlines()[1:])
        if columns[3] == TCP_LISTEN and int(columns[1].rpartition(":")[2], 16) == port
    }  # fmt: skip
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to see
            if sockets & _open_files(process):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                words = " ".join(command.decode(errors="replace").split())
                return f"pid {process.name} ({words:.60})"
    return "another process"


def _open_files(process: Path) -> set[str]:
    files: set[str] = set()
    for name in os.listdir(process / "fd"):
        with contextlib.suppress(FileNotFoundError):
            files.add(os.readlink(process / "fd" / name))
    return files
