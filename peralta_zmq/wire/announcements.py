"""Announcements: the trainer publishes its progress every second and on change (PUB/SUB).

An announcement holds the whole state, so a lost one does no harm. A group is all rollouts of one
problem, sent as one message. A sender is one start of a generator, 'NAME/INCARNATION'; its groups
are numbered by `sequence` from 0. Received groups are in the trainer's memory, durable ones in the
journal on its disk.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.wire.auth import CurveAuthenticator, GeneratorKeys, HandshakeMonitor
from peralta_zmq.wire.message_fields import decode_fields, encode_fields
from peralta_zmq.wire.sockets import open_server, open_socket, ready

ANNOUNCE_SECONDS = 1.0
MAX_ANNOUNCEMENT = 4 << 20  # bytes; with 4,096 senders of the longest names it has 2.7 million
MAX_BITS = 1 << 19  # problems of a bit field
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Progress of the trainer and acknowledgements of groups."""

    run_id: str
    incarnation: bytes = b""  # 8 random bytes, new with each start of the trainer
    step: int = 0  # optimizer steps completed
    started_step: int = 0  # optimizer steps started
    version: int = -1  # newest published weight version; -1 before the first
    weights_id: str = ""  # of the newest version
    received: dict[str, int] = field(default_factory=dict[str, int])
    """By active sender: all of its groups up to this sequence were received; -1 = none."""
    durable: dict[str, int] = field(default_factory=dict[str, int])
    """By sender: all of its groups up to this sequence are durable, or were dropped."""
    highest_received: dict[str, int] = field(default_factory=dict[str, int])
    """By sender: highest sequence received; above `received` if a group between was lost."""
    consumed: dict[str, int] = field(default_factory=dict[str, int])
    """By sender: number of its groups in started steps or dropped, minus 1."""
    waiting: bool = False  # for groups; False during a step, an evaluation and the start
    done: bool = False  # the run is complete
    groups_in_step: int = 0  # groups in the newest step; 0 before the first
    next_sample_index: int = 0  # above the sample_index of every received group
    train_set_digest: bytes = b""  # 8 bytes that identify the training problems
    excluded: bytes = b""
    """Bit field of the positions in the train set that are not sampled at present (bit p % 8 of
    byte p // 8); empty = all are sampled."""
    evaluation_step: int = -1  # step of the weights that the generators evaluate; -1 = none
    answered: bytes = b""
    """Bit field of the held-out examples that need no further answer in this evaluation."""


def decode_announcement(frame: bytes) -> Announcement:
    """The announcement in a frame of `encode_fields`; unknown fields are ignored.

    Raises WireError if it is too large, `run_id` is missing or a field has a wrong type.
    """
    if len(frame) > MAX_ANNOUNCEMENT:
        raise WireError(f"announcement of {len(frame)} bytes")
    return decode_fields(frame, Announcement, _check, max_map_len=1 << 14)


def _check(announcement: Announcement) -> None:
    if max(len(announcement.excluded), len(announcement.answered)) > MAX_BITS // 8:
        raise ValueError(f"bit field of more than {MAX_BITS} bits")


class AnnouncementPublisher:
    """Publishes the newest announcement at once and every second until there is a newer one.

    A thread owns the socket, so announcements continue while the trainer computes. Use with
    `closing`.
    """

    def __init__(self, address: str, *, authenticator: CurveAuthenticator | None = None) -> None:
        self._changed = threading.Condition()
        self._newest: bytes | None = None  # this and the next two are guarded by _changed
        self._is_new = self._closed = False
        self._socket, self.address = open_server(zmq.PUB, address, authenticator)
        self._thread = threading.Thread(target=self._work, name="announcements", daemon=True)
        self._thread.start()

    def publish(self, announcement: Announcement) -> None:
        """Replace the announcement and publish it now; never blocks."""
        frame = encode_fields(announcement)
        with self._changed:
            self._newest, self._is_new = frame, True
            self._changed.notify()

    def close(self) -> None:
        """Publish the last announcement once more and close; returns before it is delivered."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self._is_new or self._closed, ANNOUNCE_SECONDS)
                frame, closed, self._is_new = self._newest, self._closed, False
            if frame is not None:
                self._socket.send(frame)  # PUB drops messages, it never blocks
        self._socket.close(linger=500)  # milliseconds, in the background


class AnnouncementSubscriber:
    """Receives the trainer's announcements and keeps the latest. Use with `closing`."""

    def __init__(self, address: str, *, keys: GeneratorKeys | None = None) -> None:
        self.latest: Announcement | None = None
        self.received_at = float("-inf")  # monotonic seconds
        self._socket = open_socket(zmq.SUB, max_bytes=MAX_ANNOUNCEMENT)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self._socket.subscribe(b"")
        self._monitor = HandshakeMonitor(self._socket, address, keys)
        self._socket.connect(address)

    def receive(self, *, timeout: float = 0.0) -> Announcement | None:
        """The latest announcement, after waiting up to `timeout` seconds for a new one.

        Raises WireError if the trainer refused the connection.
        """
        self._monitor.check()
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
        self._monitor.close()
        self._socket.close(linger=0)
