"""Probe: the doctor on a generator's machine tests the connection to the trainer's machine.

The doctor is the diagnostic command bin/doctor. The trainer, or the doctor on its machine, answers
with its identity and clock, creates a file in the weights folder on request (the other side then
looks for it), and receives data for a measurement of the throughput (REQ/REP).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, cast, get_args

import msgpack
import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.wire.auth import CurveAuthenticator, GeneratorKeys, HandshakeMonitor
from peralta_zmq.wire.message_fields import check_facts, decode_fields, encode_fields, unpack
from peralta_zmq.wire.sockets import open_server, open_socket, ready

POLL_SECONDS = 0.2  # maximum delay of closing the server and of reporting a refusal
MAX_REQUEST = 256 << 10  # bytes
CHUNK = 64 << 10  # bytes of one request of a throughput measurement
NUM_IN_FLIGHT = 8  # requests of a throughput measurement without a reply
ProbeRequest: TypeAlias = Literal["info", "create_file", "discard"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """Identity of the server and the result of a request."""

    run: str  # name of the run
    role: str = "trainer"  # or doctor
    run_id: str = ""  # empty if a doctor answers
    time: float = 0.0  # unix seconds of the reply
    worker_info: dict[str, str] = field(default_factory=dict[str, str])  # as in GeneratorStatus
    created_file: str = ""  # for "create_file": name of the new file in the weights folder
    error: str = ""  # why it was not created


def encode_probe_request(request: ProbeRequest, payload: bytes = b"") -> bytes:
    """A request; the payload is ignored."""
    return cast(bytes, msgpack.packb({"request": request, "payload": payload}))


def decode_probe_request(frame: bytes) -> ProbeRequest:
    """The request in a frame. Raises WireError if it is unknown."""
    request = unpack(frame).get("request")
    if request not in get_args(ProbeRequest):
        raise WireError(f"malformed request: {request!a:.40}")
    return cast(ProbeRequest, request)


def decode_probe_reply(frame: bytes) -> ProbeReply:
    """The reply in a frame of `encode_fields`; unknown fields are ignored.

    Raises WireError if `run` is missing or a field has a wrong type or is too long.
    """
    return decode_fields(frame, ProbeReply, _check)


def _check(reply: ProbeReply) -> None:
    check_facts(reply.worker_info)
    if not math.isfinite(reply.time):
        raise ValueError("time is not finite")


class ProbeServer:
    """Answers probes in a thread, also while the trainer computes. Use with `closing`.

    Each answer is `reply` with the time. `create_file` creates a file in the weights folder and
    returns its name; it may raise OSError.
    """

    def __init__(
        self,
        address: str,
        reply: ProbeReply,
        *,
        create_file: Callable[[], str] | None = None,
        authenticator: CurveAuthenticator | None = None,
    ) -> None:
        self.reply = reply
        self._create_file, self._closed = create_file, threading.Event()
        self._socket, self.address = open_server(
            zmq.REP, address, authenticator, max_bytes=MAX_REQUEST
        )
        self._thread = threading.Thread(target=self._work, name="probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; a thread that is blocked in a dead mount is left behind."""
        self._closed.set()
        self._thread.join(timeout=2.0)

    def _work(self) -> None:
        while not self._closed.is_set():
            if ready(self._socket, zmq.POLLIN, POLL_SECONDS):
                self._socket.send(self._answer(self._socket.recv_multipart()))
        self._socket.close(linger=0)

    def _answer(self, frames: list[bytes]) -> bytes:
        """The encoded reply; empty for an invalid request, since REP must send something."""
        try:
            request = decode_probe_request(frames[0])
        except WireError as error:
            logger.debug("probe refused: %s", error)
            return b""
        name, error = self._new_file() if request == "create_file" else ("", "")
        reply = replace(self.reply, time=time.time(), created_file=name, error=error)
        return encode_fields(reply)

    def _new_file(self) -> tuple[str, str]:
        """The name of a new file, or an error."""
        if self._create_file is None:
            return "", "it has no weights folder to create a file in"
        try:
            return self._create_file(), ""
        except OSError as error:
            return "", f"it cannot write its weights folder ({error.strerror or error})"


class ProbeClient:
    """Sends requests to a ProbeServer. Use with `closing`."""

    def __init__(self, address: str, *, keys: GeneratorKeys | None = None) -> None:
        self._address = address
        self._socket = open_socket(zmq.DEALER)
        self._monitor = HandshakeMonitor(self._socket, address, keys)
        self._socket.connect(address)

    def request(self, kind: ProbeRequest, *, timeout: float) -> tuple[ProbeReply, float]:
        """The reply and the round-trip time in seconds.

        Raises WireError without a reply within `timeout` seconds, or if the connection is refused.
        """
        started = time.monotonic()
        self._send(encode_probe_request(kind), started + timeout)
        return self._receive(started + timeout), time.monotonic() - started

    def measure_throughput(self, *, seconds: float, timeout: float) -> float:
        """Bytes per second to the server, measured for `seconds`. Raises WireError as `request`."""
        frame = encode_probe_request("discard", bytes(CHUNK))
        started, sent, received = time.monotonic(), 0, 0
        while time.monotonic() < started + seconds or received < sent:
            while sent - received < NUM_IN_FLIGHT and time.monotonic() < started + seconds:
                self._send(frame, started + timeout)
                sent += 1
            self._receive(started + timeout)
            received += 1
        return received * CHUNK / (time.monotonic() - started)

    def close(self) -> None:
        """Close at once; replies in flight are lost."""
        self._monitor.close()
        self._socket.close(linger=0)

    def _send(self, frame: bytes, deadline: float) -> None:
        self._wait(zmq.POLLOUT, deadline)  # a refused connection never becomes writable
        self._socket.send_multipart([b"", frame])

    def _receive(self, deadline: float) -> ProbeReply:
        self._wait(zmq.POLLIN, deadline)
        return decode_probe_reply(self._socket.recv_multipart()[-1])

    def _wait(self, event: int, deadline: float) -> None:
        while not ready(self._socket, event, POLL_SECONDS):
            self._monitor.check()
            if time.monotonic() > deadline:
                raise WireError(
                    f"{self._address} does not answer the probe; use the same version on both "
                    "sides, with no proxy between them"
                )
