"""ZeroMQ sockets with the protocol's options; sender and receiver of groups.

`hwm` (high-water mark) is the maximum number of messages in a socket's queue.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import Counter
from typing import cast

import psutil
import zmq

from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import WireError
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.wire.auth import Authenticator, ConnectionQuota, GeneratorKeys, ServerLimits
from peralta_zmq.wire.connection import DEFAULT_TIMING, ClientConnection, ConnectionTiming
from peralta_zmq.wire.message_fields import MAX_MESSAGE, check_owner
from peralta_zmq.wire.messages import GroupLimits, InvalidGroupError, decode_group

logger = logging.getLogger(__name__)


# Options, addresses, ports.


def open_socket(kind: int, *, hwm: int = 100, max_bytes: int = MAX_MESSAGE) -> zmq.Socket[bytes]:
    """Open a socket of the ZeroMQ type `kind` with the options of the protocol.

    `max_bytes` limits one received message; libzmq closes the connection on a larger one.
    """
    opened = zmq.Context.instance().socket(kind)
    # TCP buffers in bytes. The send buffer is small, because `hwm` does not count the groups in it:
    # dozens would wait in a larger one and become stale. With a receive buffer of less than two
    # segments of the loopback device (64 KiB each), TCP often waits 40 ms for an acknowledgement:
    # 177 to 5,000 groups per second arrived instead of 25,000.
    for option, value in (
        (zmq.LINGER, 0), (zmq.IMMEDIATE, 0), (zmq.SNDHWM, hwm), (zmq.RCVHWM, hwm),
        (zmq.SNDBUF, 16 << 10), (zmq.RCVBUF, 128 << 10), (zmq.MAXMSGSIZE, max_bytes),
        (zmq.RECONNECT_IVL_MAX, 1000),  # ms
    ):  # fmt: skip
        opened.setsockopt(option, value)
    return opened


def open_server(
    kind: int,
    address: str,
    authenticator: Authenticator | None,
    *,
    hwm: int = 100,
    max_bytes: int = MAX_MESSAGE,
) -> tuple[zmq.Socket[bytes], str, ConnectionQuota]:
    """Open a socket and bind it to `address`; returns socket, bound address and quota.

    The caller reports each message that it reads to the quota. Raises WireError.
    """
    server = open_socket(kind, hwm=hwm, max_bytes=max_bytes)
    limits = authenticator.limits if authenticator is not None else ServerLimits()
    # TCP keepalive (in seconds) detects dead peers; ZeroMQ heartbeats would disconnect busy peers.
    # HANDSHAKE_IVL (in ms) closes connections on which a client does not complete the handshake.
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 60),
        (zmq.TCP_KEEPALIVE_INTVL, 15), (zmq.TCP_KEEPALIVE_CNT, 8),
        (zmq.HANDSHAKE_IVL, int(limits.handshake_seconds * 1000)), (zmq.IPV6, int("[" in address)),
    ):  # fmt: skip
        server.setsockopt(option, value)
    # Besides the queue, libzmq holds one message that it has read from the connection.
    quota = ConnectionQuota(queue=hwm + 1, max_bytes=max_bytes, limits=limits)
    if authenticator is not None:
        authenticator.protect(server, quota)
    try:
        server.bind(address)
    except zmq.ZMQError as error:
        server.close(linger=0)
        if error.errno == zmq.EADDRINUSE:
            raise WireError(port_in_use_message(int(address.rpartition(":")[2]))) from None
        raise WireError(
            f"cannot listen on {address} ({error}); check wire.bind and wire.port"
        ) from None
    return server, cast(bytes, server.getsockopt(zmq.LAST_ENDPOINT)).decode(), quota


def ready(opened: zmq.Socket[bytes], event: int, timeout: float) -> bool:
    """Wait for `event`, POLLIN or POLLOUT; False after `timeout` seconds."""
    return bool(opened.poll(int(timeout * 1000), event))


def interface_address(bind: str) -> str:
    """The IPv4 address of a network interface, which ZeroMQ would bind; another text unchanged."""
    found = psutil.net_if_addrs().get(bind, ())
    return next((each.address for each in found if each.family == socket.AF_INET), bind)


def next_port(address: str, by: int = 1) -> str:
    """The address with the port + `by`: 1 announcements, 2 status, 3 probes."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + by}"


def port_in_use_message(port: int) -> str:
    return (
        f"port {port} is in use by {_listener_of(port)}; "
        "stop it, or choose another with --wire.port"
    )


def _listener_of(port: int) -> str:
    """The process that listens on a local port, as 'pid 123 (python bin/trainer)', if shown."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            pid = connection.pid
            is_server = connection.status == psutil.CONN_LISTEN
            if is_server and pid and connection.laddr.port == port:  # pyright: ignore
                command = " ".join(" ".join(psutil.Process(pid).cmdline()).split())
                return f"pid {pid} ({command:.60})"
    return "another process"


# Groups of rollouts.


class _Timeout:
    """A socket's SNDTIMEO or RCVTIMEO; changing the option takes as long as a receive."""

    def __init__(self, opened: zmq.Socket[bytes], option: int) -> None:
        self.socket = opened
        self._option = option
        self._seconds = -1.0

    def set(self, seconds: float) -> None:
        if seconds != self._seconds:
            self.socket.setsockopt(self._option, int(seconds * 1000))
            self._seconds = seconds


class RolloutSender:
    """A generator's PUSH socket for encoded groups. Use with `closing`."""

    def __init__(
        self,
        address: str,
        *,
        hwm: int = 1,
        keys: GeneratorKeys | None = None,
        timing: ConnectionTiming = DEFAULT_TIMING,
    ) -> None:
        self.socket = open_socket(zmq.PUSH, hwm=hwm)
        self._timeout = _Timeout(self.socket, zmq.SNDTIMEO)
        self.connection = ClientConnection(
            self.socket, address, keys, name="rollouts", timing=timing
        )

    def send(self, frame: bytes, *, timeout: float) -> bool:
        """Queue one encoded group; False if the queue stays full. Raises WireError if refused."""
        failpoint("wire.send")  # where a test can kill the process
        self._timeout.set(timeout)
        try:
            self.socket.send(frame)
        except zmq.Again:
            self.connection.check()
            return False
        return True

    def close(self, linger_seconds: float = 2.0) -> None:
        self.connection.close()
        self.socket.close(linger=int(linger_seconds * 1000))


class RolloutReceiver:
    """Binds the trainer's PULL socket and receives the groups of one run. Use with `closing`.

    Counts invalid messages in `refused`, also those under another name than the CURVE key's.
    """

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        limits: GroupLimits,
        hwm: int = 1,
        authenticator: Authenticator | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()  # reason -> number of messages
        self._run_id = run_id
        self._limits = limits
        self._has_keys = authenticator is not None and authenticator.has_keys
        self.socket, self.address, self._quota = open_server(
            zmq.PULL, address, authenticator, hwm=hwm, max_bytes=limits.max_bytes + 33
        )  # encryption adds 33 bytes
        self._timeout = _Timeout(self.socket, zmq.RCVTIMEO)

    def receive(self, *, timeout: float) -> tuple[RolloutGroup, bytes] | None:
        """The next group and its frame; None after `timeout` seconds or an invalid message.

        If only the rollouts are invalid, returns the group without them, to be counted as dropped.
        """
        self._timeout.set(timeout)  # twice as fast as to poll and then receive
        try:
            # With copy=False the result is a Frame, whose `more` needs no system call.
            first = self.socket.recv(copy=False)
        except zmq.Again:
            self._quota.on_socket_empty()
            return None
        self._quota.on_message_read()
        last = first
        count = 1
        while last.more:  # a valid message has one frame; read all frames of an invalid one
            last = self.socket.recv(copy=False)
            count = count + 1
        failpoint("wire.receive")
        try:
            return self._check_message(first, count)
        except WireError as error:
            self.refuse(error)
            return None

    def refuse(self, error: WireError) -> None:
        """Count an invalid message by reason, and log the first one of each reason."""
        reason = str(error)[:80]
        if reason not in self.refused and len(self.refused) >= 100:  # it could fill the memory
            reason = "other"
        if not self.refused[reason]:  # once per reason, so that one sender cannot fill the log
            logger.warning("message refused: %s", reason)
        self.refused[reason] += 1

    def close(self) -> None:
        self.socket.close(linger=0)

    def _check_message(self, first: zmq.Frame, count: int) -> tuple[RolloutGroup, bytes]:
        """Decode and check a message of `count` frames. Raises WireError."""
        if count > 1:
            raise WireError(f"{count} frames instead of one")
        frame = first.bytes
        invalid = None
        try:
            group = decode_group(frame, self._limits)
        except InvalidGroupError as error:
            group = error.group
            invalid = error
        # The authenticator sets User-Id to the name of the sender's key.
        check_owner(group.generator_id, str(first["User-Id"]) if self._has_keys else None)
        if group.run_id != self._run_id:
            raise WireError(f"group of another run, {group.run_id[:40]!a}")
        if invalid is not None:
            self.refuse(invalid)
        return group, frame
