"""One ZeroMQ socket, opened with the options of the protocol, bound or explained.

Knows options, addresses and ports; knows nothing of messages.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import cast

import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.wire.validation import MAX_MESSAGE

SEND_BUFFER = 16 << 10  # bytes; more would queue dozens of groups
# With a window below two segments of the loopback (64 KiB each) TCP waits 40 ms for an
# acknowledgement again and again: 177 to 5,000 groups a second instead of 25,000.
RECEIVE_BUFFER = 128 << 10
# Milliseconds between two tries, doubled; at 5000 a short run ended before it was heard.
RECONNECT, RECONNECT_MAX = 100, 1000
HINTS_HWM = 100  # announcements or counters that wait for a slow reader
TCP_LISTEN = "0A"  # in /proc/net/tcp


def open_socket(kind: int, *, hwm: int) -> zmq.Socket[bytes]:
    """A socket of this kind with the options of the protocol."""
    opened = zmq.Context.instance().socket(kind)
    for option, value in (
        (zmq.LINGER, 0), (zmq.IMMEDIATE, 0), (zmq.SNDHWM, hwm), (zmq.RCVHWM, hwm),
        (zmq.SNDBUF, SEND_BUFFER), (zmq.RCVBUF, RECEIVE_BUFFER), (zmq.MAXMSGSIZE, MAX_MESSAGE),
        (zmq.RECONNECT_IVL, RECONNECT), (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX),
    ):  # fmt: skip
        opened.setsockopt(option, value)
    return opened


def keep_alive(opened: zmq.Socket[bytes]) -> None:
    """Let the kernel notice a peer that is gone; heartbeats would cut off a busy one."""
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 60),
        (zmq.TCP_KEEPALIVE_INTVL, 15), (zmq.TCP_KEEPALIVE_CNT, 8),
    ):  # fmt: skip
        opened.setsockopt(option, value)


def ready(opened: zmq.Socket[bytes], event: int, timeout: float) -> bool:
    """Whether `event` comes within `timeout` seconds."""
    return bool(opened.poll(int(timeout * 1000), event))


def wait_at_most(opened: zmq.Socket[bytes], option: int, timeout: float, before: float) -> float:
    """Seconds that it waits in RCVTIMEO or SNDTIMEO from now on; `before` is what it waited."""
    if timeout != before:  # to set the option costs as much as to receive
        opened.setsockopt(option, int(timeout * 1000))
    return timeout


def bind(opened: zmq.Socket[bytes], address: str) -> str:
    """The address that it listens on. Raises WireError, having closed the socket."""
    try:
        opened.bind(address)
    except zmq.ZMQError as error:
        opened.close(linger=0)
        raise WireError(_bind_failure(address, error)) from None
    return cast(bytes, opened.getsockopt(zmq.LAST_ENDPOINT)).decode()


def next_port(address: str, by: int = 1) -> str:
    """Announcements are on the port after the rollouts', then counters, then hellos."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + by}"


def accepts_connection(address: str, *, timeout: float = 1.0) -> bool:
    """Whether anything accepts a TCP connection at tcp://HOST:PORT."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout):
            return True
    except OSError:
        return False


def greets(address: str, *, timeout: float = 0.5) -> bool:
    """Whether a ZeroMQ socket of a program that runs is at tcp://HOST:PORT: it speaks first. What
    forwards to a dead one hangs up, and the kernel of a frozen one only accepts.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout) as link:
            return link.recv(1) == b"\xff"
    except OSError:
        return False


def _bind_failure(address: str, error: zmq.ZMQError) -> str:
    if error.errno != zmq.EADDRINUSE:
        return f"cannot listen on {address} ({error}); check wire.bind and wire.port"
    return port_in_use_message(int(address.rpartition(":")[2]))


def port_in_use_message(port: int) -> str:
    """What to tell a person about a port of this machine that is in use."""
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
