"""Some of the generators of the bench `scale`, in one process and one thread, until it is killed.

Each has the three sockets of a real one. Its groups are of the step that was announced last.
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

from benchmarks.scale import RUN
from benchmarks.wire import group_of
from peralta_zmq import wire
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.wire.counting import REPORT_SECONDS
from peralta_zmq.wire.sockets import open_socket

SIBLINGS, NUM_PROMPT, NUM_GENERATED = 8, 31, 12
IMPATIENCE = 0.01  # seconds until a full queue is tried again


@dataclass(slots=True)
class Scripted:
    """One generator."""

    name: str
    sender: wire.RolloutSender
    counters: wire.CounterSender
    boot: bytes
    sequence: int = 0

    def push(self, group: RolloutGroup) -> bool:
        """One more group, when the queue has room."""
        mine = replace(group, generator_id=self.name, boot=self.boot, sequence=self.sequence)
        if not self.sender.send(wire.encode_group(mine), timeout=0):
            return False
        self.sequence += 1
        return True


def main() -> None:
    """Push in the order in which they are due."""
    asked = json.loads(sys.argv[1])
    zmq.Context.instance().set(zmq.MAX_SOCKETS, 8192)
    with ExitStack() as stack:
        crowd = [opened(stack, asked["address"], n) for n in range(asked["first"], asked["end"])]
        listener = wire.Listener(wire.next_port(asked["address"]))
        stack.enter_context(closing(listener))
        for each in range(len(crowd) - 1):  # the others hear, and do not read
            deaf(stack, asked["address"], each)
        work(crowd, listener, rate=asked["rate"])


def opened(stack: ExitStack, address: str, number: int) -> Scripted:
    """Connected, and reporting."""
    sender = wire.RolloutSender(address)
    stack.enter_context(closing(sender))
    counters = wire.CounterSender(wire.next_port(address, 2))
    stack.enter_context(closing(counters))
    return Scripted(f"g{number}", sender, counters, os.urandom(8))


def deaf(stack: ExitStack, address: str, number: int) -> None:
    """A subscriber to the announcements that keeps the newest only."""
    socket = open_socket(zmq.SUB, hwm=1)
    socket.setsockopt(zmq.CONFLATE, 1)
    socket.subscribe(b"")
    socket.connect(wire.next_port(address))
    stack.enter_context(closing(socket))


def work(crowd: list[Scripted], listener: wire.Listener, *, rate: float) -> None:
    """Each pushes `rate` groups a second, evenly, or as many as it can when that is 0."""
    interval, chance = (1 / rate if rate else 0.0), random.Random(os.getpid())
    now = time.monotonic()
    due = [(now + chance.random() * interval, n) for n in range(len(crowd))]
    heapq.heapify(due)
    groups = newest(listener)
    reports = now
    while True:
        at, number = due[0]
        time.sleep(max(0.0, at - time.monotonic()))
        sent = crowd[number].push(next(groups))
        heapq.heapreplace(due, (at + interval if sent and rate else soon(sent), number))
        if time.monotonic() > reports:
            reports = time.monotonic() + REPORT_SECONDS
            for each in crowd:
                each.counters.send(wire.Counters(RUN, each.name, each.boot, made=each.sequence))


def soon(sent: bool) -> float:
    """When to try the next group."""
    return time.monotonic() + (0.0 if sent else IMPATIENCE)


def newest(listener: wire.Listener) -> Iterator[RolloutGroup]:
    """A group of the newest announced step, again and again."""
    step, group = -1, group_of(SIBLINGS, NUM_PROMPT, NUM_GENERATED)
    while True:
        heard = listener.listen()
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
