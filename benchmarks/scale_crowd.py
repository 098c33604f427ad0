"""Some of the generators of the bench `scale`, in one process, until it is killed or left alone.

Each has the three sockets of a real one, and begins a group when the real pace allows it. Its
groups are of the step that was announced last.
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
MAX_AHEAD = 1  # train.max_async_level of a run that says nothing of it
IMPATIENCE = 0.01  # seconds until one that may not begin, or has a full queue, tries again


@dataclass(slots=True)
class Scripted:
    """One generator."""

    name: str
    rollouts: wire.RolloutSender
    counters: wire.GeneratorStatusSender
    incarnation: bytes
    pace: SamplingPacer
    sequence: int = 0

    def may_begin(self, heard: wire.Announcement | None, step: int) -> bool:
        """As a real one asks itself."""
        if heard is None:
            return not self.sequence
        sender = sender_of(self.name, self.incarnation)
        return self.pace.allows(
            step=step,
            begun=heard.started_step,
            pending=self.sequence - heard.consumed.get(sender, -1) - 1,
            generators=len(heard.received),
            starved=heard.waiting and heard.received.get(sender, -1) + 1 == self.sequence,
        )

    def push(self, group: RolloutGroup) -> bool:
        """One more group, when the queue has room."""
        mine = replace(
            group, generator_id=self.name, incarnation=self.incarnation, sequence=self.sequence
        )
        if not self.rollouts.send(wire.encode_group(mine), timeout=0):
            return False
        self.sequence += 1
        self.pace.record_start()
        return True


def main() -> None:
    """Push in the order in which they are due."""
    asked = json.loads(sys.argv[1])
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 8192)
    with ExitStack() as stack:
        crowd = [
            opened(
                stack,
                asked["address"],
                f"g{number}",
                SamplingPacer(asked["groups_per_step"], MAX_AHEAD),
            )
            for number in range(asked["first"], asked["end"])
        ]
        listener = wire.AnnouncementSubscriber(wire.next_port(asked["address"]))
        stack.enter_context(closing(listener))
        for _ in crowd[1:]:  # the others hear, and do not read
            deaf(stack, asked["address"])
        work(crowd, listener, rate=asked["rate"])


def opened(stack: ExitStack, address: str, name: str, pace: SamplingPacer) -> Scripted:
    """Connected, and reporting."""
    sender = wire.RolloutSender(address)
    stack.enter_context(closing(sender))
    counters = wire.GeneratorStatusSender(wire.next_port(address, 2))
    stack.enter_context(closing(counters))
    return Scripted(name, sender, counters, os.urandom(8), pace)


def deaf(stack: ExitStack, address: str) -> None:
    """A subscriber to the announcements that keeps the newest only."""
    socket = open_socket(zmq.SUB, hwm=1)
    socket.setsockopt(zmq.CONFLATE, 1)
    socket.subscribe(b"")
    socket.connect(wire.next_port(address))
    stack.enter_context(closing(socket))


def work(crowd: list[Scripted], listener: wire.AnnouncementSubscriber, *, rate: float) -> None:
    """Each pushes `rate` groups a second, evenly, or as many as it may when that is 0."""
    interval, chance = (1 / rate if rate else 0.0), random.Random(os.getpid())
    now = time.monotonic()
    due = [(now + chance.random() * interval, n) for n in range(len(crowd))]
    heapq.heapify(due)
    groups = newest(listener)
    reports, parent = now, os.getppid()
    while os.getppid() == parent:
        at, number = due[0]
        time.sleep(max(0.0, at - time.monotonic()))
        group, one = next(groups), crowd[number]
        sent = one.may_begin(listener.latest, group.policy_step) and one.push(group)
        wait = interval if sent else IMPATIENCE
        heapq.heapreplace(due, (max(at, time.monotonic() - interval) + wait, number))
        if time.monotonic() > reports:
            reports = time.monotonic() + STATUS_SECONDS
            for each in crowd:
                each.counters.send(
                    wire.GeneratorStatus(RUN, each.name, each.incarnation, made=each.sequence)
                )


def newest(listener: wire.AnnouncementSubscriber) -> Iterator[RolloutGroup]:
    """A group of the newest announced step, again and again."""
    step, group = -1, group_of(SIBLINGS, NUM_PROMPT, NUM_GENERATED)
    while True:
        heard = listener.receive()
        if (heard.step if heard else 0) != step:
            step = heard.step if heard else 0
            rollouts = tuple(
                replace(each, policy_steps=np.where(each.loss_mask, step, -1).astype(np.int32))
                for each in group.rollouts
            )
            group = replace(group, policy_step=step, rollouts=rollouts)
        yield group


if __name__ == "__main__":
    main()
