"""Client connections: damaged messages without keys, silence, back-off, a cut link."""

from __future__ import annotations

from contextlib import ExitStack, closing
from time import sleep

import pytest
import zmq
from bad_network import BitFlip, Proxy
from sample_data import INCARNATION, RUN
from sockets import ANYWHERE, eventually, until, unused_address

from peralta_zmq import wire
from peralta_zmq.wire import connection
from peralta_zmq.wire.connection import ClientConnection
from peralta_zmq.wire.sockets import open_socket

STATUS = wire.GeneratorStatus(RUN, "ann", INCARNATION)


def open_publisher(stack: ExitStack) -> wire.AnnouncementPublisher:
    return stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))


def subscriber_to(address: str, stack: ExitStack) -> wire.AnnouncementSubscriber:
    return stack.enter_context(closing(wire.AnnouncementSubscriber(address)))


def test_announcements_after_a_damaged_length_arrive_on_a_new_connection(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq waits for a megabyte that never comes."""
    monkeypatch.setattr(connection, "SILENT_SECONDS", 1.5)  # announcements are a second apart
    publisher = open_publisher(stack)
    publisher.publish(wire.Announcement(RUN, step=3))
    proxy = stack.enter_context(Proxy(publisher.address))
    proxy.damage = flip = BitFlip(b"\xa6run_id", -6, bit=4)  # in the length before the frame
    subscriber = subscriber_to(proxy.address, stack)
    assert eventually(lambda: subscriber.receive(timeout=0.1)) == wire.Announcement(RUN, step=3)
    assert flip.done.is_set() and subscriber.connection.num_reconnects >= 1
    assert "reconnecting connection=announcements silent_seconds=" in caplog.text


def test_damaged_status_subscription_is_requested_again(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.5)
    receiver = stack.enter_context(closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)))
    proxy = stack.enter_context(Proxy(receiver.address))
    proxy.damage = flip = BitFlip(b"SUBSCRIBE")
    sender = stack.enter_context(closing(wire.GeneratorStatusSender(proxy.address)))

    def is_received() -> bool:
        if sender.check_due():
            sender.send(STATUS)
        return bool(receiver.receive(timeout=0.05))

    eventually(is_received)
    assert flip.done.is_set() and sender.connection.num_reconnects == 1


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
    proxy = stack.enter_context(Proxy(publisher.address))
    subscriber = subscriber_to(proxy.address, stack)
    publisher.publish(wire.Announcement(RUN))
    eventually(lambda: subscriber.receive(timeout=0.1))
    for step in range(400):  # far more than the queue of a socket holds
        publisher.publish(wire.Announcement(RUN, step=step))
        sleep(0.001)  # or the publisher would send the newest only
    proxy.cut.set()
    for _ in until(14):  # longer than the timeout that the heartbeats had
        sleep(0.05)
    subscriber.receive()
    proxy.cut.clear()
    publisher.publish(wire.Announcement(RUN, step=400))
    eventually(lambda: subscriber.receive(timeout=0.1) == wire.Announcement(RUN, step=400))
