"""Announcements: the trainer publishes its progress every second and on change.

Every announcement holds all fields, so the next one makes up for a lost one. The trainer binds an
XSUB and sends on it, and every connected XPUB receives the messages: a PUB would store every
subscription that it receives, without a limit on their memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.wire.auth import Authenticator, GeneratorKeys
from peralta_zmq.wire.connection import DEFAULT_TIMING, ClientConnection, ConnectionTiming
from peralta_zmq.wire.message_fields import MAX_MESSAGE, decode_fields, encode_fields
from peralta_zmq.wire.rollout_sockets import open_server, open_socket, ready

MAX_ANNOUNCEMENT = 2 << 20  # bytes; 4,096 senders with the longest names need 1.5 million
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SenderProgress:
    """What the trainer has done with the groups of a sender, and what it grants to this sender."""

    settled: int = 0  # number of its groups before the first one without an outcome
    settled_end: int = 0  # the number after its newest group with one; above `settled` at a gap
    durable: int = 0  # number of its groups before the first one that is not durable
    consumed: int = 0  # how many of its groups were used in a started step or dropped
    # The new sample range that it alone draws: first index, and the one after the last.
    range_start: int = 0
    range_stop: int = 0
    without_status: int = 0  # seconds in which its groups arrived, but no status; 0 if few


@dataclass(frozen=True, slots=True)
class Announcement:
    """Progress of the trainer and acknowledgements of groups.

    A live sender is one from which the trainer has received a message in the last 30 s. Bit fields:
    bit p % 8 of byte p // 8 is that of the problem at position p; a missing byte is 0.
    """

    run_id: str
    incarnation: bytes = b""  # 8 random bytes, new with each start of the trainer
    step: int = 0  # training steps completed
    started_step: int = 0  # training steps started
    version: int | None = None  # number of the newest weight version
    weights_id: str = ""  # hash that identifies the newest weight version
    senders: dict[str, SenderProgress] = field(default_factory=dict[str, SenderProgress])  # live
    suppliers: dict[str, int] = field(default_factory=dict[str, int])
    """Generator -> number of its groups in the batches of the four newest started steps."""
    waiting: bool = False  # whether the trainer waits for groups, and does nothing else
    done: bool = False  # the run is complete; AnnouncementSubscriber passes on only a repeated True
    groups_in_step: int = 0  # groups in the batch of the newest started step; 0 before the first
    next_sample_index: int = 0  # above every sample index that was granted or received
    train_set_digest: bytes = b""  # 8 bytes that identify the list of training problems
    excluded: bytes = b""  # bit field: the training problems that must not be sampled now
    evaluation_step: int | None = None  # policy step to evaluate on held-out problems
    answered: bytes = b""  # bit field: the held-out problems whose answers are complete
    max_group_bytes: int = MAX_MESSAGE  # a larger group makes the trainer close the connection

    def progress_of(self, sender: str) -> SenderProgress:
        """The progress of a sender; of one that is not live, zeros."""
        return self.senders.get(sender, SenderProgress())


def decode_announcement(frame: bytes) -> Announcement:
    """Decode an announcement from a frame made by `encode_fields`. Raises WireError."""
    if len(frame) > MAX_ANNOUNCEMENT:
        raise WireError(f"announcement of {len(frame)} bytes; the limit is {MAX_ANNOUNCEMENT}")
    return decode_fields(frame, Announcement, max_map_len=1 << 14)


class AnnouncementPublisher:
    """Publishes announcements at once and at intervals, in a thread. Use with `closing`."""

    def __init__(
        self,
        address: str,
        *,
        authenticator: Authenticator | None = None,
        announce_seconds: float = 1.0,
    ) -> None:
        self._announce_seconds = announce_seconds
        self._changed = threading.Condition()
        # The condition `_changed` guards the following four attributes.
        self._newest: bytes | None = None  # the encoded announcement
        self.is_new = False  # True if the newest announcement is not sent yet
        self._closed = False  # `close` was called
        self._seconds = announce_seconds  # until `_newest` is repeated
        self.socket, self.address, self._quota = open_server(
            zmq.XSUB, address, authenticator, hwm=8,
            max_bytes=512,  # a handshake with CURVE keys needs 300
        )  # fmt: skip
        self._thread = threading.Thread(target=self._publish, name="announcements", daemon=True)
        self._thread.start()

    def publish(self, announcement: Announcement) -> None:
        """Replace the announcement; never blocks."""
        frame = encode_fields(announcement)
        with self._changed:
            self._newest = frame
            self.is_new = True
            self._seconds = 0.1 if announcement.done else self._announce_seconds
            self._changed.notify()

    def close(self) -> None:
        """Publish the newest announcement twice more and close, without waiting for delivery."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _publish(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self.is_new or self._closed, self._seconds)
                frame = self._newest
                closed = self._closed
                self.is_new = False
            for _ in range(2 if closed else 1):  # a subscriber must receive `done` twice
                if frame is not None:
                    # `send` never blocks: it drops messages to slow peers. To an XSUB, a frame that
                    # begins with 0 or 1 is a subscription command; no msgpack map begins so.
                    self.socket.send(frame)
            self._discard_received()
        self.socket.close(linger=500)  # milliseconds in which libzmq still sends in the background

    def _discard_received(self) -> None:
        """Discard messages of peers, which libzmq keeps in memory even after a disconnect."""
        try:
            for _ in range(10_000):  # about 10 ms
                self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            self._quota.on_socket_empty()


class AnnouncementSubscriber:
    """Receives the trainer's announcements and keeps the latest. Use with `closing`.

    `latest.done` is True only if two announcements in a row had it: a single damaged one must not
    end the generator.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: GeneratorKeys | None = None,
        has_run: Callable[[str], bool] = lambda run_id: True,
        timing: ConnectionTiming = DEFAULT_TIMING,
    ) -> None:
        """`has_run(run_id)` is False for runs whose announcements count as silence."""
        self._has_run = has_run
        self.latest: Announcement | None = None
        self.received_at = time.monotonic()  # time of `latest`; time of the start while it is None
        self.num_refused = 0  # invalid announcements
        self._done_run_id = ""  # run_id of the newest announcement if that has `done`, otherwise ""
        # ZeroMQ heartbeats are off. While the receive queue is full, libzmq reads no heartbeats, so
        # the heartbeats would time out and libzmq would reconnect. Reading the queue would then
        # abort the process (libzmq issue 3937).
        self.socket = open_socket(zmq.XPUB, max_bytes=MAX_ANNOUNCEMENT)
        self.connection = ClientConnection(
            self.socket, address, keys, name="announcements", timing=timing
        )

    def receive(self, *, timeout: float = 0.0) -> Announcement | None:
        """Wait for a new announcement; returns the latest one. Raises WireError if refused."""
        self.connection.check()
        while ready(self.socket, zmq.POLLIN, timeout):
            timeout = 0.0  # wait for the first message only, then empty the queue
            try:
                self.accept(decode_announcement(self.socket.recv()))
            except WireError as error:
                self.num_refused += 1
                level = logging.DEBUG if self.num_refused > 1 else logging.WARNING
                logger.log(level, "announcement refused: %s", error)
        self.connection.reconnect_if_silent(time.monotonic() - self.received_at)
        return self.latest

    def close(self) -> None:
        self.connection.close()
        self.socket.close(linger=0)

    def accept(self, announcement: Announcement) -> None:
        """Set `latest`; clears `done` unless the previous announcement had it, too."""
        if not self._has_run(announcement.run_id):
            return
        is_confirmed = self._done_run_id == announcement.run_id
        self._done_run_id = announcement.run_id if announcement.done else ""
        if announcement.done and not is_confirmed:
            announcement = replace(announcement, done=False)
        self.latest = announcement
        self.received_at = time.monotonic()
