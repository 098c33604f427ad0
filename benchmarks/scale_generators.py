"""Scripted generators of the benchmark `scale`, in one process, until it is killed or orphaned.

Each has the three sockets of a generator and starts a group when the sampling pacer allows it. The
groups have the policy step that was announced last.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import numpy as np
import zmq

from benchmarks.wire import RUN, group_of
from peralta_zmq import wire
from peralta_zmq.generator.pacing import SamplingPacer
from peralta_zmq.rollout import RolloutGroup, sender_of
from peralta_zmq.wire.generator_status import STATUS_SECONDS
from peralta_zmq.wire.sockets import open_socket

SIBLINGS, NUM_PROMPT, NUM_GENERATED = 8, 31, 12
MAX_AHEAD = 1  # default of train.max_async_level
RETRY_SECONDS = 0.01  # for a generator that may not start, or still has a full queue
FULL_SECONDS = 0.001  # wait for room in the queue of one group; libzmq takes a group in less


@dataclass(slots=True)
class Scripted:
    """One generator."""

    name: str
    rollouts: wire.RolloutSender
    statuses: wire.GeneratorStatusSender
    incarnation: bytes
    pace: SamplingPacer
    sequence: int = 0

    def may_begin(self, announcement: wire.Announcement | None, step: int) -> bool:
        """Whether the sampling pacer allows a further group."""
        if announcement is None:
            return not self.sequence
        sender = sender_of(self.name, self.incarnation)
        received = announcement.received.get(sender, -1) + 1
        return self.pace.may_start(
            announcement,
            step=step,
            num_pending=self.sequence - announcement.consumed.get(sender, -1) - 1,
            num_unreceived=self.sequence - received,
        )

    def push(self, group: RolloutGroup) -> bool:
        """Send one group; False if the queue is full."""
        mine = replace(
            group, generator_id=self.name, incarnation=self.incarnation, sequence=self.sequence
        )
        if not self.rollouts.send(wire.encode_group(mine), timeout=FULL_SECONDS):
            return False
        self.sequence += 1
        self.pace.record_start()
        return True


def main() -> None:
    """Open the generators and run them."""
    settings = json.loads(sys.argv[1])
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 8192)
    with ExitStack() as stack:
        generators = [
            opened(
                stack,
                settings["address"],
                f"g{number}",
                SamplingPacer(settings["groups_per_step"], MAX_AHEAD, name=f"g{number}"),
            )
            for number in range(settings["first"], settings["end"])
        ]
        subscriber = wire.AnnouncementSubscriber(wire.next_port(settings["address"]))
        stack.enter_context(closing(subscriber))
        for _ in generators[1:]:  # subscribers that do not read
            subscribe_without_reading(stack, settings["address"])
        run(generators, subscriber, rate=settings["rate"])


def opened(stack: ExitStack, address: str, name: str, pace: SamplingPacer) -> Scripted:
    """A connected generator."""
    sender = wire.RolloutSender(address)
    stack.enter_context(closing(sender))
    statuses = wire.GeneratorStatusSender(wire.next_port(address, 2))
    stack.enter_context(closing(statuses))
    return Scripted(name, sender, statuses, os.urandom(8), pace)


def subscribe_without_reading(stack: ExitStack, address: str) -> None:
    """A receiver of announcements that keeps the newest only; an XPUB cannot do that, a PUB can."""
    socket = open_socket(zmq.PUB, hwm=1)
    socket.setsockopt(zmq.CONFLATE, 1)
    socket.connect(wire.next_port(address))
    stack.enter_context(closing(socket))


def run(
    generators: list[Scripted], subscriber: wire.AnnouncementSubscriber, *, rate: float
) -> None:
    """Send `rate` groups a second from each, evenly; 0 = as many as the pacer allows."""
    interval, rng = (1 / rate if rate else 0.0), random.Random(os.getpid())
    now = time.monotonic()
    due = [(now + rng.random() * interval, n) for n in range(len(generators))]
    heapq.heapify(due)
    groups = groups_of_newest_step(subscriber)
    reports, parent = now, os.getppid()
    while os.getppid() == parent:
        at, number = due[0]
        time.sleep(max(0.0, at - time.monotonic()))
        group, generator = next(groups), generators[number]
        sent = generator.may_begin(subscriber.latest, group.policy_step) and generator.push(group)
        wait = interval if sent else RETRY_SECONDS
        heapq.heapreplace(due, (max(at, time.monotonic() - interval) + wait, number))
        if time.monotonic() > reports:
            reports = time.monotonic() + STATUS_SECONDS
            for generator in generators:
                generator.statuses.send(
                    wire.GeneratorStatus(
                        RUN, generator.name, generator.incarnation, made=generator.sequence
                    )
                )


def groups_of_newest_step(subscriber: wire.AnnouncementSubscriber) -> Iterator[RolloutGroup]:
    """Yield a group of the newest announced step for ever."""
    step, group = -1, group_of(SIBLINGS, NUM_PROMPT, NUM_GENERATED)
    while True:
        announcement = subscriber.receive()
        if (announcement.step if announcement else 0) != step:
            step = announcement.step if announcement else 0
            rollouts = tuple(
                replace(each, policy_steps=np.where(each.loss_mask, step, -1).astype(np.int32))
                for each in group.rollouts
            )
            group = replace(group, policy_step=step, rollouts=rollouts)
        yield group


if __name__ == "__main__":
    main()
