"""Generator status: each generator reports its counters to the trainer every two seconds.

A status holds all counters, so a lost one does no harm. A group is all rollouts of one problem. An
incarnation is the 8 random bytes that a generator draws at its start; the sender 'NAME/INCARNATION'
names one start of one generator. A keyframe is a weight version with complete tensors, a delta one
with the changes only.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import cast

import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.rollout import sender_of
from peralta_zmq.wire import message_fields
from peralta_zmq.wire.auth import CurveAuthenticator, GeneratorKeys, use_keys
from peralta_zmq.wire.sockets import open_server, open_socket, ready

STATUS_SECONDS = 2.0  # between two statuses
MAX_SENDERS = 4096  # remembered; the sender that was silent for longest is forgotten first
MAX_AT_ONCE = 1000  # messages read in one call
MAX_STATUS = 1 << 16  # bytes; a queue of them waits while the trainer computes
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratorStatus:
    """Progress of one incarnation of a generator; counts are since its start."""

    run_id: str
    generator_id: str
    incarnation: bytes  # as in its groups
    made: int = 0  # groups
    lost: int = 0  # groups dropped because the outbox was full
    resent: int = 0  # groups sent again
    unscored: int = 0  # groups dropped because a reward failed
    step: int = 0  # policy step of the weights in use
    tokens_per_s: float = 0.0
    blocked_frac: float = 0.0  # fraction of the time in which it could not sample
    queue_frac: float = 0.0  # fraction of the time with a full send queue, part of blocked_frac
    reload_s: float = 0.0  # seconds of the latest change of weights
    wants_keyframe: bool = False  # it cannot load the newest version by deltas
    last: bool = False  # no group will follow this status
    worker_info: dict[str, str] = field(default_factory=dict[str, str])
    """Constant facts: versions of package, python, torch, transformers; device, dtype, threads."""

    @property
    def sender(self) -> str:
        """As RolloutGroup.sender."""
        return sender_of(self.generator_id, self.incarnation)


def decode_generator_status(frame: bytes) -> GeneratorStatus:
    """The status in a frame of `encode_fields`; unknown fields are ignored.

    Raises WireError if an identity is missing, a field has a wrong type or a number is invalid.
    """
    return message_fields.decode_fields(frame, GeneratorStatus, _check)


def _check(status: GeneratorStatus) -> None:
    message_fields.check_identity(status.generator_id, status.incarnation)
    for name, value in message_fields.fields_of(status).items():
        if type(value) in (int, float) and not 0 <= value < math.inf:  # a NaN is refused, too
            raise ValueError(f"{name} {value} is negative or not finite")
    message_fields.check_facts(status.worker_info)


class GeneratorStatusSender:
    """Sends the status of one generator; never blocks and never fails. Use with `closing`."""

    def __init__(self, address: str, *, keys: GeneratorKeys | None = None) -> None:
        self._due = float("inf")  # monotonic seconds; not before the trainer subscribes
        self._socket = open_socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # show subscriptions of a restarted trainer
        use_keys(self._socket, keys)
        self._socket.connect(address)

    @property
    def due(self) -> bool:
        """Whether a trainer has just subscribed or it is time for the next status."""
        while cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._socket.recv()  # a subscription
            self._due = float("-inf")
        return time.monotonic() >= self._due

    def send(self, status: GeneratorStatus) -> None:
        """Send now; lost if no trainer is connected."""
        self._due = time.monotonic() + STATUS_SECONDS
        self._socket.send(message_fields.encode_fields(status))

    def close(self, linger_seconds: float = 0.5) -> None:
        """Close after sending the last status for up to `linger_seconds`."""
        self._socket.close(linger=int(linger_seconds * 1000))


class GeneratorStatusReceiver:
    """Binds the trainer's SUB socket and keeps the latest status of each sender of one run."""

    def __init__(
        self, address: str, *, run_id: str, authenticator: CurveAuthenticator | None = None
    ) -> None:
        self.latest: dict[str, GeneratorStatus] = {}  # by sender, the most recent at the end
        self.refused = 0  # messages
        self.is_empty = True  # whether the last `receive` emptied the queue
        self._run_id, self._has_keys = run_id, authenticator is not None
        self._socket, self.address = open_server(
            zmq.SUB, address, authenticator, max_bytes=MAX_STATUS
        )
        self._socket.subscribe(b"")

    def receive(self, *, timeout: float = 0.0) -> dict[str, GeneratorStatus]:
        """The status of each sender with a new one; waits up to `timeout` seconds for the first."""
        if timeout > 0.0:
            ready(self._socket, zmq.POLLIN, timeout)
        received: dict[str, GeneratorStatus] = {}
        self.is_empty = False
        for _ in range(MAX_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self.is_empty = True
                break
            try:
                status = self._accept(frames)
                received[status.sender] = status
            except WireError as error:
                self.refused += 1
                level = logging.DEBUG if self.refused > 1 else logging.WARNING
                logger.log(level, "generator status refused: %s", error)
        return received

    def close(self) -> None:
        """Close at once."""
        self._socket.close(linger=0)

    def _accept(self, frames: list[zmq.Frame]) -> GeneratorStatus:
        if len(frames) > 1:
            raise WireError(f"{len(frames)} frames instead of one")
        status = decode_generator_status(frames[0].bytes)
        owner = str(frames[0]["User-Id"]) if self._has_keys else None
        message_fields.check_owner(status.generator_id, owner)
        if status.run_id != self._run_id:
            raise WireError(f"generator status of another run, {status.run_id[:40]!a}")
        self.latest.pop(status.sender, None)
        self.latest[status.sender] = status
        if len(self.latest) > MAX_SENDERS:
            del self.latest[next(iter(self.latest))]
        return status
