"""Probes: requests by which bin/doctor tests the link to the trainer's machine.

The server is the trainer, or bin/doctor there. "info" returns its identity and clock; "create_file"
creates a file in the weights folder, which the client then looks for; "discard" only carries data.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, get_args

import msgpack
import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.wire.auth import Authenticator, GeneratorKeys
from peralta_zmq.wire.connection import ClientConnection, ConnectionTiming
from peralta_zmq.wire.message_fields import decode_fields, encode_fields, unpack
from peralta_zmq.wire.rollout_sockets import open_server, open_socket, ready

POLL_SECONDS = 0.2  # interval of checks for `close`, a refused connection and the deadline
CHUNK = 64 << 10  # bytes of the payload of one request in a throughput measurement
NUM_IN_FLIGHT = 8  # unanswered requests in a throughput measurement; 1 would measure latency
PROBE_TIMING = ConnectionTiming(patience_seconds=3.0)  # short, because a person waits
ProbeRequest: TypeAlias = Literal["info", "create_file", "discard"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """Identity of the server and the result of a request."""

    run: str  # name of the run
    role: str = "trainer"  # program that answers: "trainer" or "doctor"
    run_id: str = ""  # empty if bin/doctor answers
    time: float = 0.0  # unix seconds of the reply, by the server's clock
    created_file: str = ""  # name of the file that "create_file" has made
    error: str = ""  # why "create_file" made no file; empty after a success


def encode_probe_request(request: ProbeRequest, payload: bytes = b"") -> bytes:
    return cast(bytes, msgpack.packb({"request": request, "payload": payload}))


def decode_probe_request(frame: bytes) -> ProbeRequest:
    request = unpack(frame).get("request")
    if request not in get_args(ProbeRequest):
        raise WireError(f"malformed request: {request!a:.40}")
    return cast(ProbeRequest, request)


def decode_probe_reply(frame: bytes) -> ProbeReply:

    def check(reply: ProbeReply) -> None:
        if not math.isfinite(reply.time):
            raise ValueError("time is not finite")

    return decode_fields(frame, ProbeReply, check)


class ProbeServer:
    """Answers probes in a thread, also while the trainer computes. Use with `closing`.

    `create_file` creates a file in the weights folder and returns its name; it may raise OSError.
    """

    def __init__(
        self,
        address: str,
        reply: ProbeReply,
        *,
        create_file: Callable[[], str] | None = None,
        authenticator: Authenticator | None = None,
    ) -> None:
        self.reply = reply
        self._create_file = create_file
        self._closed = threading.Event()
        # A REP drops a reply if the queue seems full, and libzmq reports that messages have left a
        # queue only after half of them have left: twice as many fit.
        self.socket, self.address, self._quota = open_server(
            zmq.REP, address, authenticator, hwm=2 * NUM_IN_FLIGHT, max_bytes=CHUNK + 1024
        )
        self._thread = threading.Thread(target=self._serve, name="probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2.0)  # `create_file` can block on an unresponsive mount

    def _serve(self) -> None:
        while not self._closed.is_set():
            ready(self.socket, zmq.POLLIN, POLL_SECONDS)
            try:
                # NOBLOCK: a REP is also ready for a request without delimiter, which it discards.
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._quota.on_socket_empty()
                continue
            self._quota.on_message_read()
            self.socket.send(self._answer(frames))
        self.socket.close(linger=0)

    def _answer(self, frames: list[bytes]) -> bytes:
        """The encoded reply; empty for an invalid request, as a REP socket must reply."""
        try:
            request = decode_probe_request(frames[0])
        except WireError as error:
            logger.debug("probe refused: %s", error)
            return b""
        name, error = self._new_file() if request == "create_file" else ("", "")
        reply = replace(self.reply, time=time.time(), created_file=name, error=error)
        return encode_fields(reply)

    def _new_file(self) -> tuple[str, str]:
        if self._create_file is None:
            return "", "no weights folder to create a file in"
        try:
            return self._create_file(), ""
        except OSError as error:
            return "", f"the weights folder cannot be written ({error.strerror or error})"


class ProbeClient:
    """Sends requests to a ProbeServer. Use with `closing`."""

    def __init__(
        self,
        address: str,
        *,
        keys: GeneratorKeys | None = None,
        timing: ConnectionTiming = PROBE_TIMING,
    ) -> None:
        self._address = address
        self.socket = open_socket(zmq.DEALER)  # a REQ could have only one request in flight
        self._connection = ClientConnection(self.socket, address, keys, name="probe", timing=timing)

    def request(self, kind: ProbeRequest, *, timeout: float) -> tuple[ProbeReply, float]:
        """Return the reply to a request and the round-trip time in seconds. Raises WireError."""
        started = time.monotonic()
        self._send(encode_probe_request(kind), started + timeout)
        return self._receive(started + timeout), time.monotonic() - started

    def measure_throughput(self, *, seconds: float, timeout: float) -> float:
        """Send data for `seconds`; returns bytes per second. Raises WireError."""
        frame = encode_probe_request("discard", bytes(CHUNK))
        started = time.monotonic()
        sent = 0
        received = 0
        while time.monotonic() < started + seconds or received < sent:
            while sent - received < NUM_IN_FLIGHT and time.monotonic() < started + seconds:
                self._send(frame, started + timeout)
                sent += 1
            self._receive(started + timeout)
            received += 1
        return received * CHUNK / (time.monotonic() - started)

    def close(self) -> None:
        self._connection.close()
        self.socket.close(linger=0)

    def _send(self, frame: bytes, deadline: float) -> None:
        while True:
            self._wait(zmq.POLLOUT, deadline)
            # NOBLOCK: the connection may be refused after `_wait`.
            with contextlib.suppress(zmq.Again):
                # REP expects the empty delimiter of a REQ.
                self.socket.send_multipart([b"", frame], zmq.NOBLOCK)
                return

    def _receive(self, deadline: float) -> ProbeReply:
        self._wait(zmq.POLLIN, deadline)
        return decode_probe_reply(self.socket.recv_multipart()[-1])

    def _wait(self, event: int, deadline: float) -> None:
        """Wait for POLLIN or POLLOUT. Raises WireError at the deadline, or if refused."""
        while not ready(self.socket, event, POLL_SECONDS):
            self._connection.check()
            if time.monotonic() > deadline:
                raise WireError(
                    f"{self._address} does not answer the probe; use the same version on both "
                    "sides, with no proxy between them"
                )
