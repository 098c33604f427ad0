"""Generator status: delivery, when one is due, refused messages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import msgpack as partly_annotated_msgpack
import pytest
import zmq
from damage import ANY_VALUE
from group_frames import FRAME, decoded
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_data import INCARNATION, RUN
from sockets import ANYWHERE, DEADLINE, bound_again, eventually, raw_socket

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.wire import announcements, connection, generator_status, message_fields, probe
from peralta_zmq.wire.message_fields import pack_with_checksum
from peralta_zmq.wire.rollout_sockets import ready

msgpack: Any = partly_annotated_msgpack
STATUS = wire.GeneratorStatus(
    RUN, "ann", INCARNATION, made=7, lost=1, unscored=2, aborted=5, resumed=6,
    step=4, tokens_per_s=123.5, blocked_frac=0.25, queue_frac=0.125, reload_s=0.5,
    wants_keyframe=True, store_error="denied", announcement_reconnects=1, rollout_reconnects=2,
    last=True, worker_info={"python": "3.11", "device": "cpu"},
)  # fmt: skip


@pytest.fixture
def receiver(stack: ExitStack) -> wire.GeneratorStatusReceiver:
    return stack.enter_context(closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)))


@pytest.fixture
def sender(receiver: wire.GeneratorStatusReceiver, stack: ExitStack) -> wire.GeneratorStatusSender:
    return stack.enter_context(closing(wire.GeneratorStatusSender(receiver.address)))


def send_until_received(
    sender: wire.GeneratorStatusSender,
    receiver: wire.GeneratorStatusReceiver,
    status: wire.GeneratorStatus,
) -> None:
    """Repeat, because messages are lost until the sender has connected."""

    def send() -> bool:
        sender.send(status)
        zmq.select([receiver.socket], [], [], timeout=0.1)
        return receiver.receive().get(status.sender) == status

    eventually(send)


def test_status_of_another_version_is_read() -> None:
    later = {**dataclasses.asdict(STATUS), "added": "later"}
    assert generator_status.decode_generator_status(pack_with_checksum(later)) == STATUS
    earlier = dataclasses.asdict(STATUS)
    del earlier["last"]
    read = generator_status.decode_generator_status(pack_with_checksum(earlier))
    assert read == dataclasses.replace(STATUS, last=False)


def test_receive_returns_the_latest_status_of_each_sender(
    stack: ExitStack, receiver: wire.GeneratorStatusReceiver, sender: wire.GeneratorStatusSender
) -> None:
    other = stack.enter_context(closing(wire.GeneratorStatusSender(receiver.address)))
    bob = dataclasses.replace(STATUS, generator_id="bob")
    send_until_received(sender, receiver, STATUS)
    send_until_received(other, receiver, bob)
    for made in (8, 9):
        sender.send(dataclasses.replace(STATUS, made=made))
        other.send(dataclasses.replace(bob, made=made))
    statuses: dict[str, wire.GeneratorStatus] = {}

    def newest() -> bool:
        statuses.update(receiver.receive(timeout=0.1))
        return [status.made for status in statuses.values()] == [9, 9]

    eventually(newest)
    assert statuses.keys() == {STATUS.sender, bob.sender}
    assert not receiver.receive()  # nothing is new


def test_largest_status_is_accepted(
    receiver: wire.GeneratorStatusReceiver, sender: wire.GeneratorStatusSender
) -> None:
    longest = '"' * 128
    facts = {f"{n}{longest}"[:128]: longest for n in range(16)}
    send_until_received(sender, receiver, dataclasses.replace(STATUS, worker_info=facts))


def test_status_is_due_after_a_subscription_and_every_two_seconds(
    stack: ExitStack,
    receiver: wire.GeneratorStatusReceiver,
    sender: wire.GeneratorStatusSender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eventually(lambda: receiver.receive() or sender.check_due())
    now = [time.monotonic()]
    monkeypatch.setattr(generator_status.time, "monotonic", lambda: now[0])
    for _ in range(3):
        sender.send(STATUS)
        now[0] += 1.99
        assert not sender.check_due()
        now[0] += 0.011
        assert sender.check_due()
    sender.send(STATUS)
    assert receiver.receive(timeout=DEADLINE) and not sender.check_due()
    receiver.close()
    restarted = bound_again(receiver.address, wire.GeneratorStatusReceiver, run_id=RUN)
    stack.enter_context(closing(restarted))
    eventually(lambda: restarted.receive() or sender.check_due())  # with the clock stopped


def test_unread_subscription_is_no_silence(
    receiver: wire.GeneratorStatusReceiver,
    sender: wire.GeneratorStatusSender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eventually(lambda: receiver.receive() or ready(sender.socket, zmq.POLLIN, 0.1))
    loaded = time.monotonic() + 2 * connection.SILENT_SECONDS
    monkeypatch.setattr(generator_status.time, "monotonic", lambda: loaded)
    assert sender.check_due() and sender.connection.num_reconnects == 0


def test_end_of_a_subscription_makes_no_status_due(
    receiver: wire.GeneratorStatusReceiver, stack: ExitStack
) -> None:
    sender = wire.GeneratorStatusSender(receiver.address, status_seconds=2 * DEADLINE)
    stack.enter_context(closing(sender))
    eventually(lambda: receiver.receive() or sender.check_due())
    sender.send(STATUS)
    assert sender.connection.reconnect_if_silent(2 * connection.SILENT_SECONDS)
    assert ready(sender.socket, zmq.POLLIN, DEADLINE)  # libzmq reports the end
    assert not sender.check_due()


def test_later_connection_without_subscription_is_opened_again(
    receiver: wire.GeneratorStatusReceiver,
    sender: wire.GeneratorStatusSender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No group is needed, with which the trainer would notice that it receives no status."""
    eventually(lambda: receiver.receive() or sender.check_due())
    now, reconnects = [time.monotonic()], list[int]()
    monkeypatch.setattr(generator_status.time, "monotonic", lambda: now[0])
    sender.send(STATUS)
    sender.unreceived_seconds = 11
    assert not sender.check_due() and sender.connection.num_reconnects == 1
    sender.unreceived_seconds = 0
    for second in range(50):  # the receiver sends no subscription, because it is not used
        before = sender.connection.num_reconnects
        sender.check_due()
        if sender.connection.num_reconnects > before:
            reconnects.append(second)
        now[0] += 1.0
    assert reconnects == [10, 20, 40]
    sender.send(STATUS)

    def is_due() -> bool:
        receiver.receive(timeout=0.05)  # sends the subscription
        return sender.check_due()

    eventually(is_due)
    now[0] += 100.0
    sender.check_due()
    assert sender.connection.num_reconnects == 4


def test_sender_without_a_trainer_never_blocks_and_is_never_due(stack: ExitStack) -> None:
    sender = wire.GeneratorStatusSender("tcp://127.0.0.1:9")
    stack.callback(sender.close, linger_seconds=0)
    assert not sender.check_due()
    for _ in range(1000):
        sender.send(STATUS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", 5), ("run_id", "other-1"), ("generator_id", None), ("incarnation", b"seven.."),
        ("incarnation", "text"), ("made", -1), ("made", 1.5), ("made", True), ("step", "4"),
        ("tokens_per_s", float("nan")), ("tokens_per_s", float("inf")), ("tokens_per_s", 5),
        ("blocked_frac", -0.1), ("blocked_frac", 1.01), ("queue_frac", 1.7e308),
        ("tokens_per_s", 1.7e308), ("reload_s", 1.7e308), ("reload_s", None), ("last", 1),
        ("worker_info", []), ("worker_info", {"a": 1}),
        ("worker_info", {b"a": "b"}), ("worker_info", {"a": {}}),
        ("worker_info", {str(n): "" for n in range(17)}), ("worker_info", {"device": "\x1b[2J"}),
        ("worker_info", {"torch\n": "2"}), ("worker_info", {"device": "\U0001f600"}),
        ("added", [1]), ("added", {"a": {"b": {"c": {"d": {}}}}}), ("generator_id", "x" * 129),
        ("generator_id", "ann\x1b]0;owned\x07"), ("generator_id", "ann/bob"), ("generator_id", "ü"),
        ("store_error", "\x1b[2J"), ("store_error", "x" * 251), ("store_error", None),
    ],
)  # fmt: skip
def test_malformed_status_is_counted_and_dropped(
    stack: ExitStack, receiver: wire.GeneratorStatusReceiver, field: str, value: object
) -> None:
    raw = raw_socket(stack, receiver.address, zmq.PUB)
    frame = pack_with_checksum({**dataclasses.asdict(STATUS), field: value})
    statuses: dict[str, wire.GeneratorStatus] = {}

    def send() -> int:
        raw.send(frame)
        statuses.update(receiver.receive(timeout=0.01))
        return receiver.refused

    eventually(send)
    assert not statuses


DECODERS: dict[Callable[[bytes], Any], dict[str, Any]] = {
    generator_status.decode_generator_status: dataclasses.asdict(STATUS),
    announcements.decode_announcement: dataclasses.asdict(wire.Announcement(RUN)),
}


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.data())
@settings(max_examples=200, deadline=None, database=None)
def test_decoder_raises_only_wire_error(decode: Callable[[bytes], Any], data: Any) -> None:
    valid = DECODERS[decode]
    fields = data.draw(st.dictionaries(st.sampled_from([*valid]), ANY_VALUE, min_size=1))
    try:
        message = decode(pack_with_checksum({**valid, **fields}))
    except WireError:
        return
    assert decode(message_fields.encode_fields(message)) == message


FRAMES = {decoded: FRAME} | {
    decode: pack_with_checksum(fields) for decode, fields in DECODERS.items()
}


@pytest.mark.parametrize("decode", FRAMES)
def test_decoder_refuses_every_flipped_bit(decode: Callable[[bytes], Any]) -> None:
    frame = FRAMES[decode]
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode(bytes(damaged))


@pytest.mark.parametrize(
    "decode", [*DECODERS, probe.decode_probe_reply, probe.decode_probe_request]
)
@given(frame=st.binary(max_size=80))
@settings(max_examples=200, deadline=None, database=None)
def test_decoder_refuses_random_bytes(decode: Callable[[bytes], Any], frame: bytes) -> None:
    for content in (frame, msgpack.packb([1]), msgpack.packb(None), msgpack.packb({})):
        with pytest.raises(WireError):
            decode(content)
