"""Groups over real sockets: options, backpressure, order, refusals, ports."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from time import monotonic

import pytest
import zmq
from fakes import RUN, group_of
from sockets import (
    ANYWHERE,
    DEADLINE,
    GROUP,
    address_of_nobody,
    bound_again,
    pair,
    raw_socket,
    received,
    receiver_at,
    sender_to,
)

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.wire import sockets as wire_sockets

# Rollouts over sockets.


def test_group_arrives_with_its_frame(stack: ExitStack) -> None:
    receiver, sender = pair(stack)
    frame = wire.encode_group(GROUP)
    assert sender.send(frame, timeout=DEADLINE)
    got = receiver.receive(timeout=DEADLINE)
    assert got is not None
    assert wire.encode_group(got[0]) == got[1] == frame


def test_receive_gives_none_when_nothing_comes(stack: ExitStack) -> None:
    receiver, _ = pair(stack)
    assert receiver.receive(timeout=0.01) is None


def bad_version() -> list[bytes]:
    return [b"\x81\xa1v\x09"]


def bad_run() -> list[bytes]:
    return [wire.encode_group(dataclasses.replace(GROUP, run_id="other-1"))]


def bad_frames() -> list[bytes]:
    return [wire.encode_group(GROUP), b"tail"]


def bad_bytes() -> list[bytes]:
    return [b"GET / HTTP/1.1"]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [(bad_version, "format"), (bad_run, "another run"), (bad_frames, "2 frames"),
     (bad_bytes, "not a message")],
)  # fmt: skip
def test_bad_message_is_counted_and_the_next_good_one_received(
    stack: ExitStack, frames: Callable[[], list[bytes]], reason: str
) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    sender = raw_socket(stack, receiver.address)
    sender.send_multipart(frames())
    sender.send(wire.encode_group(GROUP))
    assert wire.encode_group(received(receiver)) == wire.encode_group(GROUP)
    ((said, count),) = receiver.refused.items()
    assert reason in said and count == 1


def test_each_receive_waits_as_long_as_it_is_told(stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    for milliseconds in (3, 1, 1, 3, 0):
        assert receiver.receive(timeout=milliseconds / 1000) is None
        assert receiver._socket.getsockopt(zmq.RCVTIMEO) == milliseconds


def test_group_whose_rollouts_break_a_rule_comes_without_them(stack: ExitStack) -> None:
    receiver = wire.RolloutReceiver(ANYWHERE, run_id=RUN, vocab_size=2)
    stack.enter_context(closing(receiver))
    raw_socket(stack, receiver.address).send(wire.encode_group(GROUP))
    group = received(receiver)
    assert (group.sender, group.sequence, len(group.rollouts)) == (GROUP.sender, 5, 0)
    ((said, count),) = receiver.refused.items()
    assert "outside the vocabulary" in said and count == 1


def test_reasons_are_remembered_and_logged_up_to_a_bound(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    sender = raw_socket(stack, receiver.address)
    for number in range(300):  # each name of a run is another reason
        sender.send(wire.encode_group(dataclasses.replace(GROUP, run_id=f"run-{number}")))
        while not sum(receiver.refused.values()) > number:
            assert receiver.receive(timeout=DEADLINE) is None
    assert len(receiver.refused) == wire_sockets.MAX_REASONS + 1 == len(caplog.records)
    assert sum(receiver.refused.values()) == 300


def accepted(sender: wire.RolloutSender, frame: bytes, *, limit: int) -> int:
    """Groups that the sender takes while nobody reads."""
    count = 0
    while count < limit and sender.send(frame, timeout=0.3):
        count += 1
    return count


def frame_of_4_kilobytes() -> bytes:
    frame = wire.encode_group(group_of([1, 0, 0, 1], lengths=[120] * 4))
    assert 3900 < len(frame) < 6000
    return frame


def test_sender_stops_when_the_trainer_does_not_read(stack: ExitStack) -> None:
    _, sender = pair(stack)
    assert accepted(sender, frame_of_4_kilobytes(), limit=256) < 160


def test_sender_stops_when_there_is_no_trainer(stack: ExitStack) -> None:
    sender = sender_to(address_of_nobody(), stack)
    assert accepted(sender, frame_of_4_kilobytes(), limit=64) <= 2


def test_sender_goes_on_when_the_trainer_reads_again(stack: ExitStack) -> None:
    receiver, sender = pair(stack)
    assert accepted(sender, frame_of_4_kilobytes(), limit=256) < 160
    ends = monotonic() + DEADLINE
    while not sender.send(frame_of_4_kilobytes(), timeout=0.05):
        received(receiver)
        assert monotonic() < ends


def test_groups_of_one_sender_arrive_in_order(stack: ExitStack) -> None:
    receiver, sender = pair(stack)
    numbers = []
    for number in range(50):
        frame = wire.encode_group(dataclasses.replace(GROUP, sequence=number))
        while not sender.send(frame, timeout=0.02):
            numbers.append(received(receiver).sequence)
    while len(numbers) < 50:
        numbers.append(received(receiver).sequence)
    assert numbers == list(range(50))


def test_trainer_bound_again_on_its_port_receives_what_is_sent_afterwards(
    stack: ExitStack,
) -> None:
    first = receiver_at()
    sender = sender_to(first.address, stack)
    assert sender.send(wire.encode_group(GROUP), timeout=DEADLINE)
    received(first)
    first.close()
    second = stack.enter_context(closing(bound_again(first.address)))
    afterwards = wire.encode_group(dataclasses.replace(GROUP, sequence=6))
    ends = monotonic() + DEADLINE
    got = None
    while got is None:  # what left before the old connection was known to be dead is lost
        assert monotonic() < ends
        sender.send(afterwards, timeout=0.05)
        got = second.receive(timeout=0.05)
    assert got[0].sequence == 6


def test_sender_closes_within_its_linger_when_the_trainer_is_absent() -> None:
    zmq.Context.instance().term()  # with what other tests left lingering
    sender = wire.RolloutSender(address_of_nobody())
    assert sender.send(wire.encode_group(GROUP), timeout=DEADLINE)
    started = monotonic()
    sender.close(linger_seconds=0.2)
    zmq.Context.instance().term()  # waits for what lingers
    assert 0.15 < monotonic() - started < DEADLINE


# Ports.


def test_port_in_use_names_its_holder_and_the_remedy(stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    port = receiver.address.rpartition(":")[2]
    with pytest.raises(WireError, match=rf"port {port} .*pid {os.getpid()} .*--wire\.port"):
        receiver_at(receiver.address)


def test_address_that_is_not_ours_names_the_setting() -> None:
    with pytest.raises(WireError, match=r"192\.0\.2\.1.*wire\.bind"):
        receiver_at("tcp://192.0.2.1:5555")


def test_announcements_are_on_the_next_port() -> None:
    assert wire.next_port("tcp://10.0.0.1:5555") == "tcp://10.0.0.1:5556"


def test_bound_port_answers(stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    assert wire.accepts_connection(receiver.address)


def test_closed_port_does_not_answer() -> None:
    assert not wire.accepts_connection(address_of_nobody())


# Options.


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (zmq.SNDHWM, 1),
        (zmq.RCVHWM, 1),
        (zmq.SNDBUF, 16 << 10),
        (zmq.RCVBUF, 128 << 10),
        (zmq.IMMEDIATE, 0),
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, 16 << 20),
        (zmq.RECONNECT_IVL, 100),
        (zmq.RECONNECT_IVL_MAX, 1000),
        (zmq.HEARTBEAT_IVL, 0),  # a busy trainer would be cut off
        (zmq.TCP_MAXRT, 0),
    ],
)
def test_both_ends_have_the_options_of_the_protocol(
    stack: ExitStack, option: int, value: int
) -> None:
    for end in pair(stack):
        assert end._socket.getsockopt(option) == value


def test_trainer_notices_with_keepalive_that_a_generator_is_gone(stack: ExitStack) -> None:
    receiver, _ = pair(stack)
    options = (zmq.TCP_KEEPALIVE, zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_INTVL,
               zmq.TCP_KEEPALIVE_CNT)  # fmt: skip
    assert [receiver._socket.getsockopt(each) for each in options] == [1, 60, 15, 8]


def test_queue_is_as_long_as_asked_for(stack: ExitStack) -> None:
    sender = sender_to(address_of_nobody(), stack, hwm=5)
    assert accepted(sender, frame_of_4_kilobytes(), limit=64) == 5
