"""Groups from sender to receiver. Knows queues and refusals; knows nothing of what is learned."""

from __future__ import annotations

import logging
from collections import Counter

import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.failpoints import failpoint
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.wire import validation
from peralta_zmq.wire.auth import CurveAuthenticator, HandshakeMonitor
from peralta_zmq.wire.keys import GeneratorKeys
from peralta_zmq.wire.messages import InvalidGroupError, decode_group
from peralta_zmq.wire.sockets import bind, keep_alive, open_socket, wait_at_most

MAX_REASONS = 100  # distinct refusals remembered, so that a hostile sender cannot fill memory
logger = logging.getLogger(__name__)


class RolloutSender:
    """Pushes groups to the trainer; `send` says no when the queue is full. Use with `closing`."""

    def __init__(
        self,
        address: str,
        *,
        hwm: int = 1,
        keys: GeneratorKeys | None = None,
    ) -> None:
        self._timeout = -1.0  # seconds, as the socket has it: it waits without end
        self._socket = open_socket(zmq.PUSH, hwm=hwm)
        self._turnstile = HandshakeMonitor(self._socket, address, keys)
        self._socket.connect(address)

    def send(self, frame: bytes, *, timeout: float) -> bool:
        """Queue one encoded group within `timeout` seconds, or return False; at 0 it may not have
        been seen yet that there is room.

        Raises WireError when the trainer turned us away: libzmq does not try again after that.
        """
        failpoint("wire.send")
        self._timeout = wait_at_most(self._socket, zmq.SNDTIMEO, timeout, self._timeout)
        try:
            self._socket.send(frame)
        except zmq.Again:
            self._turnstile.check()
            return False
        return True

    def close(self, linger_seconds: float = 2.0) -> None:
        """Close, giving queued groups up to `linger_seconds` to leave."""
        self._turnstile.close()
        self._socket.close(linger=int(linger_seconds * 1000))


class RolloutReceiver:
    """Binds the trainer's PULL socket and yields valid groups of its run. Use with `closing`."""

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        vocab_size: int,
        hwm: int = 1,
        authenticator: CurveAuthenticator | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()  # reason -> messages
        self._run_id, self._vocab_size = run_id, vocab_size
        self._guarded = authenticator is not None
        self._timeout = -1.0  # seconds, as the socket has it: it waits without end
        self._socket = open_socket(zmq.PULL, hwm=hwm)
        keep_alive(self._socket)
        if authenticator is not None:
            authenticator.protect(self._socket)
        self.address = bind(self._socket, address)

    def receive(self, *, timeout: float) -> tuple[RolloutGroup, bytes] | None:
        """The next group with its frame, or None after `timeout` seconds or a bad message.

        A group without rollouts is one that was refused: it is known whose it was.
        """
        message = self._next(timeout)
        if message is None:
            return None
        failpoint("wire.receive")
        try:
            return self._group_of(*message)
        except WireError as error:
            self._refuse(error)
            return None

    def close(self) -> None:
        """Close at once; what lies in the queue is lost."""
        self._socket.close(linger=0)

    def _next(self, timeout: float) -> tuple[bytes, int, str | None] | None:
        """The first frame of a message, how many it had, and whose key it came with."""
        # To try, to poll and to try again costs twice as much when the queue is often empty.
        self._timeout = wait_at_most(self._socket, zmq.RCVTIMEO, timeout, self._timeout)
        try:
            frame = self._socket.recv(copy=False)  # knows whether more comes; to ask costs more
        except zmq.Again:
            return None
        owner = str(frame["User-Id"]) if self._guarded else None
        first, more, count = frame.bytes, frame.more, 1
        while more:
            more = self._socket.recv(copy=False).more
            count += 1
        return first, count, owner

    def _group_of(self, frame: bytes, count: int, owner: str | None) -> tuple[RolloutGroup, bytes]:
        if count > 1:
            raise WireError(f"{count} frames instead of one")
        try:
            group = decode_group(frame, vocab_size=self._vocab_size)
        except InvalidGroupError as error:
            group, invalid = error.group, error
        else:
            invalid = None
        validation.check_claim(group.generator_id, owner)
        if group.run_id != self._run_id:
            raise WireError(f"group of another run, {group.run_id[:40]!a}")
        if invalid is not None:
            self._refuse(invalid)
        return group, frame

    def _refuse(self, error: WireError) -> None:
        reason = str(error)[:80]
        if reason not in self.refused and len(self.refused) >= MAX_REASONS:
            reason = "other"
        if not self.refused[reason]:  # once, so that whoever sends many fills no log
            logger.warning("message refused: %s", reason)
        self.refused[reason] += 1
