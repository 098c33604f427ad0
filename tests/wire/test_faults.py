"""Rows of the fault table: network, trainer restarts, hostile clients."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from time import monotonic

import pytest
import zmq
from bad_network import Slow, proxy_to
from sample_data import RUN, VOCAB_SIZE, group_of, resident_bytes
from sockets import (
    DEADLINE,
    GREETING,
    GROUP,
    bound_again,
    drained,
    eventually,
    frame_of,
    hello,
    numbered,
    pair,
    received,
    receiver_at,
    sender_to,
    until,
)

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.generator.trainer_link import Outbox
from peralta_zmq.learning.admission import Ledger
from peralta_zmq.wire import generator_status
from peralta_zmq.wire import rollout_sockets as wire_sockets
from peralta_zmq.wire.auth import GeneratorKeys, generator_keys, make_keys, use_keys
from tools.link_proxy import LinkProxy, free_ports

ANNOUNCEMENTS, STATUSES = 1, 2  # by position of the port
NUM_IN_FLIGHT = 4  # groups, as the sampling pacer would allow
REPO = Path(__file__).parents[2]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def events_of(end: wire.RolloutReceiver) -> zmq.Socket[bytes]:
    return end.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)


# Rows 9 and 10: the network.


def test_unread_handshake_failures_block_no_other_socket(stack: ExitStack) -> None:
    """A forwarder to a trainer that is down for minutes; libzmq queues 2,000 events by itself."""
    often = wire.ConnectionTiming(reconnect_seconds=0.001)
    forwarder = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    forwarder.settimeout(DEADLINE)
    address = "tcp://{}:{}".format(*forwarder.getsockname())
    stack.enter_context(closing(wire.AnnouncementSubscriber(address, timing=often)))
    stack.enter_context(closing(wire.GeneratorStatusSender(address, timing=often)))
    stack.callback(wire.RolloutSender(address, timing=often).close, linger_seconds=0)
    for _ in range(9000):
        forwarder.accept()[0].close()
    receiver, sender = pair(stack)
    assert sender.send(numbered(0), timeout=DEADLINE)
    assert received(receiver).group_number == 0


def test_subscribers_can_be_opened_and_closed_many_times() -> None:
    for _ in range(200):  # libzmq releases the names of their monitors late
        wire.AnnouncementSubscriber("tcp://127.0.0.1:9").close()


@pytest.mark.parametrize("half_open", [False, True])
def test_interrupted_link_resumes_and_loses_nothing(stack: ExitStack, half_open: bool) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    proxy = stack.enter_context(proxy_to(receiver.address))
    sender = sender_to(proxy.address, stack)
    assert sender.send(numbered(0), timeout=DEADLINE)
    received(receiver)
    proxy.cut(half_open=half_open)
    sent = 1
    for _ in until(2):
        sent += sender.send(numbered(sent), timeout=0.1)
    assert sent < 2000  # it blocked; without backpressure about 100,000
    proxy.restore()
    got: list[int] = []
    last = sent
    for _ in until(60):  # the kernel retries a dead link at growing intervals
        got += [each.group_number for each in drained(receiver, quiet=0.1)]
        sent += sent == last and sender.send(numbered(last), timeout=0.1)
        if last in got:
            break
    assert got == list(range(1, last + 1))
    assert proxy.num_connections == 1


def test_slow_lossy_network_keeps_the_order_and_resends_nothing(stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    proxy = stack.enter_context(proxy_to(receiver.address))
    proxy.damage = Slow(bits_per_s=1e6, delay=0.05, loss=0.03)
    sender, outbox = sender_to(proxy.address, stack), Outbox(GROUP.sender)
    ledger, got, sent = Ledger(), [], 0
    for _ in until(4):
        if outbox.num_unreceived < NUM_IN_FLIGHT:
            frame = numbered(sent)
            outbox.add(frame)
            sent += 1
            while not sender.send(frame, timeout=0.01):
                got += settle_next(receiver, ledger)
            outbox.mark_sent()
        got += settle_next(receiver, ledger)
        newest = ledger.settled(GROUP.sender)
        outbox.acknowledge(announcement(newest))
        outbox.queue_lost()
        assert outbox.next_frame() is None
    assert got == list(range(len(got))) and len(got) > 10


def settle_next(receiver: wire.RolloutReceiver, ledger: Ledger) -> list[int]:
    message = receiver.receive(timeout=0.01)
    if message is None:
        return []
    ledger.settle(message[0].sender, message[0].group_number, "trained")
    return [message[0].group_number]


def announcement(newest: int) -> wire.Announcement:
    number = newest + 1
    progress = wire.SenderProgress(settled=number, settled_end=number, durable=number)
    return wire.Announcement(GROUP.run_id, incarnation=b"1", senders={GROUP.sender: progress})


# Rows 11, 12 and 13: the trainer.


def test_memory_is_bounded_with_five_fast_senders(stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    senders = [sender_to(receiver.address, stack) for _ in range(5)]
    group = group_of([1.0, 0.0], lengths=[6_000] * 2)  # about 100 KB
    resident, queued = list[int](), 0
    for tries in range(1, 601):
        for sender in senders:
            frame = wire.encode_group(dataclasses.replace(group, group_number=tries))
            queued += sender.send(frame, timeout=0)
        if tries % 20 == 0:
            received(receiver)
        if tries % 300 == 0:
            resident.append(resident_bytes())
    assert queued < 150  # of 3,000: the trainer reads 30, the others fill the queues once
    assert resident[1] - resident[0] < 16 << 20  # of 150 MB that were offered meanwhile


@pytest.mark.parametrize(
    "seconds", [3, pytest.param(60, marks=[pytest.mark.chaos, pytest.mark.timeout(120)])]
)
def test_stalled_trainer_keeps_connections_and_groups(stack: ExitStack, seconds: int) -> None:
    receiver, sender = pair(stack)
    disconnects = stack.enter_context(events_of(receiver))
    stack.callback(receiver.socket.disable_monitor)
    sent = 0
    for _ in until(seconds):
        sent += sender.send(numbered(sent), timeout=0.2)
    assert not disconnects.poll(0)
    assert [received(receiver).group_number for _ in range(sent)] == list(range(sent))
    assert receiver.receive(timeout=0.5) is None


def test_trainer_restarted_20_times_is_reached_within_a_second(stack: ExitStack) -> None:
    receiver = receiver_at()
    sender = sender_to(receiver.address, stack)
    assert sender.send(numbered(0), timeout=DEADLINE)
    received(receiver)
    seconds: list[float] = []
    for number in range(1, 21):
        receiver.close()
        receiver = bound_again(receiver.address)
        bound, got = monotonic(), None
        while got is None:
            sender.send(numbered(number), timeout=0.02)
            got = receiver.receive(timeout=0.02)
            assert monotonic() - bound < DEADLINE
        seconds.append(monotonic() - bound)
        drained(receiver, quiet=0.05)
    receiver.close()
    assert sorted(seconds)[-2] < 1.0  # one outlier is allowed on a loaded machine


def test_second_trainer_is_refused_and_the_first_continues(stack: ExitStack) -> None:
    receiver, sender = pair(stack)
    with pytest.raises(WireError, match=r"in use by pid \d+ .*--wire\.port"):
        receiver_at(receiver.address)
    assert sender.send(numbered(3), timeout=DEADLINE)
    assert received(receiver).group_number == 3


# Rows 23 and 26: hostile clients.

HOSTILE = [
    b"GET / HTTP/1.1\r\nHost: trainer\r\n\r\n",
    bytes(range(256)) * 40,
    b"\xff" * 64,
    GREETING,
    GREETING + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\4PUSH",
    GREETING + b"\x06" + (2**62).to_bytes(8, "big"),  # a frame of 2^62 bytes
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
]


def test_trainer_serves_among_garbage_and_200_slow_clients(stack: ExitStack) -> None:
    receiver, sender = pair(stack)
    port = port_of(receiver.address)
    for number in range(200):
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE))
        slow.sendall(GREETING[: number % len(GREETING)])  # and nothing more
    for content in HOSTILE * 5:
        hostile = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        hostile.sendall(content)
    for number in range(20):
        assert sender.send(numbered(number), timeout=DEADLINE)
        assert received(receiver).group_number == number
    assert not receiver.refused


def test_connection_without_a_handshake_is_closed(stack: ExitStack) -> None:
    limits = wire.ServerLimits(handshake_seconds=0.2)
    authenticator = stack.enter_context(closing(wire.Authenticator(None, limits)))
    receiver = stack.enter_context(closing(receiver_at(authenticator=authenticator)))
    opened = socket.create_connection(("127.0.0.1", port_of(receiver.address)))
    send_until_closed(stack.enter_context(closing(opened)), GREETING)


def connected(stack: ExitStack, address: str, kind: str) -> socket.socket:
    """A connection of a client without keys, after the handshake; may raise ConnectionError."""
    opened = socket.create_connection(("127.0.0.1", port_of(address)), timeout=DEADLINE)
    stack.enter_context(closing(opened))
    opened.sendall(hello(kind))
    with opened.makefile("rb") as reader:
        answer = reader.read(len(GREETING) + 2)
        if len(answer) < len(GREETING) + 2 or len(reader.read(answer[-1])) < answer[-1]:
            raise ConnectionResetError
    return opened  # libzmq refuses messages that come before its own READY, which is read


def send_until_closed(opened: socket.socket, content: bytes) -> None:
    """Send and wait until the trainer closes the connection."""
    opened.settimeout(10)
    with suppress(ConnectionError):
        opened.sendall(content)
        while opened.recv(1000):
            pass  # the greeting of the trainer, then the end


def test_length_above_any_group_of_the_run_closes_its_connection(stack: ExitStack) -> None:
    limits = wire.GroupLimits(VOCAB_SIZE, max_rollouts=8, max_tokens=512, max_turns=64)
    assert limits.max_bytes < 128 << 10
    receiver = stack.enter_context(closing(receiver_at(limits=limits)))
    sender = sender_to(receiver.address, stack)
    opened = connected(stack, receiver.address, "PUSH")
    send_until_closed(opened, frame_of(bytes(128 << 10))[:1000])
    assert sender.send(numbered(7), timeout=DEADLINE)  # of another connection
    assert received(receiver).group_number == 7 and not receiver.refused


class AttackedPorts:
    """The trainer's ports for announcements and statuses, and a client of the two.

    With `keys`, a folder, the client has the key of a known generator.
    """

    def __init__(self, stack: ExitStack, keys: Path | None) -> None:
        self._stack, self._port = stack, free_ports()
        self._keys: GeneratorKeys | None = None
        first = f"tcp://127.0.0.1:{self._port}"
        if keys is not None:
            for name in ("trainer", "bob"):
                make_keys(keys, name)
            self._keys = generator_keys(keys, "bob")
        authenticator = stack.enter_context(closing(wire.Authenticator(keys)))
        address, options = wire_sockets.next_port, {"authenticator": authenticator}
        # The next read of its socket is long after a publication.
        self.publisher = wire.AnnouncementPublisher(
            address(first), announce_seconds=2 * DEADLINE, **options
        )
        stack.enter_context(closing(self.publisher))
        self._statuses = wire.GeneratorStatusReceiver(
            address(first, STATUSES), run_id=RUN, **options
        )
        stack.enter_context(closing(self._statuses))

    def sender_to(self, port: int) -> zmq.Socket[bytes]:
        """A socket of the client from which a port receives messages."""
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(self._open_sender, port)
            while not opened.done():
                self._statuses.receive(timeout=0.05)  # subscribes
                self.publisher.publish(wire.Announcement(RUN))
            return opened.result()

    def _open_sender(self, port: int) -> zmq.Socket[bytes]:
        """An XPUB sends only to peers that have subscribed, which the trainer does on STATUSES.

        A proxy leads the connection there first and then to ANNOUNCEMENTS: libzmq keeps the
        subscription.
        """
        if port == STATUSES:
            return self._subscribed(self._port)
        proxy = self._stack.enter_context(LinkProxy(self._port, kernel_buffer=1 << 20))
        opened = self._subscribed(proxy.port)
        proxy.target -= STATUSES - ANNOUNCEMENTS
        proxy.reset()
        opened.recv()  # an announcement
        return opened

    def _subscribed(self, port: int) -> zmq.Socket[bytes]:
        """An XPUB to the statuses of the ports from `port` on, after the trainer has subscribed."""
        opened = self._stack.enter_context(zmq.Context.instance().socket(zmq.XPUB))
        for option, value in (
            (zmq.LINGER, 0), (zmq.SNDHWM, 1000), (zmq.SNDTIMEO, 3000), (zmq.RCVTIMEO, 3000),
        ):  # fmt: skip
            opened.setsockopt(option, value)
        use_keys(opened, self._keys)
        opened.connect(f"tcp://127.0.0.1:{port + STATUSES}")
        opened.setsockopt(zmq.XPUB_NODROP, 1)  # wait for room in the queue instead
        opened.recv()
        return opened


@pytest.fixture(params=[False, True], ids=["no keys", "known generator"])
def attacked(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path) -> AttackedPorts:
    return AttackedPorts(stack, tmp_path / "keys" if request.param else None)


@pytest.mark.parametrize(
    ("port", "limit"),
    [(ANNOUNCEMENTS, 512),
     (STATUSES, generator_status.MAX_STATUS)],
)  # fmt: skip
def test_oversize_message_closes_its_connection(
    attacked: AttackedPorts, stack: ExitStack, port: int, limit: int
) -> None:
    hostile = attacked.sender_to(port)
    events = stack.enter_context(hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED))
    stack.callback(hostile.disable_monitor)
    hostile.send(bytes(limit + 1))
    assert events.poll(5000)  # ms


@pytest.mark.parametrize("port", [ANNOUNCEMENTS, STATUSES])
def test_unread_messages_of_a_connection_are_bounded(attacked: AttackedPorts, port: int) -> None:
    hostile, sent = attacked.sender_to(port), 0
    hostile.setsockopt(zmq.SNDTIMEO, 500)  # ms
    attacked.publisher.publish(wire.Announcement(RUN))
    with suppress(zmq.Again):
        while sent < 100_000:
            hostile.send(bytes(400))
            sent += 1
    assert sent < 60_000  # the queues of both sides and the buffers of the kernel are full


# Row 39: what peers make the announcement socket store.

MAX_GROWTH = 40 << 20  # bytes
PUBLISHER = """
import sys, threading, os, time
from peralta_zmq import wire

threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
publisher = wire.AnnouncementPublisher("tcp://127.0.0.1:*")
print(publisher.address, flush=True)
for step in range(1_000_000):
    publisher.publish(wire.Announcement("demo", step=step))
    time.sleep(0.005)
"""
ATTACKS = {  # messages that begin with 1 are subscriptions
    "a large subscription": lambda: frame_of(b"\1" + os.urandom(15 << 20)),
    "many subscriptions": lambda: b"".join(
        frame_of(b"\1" + os.urandom(200)) for _ in range(60_000)
    ),
}


@contextmanager
def publisher_of_constant_memory() -> Iterator[str]:
    """The address of a process that publishes all the time, and must not grow meanwhile."""
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", PUBLISHER], cwd=REPO, text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )  # fmt: skip
        stack.callback(process.kill)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        subscriber = stack.enter_context(closing(wire.AnnouncementSubscriber(address)))
        eventually(lambda: subscriber.receive(timeout=0.1))
        before = resident_bytes(process.pid)
        yield address
        step = eventually(lambda: subscriber.receive(timeout=0.1)).step
        eventually(lambda: subscriber.receive(timeout=0.1).step > step + 100)  # type: ignore
        assert resident_bytes(process.pid) - before < MAX_GROWTH


@pytest.mark.parametrize("attack", ATTACKS)
def test_subscriptions_take_no_memory(stack: ExitStack, attack: str) -> None:
    content = ATTACKS[attack]()
    with publisher_of_constant_memory() as address:
        for kind in ("SUB", "XPUB"):
            with suppress(ConnectionError):  # libzmq refuses the type of the socket or the size
                connected(stack, address, kind).sendall(content)


def test_unread_messages_of_closed_connections_are_freed() -> None:
    with publisher_of_constant_memory() as address:
        for _ in range(3000):  # each keeps 33 KB while its messages are unread
            with ExitStack() as once:
                connected(once, address, "XPUB").sendall(frame_of(bytes(500)) * 90)
