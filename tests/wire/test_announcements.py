"""Announcements: delivery, repetition, refused messages, recovery of lost groups."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing
from time import monotonic

import msgpack
import pytest
import zmq
from sample_data import RUN
from sockets import (
    ANYWHERE,
    DEADLINE,
    GROUP,
    bound_again,
    eventually,
    numbered,
    received,
    receiver_at,
    sender_to,
    until,
)

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.generator.trainer_link import Outbox
from peralta_zmq.learning.admission import Ledger
from peralta_zmq.trainer.collector import MAX_SUPPLIERS
from peralta_zmq.trainer.generator_registry import RegistryLimits
from peralta_zmq.wire import announcements, message_fields
from peralta_zmq.wire.announcements import decode_announcement
from peralta_zmq.wire.message_fields import pack_with_checksum
from peralta_zmq.wire.rollout_sockets import open_socket


def open_pair(stack: ExitStack) -> tuple[wire.AnnouncementPublisher, wire.AnnouncementSubscriber]:
    publisher = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
    subscriber = stack.enter_context(closing(wire.AnnouncementSubscriber(publisher.address)))
    return publisher, subscriber


def publish_until_received(
    publisher: wire.AnnouncementPublisher,
    subscriber: wire.AnnouncementSubscriber,
    announcement: wire.Announcement,
) -> None:
    """Repeat, because announcements are lost until the subscriber has connected."""

    def publish() -> bool:
        publisher.publish(announcement)
        return subscriber.receive(timeout=0.1) == announcement

    eventually(publish)


def test_announcement_arrives_with_every_field(stack: ExitStack) -> None:
    progress = wire.SenderProgress(1, 2, 3, 4, 5, 6, 7)
    announcement = wire.Announcement(
        RUN, b"8 bytes.", 7, 8, 9, "0123456789abcdef", {"ann/00": progress}, {"ann": 5},
        True, True, 4, 100, b"8 digest", b"\1", 6, b"\2", 1000,
    )  # fmt: skip
    for complete, default in (
        (announcement, wire.Announcement("")),
        (progress, wire.SenderProgress()),
    ):
        for field in dataclasses.fields(complete):
            assert getattr(complete, field.name) != getattr(default, field.name)
    publish_until_received(*open_pair(stack), announcement)


def test_subscriber_returns_the_newest_of_many(stack: ExitStack) -> None:
    publisher, subscriber = open_pair(stack)
    assert subscriber.receive(timeout=0.01) is None
    publish_until_received(publisher, subscriber, wire.Announcement(RUN, step=0))
    for step in range(1, 6):
        publisher.publish(wire.Announcement(RUN, step=step))
    eventually(lambda: subscriber.receive(timeout=0.1) == wire.Announcement(RUN, step=5))


@pytest.mark.parametrize("has_subscriber", [False, True])
def test_publisher_without_a_reader_never_blocks(stack: ExitStack, has_subscriber: bool) -> None:
    publisher = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
    if has_subscriber:
        subscriber = stack.enter_context(closing(wire.AnnouncementSubscriber(publisher.address)))
        publish_until_received(publisher, subscriber, wire.Announcement(RUN))
    started = monotonic()
    for step in range(5000):
        publisher.publish(wire.Announcement(RUN, step=step))
    assert monotonic() - started < DEADLINE


def test_publisher_keeps_few_announcements_for_a_peer_that_does_not_read(stack: ExitStack) -> None:
    publisher, _ = open_pair(stack)
    peer = stack.enter_context(open_socket(zmq.XPUB, hwm=1))
    peer.connect(publisher.address)
    large = bytes(1 << 17)  # as large as the kernel's buffers

    def publish(step: int) -> None:
        publisher.publish(wire.Announcement(RUN, step=step, excluded=large))
        eventually(lambda: not publisher.is_new)  # else the next announcement replaces it

    def received() -> int:
        return decode_announcement(peer.recv()).step

    for _ in until():
        publish(0)
        if peer.poll(100):
            break
    for step in range(1, 61):
        publish(step)
    steps: set[int] = set()
    while 100 not in steps:
        steps.add(received())
        publish(100)
    assert len(steps) < 20, "the queue's limit, and the messages in the buffers of both sides"


@pytest.mark.parametrize(
    "fields",
    [
        {"run_id": 5}, {"step": "7"}, {"version": 1.5}, {"senders": None},
        {"suppliers": {"ann": "5"}, "senders": {"ann": {}}}, {"senders": {b"a": {}}},
        {"senders": {"ann": 5}}, {"senders": {"ann": {"durable": "5"}}}, {"suppliers": None},
        {"incarnation": "text"}, {"done": 1}, {"waiting": 0}, {"step": True},
        {"suppliers": {"ann": {}}}, {"added": [1]},
    ],
    ids=repr,
)  # fmt: skip
def test_malformed_announcement_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(WireError):
        announcements.decode_announcement(pack_with_checksum({"run_id": RUN, **fields}))


def test_announcement_of_a_later_version_is_read() -> None:
    frame = pack_with_checksum({"run_id": RUN, "step": 4, "added": "later", "more": {"ann": 1},
                                "senders": {"ann": {"durable": 2, "added": 1}}})  # fmt: skip
    expected = wire.Announcement(RUN, step=4, senders={"ann": wire.SenderProgress(durable=2)})
    assert announcements.decode_announcement(frame) == expected


def test_largest_announcement_is_accepted_and_a_larger_one_refused() -> None:
    progress = wire.SenderProgress(*[2**64 - 1] * len(dataclasses.fields(wire.SenderProgress)))
    senders = {f"{n:0>128}/{'0' * 16}": progress for n in range(RegistryLimits().max_live)}
    names = {f"{n:0>128}": 2**64 - 1 for n in range(MAX_SUPPLIERS)}
    bits = bytes((1 << 19) // 8)  # one for each problem
    announcement = wire.Announcement(
        "x" * 1024, senders=senders, suppliers=names, excluded=bits, answered=bits
    )
    frame = message_fields.encode_fields(announcement)
    assert announcements.decode_announcement(frame) == announcement
    spare = bytes(announcements.MAX_ANNOUNCEMENT - len(frame))
    larger = msgpack.packb({**msgpack.unpackb(frame), "added": spare})
    with pytest.raises(WireError, match=f"announcement of {len(larger)} bytes"):
        announcements.decode_announcement(larger)


def raw_publisher(stack: ExitStack) -> tuple[zmq.Socket[bytes], wire.AnnouncementSubscriber]:
    """A bare socket that can send invalid announcements, and a subscriber to it."""
    raw = zmq.Context.instance().socket(zmq.XSUB)
    stack.callback(raw.close, linger=0)
    address = f"tcp://127.0.0.1:{raw.bind_to_random_port('tcp://127.0.0.1')}"
    return raw, stack.enter_context(closing(wire.AnnouncementSubscriber(address)))


def test_refused_announcement_leaves_the_latest(stack: ExitStack) -> None:
    (raw, subscriber), valid = raw_publisher(stack), wire.Announcement(RUN, step=1)

    def publish() -> wire.Announcement | None:
        raw.send(message_fields.encode_fields(valid))
        raw.send(b"\xc1")
        return subscriber.receive(timeout=0.1)

    eventually(publish)
    assert subscriber.receive(timeout=0.1) == valid


def test_publisher_repeats_the_newest_announcement_every_second(stack: ExitStack) -> None:
    publisher = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
    publisher.publish(wire.Announcement(RUN, step=1))
    publisher.publish(wire.Announcement(RUN, step=2))
    subscriber = stack.enter_context(closing(wire.AnnouncementSubscriber(publisher.address)))
    times: list[float] = []
    for _ in until():
        before = subscriber.received_at
        if subscriber.receive(timeout=0.1) is not None and subscriber.received_at > before:
            times.append(subscriber.received_at)
        if len(times) == 3:
            break
    assert subscriber.latest == wire.Announcement(RUN, step=2)
    pauses = [times[1] - times[0], times[2] - times[1]]
    assert max(pauses) > 0.9 and min(pauses) < 2  # a late one is followed by a short pause


def test_publisher_publishes_a_change_at_once(stack: ExitStack) -> None:
    publisher, subscriber = open_pair(stack)
    publish_until_received(publisher, subscriber, wire.Announcement(RUN))
    seconds = []
    for step in range(1, 6):
        started = monotonic()
        publisher.publish(wire.Announcement(RUN, step=step))
        while subscriber.receive(timeout=2) != wire.Announcement(RUN, step=step):
            assert monotonic() < started + DEADLINE
        seconds.append(monotonic() - started)
    assert sorted(seconds)[2] < 0.5  # the median; the repetition would take up to a second


def test_publisher_repeats_the_last_announcement_when_it_closes(stack: ExitStack) -> None:
    publisher, subscriber = open_pair(stack)
    publish_until_received(publisher, subscriber, wire.Announcement(RUN))
    publisher.publish(wire.Announcement(RUN, done=True))
    publisher.close()
    eventually(lambda: (latest := subscriber.receive(timeout=0.1)) and latest.done)


def test_subscriber_reports_done_from_the_second_announcement_on(stack: ExitStack) -> None:
    raw, subscriber = raw_publisher(stack)
    training, complete = wire.Announcement(RUN, step=1), wire.Announcement(RUN, step=2, done=True)

    def receive(announcement: wire.Announcement) -> wire.Announcement | None:
        raw.send(message_fields.encode_fields(announcement))
        before = subscriber.received_at
        eventually(lambda: subscriber.receive(timeout=0.1) and subscriber.received_at > before)
        return subscriber.latest

    def connected() -> wire.Announcement | None:
        raw.send(message_fields.encode_fields(training))
        return subscriber.receive(timeout=0.1)

    eventually(connected)
    for _ in range(2):
        assert receive(complete) == dataclasses.replace(complete, done=False)
        assert receive(training) == training
    assert receive(dataclasses.replace(complete, run_id="other")).done is False
    assert receive(complete).done is False
    assert receive(complete) == complete


def test_complete_run_is_announced_often_enough_to_be_reported_at_once(stack: ExitStack) -> None:
    publisher, subscriber = open_pair(stack)
    publish_until_received(publisher, subscriber, wire.Announcement(RUN))
    seconds = []
    for _ in range(3):
        started = monotonic()
        publisher.publish(wire.Announcement(RUN, done=True))
        eventually(lambda: (latest := subscriber.receive(timeout=0.01)) and latest.done)
        seconds.append(monotonic() - started)
        publish_until_received(publisher, subscriber, wire.Announcement(RUN))
    assert min(seconds) < 0.8  # the repetition of other announcements would take a second


def test_subscriber_bounds_its_queue_and_sends_no_heartbeats(stack: ExitStack) -> None:
    _, subscriber = open_pair(stack)
    options = (zmq.HEARTBEAT_IVL, zmq.RCVHWM, zmq.MAXMSGSIZE)
    assert [subscriber.socket.getsockopt(option) for option in options] == [0, 100, 2 << 20]


def test_groups_lost_in_a_trainer_restart_are_trained_exactly_once(stack: ExitStack) -> None:
    first = receiver_at()
    sender, outbox = sender_to(first.address, stack), Outbox(GROUP.sender)
    outbox.acknowledge(wire.Announcement(RUN, incarnation=b"first"))
    for number in range(6):
        outbox.add(numbered(number))
        outbox.mark_sent()
        assert sender.send(numbered(number), timeout=DEADLINE)
    ledger, trained = Ledger(), []
    for _ in range(2):
        group = received(first)
        ledger.settle(group.sender, group.group_number, "trained")
        trained.append(group.group_number)
    first.close()  # with four groups in its queues

    second = stack.enter_context(closing(bound_again(first.address)))
    progress = wire.SenderProgress(durable=2)
    restarted = wire.Announcement(RUN, incarnation=b"second", senders={GROUP.sender: progress})
    outbox.acknowledge(restarted)
    outbox.queue_lost()
    while (frame := outbox.next_frame()) is not None:
        assert sender.send(frame, timeout=DEADLINE)
        outbox.mark_sent()
    ends = monotonic() + DEADLINE
    while not {*range(6)} <= {*trained}:
        assert monotonic() < ends
        message = second.receive(timeout=0.5)
        if message is None:  # all went into the dead connection; a later group shows the gap
            number += 1
            outbox.add(numbered(number))
        elif ledger.settle(message[0].sender, message[0].group_number, "trained"):
            trained.append(message[0].group_number)
        progress = wire.SenderProgress(
            durable=ledger.settled(GROUP.sender) + 1,
            settled_end=ledger.highest(GROUP.sender) + 1,
        )
        outbox.acknowledge(dataclasses.replace(restarted, senders={GROUP.sender: progress}))
        outbox.queue_lost()
        while (frame := outbox.next_frame()) and sender.send(frame, timeout=DEADLINE):
            outbox.mark_sent()
    assert len(trained) == len({*trained})
