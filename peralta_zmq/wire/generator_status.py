"""Generator status: each generator reports its counters every two seconds.

Every status holds all counters, so the next status makes up for a lost one.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import cast

import zmq

from peralta_zmq.atomic_files import MAX_REASON
from peralta_zmq.errors import WireError
from peralta_zmq.rollout import sender_of
from peralta_zmq.wire import message_fields
from peralta_zmq.wire.auth import Authenticator, GeneratorKeys
from peralta_zmq.wire.connection import DEFAULT_TIMING, ClientConnection, ConnectionTiming
from peralta_zmq.wire.rollout_sockets import open_server, open_socket, ready

MAX_STATUS = 1 << 14  # bytes
POLLIN = int(zmq.POLLIN)  # the operators of an enum take longer
SUBSCRIPTION = b"\1"  # message of libzmq; the end of a subscription is b"\0"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratorStatus:
    """Progress of one incarnation of a generator; counts are since its start.

    `tokens_per_s`, `blocked_frac` and `queue_frac` are of the last interval in which a group ended.
    """

    run_id: str
    generator_id: str  # name of the generator
    incarnation: bytes
    made: int = 0  # groups made, including lost groups
    lost: int = 0  # groups dropped: the outbox was full, or no valid frame
    unscored: int = 0  # groups dropped because a reward could not be computed
    aborted: int = 0  # groups dropped in flight: the engine's process failed, or they became stale
    resumed: int = 0  # interrupted rollouts whose sampling was resumed
    branched: int = 0  # rollouts of agents that rewrote their history
    step: int = 0  # policy step of the weights in use
    tokens_per_s: float = 0.0  # generated tokens
    blocked_frac: float = 0.0  # fraction of the time in which no group could be started
    queue_frac: float = 0.0  # the part of it with a full send queue
    reload_s: float = 0.0  # duration of the latest change of weights
    wants_keyframe: bool = False  # a delta that the newest version needs is missing
    store_error: str = ""  # why newer weights cannot be read; printable, at most MAX_REASON letters
    announcement_reconnects: int = 0  # reconnects because no announcements arrived
    rollout_reconnects: int = 0  # reconnects because the trainer received no groups
    needs_range: bool = False  # asks for a sample range
    next_sample_index: int = 0  # greater than every sample index that was granted to it or drawn
    last: bool = False  # no group will follow this status
    worker_info: dict[str, str] = field(default_factory=dict[str, str])
    """Constants: versions of package, python, torch, transformers; device, dtype, threads."""

    @property
    def sender(self) -> str:
        return sender_of(self.generator_id, self.incarnation)


def decode_generator_status(frame: bytes) -> GeneratorStatus:
    """Decode a status from a frame made by `encode_fields`. Raises WireError."""
    return message_fields.decode_fields(frame, GeneratorStatus, _check)


def _check(status: GeneratorStatus) -> None:
    message_fields.check_identity(status.generator_id, status.incarnation)
    for name, value in message_fields.fields_of(status).items():
        largest = 1.0 if name.endswith("_frac") else 2.0**64  # sums must stay finite
        if type(value) in (int, float) and not 0 <= value <= largest:  # true for NaN, too
            raise ValueError(f"{name} {value} is negative or too large")
    if len(status.store_error) > MAX_REASON or not status.store_error.isprintable():
        raise ValueError(f"store_error {status.store_error!a:.40} is not printable, or too long")
    if len(status.worker_info) > 16:
        raise ValueError("worker_info of more than 16 entries")
    for text in (*status.worker_info.keys(), *status.worker_info.values()):
        if len(text) > 128 or not (text.isascii() and text.isprintable()):
            raise ValueError(f"worker_info has {text!a:.40}: long, or not printable ASCII")


class GeneratorStatusSender:
    """Sends the status of one generator; lost if no trainer is connected. Use with `closing`."""

    def __init__(
        self,
        address: str,
        *,
        keys: GeneratorKeys | None = None,
        status_seconds: float = 2.0,  # between two statuses
        timing: ConnectionTiming = DEFAULT_TIMING,
    ) -> None:
        self._status_seconds = status_seconds
        self._due = float("inf")  # monotonic seconds; infinite until a trainer subscribes
        # Monotonic seconds when the trainer's subscription was lost; infinite while it is there.
        self._missing_since = time.monotonic()
        # Set by the caller, from the announcements: for how many seconds the trainer has received
        # groups of this generator but no status.
        self.unreceived_seconds = 0
        self.socket = open_socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # deliver repeated subscriptions, too
        self.connection = ClientConnection(self.socket, address, keys, name="status", timing=timing)

    def check_due(self) -> bool:
        """True if a status is due; also connects again if the connection is silent.

        A status is due when a trainer subscribes, and `status_seconds` after each `send`. Raises
        WireError.
        """
        while cast(int, self.socket.getsockopt(zmq.EVENTS)) & POLLIN:
            if self.socket.recv() == SUBSCRIPTION:
                self._due = float("-inf")
                self._missing_since = float("inf")
        # A connection that this program opens has no subscription at first. `min`: while attempts
        # fail, the time without a subscription grows, and with it the pause before the next one.
        has_reconnected = self.connection.check()
        seconds = max(self.unreceived_seconds, time.monotonic() - self._missing_since)
        if self.connection.reconnect_if_silent(seconds) or has_reconnected:
            self._missing_since = min(self._missing_since, time.monotonic())
        return time.monotonic() >= self._due

    def send(self, status: GeneratorStatus) -> None:
        self._due = time.monotonic() + self._status_seconds
        self.socket.send(message_fields.encode_fields(status))

    def close(self, linger_seconds: float = 0.5) -> None:
        self.connection.close()
        self.socket.close(linger=int(linger_seconds * 1000))


class GeneratorStatusReceiver:
    """Binds the trainer's SUB socket and receives the statuses of one run. Use with `closing`.

    Counts invalid messages in `refused`, also those under another name than the CURVE key's.
    """

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        authenticator: Authenticator | None = None,
        max_at_once: int = 100,  # messages read in one call, so that a flood delays no groups
    ) -> None:
        self.max_at_once = max_at_once
        self.refused = 0  # number of messages
        self.is_empty = True  # False if the last `receive` left messages in the queue
        self._run_id = run_id
        self._has_keys = authenticator is not None and authenticator.has_keys
        self.socket, self.address, self._quota = open_server(
            zmq.SUB, address, authenticator, hwm=8, max_bytes=MAX_STATUS
        )
        self.socket.subscribe(b"")

    def receive(self, *, timeout: float = 0.0) -> dict[str, GeneratorStatus]:
        """Read waiting messages, up to `max_at_once`; returns sender -> newest status."""
        if timeout > 0.0:
            ready(self.socket, zmq.POLLIN, timeout)
        received: dict[str, GeneratorStatus] = {}
        self.is_empty = False
        for _ in range(self.max_at_once):
            # Asked once per group; a tenth of the time of a receive that raises zmq.Again.
            if not cast(int, self.socket.getsockopt(zmq.EVENTS)) & POLLIN:
                self.is_empty = True
                self._quota.on_socket_empty()
                break
            self._quota.on_message_read()
            try:
                status = self.accept(self.socket.recv_multipart(copy=False))
                received[status.sender] = status
            except WireError as error:
                self.refused += 1
                level = logging.DEBUG if self.refused > 1 else logging.WARNING
                logger.log(level, "generator status refused: %s", error)
        return received

    def close(self) -> None:
        self.socket.close(linger=0)

    def accept(self, frames: list[zmq.Frame]) -> GeneratorStatus:
        if len(frames) > 1:
            raise WireError(f"{len(frames)} frames instead of one")
        status = decode_generator_status(frames[0].bytes)
        # The authenticator sets User-Id to the name of the sender's key.
        owner = str(frames[0]["User-Id"]) if self._has_keys else None
        message_fields.check_owner(status.generator_id, owner)
        if status.run_id != self._run_id:
            raise WireError(f"generator status of another run, {status.run_id[:40]!a}")
        return status
