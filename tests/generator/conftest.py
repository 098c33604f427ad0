"""Fixtures of the generator's tests: sockets without a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from generators import Scene

from peralta_zmq import wire
from peralta_zmq.generator.trainer_link import Sockets
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Connected to a port on which nothing listens; the send queue holds 64 groups."""
    address = "tcp://127.0.0.1:9"
    opened = Sockets(
        wire.AnnouncementSubscriber(address),
        wire.RolloutSender(address, hwm=64),
        wire.GeneratorStatusSender(address),
        wire.TrainerAddress(address),
    )
    with closing(opened.announcements), closing(opened.rollouts), closing(opened.statuses):
        yield opened


@pytest.fixture
def scene(
    store: WeightStore, subscriber: WeightSubscriber, sockets: Sockets, stack: ExitStack
) -> Scene:
    return Scene(store, subscriber, sockets, stack)
