"""Announcements from announcer to listener: every second, and on change.

Knows sockets and a thread; knows nothing of what is announced.
"""

from __future__ import annotations

import logging
import threading
import time

import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.wire.announcements import (
    MAX_ANNOUNCEMENT,
    Announcement,
    decode_announcement,
    encode_announcement,
)
from peralta_zmq.wire.auth import CurveAuthenticator, HandshakeMonitor
from peralta_zmq.wire.keys import GeneratorKeys
from peralta_zmq.wire.sockets import HINTS_HWM, bind, open_socket, ready

ANNOUNCE_SECONDS = 1.0
logger = logging.getLogger(__name__)


class AnnouncementPublisher:
    """Publishes the newest announcement at once and again every second, also while the trainer
    computes: a thread owns the socket. Use with `closing`.
    """

    def __init__(self, address: str, *, authenticator: CurveAuthenticator | None = None) -> None:
        self._changed = threading.Condition()
        self._newest: bytes | None = None  # guarded by _changed, as all below
        self._is_new = self._closed = False
        self._linger_seconds = 0.0
        self._socket = open_socket(zmq.PUB, hwm=HINTS_HWM)  # the thread's, once it runs
        if authenticator is not None:
            authenticator.protect(self._socket)
        self.address = bind(self._socket, address)
        self._thread = threading.Thread(target=self._work, name="announcer", daemon=True)
        self._thread.start()

    def publish(self, announcement: Announcement) -> None:
        """Tell whoever listens, now and until there is something newer; never blocks."""
        frame = encode_announcement(announcement)
        with self._changed:
            self._newest, self._is_new = frame, True
            self._changed.notify()

    def close(self, linger_seconds: float = 0.5) -> None:
        """Say the last announcement once more and close, giving it time to leave."""
        with self._changed:
            self._closed, self._linger_seconds = True, linger_seconds
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self._is_new or self._closed, ANNOUNCE_SECONDS)
                frame, closed, self._is_new = self._newest, self._closed, False
            if frame is not None:
                self._socket.send(frame)  # PUB drops, it never blocks
        self._socket.close(linger=int(self._linger_seconds * 1000))


class AnnouncementSubscriber:
    """Hears the trainer's announcements. Use with `closing`."""

    def __init__(self, address: str, *, keys: GeneratorKeys | None = None) -> None:
        self.latest: Announcement | None = None
        self.received_at = float("-inf")  # monotonic seconds
        self._socket = open_socket(zmq.SUB, hwm=HINTS_HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANNOUNCEMENT)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self._socket.subscribe(b"")
        self._turnstile = HandshakeMonitor(self._socket, address, keys)
        self._socket.connect(address)

    def receive(self, *, timeout: float = 0.0) -> Announcement | None:
        """The newest announcement so far, after waiting up to `timeout` seconds for one.

        Raises WireError when the trainer turned us away.
        """
        self._turnstile.check()
        while ready(self._socket, zmq.POLLIN, timeout):
            timeout = 0.0
            try:
                self.latest = decode_announcement(self._socket.recv())
                self.received_at = time.monotonic()
            except WireError as error:
                logger.warning("announcement refused: %s", error)
        return self.latest

    def close(self) -> None:
        """Close at once."""
        self._turnstile.close()
        self._socket.close(linger=0)
