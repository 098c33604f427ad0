"""Client connections: damaged messages, refusals, silence, back-off, a cut link."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import ExitStack, closing, suppress
from time import sleep
from typing import Any

import pytest
import zmq
from bad_network import BitFlip, proxy_to
from sample_data import INCARNATION, RUN
from sockets import ANYWHERE, DEADLINE, GREETING, eventually, until, unused_address

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.wire.auth import GeneratorKeys
from peralta_zmq.wire.connection import PATIENCE_TRIES, ClientConnection
from peralta_zmq.wire.rollout_sockets import open_socket

STATUS = wire.GeneratorStatus(RUN, "ann", INCARNATION)


def open_publisher(stack: ExitStack) -> wire.AnnouncementPublisher:
    return stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))


def subscriber_to(address: str, stack: ExitStack, **options: Any) -> wire.AnnouncementSubscriber:
    return stack.enter_context(closing(wire.AnnouncementSubscriber(address, **options)))


def test_announcements_after_a_damaged_length_arrive_on_a_new_connection(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq waits for a megabyte that never comes."""
    timing = wire.ConnectionTiming(silent_seconds=1.5)  # announcements are a second apart
    publisher = open_publisher(stack)
    publisher.publish(wire.Announcement(RUN, step=3))
    proxy = stack.enter_context(proxy_to(publisher.address))
    proxy.damage = flip = BitFlip(b"\xa6run_id", -6, bit=4)  # in the length before the frame
    subscriber = subscriber_to(proxy.address, stack, timing=timing)
    assert eventually(lambda: subscriber.receive(timeout=0.1)) == wire.Announcement(RUN, step=3)
    assert flip.done.is_set() and subscriber.connection.num_reconnects >= 1
    assert "reconnecting connection=announcements silent_seconds=" in caplog.text


class StatusLink:
    """A sender of statuses, connected through a proxy to a receiver."""

    TIMING = wire.ConnectionTiming(silent_seconds=0.5, retry_seconds=0.05)

    def __init__(self, stack: ExitStack) -> None:
        receiver = wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)
        self._receiver = stack.enter_context(closing(receiver))
        self.proxy = stack.enter_context(proxy_to(receiver.address))
        sender = wire.GeneratorStatusSender(self.proxy.address, timing=self.TIMING)
        self.sender = stack.enter_context(closing(sender))

    def is_received(self) -> bool:
        """Send a status if one is due; True if the receiver has received one."""
        if self.sender.check_due():
            self.sender.send(STATUS)
        return bool(self._receiver.receive(timeout=0.05))


def test_damaged_status_subscription_is_requested_again(stack: ExitStack) -> None:
    link = StatusLink(stack)
    link.proxy.damage = flip = BitFlip(b"SUBSCRIBE")
    eventually(link.is_received)
    assert flip.done.is_set() and link.sender.connection.num_reconnects == 1
    # Also on a later connection, which is opened because the trainer received no status.
    link.proxy.damage = flip = BitFlip(b"SUBSCRIBE")
    link.sender.unreceived_seconds = 1
    eventually(lambda: link.sender.check_due() or link.sender.connection.num_reconnects == 2)
    link.sender.unreceived_seconds = 0  # the trainer receives no groups now
    eventually(lambda: link.is_received() and flip.done.is_set())
    assert link.sender.connection.num_reconnects == 3


def test_subscription_damaged_after_a_refusal_is_requested_again(stack: ExitStack) -> None:
    link = StatusLink(stack)
    eventually(link.is_received)
    link.proxy.damage = lambda chunk: chunk.replace(b"NULL", b"OULL")  # in the greeting
    link.proxy.reset()

    def is_refused() -> bool:
        link.sender.check_due()
        return link.sender.connection.retry_at < float("inf")

    eventually(is_refused)
    link.proxy.damage = flip = BitFlip(b"SUBSCRIBE")
    eventually(lambda: link.is_received() and flip.done.is_set())


class RefusingServer:
    """Sends `reply` to each client and closes the connection.

    After a whole greeting it waits until the client closes the connection.
    """

    def __init__(self, stack: ExitStack, reply: bytes) -> None:
        self.reply, self.num_accepted = reply, 0
        self._server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = "tcp://{}:{}".format(*self._server.getsockname())
        thread = threading.Thread(target=self._serve)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self._server.shutdown, socket.SHUT_RDWR)  # ends `accept`

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._server.accept()
                accepted.settimeout(DEADLINE)
                with accepted, suppress(ConnectionError):
                    accepted.sendall(self.reply)
                    while len(self.reply) >= len(GREETING) and accepted.recv(64):
                        pass
                self.num_accepted += 1


RUNNING = GREETING[:1]  # from a server that runs, but closes the connection
MISMATCH = GREETING.replace(b"NULL", b"OULL")  # one flipped bit
UNKNOWN_COMMAND = GREETING + b"\4\6\5WRONG"


class RefusedClient:
    """A client of a RefusingServer. `failures` are those that the connection has counted."""

    def __init__(
        self, stack: ExitStack, server: RefusingServer, *, has_keys: bool, patience: float
    ) -> None:
        keys = GeneratorKeys("ann", zmq.curve_keypair()[1], zmq.curve_keypair()[0])
        self.socket = stack.enter_context(open_socket(zmq.PUSH))
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
        timing = wire.ConnectionTiming(
            patience_seconds=patience, retry_seconds=0.02, reconnect_seconds=0.02
        )
        opened = ClientConnection(
            self.socket, server.address, keys if has_keys else None, name="", timing=timing
        )
        self.connection = stack.enter_context(closing(opened))

    def check(self) -> object:
        """Check the connection; returns the failures that it has counted."""
        self.connection.check()
        self.socket.poll(10)
        return self.connection.failures


@pytest.mark.parametrize("has_keys", [False, True])
def test_damaged_greeting_is_not_the_reason_of_closed_connections(
    stack: ExitStack, has_keys: bool
) -> None:
    server = RefusingServer(stack, MISMATCH)
    client = RefusedClient(stack, server, has_keys=has_keys, patience=0.2)
    eventually(client.check)
    server.reply = RUNNING
    # `check` itself connects, too, after failures.
    num_accepted = server.num_accepted + 4 * PATIENCE_TRIES
    if not has_keys:
        eventually(lambda: client.check() and server.num_accepted > num_accepted)
        return
    with pytest.raises(WireError, match=re.escape("closes every connection: trainer.public")):
        eventually(lambda: client.check() and server.num_accepted > num_accepted)


def test_refusals_before_and_after_an_outage_are_not_added(stack: ExitStack) -> None:
    server = RefusingServer(stack, MISMATCH)
    client = RefusedClient(stack, server, has_keys=False, patience=0.0)

    def count() -> int:
        client.check()
        return sum(count for count, _ in client.connection.failures.values())

    for _ in range(PATIENCE_TRIES):  # two of each, added, would be twice the limit
        server.reply = MISMATCH
        eventually(lambda: count() >= 2)
        server.reply = b""  # as the port forwarder of a trainer that does not run
        eventually(lambda: count() == 0)


def test_damaged_handshakes_are_no_refusal(stack: ExitStack) -> None:
    server = RefusingServer(stack, UNKNOWN_COMMAND)
    client = RefusedClient(stack, server, has_keys=False, patience=0.0)
    eventually(lambda: client.check() or server.num_accepted > 4 * PATIENCE_TRIES)
    assert server.num_accepted > 4 * PATIENCE_TRIES


def test_failures_before_the_first_check_count_once(stack: ExitStack) -> None:
    server = RefusingServer(stack, RUNNING)
    client = RefusedClient(stack, server, has_keys=True, patience=0.0)
    eventually(lambda: client.socket.poll(10) or server.num_accepted > PATIENCE_TRIES + 1)
    client.check()  # raises no error


def test_silent_connection_is_opened_again_with_back_off(stack: ExitStack) -> None:
    client = stack.enter_context(open_socket(zmq.PUSH))
    opened = ClientConnection(client, unused_address(), None, name="rollouts")
    stack.enter_context(closing(opened))
    first = [seconds for seconds in range(700) if opened.reconnect_if_silent(seconds)]
    assert first == [10, 20, 40, 80, 160, 320, 480, 640]
    assert not opened.reconnect_if_silent(0.0)  # it works again
    second = [seconds for seconds in range(30) if opened.reconnect_if_silent(seconds)]
    assert second == [10, 20] and opened.num_reconnects == 10


@pytest.mark.chaos
def test_subscriber_survives_a_cut_link_after_many_unread_announcements(stack: ExitStack) -> None:
    """With heartbeats libzmq aborted the process: `Assertion failed: _input_stopped`."""
    publisher = open_publisher(stack)
    proxy = stack.enter_context(proxy_to(publisher.address))
    subscriber = subscriber_to(proxy.address, stack)
    publisher.publish(wire.Announcement(RUN))
    eventually(lambda: subscriber.receive(timeout=0.1))
    for step in range(400):  # far more than the queue of a socket holds
        publisher.publish(wire.Announcement(RUN, step=step))
        sleep(0.001)  # or the publisher would send the newest only
    proxy.cut()
    for _ in until(14):  # longer than the timeout that the heartbeats had
        sleep(0.05)
    subscriber.receive()
    proxy.restore()
    publisher.publish(wire.Announcement(RUN, step=400))
    eventually(lambda: subscriber.receive(timeout=0.1) == wire.Announcement(RUN, step=400))
