"""Counters from every generator to the trainer: a report every two seconds, which may be lost.

Knows sockets; knows nothing of what is counted.
"""

from __future__ import annotations

import logging
import time
from typing import cast

import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.wire import validation
from peralta_zmq.wire.auth import CurveAuthenticator, show_keys
from peralta_zmq.wire.generator_status import (
    GeneratorStatus,
    decode_generator_status,
    encode_generator_status,
)
from peralta_zmq.wire.keys import GeneratorKeys
from peralta_zmq.wire.sockets import HINTS_HWM, bind, keep_alive, open_socket, ready

REPORT_SECONDS = 2.0
MAX_SENDERS = 4096  # remembered; the one unheard for longest goes first
MAX_AT_ONCE = 1000  # reports read in one call
MAX_REPORT = 1 << 16  # bytes; a queue of them waits while the trainer computes
logger = logging.getLogger(__name__)


class GeneratorStatusSender:
    """Reports on one generator; never blocks, and never fails. Use with `closing`."""

    def __init__(self, address: str, *, keys: GeneratorKeys | None = None) -> None:
        self._due = float("inf")  # monotonic seconds
        self._socket = open_socket(zmq.XPUB, hwm=HINTS_HWM)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # a restarted trainer's subscription comes too
        show_keys(self._socket, keys)
        self._socket.connect(address)

    @property
    def due(self) -> bool:
        """Whether a trainer has begun to listen just now, or it is time for the next report."""
        while cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._socket.recv()  # its subscription
            self._due = float("-inf")
        return time.monotonic() >= self._due

    def send(self, counters: GeneratorStatus) -> None:
        """Report now."""
        self._due = time.monotonic() + REPORT_SECONDS
        self._socket.send(encode_generator_status(counters))

    def close(self, linger_seconds: float = 0.5) -> None:
        """Close, giving the last report time to leave."""
        self._socket.close(linger=int(linger_seconds * 1000))


class GeneratorStatusReceiver:
    """Binds the trainer's SUB socket and keeps the latest report of each sender of its run."""

    def __init__(
        self, address: str, *, run_id: str, authenticator: CurveAuthenticator | None = None
    ) -> None:
        self.latest: dict[str, GeneratorStatus] = {}  # by Counters.sender, the latest heard last
        self.refused = 0  # reports
        self.is_empty = True  # at the end of the last `receive`: nothing more had come
        self._run_id, self._guarded = run_id, authenticator is not None
        self._socket = open_socket(zmq.SUB, hwm=HINTS_HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPORT)
        self._socket.subscribe(b"")
        keep_alive(self._socket)
        if authenticator is not None:
            authenticator.protect(self._socket)
        self.address = bind(self._socket, address)

    def receive(self, *, timeout: float = 0.0) -> dict[str, GeneratorStatus]:
        """The reports that came meanwhile, the latest of each sender.

        When there is none yet, waits for so many seconds at most until one comes.
        """
        if timeout > 0.0:
            ready(self._socket, zmq.POLLIN, timeout)
        came: dict[str, GeneratorStatus] = {}
        self.is_empty = False
        for _ in range(MAX_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self.is_empty = True
                break
            try:
                counters = self._keep(frames)
                came[counters.sender] = counters
            except WireError as error:
                self.refused += 1
                logger.log(logging.DEBUG if self.refused > 1 else logging.WARNING,
                           "counters refused: %s", error)  # fmt: skip
        return came

    def close(self) -> None:
        """Close at once."""
        self._socket.close(linger=0)

    def _keep(self, frames: list[zmq.Frame]) -> GeneratorStatus:
        if len(frames) > 1:
            raise WireError(f"{len(frames)} frames instead of one")
        counters = decode_generator_status(frames[0].bytes)
        validation.check_claim(
            counters.generator_id, str(frames[0]["User-Id"]) if self._guarded else None
        )
        if counters.run_id != self._run_id:
            raise WireError(f"counters of another run, {counters.run_id[:40]!a}")
        self.latest.pop(counters.sender, None)
        self.latest[counters.sender] = counters
        if len(self.latest) > MAX_SENDERS:
            del self.latest[next(iter(self.latest))]
        return counters
