"""Connect a client socket to the trainer, and again if the connection fails.

libzmq itself connects again after a lost connection, but not after a refused handshake or bytes
that violate ZeroMQ's protocol. Nor does it detect a damaged message: a damaged subscription leaves
a connection open on which the socket never receives a message.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from peralta_zmq.errors import WireError
from peralta_zmq.wire.auth import HANDSHAKE_SECONDS, GeneratorKeys, use_keys

SILENT_SECONDS = 10.0  # a connection that was silent for this time is opened again
# A client reports a refusal only after this number of handshakes that failed for the same reason,
# and ConnectionTiming.patience_seconds, because damaged bytes can look like a refusal.
PATIENCE_TRIES = 5
# Reasons of a failed handshake that are no refusal by themselves.
CLOSED, DAMAGED = "closed during the handshake", "damaged data"
HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_accepted_keys: set[GeneratorKeys] = set()  # keys of all successful handshakes of this process
_monitor_numbers = itertools.count()  # one for each ClientConnection of the process
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionTiming:
    """Times of a client's connection, in seconds."""

    silent_seconds: float = SILENT_SECONDS
    max_silent_seconds: float = 160.0  # between attempts, which become rarer during silence
    retry_seconds: float = 0.5  # from a refused handshake to the next attempt
    patience_seconds: float = 20.0  # failed handshakes before a refusal is reported
    handshake_seconds: float = HANDSHAKE_SECONDS  # limit of the server
    # Between two attempts to connect; libzmq doubles it after each attempt, up to a second: a short
    # run could end before the generators received an announcement.
    reconnect_seconds: float = 0.1


DEFAULT_TIMING = ConnectionTiming()


class ClientConnection:
    """Connects a client socket, with keys or without, and again after a fault.

    Create it after the socket's options are set, and close it before the socket.
    """

    def __init__(
        self,
        client: zmq.Socket[bytes],
        address: str,
        keys: GeneratorKeys | None,
        *,
        name: str,
        timing: ConnectionTiming = DEFAULT_TIMING,
    ) -> None:
        self.num_reconnects = 0  # after silence only
        self.raises_refusals = True  # False: `check` logs a refusal instead
        self._client = client
        self._address = address
        self._keys = keys
        self._name = name
        self._timing = timing
        self._is_accepted = False  # a handshake of this socket has succeeded
        self._is_failing = False  # a handshake has failed since the last success
        # Since the last success: reason -> number of failed handshakes, monotonic seconds of the
        # first one.
        self.failures: dict[str, tuple[int, float]] = {}
        self.retry_at = float("inf")  # monotonic seconds; infinite if no attempt is planned
        self._silence_limit = timing.silent_seconds  # silence before the next attempt
        use_keys(client, keys)
        client.setsockopt(zmq.RECONNECT_IVL, int(timing.reconnect_seconds * 1000))
        # A new endpoint each time: libzmq releases a closed endpoint only some time later.
        endpoint = f"inproc://handshakes-{next(_monitor_numbers)}"
        client.monitor(endpoint, HANDSHAKE_EVENTS)
        self._events = zmq.Context.instance().socket(zmq.PAIR)
        # 0 = unlimited: on a full queue libzmq would block the I/O thread that serves all sockets.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(endpoint)
        client.setsockopt(zmq.IPV6, needs_ipv6(address))
        client.connect(address)

    def check(self) -> bool:
        """Connect again after a refused handshake, then return True; call this often.

        Raises WireError with reason and remedy if no handshake has succeeded, and the trainer has
        refused handshakes for the same reason for `patience_seconds`. After a success with these
        keys, damaged data is the likely cause. Can block for half a second.
        """
        reasons: list[str] = []  # why handshakes failed since the previous call
        while self._events.poll(0):
            message: Any = parse_monitor_message(self._events.recv_multipart())
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_accepted = True
                self._is_failing = False
                self.failures.clear()
                reasons.clear()
                if self._keys is not None:
                    _accepted_keys.add(self._keys)
                continue
            reasons.append(self._reason_of(message["event"], message["value"]))
            # After FAILED_NO_DETAIL libzmq connects again; after the other failures it does not.
            if message["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self.retry_at = time.monotonic() + self._timing.retry_seconds
        is_due = time.monotonic() >= self.retry_at
        if is_due:
            self._connect_again()
        is_known = self._is_accepted or self._keys in _accepted_keys
        if reasons and (is_known or not self.raises_refusals):
            if not self._is_failing:
                text = "connection failed name=%s; trying again: %s"
                logger.warning(text, self._name, reasons[0])
            self._is_failing = True
        elif reasons:
            self._check_patience(reasons)
        return is_due

    def reconnect_if_silent(self, seconds: float) -> bool:
        """Connect again after `seconds` of silence, too long; the pauses double. True if it did."""
        if seconds < self._timing.silent_seconds:
            self._silence_limit = self._timing.silent_seconds
        if seconds < self._silence_limit:
            return False
        self._silence_limit = seconds + min(seconds, self._timing.max_silent_seconds)
        self.num_reconnects += 1
        # Before the first handshake the trainer is not running, and the generator reports its wait.
        level = logging.WARNING if self._is_accepted else logging.DEBUG
        logger.log(level, "reconnecting connection=%s silent_seconds=%.0f", self._name, seconds)
        self._connect_again()
        return True

    def move(self, address: str) -> None:
        """Connect to another address; messages in the send queue are lost."""
        self._client.disconnect(self._address)
        self._address = address
        self._is_failing = False
        self.failures.clear()
        self.retry_at = float("inf")
        self._silence_limit = self._timing.silent_seconds
        self._client.setsockopt(zmq.IPV6, needs_ipv6(address))
        self._client.connect(address)

    def close(self) -> None:
        self._client.monitor(None, 0)
        self._events.close(linger=0)

    def _connect_again(self) -> None:
        """Open a new connection; messages in the send queue are lost."""
        self.retry_at = float("inf")
        self._client.disconnect(self._address)
        self._client.connect(self._address)

    def _check_patience(self, reasons: list[str]) -> None:
        """Raise WireError if the trainer has refused handshakes for one reason for too long.

        A trainer that is down, stopped or suspended may come back.
        """
        now = time.monotonic()  # before the connection test, which takes up to half a second
        if not accepts_connection(self._address, timeout=0.5, greeting=b"\xff"):
            self.failures.clear()
            return
        for reason in set(reasons) - {DAMAGED}:
            count, first = self.failures.get(reason, (0, now))
            # Of the first failures count one, because the times of the others are unknown.
            count = count + reasons.count(reason) if count else 1
            self.failures[reason] = count, first
            elapsed = now - first
            if count < PATIENCE_TRIES or elapsed < self._timing.patience_seconds:
                continue
            if reason != CLOSED:
                raise WireError(reason)
            # A trainer with a different key closes every connection during the handshake. A trainer
            # that cannot read its key folder closes it after HANDSHAKE_SECONDS.
            if self._keys is not None and elapsed / count <= self._timing.handshake_seconds / 2:
                raise WireError(
                    f"the trainer at {self._address} closes every connection: trainer.public is "
                    "not the trainer's key, or the trainer accepts no client; copy trainer.public "
                    "from the trainer's security.keys folder"
                )

    def _reason_of(self, event: int, value: int) -> str:
        """Why a handshake failed: CLOSED, DAMAGED, or the reason of a refusal with the remedy."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return CLOSED
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
        return DAMAGED


def needs_ipv6(address: str) -> bool:
    """Whether a host has IPv6 only: with its option IPV6, ZeroMQ would not try IPv4 at all."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host.replace(".", "").isdigit():  # no lookup, which may take long
        return False
    with suppress(OSError, UnicodeError):
        return {family for family, *_ in socket.getaddrinfo(host, None)} == {socket.AF_INET6}
    return False


def accepts_connection(address: str, *, timeout: float = 1.0, greeting: bytes = b"") -> bool:
    """Whether tcp://HOST:PORT accepts a connection and its first bytes are `greeting`.

    A ZeroMQ socket first sends 0xff. The kernel accepts connections also for a stopped process.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            return not greeting or connection.recv(len(greeting)) == greeting
    except OSError:
        return False
