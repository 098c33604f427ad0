"""Connect a client socket to the trainer, and again if the connection fails.

The clients are the sockets of a generator and of bin/doctor. libzmq itself connects again after a
lost connection. libzmq does not connect again after a refused handshake, or after bytes that
violate ZeroMQ's protocol. Nor does libzmq detect a damaged message; a damaged subscription, for
example, leaves a connection open on which the socket never receives a message.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from peralta_zmq.errors import WireError
from peralta_zmq.wire.auth import HANDSHAKE_SECONDS, GeneratorKeys, use_keys

SILENT_SECONDS = 10.0  # a connection that was silent for this time is opened again
MAX_WAIT_SECONDS = 160.0  # during silence, the time between attempts doubles up to this value
RETRY_SECONDS = 0.5  # from a refused handshake to the next attempt
# A client reports a refusal only after this time and this number of failed handshakes, because
# damaged bytes can look like a refusal.
PATIENCE_SECONDS, PATIENCE_TRIES = 20.0, 5
HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_accepted_keys: set[GeneratorKeys] = set()  # keys of all successful handshakes of this process
_monitor_numbers = itertools.count()  # one for each ClientConnection of the process
logger = logging.getLogger(__name__)


class ClientConnection:
    """Connects a client socket, with keys or without, and again after a fault.

    Set the socket's options before creating this object, call `check` often, and close this object
    before the socket.
    """

    def __init__(
        self,
        client: zmq.Socket[bytes],
        address: str,
        keys: GeneratorKeys | None,
        *,
        name: str,
        patience: float | None = None,
    ) -> None:
        """`name` identifies the connection in the log; `patience`: see PATIENCE_SECONDS."""
        self.num_reconnects = 0  # after silence only
        self._client, self._address, self._keys, self._name = client, address, keys, name
        self._patience = PATIENCE_SECONDS if patience is None else patience
        self._is_accepted = False  # a handshake of this socket has succeeded
        self._failures = 0  # failed handshakes since the last success
        self._first_failure = 0.0  # monotonic seconds of the first of `_failures`
        self._reason: str | None = None  # newest known reason of a failure; None after a success
        self._retry_at = float("inf")  # monotonic seconds; infinite if no attempt is planned
        self._silence_limit = SILENT_SECONDS  # seconds of silence before the next attempt
        use_keys(client, keys)
        # A new endpoint each time: libzmq releases a closed endpoint only some time later.
        endpoint = f"inproc://handshakes-{next(_monitor_numbers)}"
        client.monitor(endpoint, HANDSHAKE_EVENTS)
        self._events = zmq.Context.instance().socket(zmq.PAIR)
        # 0 = unlimited: on a full queue libzmq would block the I/O thread that serves all sockets.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(endpoint)
        client.connect(address)

    def check(self) -> None:
        """Connect again after a refused handshake; call this often.

        Raises WireError with reason and remedy if the trainer has refused every handshake for
        `patience` seconds. After a successful handshake, of this socket or of another socket with
        the same keys, a failed handshake is only logged, because damaged data is the likely cause.
        Can block for half a second after failed handshakes.
        """
        failures = 0  # failed handshakes since the previous call
        while self._events.poll(0):
            message: Any = parse_monitor_message(self._events.recv_multipart())
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_accepted, self._reason = True, None
                self._failures = failures = 0
                if self._keys is not None:
                    _accepted_keys.add(self._keys)
                continue
            failures += 1
            # After FAILED_NO_DETAIL libzmq connects again; after the other failures it does not.
            if message["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._reason = self._reason_of(message["event"], message["value"]) or self._reason
                self._retry_at = time.monotonic() + RETRY_SECONDS
        if time.monotonic() >= self._retry_at:
            self._connect_again()
        if failures and (self._is_accepted or self._keys in _accepted_keys):
            self._log_failures(failures)
        elif failures:
            self._check_patience(failures)

    def reconnect_if_silent(self, seconds: float) -> bool:
        """Connect again if the connection has been silent for too long; True if it did.

        `seconds` is how long the connection has been silent. The time between two attempts doubles
        while the silence lasts.
        """
        if seconds < SILENT_SECONDS:
            self._silence_limit = SILENT_SECONDS
        if seconds < self._silence_limit:
            return False
        self._silence_limit = seconds + min(seconds, MAX_WAIT_SECONDS)
        self.num_reconnects += 1
        logger.warning("reconnecting connection=%s silent_seconds=%.0f", self._name, seconds)
        self._connect_again()
        return True

    def close(self) -> None:
        """Stop monitoring; call `close` before the client socket is closed."""
        self._client.monitor(None, 0)
        self._events.close(linger=0)

    def _connect_again(self) -> None:
        """Open a new connection; messages in the send queue are lost."""
        self._retry_at = float("inf")
        self._client.disconnect(self._address)
        self._client.connect(self._address)

    def _log_failures(self, failures: int) -> None:
        """Count failed handshakes; logs the first one after a successful handshake."""
        if not self._failures:
            reason = self._reason or "damaged data, or closed during the handshake"
            logger.warning("connection failed name=%s; trying again: %s", self._name, reason)
        self._failures += failures

    def _check_patience(self, failures: int) -> None:
        """Raise WireError if the trainer has refused all handshakes for too long.

        `failures` is the number of new failures. A trainer that is down, stopped or suspended
        raises no error, because it may come back.
        """
        now = time.monotonic()  # before the connection test, which takes up to half a second
        if not accepts_connection(self._address, timeout=0.5, greeting=b"\xff"):
            self._failures = 0
            return
        if not self._failures:
            failures, self._first_failure = 1, now  # count one: other times are unknown
        self._failures += failures
        elapsed = now - self._first_failure
        reason = self._reason
        # A trainer that cannot read its key folder closes a connection after HANDSHAKE_SECONDS.
        is_slow = elapsed / self._failures > HANDSHAKE_SECONDS / 2
        if reason is None and self._keys is not None and not is_slow:
            # A trainer with a different key closes every connection during the handshake.
            reason = (
                f"the trainer at {self._address} closes every connection: trainer.public is not "
                "the trainer's key, or the trainer accepts no client; copy trainer.public from the "
                "trainer's security.keys folder"
            )
        if reason and self._failures >= PATIENCE_TRIES and elapsed >= self._patience:
            raise WireError(reason)

    def _reason_of(self, event: int, value: int) -> str | None:
        """Reason and remedy for a failed handshake; None if its cause is damaged data."""
        if (
            event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        ):
            used, expected = ("no keys", "keys") if self._keys is None else ("keys", "no keys")
            return (
                f"the trainer at {self._address} refused the connection: this generator uses "
                f"{used}, the trainer {expected}; set the same security.keys on both sides"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._keys is not None:
            return (
                f"the trainer at {self._address} has no key of {self._keys.name}; "
                f"put {self._keys.name}.public into the trainer's security.keys folder"
            )
        return None


def accepts_connection(address: str, *, timeout: float = 1.0, greeting: bytes = b"") -> bool:
    """Whether tcp://HOST:PORT accepts a connection and its first bytes are `greeting`.

    A ZeroMQ socket first sends the byte 0xff, so the greeting b"\\xff" proves that its owner runs.
    Without a greeting the result is True also for a port forwarder to a dead process, and for a
    stopped process (SIGSTOP), because the kernel accepts the connection.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout) as connection:
            return not greeting or connection.recv(len(greeting)) == greeting
    except OSError:
        return False
