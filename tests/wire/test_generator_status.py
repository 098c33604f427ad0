"""Counters: what each generator says of itself reaches the trainer, or is refused."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack, closing
from typing import Any

import msgpack
import pytest
import zmq
from fakes import BOOT, RUN
from hypothesis import given, settings
from hypothesis import strategies as st
from sockets import ANYWHERE, DEADLINE, bound_again, eventually, raw_socket, until

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.wire import generator_status, validation

SAID = wire.GeneratorStatus(
    RUN, "ann", BOOT, made=7, lost=1, resent=3, unjudged=2, step=4,
    tokens_per_s=123.5, blocked_frac=0.25, queue_frac=0.125, reload_s=0.5, wants_keyframe=True,
    last=True, worker_info={"python": "3.11", "device": "cpu"},
)  # fmt: skip


def receiving(stack: ExitStack, **options: Any) -> wire.GeneratorStatusReceiver:
    return stack.enter_context(
        closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN, **options))
    )


def reported(
    sender: wire.GeneratorStatusSender,
    receiver: wire.GeneratorStatusReceiver,
    said: wire.GeneratorStatus,
) -> wire.GeneratorStatus:
    """The report as it came, once the sender has joined; reports before that are lost."""

    def sent() -> wire.GeneratorStatus | None:
        sender.send(said)
        zmq.select([receiver._socket], [], [], timeout=0.1)
        found = receiver.receive().get(said.sender)
        return found if found == said else None

    return eventually(sent)


def test_report_comes_back_exactly() -> None:
    assert wire.decode_generator_status(wire.encode_generator_status(SAID)) == SAID


def test_report_of_a_later_version_is_understood() -> None:
    frame = msgpack.packb({**dataclasses.asdict(SAID), "mood": "good"})
    assert wire.decode_generator_status(frame) == SAID


def test_report_of_a_version_that_did_not_say_whether_it_is_the_last_is_none() -> None:
    earlier = dataclasses.asdict(SAID)
    del earlier["last"]
    assert wire.decode_generator_status(msgpack.packb(earlier)) == dataclasses.replace(
        SAID, last=False
    )


def test_latest_report_of_each_sender_is_kept(stack: ExitStack) -> None:
    receiver = receiving(stack)
    ann = stack.enter_context(closing(wire.GeneratorStatusSender(receiver.address)))
    bob = stack.enter_context(closing(wire.GeneratorStatusSender(receiver.address)))
    of_bob = dataclasses.replace(SAID, generator_id="bob")
    reported(ann, receiver, SAID)
    reported(bob, receiver, of_bob)
    later = dataclasses.replace(SAID, made=8)
    reported(ann, receiver, later)
    assert receiver.latest == {later.sender: later, of_bob.sender: of_bob}
    assert not receiver.receive()  # nothing came since


def test_receiving_waits_for_a_report_as_long_as_it_was_told_to_and_no_longer_than_it_takes(
    stack: ExitStack,
) -> None:
    receiver = receiving(stack)
    sender = stack.enter_context(closing(wire.GeneratorStatusSender(receiver.address)))
    reported(sender, receiver, SAID)
    begun = time.monotonic()
    assert receiver.receive(timeout=0.2) == {}  # nothing comes
    assert time.monotonic() - begun >= 0.19
    later = dataclasses.replace(SAID, made=8)
    sender.send(later)
    assert receiver.receive(timeout=DEADLINE) == {later.sender: later}
    assert time.monotonic() - begun < DEADLINE


def test_the_largest_report_comes_and_a_larger_message_is_never_queued(stack: ExitStack) -> None:
    receiver = receiving(stack)
    sender = stack.enter_context(closing(wire.GeneratorStatusSender(receiver.address)))
    longest = "\U00010000" * validation.MAX_FACT
    facts = {f"{n}{longest}"[: validation.MAX_FACT]: longest for n in range(validation.MAX_FACTS)}
    reported(sender, receiver, dataclasses.replace(SAID, worker_info=facts))
    bob = dataclasses.asdict(dataclasses.replace(SAID, generator_id="bob"))
    sender._socket.send(msgpack.packb({**bob, "mood": bytes(generator_status.MAX_STATUS)}))
    reported(sender, receiver, SAID)  # it is connected again
    assert list(receiver.latest) == [SAID.sender] and not receiver.refused


def test_senders_remembered_are_bounded(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_status, "MAX_SENDERS", 3)
    receiver = receiving(stack)
    sender = stack.enter_context(closing(wire.GeneratorStatusSender(receiver.address)))
    for number in range(6):
        reported(sender, receiver, dataclasses.replace(SAID, generator_id=f"g{number}"))
    assert [each.generator_id for each in receiver.latest.values()] == ["g3", "g4", "g5"]


def test_report_is_due_once_a_trainer_listens_every_two_seconds_and_when_it_listens_again(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = receiving(stack)
    sender = stack.enter_context(closing(wire.GeneratorStatusSender(receiver.address)))
    eventually(lambda: receiver.receive() or sender.due)
    now = [time.monotonic()]
    monkeypatch.setattr(generator_status.time, "monotonic", lambda: now[0])
    for _ in range(3):
        sender.send(SAID)
        now[0] += 1.99
        assert not sender.due
        now[0] += 0.011
        assert sender.due
    sender.send(SAID)
    assert receiver.receive(timeout=DEADLINE) and not sender.due
    receiver.close()
    again = bound_again(receiver.address, wire.GeneratorStatusReceiver, run_id=RUN)
    stack.enter_context(closing(again))
    eventually(lambda: again.receive() or sender.due)  # the clock stands still


def test_no_report_is_due_while_nobody_listens(stack: ExitStack) -> None:
    sender = stack.enter_context(closing(wire.GeneratorStatusSender("tcp://127.0.0.1:9")))
    assert not sender.due


def test_reporting_to_nobody_never_blocks(stack: ExitStack) -> None:
    sender = wire.GeneratorStatusSender("tcp://127.0.0.1:9")
    stack.callback(sender.close, linger_seconds=0)
    for _ in range(1000):
        sender.send(SAID)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", 5), ("run_id", "other-1"), ("generator_id", None), ("incarnation", b"seven.."),
        ("incarnation", "text"), ("made", -1), ("made", 1.5), ("made", True), ("step", "4"),
        ("tokens_per_s", float("nan")), ("tokens_per_s", float("inf")), ("tokens_per_s", 5),
        ("blocked_frac", -0.1), ("reload_s", None), ("last", 1),
        ("worker_info", []), ("worker_info", {"a": 1}),
        ("worker_info", {b"a": "b"}), ("worker_info", {"a": {}}),
        ("worker_info", {str(n): "" for n in range(33)}),
        ("mood", [1]), ("mood", {"a": {}}), ("generator_id", "x" * 1025),
    ],
)  # fmt: skip
def test_malformed_report_is_counted_and_dropped(
    stack: ExitStack, field: str, value: object
) -> None:
    receiver = receiving(stack)
    sender = raw_socket(stack, receiver.address, zmq.PUB)
    bad = msgpack.packb({**dataclasses.asdict(SAID), field: value})
    for _ in until():
        sender.send(bad)
        receiver.receive()
        if receiver.refused:
            break
    assert receiver.refused and not receiver.latest


STRANGE = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.dictionaries(st.text(max_size=3) | st.binary(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
NAMES = [each.name for each in dataclasses.fields(wire.GeneratorStatus)]
ANNOUNCED = [each.name for each in dataclasses.fields(wire.Announcement)]


@given(fields=st.dictionaries(st.sampled_from(NAMES), STRANGE, min_size=1))
@settings(max_examples=200, deadline=None, database=None)
def test_no_strange_report_raises_anything_but_wire_error(fields: dict[str, Any]) -> None:
    frame = msgpack.packb({**dataclasses.asdict(SAID), **fields})
    try:
        counters = wire.decode_generator_status(frame)
    except WireError:
        return
    assert wire.decode_generator_status(wire.encode_generator_status(counters)) == counters


@given(fields=st.dictionaries(st.sampled_from(ANNOUNCED), STRANGE, min_size=1))
@settings(max_examples=200, deadline=None, database=None)
def test_no_strange_announcement_raises_anything_but_wire_error(fields: dict[str, Any]) -> None:
    try:
        heard = wire.decode_announcement(msgpack.packb({"run_id": RUN, **fields}))
    except WireError:
        return
    assert wire.decode_announcement(wire.encode_announcement(heard)) == heard


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None, database=None)
def test_no_random_bytes_raise_anything_but_wire_error(frame: bytes) -> None:
    for decode in (wire.decode_generator_status, wire.decode_announcement):
        with pytest.raises(WireError):
            decode(frame)
