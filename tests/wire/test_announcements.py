"""Announcements: what is heard, how often, and what is refused."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing
from time import monotonic

import msgpack
import pytest
import zmq
from fakes import RUN
from sockets import (
    ANYWHERE,
    DEADLINE,
    GROUP,
    bound_again,
    numbered,
    received,
    receiver_at,
    sender_to,
    until,
)

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.learning.admission import Ledger
from peralta_zmq.trainer.generator_registry import MAX_LIVE
from peralta_zmq.wire import announcements

# Announcements.


def announcing(stack: ExitStack) -> tuple[wire.AnnouncementPublisher, wire.AnnouncementSubscriber]:
    announcer = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
    listener = stack.enter_context(closing(wire.AnnouncementSubscriber(announcer.address)))
    return announcer, listener


def heard(
    announcer: wire.AnnouncementPublisher,
    listener: wire.AnnouncementSubscriber,
    said: wire.Announcement,
) -> wire.Announcement | None:
    """What the listener heard last, once it has joined; announcements before that are lost."""
    ends = monotonic() + DEADLINE
    while monotonic() < ends:
        announcer.publish(said)
        if (latest := listener.receive(timeout=0.1)) == said:
            return latest
    return listener.latest


def test_announcement_arrives_whole(stack: ExitStack) -> None:
    said = wire.Announcement(
        run_id=RUN,
        incarnation=b"8 bytes.",
        step=7,
        version=9,
        received={"ann/00": 5},
        durable={"ann/00": 5},
        highest_received={"ann/00": 7},
        weights_id="0123456789abcdef",
        min_step=3,
        waiting=True,
        done=True,
    )
    assert heard(*announcing(stack), said) == said


def test_listener_keeps_the_newest_of_many(stack: ExitStack) -> None:
    announcer, listener = announcing(stack)
    heard(announcer, listener, wire.Announcement(RUN, step=0))
    for step in range(1, 6):
        announcer.publish(wire.Announcement(RUN, step=step))
    ends = monotonic() + DEADLINE
    while listener.receive(timeout=0.1) != wire.Announcement(RUN, step=5):
        assert monotonic() < ends


def test_listener_that_heard_nothing_says_none(stack: ExitStack) -> None:
    _, listener = announcing(stack)
    assert listener.receive(timeout=0.01) is None


def test_announcing_to_nobody_never_blocks(stack: ExitStack) -> None:
    announcer = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
    started = monotonic()
    for step in range(1000):
        announcer.publish(wire.Announcement(RUN, step=step))
    assert monotonic() - started < DEADLINE


def test_announcing_to_a_listener_that_does_not_read_never_blocks(stack: ExitStack) -> None:
    announcer, listener = announcing(stack)
    heard(announcer, listener, wire.Announcement(RUN))
    started = monotonic()
    for step in range(5000):
        announcer.publish(wire.Announcement(RUN, step=step))
    assert monotonic() - started < DEADLINE


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb(None),
        msgpack.packb({}),
        msgpack.packb({"run_id": 5}),
        msgpack.packb({"run_id": RUN, "step": "7"}),
        msgpack.packb({"run_id": RUN, "version": 1.5}),
        msgpack.packb({"run_id": RUN, "durable": None}),
        msgpack.packb({"run_id": RUN, "durable": {"ann": "5"}, "highest_received": {"ann": 5}}),
        msgpack.packb({"run_id": RUN, "highest_received": {b"ann": 5}}),
        msgpack.packb({"run_id": RUN, "incarnation": "text"}),
        msgpack.packb({"run_id": RUN, "done": 1}),
        msgpack.packb({"run_id": RUN, "waiting": 0}),
        msgpack.packb({"run_id": RUN, "min_step": True}),
        msgpack.packb({"run_id": RUN, "received": {"ann": {}}}),
        msgpack.packb({"run_id": RUN, "mood": {"a": {}, "b": {}, "c": {}, "d": {}}}),
        msgpack.packb({"run_id": RUN, "mood": [1]}),
    ],
    ids=repr,
)
def test_malformed_announcement_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_announcement(frame)


def test_announcement_of_a_later_version_is_understood() -> None:
    frame = msgpack.packb({"run_id": RUN, "step": 4, "mood": "good"})
    assert wire.decode_announcement(frame) == wire.Announcement(RUN, step=4)


def test_announcement_holds_a_thousand_senders() -> None:
    said = wire.Announcement(RUN, durable={f"generator-{n}/0011": n for n in range(1000)})
    assert wire.decode_announcement(msgpack.packb(dataclasses.asdict(said))) == said


def test_largest_announcement_of_a_trainer_is_understood_and_a_larger_one_refused() -> None:
    senders = {f"{n:0>128}/{'0' * 16}": 2**64 - 1 for n in range(MAX_LIVE)}
    bits = bytes(announcements.MAX_BITS // 8)
    said = wire.Announcement(
        "x" * 1024, received=senders, durable=senders, highest_received=senders,
        consumed=senders, excluded=bits, answered=bits,
    )  # fmt: skip
    frame = wire.encode_announcement(said)
    assert wire.decode_announcement(frame) == said
    spare = announcements.MAX_ANNOUNCEMENT - len(frame)
    fields = msgpack.unpackb(frame)
    larger = msgpack.packb({**fields, "mood": bytes(spare)})
    with pytest.raises(WireError, match=f"announcement of {len(larger)} bytes"):
        wire.decode_announcement(larger)


def test_refused_announcement_leaves_the_latest(stack: ExitStack) -> None:
    publisher = zmq.Context.instance().socket(zmq.PUB)
    stack.callback(publisher.close, linger=0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    listener = stack.enter_context(closing(wire.AnnouncementSubscriber(f"tcp://127.0.0.1:{port}")))
    good = wire.Announcement(RUN, step=1)
    ends = monotonic() + DEADLINE
    while listener.receive(timeout=0.1) is None and monotonic() < ends:
        publisher.send(msgpack.packb(dataclasses.asdict(good)))
        publisher.send(b"\xc1")
    assert listener.receive(timeout=0.1) == good


def test_newest_announcement_comes_again_every_second_without_anyone_asking(
    stack: ExitStack,
) -> None:
    announcer = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
    announcer.publish(wire.Announcement(RUN, step=1))
    announcer.publish(wire.Announcement(RUN, step=2))
    listener = stack.enter_context(
        closing(wire.AnnouncementSubscriber(announcer.address))
    )  # too late for both
    times = []
    for _ in until():
        before = listener.received_at
        if listener.receive(timeout=0.1) is not None and listener.received_at > before:
            times.append(listener.received_at)
        if len(times) == 3:
            break
    assert listener.latest == wire.Announcement(RUN, step=2)
    pauses = [times[1] - times[0], times[2] - times[1]]
    assert max(pauses) > 0.9 and min(pauses) < 2  # one that is heard late is before a short one


def test_change_is_announced_at_once(stack: ExitStack) -> None:
    announcer, listener = announcing(stack)
    heard(announcer, listener, wire.Announcement(RUN))
    taken = []
    for step in range(1, 6):
        started = monotonic()
        announcer.publish(wire.Announcement(RUN, step=step))
        while listener.receive(timeout=2) != wire.Announcement(RUN, step=step):
            assert monotonic() < started + DEADLINE
        taken.append(monotonic() - started)
    assert sorted(taken)[2] < 0.5  # the usual one; the second's round would take longer


def test_last_word_is_said_once_more_at_the_end(stack: ExitStack) -> None:
    announcer, listener = announcing(stack)
    heard(announcer, listener, wire.Announcement(RUN))
    announcer.publish(wire.Announcement(RUN, done=True))
    announcer.close()
    for _ in until():
        if (latest := listener.receive(timeout=0.1)) is not None and latest.done:
            return
    raise AssertionError("nobody heard it")


def test_listener_pings_a_trainer_that_may_be_gone(stack: ExitStack) -> None:
    _, listener = announcing(stack)
    options = (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.RCVHWM, zmq.MAXMSGSIZE)
    assert [listener._socket.getsockopt(each) for each in options] == [2000, 10_000, 100, 4 << 20]


def test_announcer_names_a_port_in_use(stack: ExitStack) -> None:
    announcer = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
    with pytest.raises(WireError, match=r"in use by pid"):
        wire.AnnouncementPublisher(announcer.address)


def test_what_died_with_the_trainer_comes_again_and_everything_exactly_once(
    stack: ExitStack,
) -> None:
    first = receiver_at()
    sender, outbox = sender_to(first.address, stack), wire.Outbox(GROUP.sender)
    outbox.frames_to_resend(wire.Announcement(RUN, incarnation=b"first"))
    for number in range(6):
        frame = wire.encode_group(dataclasses.replace(GROUP, sequence=number))
        outbox.add(number, frame)
        assert sender.send(frame, timeout=DEADLINE)
    ledger, taken = Ledger(), []
    for _ in range(2):
        group = received(first)
        ledger.settle(group.sender, group.sequence, "trained")
        taken.append(group.sequence)
    first.close()  # with four in its queues

    second = stack.enter_context(closing(bound_again(first.address)))
    restarted = wire.Announcement(RUN, incarnation=b"second", durable={GROUP.sender: 1})
    for frame in outbox.frames_to_resend(restarted):
        assert sender.send(frame, timeout=DEADLINE)
    ends = monotonic() + DEADLINE
    while not {*range(6)} <= {*taken}:
        assert monotonic() < ends
        got = second.receive(timeout=0.5)
        if got is None:  # all went into the dead connection: a later group shows the gap
            number += 1
            outbox.add(number, numbered(number))
            sender.send(numbered(number), timeout=0)
        elif ledger.settle(got[0].sender, got[0].sequence, "trained"):
            taken.append(got[0].sequence)
        seen = {GROUP.sender: ledger.highest(GROUP.sender)}
        settled = {GROUP.sender: ledger.settled(GROUP.sender)}
        said = wire.Announcement(RUN, incarnation=b"second", durable=settled, highest_received=seen)
        for frame in outbox.frames_to_resend(said):
            sender.send(frame, timeout=DEADLINE)
    assert len(taken) == len({*taken})
