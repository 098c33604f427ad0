"""Hellos between a doctor and the trainer's machine: who is there, how far and how fast.

Knows sockets and a thread; knows nothing of what is done with the answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.wire.auth import CurveAuthenticator, HandshakeMonitor
from peralta_zmq.wire.keys import GeneratorKeys
from peralta_zmq.wire.probe import (
    ProbeReply,
    ProbeRequest,
    decode_probe_reply,
    decode_probe_request,
    encode_probe_reply,
    encode_probe_request,
)
from peralta_zmq.wire.sockets import HINTS_HWM, bind, keep_alive, open_socket, ready

LOOK_SECONDS = 0.2  # until a closed greeter ends
MAX_REQUEST = 256 << 10  # bytes
PIECE = 64 << 10  # bytes of one request of a burst
WINDOW = 8  # requests of a burst that are under way together
Show = Callable[[], str]  # makes a new file in the weights folder and names it; OSError
logger = logging.getLogger(__name__)


class ProbeServer:
    """Answers doctors, also while the trainer computes: a thread owns the socket.

    Each answer is `greeting` with the time, and the file that `show` made when one was asked for.
    Use with `closing`.
    """

    def __init__(
        self,
        address: str,
        greeting: ProbeReply,
        *,
        create_file: Show | None = None,
        authenticator: CurveAuthenticator | None = None,
    ) -> None:
        self.greeting = greeting
        self._create_file, self._closed = create_file, threading.Event()
        self._socket = open_socket(zmq.REP, hwm=HINTS_HWM)  # the thread's, once it runs
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)
        keep_alive(self._socket)
        if authenticator is not None:
            authenticator.protect(self._socket)
        self.address = bind(self._socket, address)
        self._thread = threading.Thread(target=self._work, name="greeter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more; a thread that hangs in a dead mount is left behind."""
        self._closed.set()
        self._thread.join(timeout=2.0)

    def _work(self) -> None:
        while not self._closed.is_set():
            if ready(self._socket, zmq.POLLIN, LOOK_SECONDS):
                self._socket.send(self._answer(self._socket.recv_multipart()))
        self._socket.close(linger=0)

    def _answer(self, frames: list[bytes]) -> bytes:
        """Something must be sent before the next request can come, so a bad one gets nothing."""
        try:
            asked = decode_probe_request(frames[0])
        except WireError as error:
            logger.debug("request refused: %s", error)
            return b""
        shown, problem = self._shown() if asked == "create_file" else ("", "")
        return encode_probe_reply(
            replace(self.greeting, time=time.time(), created_file=shown, error=problem)
        )

    def _shown(self) -> tuple[str, str]:
        if self._create_file is None:
            return "", "it has no weights folder to show a file in"
        try:
            return self._create_file(), ""
        except OSError as error:
            return "", f"it cannot write its weights folder ({error.strerror or error})"


class ProbeClient:
    """Asks a greeter. Use with `closing`."""

    def __init__(self, address: str, *, keys: GeneratorKeys | None = None) -> None:
        self._address = address
        self._socket = open_socket(zmq.DEALER, hwm=HINTS_HWM)
        self._turnstile = HandshakeMonitor(self._socket, address, keys)
        self._socket.connect(address)

    def request(self, kind: ProbeRequest, *, timeout: float) -> tuple[ProbeReply, float]:
        """The answer, and the seconds that it took.

        Raises WireError when none comes within `timeout` seconds, or we are turned away.
        """
        started = time.monotonic()
        self._send(encode_probe_request(kind), started + timeout)
        return self._receive(started + timeout), time.monotonic() - started

    def measure_throughput(self, *, seconds: float, timeout: float) -> float:
        """Bytes per second that arrive there, measured for so long. Raises WireError, as `ask`."""
        frame = encode_probe_request("discard", bytes(PIECE))
        started, sent, answered = time.monotonic(), 0, 0
        while time.monotonic() < started + seconds or answered < sent:
            while sent - answered < WINDOW and time.monotonic() < started + seconds:
                self._send(frame, started + timeout)
                sent += 1
            self._receive(started + timeout)
            answered += 1
        return answered * PIECE / (time.monotonic() - started)

    def close(self) -> None:
        """Close at once; answers under way are lost."""
        self._turnstile.close()
        self._socket.close(linger=0)

    def _send(self, frame: bytes, deadline: float) -> None:
        self._wait(zmq.POLLOUT, deadline)  # none who has turned us away takes anything
        self._socket.send_multipart([b"", frame])

    def _receive(self, deadline: float) -> ProbeReply:
        self._wait(zmq.POLLIN, deadline)
        return decode_probe_reply(self._socket.recv_multipart()[-1])

    def _wait(self, event: int, deadline: float) -> None:
        while not ready(self._socket, event, LOOK_SECONDS):
            self._turnstile.check()
            if time.monotonic() > deadline:
                raise WireError(
                    f"{self._address} says no hello; use the same version on both sides, "
                    "with no proxy between them"
                )
