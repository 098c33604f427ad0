"""The generator's connection to the trainer: damaged rollouts and statuses are sent again."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from bad_network import BitFlip, proxy_to
from generators import Scene
from sample_data import VOCAB_SIZE, group_of
from sockets import ANYWHERE, DEADLINE, eventually, unused_address

from peralta_zmq import wire
from peralta_zmq.generator.trainer_link import Throughput

RUN = "run"  # of the fixtures' weight store


class Trainer:
    """Receives groups of run RUN and announces each as settled, while waiting for more."""

    def __init__(self, scene: Scene, stack: ExitStack, **limits: int) -> None:
        self._limits = wire.GroupLimits(VOCAB_SIZE, **limits)
        self.receiver = stack.enter_context(
            closing(wire.RolloutReceiver(ANYWHERE, run_id=RUN, limits=self._limits))
        )
        self.publisher = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
        self.senders: dict[str, wire.SenderProgress] = {}
        scene.connect(announcements=self.publisher.address)

    def receive(self) -> None:
        """Receive a group if one has arrived, and announce."""
        if message := self.receiver.receive(timeout=0.05):
            progress = wire.SenderProgress(settled=message[0].group_number + 1)
            self.senders[message[0].sender] = progress
        announcement = wire.Announcement(
            RUN, senders=self.senders, waiting=True, max_group_bytes=self._limits.max_bytes
        )
        self.publisher.publish(announcement)

    def num_settled(self, sender: str) -> int:
        return self.senders[sender].settled if sender in self.senders else 0


def test_groups_behind_a_damaged_length_are_delivered_after_a_reconnect(
    scene: Scene, stack: ExitStack
) -> None:
    """The trainer's libzmq waits for a megabyte that never comes, and announcements arrive."""
    trainer = Trainer(scene, stack)
    proxy = stack.enter_context(proxy_to(trainer.receiver.address))
    scene.connect(rollouts=proxy.address, timing=wire.ConnectionTiming(silent_seconds=0.5))
    opened = scene.start(1).link
    eventually(lambda: trainer.receive() or opened.exchange(timeout=0.05) or opened.announcement)

    group = group_of([1.0, 0.0], run_id=RUN, generator_id="ann", incarnation=opened.incarnation)
    frame = wire.encode_group(replace(group, group_number=0))
    proxy.damage = flip = BitFlip(frame[:3], -3, bit=4)  # the length before the frame: + 1 MiB
    for number in range(2):
        opened.send(replace(group, group_number=number))
    opened.exchange()
    assert flip.done.wait(DEADLINE)

    def is_delivered() -> bool:
        trainer.receive()
        opened.exchange(timeout=0.05)
        return trainer.num_settled(group.sender) == 2

    eventually(is_delivered)
    assert scene.sockets.rollouts.connection.num_reconnects >= 1  # more on a slow machine
    assert opened.outbox.num_lost == 0 and not trainer.receiver.refused


def test_groups_too_large_for_the_trainer_do_not_block_others(
    scene: Scene, stack: ExitStack
) -> None:
    trainer = Trainer(scene, stack, max_rollouts=2, max_tokens=16)
    scene.connect(rollouts=trainer.receiver.address)
    opened = scene.start(1).link
    small = group_of([1.0, 0.0], run_id=RUN, generator_id="ann", incarnation=opened.incarnation)
    large = replace(small, rollouts=group_of([1.0, 0.0], lengths=[10_000] * 2).rollouts)
    # Sent before the first announcement, which closes the connection.
    opened.send(replace(large, group_number=0))
    opened.send(replace(small, group_number=1))

    def is_delivered() -> bool:
        trainer.receive()
        opened.exchange(timeout=0.05)
        return trainer.num_settled(small.sender) == 2

    eventually(is_delivered)
    opened.send(replace(large, group_number=2))
    assert opened.outbox.num_lost == 2 and opened.outbox.next_group_number == 3
    assert not trainer.receiver.refused


def test_full_send_queue_blocks_nothing_and_keeps_the_order(scene: Scene, stack: ExitStack) -> None:
    limits = wire.GroupLimits(VOCAB_SIZE)
    address = unused_address()  # the trainer does not read yet
    scene.connect(rollouts=address)
    opened = scene.start(1).link
    group = group_of([1.0, 0.0], run_id=RUN, generator_id="ann", incarnation=opened.incarnation)
    started = time.monotonic()
    for number in range(5):
        opened.send(replace(group, group_number=number))
        opened.exchange(is_idle=True)
    assert time.monotonic() - started < 2 and len(opened.outbox) == 5
    assert opened.throughput.queue_seconds > 0
    receiver = stack.enter_context(
        closing(wire.RolloutReceiver(address, run_id=RUN, limits=limits))
    )
    received: list[int] = []

    def all_received() -> bool:
        opened.exchange()
        if message := receiver.receive(timeout=0.05):
            received.append(message[0].group_number)
        return len(received) == 5

    eventually(all_received)
    assert received == [*range(5)]


def test_announced_lack_of_statuses_opens_the_status_connection_again(
    scene: Scene, stack: ExitStack
) -> None:
    receiver = scene.status_receiver()
    proxy = stack.enter_context(proxy_to(receiver.address))
    scene.connect(statuses=proxy.address)
    opened = scene.start(1).link
    eventually(lambda: opened.exchange(timeout=0.01) or receiver.receive(timeout=0.05))
    proxy.damage = lambda chunk: b""  # as if the trainer waited for the rest of a long message
    opened.send_status()
    assert receiver.receive(timeout=0.3) == {}

    progress = wire.SenderProgress(without_status=11)
    scene.announce(wire.Announcement(RUN, senders={opened.outbox.sender: progress}))
    proxy.damage = bytes
    eventually(lambda: opened.exchange(timeout=0.01) or receiver.receive(timeout=0.05))
    assert scene.sockets.statuses.connection.num_reconnects == 1


def test_status_reports_the_shares_of_time_without_a_group_and_in_the_queue(
    scene: Scene,
) -> None:
    receiver = scene.status_receiver()
    scene.connect(statuses=receiver.address)
    opened = scene.start(1).link
    eventually(lambda: opened.send_status() or receiver.receive(timeout=0.05))

    def next_status() -> wire.GeneratorStatus:
        opened.send_status()
        (status,) = eventually(lambda: receiver.receive(timeout=0.05)).values()
        return status

    counts = {"num_tokens": 50_000, "idle_seconds": 2000.0, "queue_seconds": 3000.0}
    opened.throughput = Throughput(**counts, started=time.monotonic() - 10_000)
    status = next_status()
    assert status.tokens_per_s == pytest.approx(5.0, rel=0.01)
    assert status.blocked_frac == pytest.approx(0.5, rel=0.01)
    assert status.queue_frac == pytest.approx(0.3, rel=0.01)
    same = next_status()  # no group has ended in the short time since then
    assert (same.tokens_per_s, same.blocked_frac) == (status.tokens_per_s, status.blocked_frac)
    opened.throughput = Throughput(idle_seconds=9000.0, started=time.monotonic() - 30_000)
    later = next_status()  # none for longer than the group took
    assert later.tokens_per_s == pytest.approx(50_000 / 40_000, rel=0.01)
    assert later.blocked_frac == pytest.approx(14_000 / 40_000, rel=0.01)
    opened.throughput = Throughput(num_tokens=60_000, started=time.monotonic() - 10_000)
    newest = next_status()
    assert newest.tokens_per_s == pytest.approx(6.0, rel=0.01)
    assert newest.blocked_frac == 0.0


def test_status_has_the_reason_why_newer_weights_cannot_be_read(
    scene: Scene,
) -> None:
    receiver = scene.status_receiver()
    scene.connect(statuses=receiver.address)
    opened = scene.start(1).link
    folder = scene.store.folder
    away = folder.rename(folder.with_name("away"))

    def reason() -> str:
        opened.send_status()
        received = receiver.receive(timeout=0.05).values()
        return next((status.store_error for status in received), "")

    expected = f"{scene.store.address} has no weights any more; is it mounted?"
    eventually(lambda: reason() == expected)
    away.rename(folder)
    eventually(lambda: scene.subscriber.store_error == "")
