"""Announcements: the trainer publishes its progress every second and on change.

Every announcement holds all fields, so the next one makes up for a lost one. A received group is in
the trainer's memory; a durable group, or the reason why it was dropped, is in the journal on the
trainer's disk.

The sockets are those of PUB/SUB in reverse: the trainer binds an XSUB and sends on it, and every
connected XPUB receives the messages. The reason is memory: a PUB stores every subscription that it
receives, at 40 bytes of memory per byte of subscription and without a limit on the number of
subscriptions. So does an XPUB, even with XPUB_MANUAL.
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
from peralta_zmq.wire.connection import ClientConnection
from peralta_zmq.wire.message_fields import MAX_MESSAGE, decode_fields, encode_fields
from peralta_zmq.wire.sockets import open_server, open_socket, ready

ANNOUNCE_SECONDS = 1.0
DONE_SECONDS = 0.1  # replaces ANNOUNCE_SECONDS when the run is complete
MAX_ANNOUNCEMENT = 5 << 20  # bytes; 4,096 senders with the longest names need 4.8 million
PUBLISHER_HWM = 8  # announcements kept for a peer that does not read
MAX_RECEIVED = 512  # bytes of a message to the trainer; a handshake with CURVE keys needs 300
MAX_DISCARDED = 10_000  # messages discarded after each announcement; takes about 10 ms
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Progress of the trainer and acknowledgements of groups.

    A live sender is one from which the trainer has received a message in the last 30 s.
    """

    run_id: str
    incarnation: bytes = b""  # 8 random bytes, new with each start of the trainer
    step: int = 0  # training steps completed
    started_step: int = 0  # training steps started
    version: int = -1  # number of the newest weight version; -1 before the first
    weights_id: str = ""  # hash that identifies the newest weight version
    received: dict[str, int] = field(default_factory=dict[str, int])
    """By live sender: all groups up to this sequence were received; -1 = none."""
    durable: dict[str, int] = field(default_factory=dict[str, int])
    """By live sender: all groups up to this sequence are durable; -1 = none."""
    highest_received: dict[str, int] = field(default_factory=dict[str, int])
    """By live sender: highest sequence received; greater than `received` while an earlier group is
    missing; -1 = none."""
    consumed: dict[str, int] = field(default_factory=dict[str, int])
    """By live sender: how many groups were used in a started step or dropped, minus 1, so that
    -1 = none as in the fields above."""
    suppliers: dict[str, int] = field(default_factory=dict[str, int])
    """Generators with groups in the batches of the four newest started steps -> number of these
    groups."""
    without_status: dict[str, int] = field(default_factory=dict[str, int])
    """Senders whose groups arrive but whose statuses do not -> seconds without a status."""
    waiting: bool = False  # whether the trainer waits for groups, and does nothing else
    done: bool = False  # the run is complete; AnnouncementSubscriber passes on only a repeated True
    groups_in_step: int = 0  # groups in the batch of the newest started step; 0 before the first
    next_sample_index: int = 0
    """Greater than every sample index (position in the run's shuffled order of problems) that was
    leased or that a received group has."""
    train_set_digest: bytes = b""  # 8 bytes that identify the list of training problems
    excluded: bytes = b""
    """Bit field of the training problems that must not be sampled now: bit p % 8 of byte p // 8 is
    1 for the problem at position p; empty = all may be sampled."""
    evaluation_step: int = -1  # policy step to evaluate on held-out problems; -1 = no evaluation
    answered: bytes = b""
    """Bit field as in `excluded`: the held-out problems whose answers are complete."""
    max_group_bytes: int = MAX_MESSAGE  # a larger group makes the trainer close the connection
    grants_leases: bool = False  # whether statuses can ask for sample leases
    lease_starts: dict[str, int] = field(default_factory=dict[str, int])
    """By live sender with a new sample lease: the first sample index that it alone draws."""
    lease_ends: dict[str, int] = field(default_factory=dict[str, int])
    """By the same senders: the sample index after the last one of the lease."""


def decode_announcement(frame: bytes) -> Announcement:
    """Decode an announcement from a frame made by `encode_fields`.

    Ignores unknown fields. Raises WireError if the frame is too large or damaged, `run_id` is
    missing or a field has a wrong type.
    """
    if len(frame) > MAX_ANNOUNCEMENT:
        raise WireError(f"announcement of {len(frame)} bytes; the limit is {MAX_ANNOUNCEMENT}")
    return decode_fields(frame, Announcement, max_map_len=1 << 14)


class AnnouncementPublisher:
    """Publishes each announcement at once and repeats the newest one every second.

    When the run is complete, the interval is DONE_SECONDS. A thread owns the socket, so
    announcements continue while the trainer computes. Use with `closing`.
    """

    def __init__(self, address: str, *, authenticator: Authenticator | None = None) -> None:
        self._changed = threading.Condition()
        # The condition `_changed` guards the following four attributes.
        self._newest: bytes | None = None  # the encoded announcement
        self._is_new = False  # `_newest` is not sent yet
        self._closed = False  # `close` was called
        self._seconds = ANNOUNCE_SECONDS  # until `_newest` is repeated
        self._socket, self.address, self._quota = open_server(
            zmq.XSUB, address, authenticator, hwm=PUBLISHER_HWM, max_bytes=MAX_RECEIVED
        )
        self._thread = threading.Thread(target=self._publish, name="announcements", daemon=True)
        self._thread.start()

    def publish(self, announcement: Announcement) -> None:
        """Replace the announcement and wake the thread that sends it; never blocks."""
        frame = encode_fields(announcement)
        with self._changed:
            self._newest = frame
            self._is_new = True
            self._seconds = DONE_SECONDS if announcement.done else ANNOUNCE_SECONDS
            self._changed.notify()

    def close(self) -> None:
        """Publish the newest announcement twice more and close, without waiting for delivery."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _publish(self) -> None:
        """The thread: send the newest frame on change and at intervals, until `close`."""
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self._is_new or self._closed, self._seconds)
                frame = self._newest
                closed = self._closed
                self._is_new = False
            for _ in range(2 if closed else 1):  # a subscriber must receive `done` twice
                if frame is not None:
                    # `send` never blocks: it drops messages to slow peers. To an XSUB, a frame that
                    # begins with 0 or 1 is a subscription command; no msgpack map begins so.
                    self._socket.send(frame)
            self._discard_received()
        self._socket.close(linger=500)  # milliseconds in which libzmq still sends in the background

    def _discard_received(self) -> None:
        """Discard messages of peers, which libzmq keeps in memory even after a disconnect."""
        try:
            for _ in range(MAX_DISCARDED):
                self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            self._quota.on_socket_empty()


class AnnouncementSubscriber:
    """Receives the trainer's announcements and keeps the latest. Use with `closing`.

    Connects again after SILENT_SECONDS (connection.py) without an announcement: a damaged message
    can leave a connection open that delivers nothing more. `latest.done` is True only if two
    announcements in a row had it: a single wrong one must not end the generator.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: GeneratorKeys | None = None,
        has_run: Callable[[str], bool] = lambda run_id: True,
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
        self._socket = open_socket(zmq.XPUB, max_bytes=MAX_ANNOUNCEMENT)
        self.connection = ClientConnection(self._socket, address, keys, name="announcements")

    def receive(self, *, timeout: float = 0.0) -> Announcement | None:
        """Wait up to `timeout` seconds for a new announcement; returns the latest one.

        None before the first announcement. Raises WireError if the trainer refuses the connection.
        """
        self.connection.check()
        while ready(self._socket, zmq.POLLIN, timeout):
            timeout = 0.0  # wait for the first message only, then empty the queue
            try:
                self._accept(decode_announcement(self._socket.recv()))
            except WireError as error:
                self.num_refused += 1
                level = logging.DEBUG if self.num_refused > 1 else logging.WARNING
                logger.log(level, "announcement refused: %s", error)
        self.connection.reconnect_if_silent(time.monotonic() - self.received_at)
        return self.latest

    def close(self) -> None:
        """Close at once."""
        self.connection.close()
        self._socket.close(linger=0)

    def _accept(self, announcement: Announcement) -> None:
        """Set `latest`; clears `done` unless the previous announcement had it, too."""
        if not self._has_run(announcement.run_id):
            return
        is_confirmed = self._done_run_id == announcement.run_id
        self._done_run_id = announcement.run_id if announcement.done else ""
        if announcement.done and not is_confirmed:
            announcement = replace(announcement, done=False)
        self.latest = announcement
        self.received_at = time.monotonic()
