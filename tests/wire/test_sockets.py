"""Groups over sockets: options, backpressure, order, refused messages, ports."""

from __future__ import annotations

from contextlib import ExitStack, closing
from time import monotonic

import pytest
import zmq
from sample_data import RUN, VOCAB_SIZE, group_of
from sockets import (
    ANYWHERE,
    DEADLINE,
    GROUP,
    numbered,
    pair,
    raw_socket,
    received,
    receiver_at,
    sender_to,
    unused_address,
)

from peralta_zmq import wire
from peralta_zmq.errors import WireError


def test_group_arrives_with_its_frame(stack: ExitStack) -> None:
    receiver, sender = pair(stack)
    frame = wire.encode_group(GROUP)
    assert sender.send(frame, timeout=DEADLINE)
    message = receiver.receive(timeout=DEADLINE)
    assert message is not None
    assert wire.encode_group(message[0]) == message[1] == frame


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"\x81\xa6format\x09"], "format"),
        ([numbered(5, run_id="other-1")], "another run"),
        ([wire.encode_group(GROUP), b"tail"], "2 frames"),
        ([b"GET / HTTP/1.1"], "not a message"),
    ],
    ids=["format", "run", "frames", "bytes"],
)
def test_invalid_message_is_counted_and_the_next_received(
    stack: ExitStack, frames: list[bytes], reason: str
) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    raw = raw_socket(stack, receiver.address)
    raw.send_multipart(frames)
    raw.send(wire.encode_group(GROUP))
    assert wire.encode_group(received(receiver)) == wire.encode_group(GROUP)
    ((refusal, count),) = receiver.refused.items()
    assert reason in refusal and count == 1


def test_receive_waits_up_to_its_timeout(stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    for milliseconds in (3, 1, 1, 3, 0):
        assert receiver.receive(timeout=milliseconds / 1000) is None
        assert receiver.socket.getsockopt(zmq.RCVTIMEO) == milliseconds


def test_group_with_invalid_rollouts_is_received_without_them(stack: ExitStack) -> None:
    receiver = wire.RolloutReceiver(ANYWHERE, run_id=RUN, limits=wire.GroupLimits(2))
    stack.enter_context(closing(receiver))
    raw_socket(stack, receiver.address).send(wire.encode_group(GROUP))
    group = received(receiver)
    assert (group.sender, group.group_number, len(group.rollouts)) == (GROUP.sender, 5, 0)
    ((refusal, count),) = receiver.refused.items()
    assert "outside the vocabulary" in refusal and count == 1


def test_receiver_limits_the_reasons_it_counts_and_logs(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    raw = raw_socket(stack, receiver.address)
    for number in range(300):  # each run_id is another reason
        raw.send(numbered(5, run_id=f"run-{number}"))
        while not sum(receiver.refused.values()) > number:
            assert receiver.receive(timeout=DEADLINE) is None
    assert len(receiver.refused) == 101 == len(caplog.records)
    assert sum(receiver.refused.values()) == 300


def num_queued(sender: wire.RolloutSender, frame: bytes, *, limit: int) -> int:
    """Number of frames that the sender accepts while nothing is read."""
    count = 0
    while count < limit and sender.send(frame, timeout=0.3):
        count += 1
    return count


FRAME_4_KB = wire.encode_group(group_of([1, 0, 0, 1], lengths=[120] * 4))


def test_sender_blocks_until_the_trainer_reads(stack: ExitStack) -> None:
    assert 3900 < len(FRAME_4_KB) < 6000
    receiver, sender = pair(stack)
    assert num_queued(sender, FRAME_4_KB, limit=256) < 160
    ends = monotonic() + DEADLINE
    while not sender.send(FRAME_4_KB, timeout=0.05):
        received(receiver)
        assert monotonic() < ends


@pytest.mark.parametrize(("hwm", "expected"), [(1, 1), (5, 5)])
def test_sender_without_a_trainer_queues_hwm_groups(
    stack: ExitStack, hwm: int, expected: int
) -> None:
    sender = sender_to(unused_address(), stack, hwm=hwm)
    assert num_queued(sender, FRAME_4_KB, limit=64) == expected


def test_sender_without_a_trainer_closes_within_its_linger() -> None:
    zmq.Context.instance().term()  # with lingering sockets of other tests
    sender = wire.RolloutSender(unused_address())
    assert sender.send(wire.encode_group(GROUP), timeout=DEADLINE)
    started = monotonic()
    sender.close(linger_seconds=0.2)
    zmq.Context.instance().term()  # waits for the lingering socket
    assert 0.15 < monotonic() - started < DEADLINE


# Ports.


def test_foreign_address_names_the_setting() -> None:
    with pytest.raises(WireError, match=r"192\.0\.2\.1.*wire\.bind"):
        receiver_at("tcp://192.0.2.1:5555")


def test_accepts_connection_is_true_for_a_bound_port_only(stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    assert wire.accepts_connection(receiver.address)
    assert not wire.accepts_connection(unused_address())


def test_sockets_have_the_options_of_the_protocol(stack: ExitStack) -> None:
    receiver, sender = pair(stack)
    for end in (receiver, sender):
        options = {
            zmq.SNDHWM: 1, zmq.RCVHWM: 1, zmq.SNDBUF: 16 << 10, zmq.RCVBUF: 128 << 10,
            zmq.IMMEDIATE: 0, zmq.LINGER: 0, zmq.MAXMSGSIZE: 16 << 20, zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000, zmq.TCP_MAXRT: 0,
            zmq.HEARTBEAT_IVL: 0,  # would disconnect a busy trainer
        }  # fmt: skip
        if end is receiver:
            largest = wire.GroupLimits(VOCAB_SIZE).max_bytes + 33  # CURVE adds 33
            options |= {zmq.MAXMSGSIZE: largest, zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60,
                        zmq.TCP_KEEPALIVE_INTVL: 15, zmq.TCP_KEEPALIVE_CNT: 8}  # fmt: skip
        assert {option: end.socket.getsockopt(option) for option in options} == options
