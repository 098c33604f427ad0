"""Fixtures of the generator's tests: a weight store, its subscriber, sockets without a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from peralta_zmq import wire
from peralta_zmq.generator.trainer_connection import Sockets
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore.open(tmp_path / "weights")
    store.claim("run")
    return store


@pytest.fixture
def subscriber(store: WeightStore, tmp_path: Path) -> Iterator[WeightSubscriber]:
    with closing(WeightSubscriber(store, tmp_path / "copy", poll_seconds=0.05)) as opened:
        yield opened


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Connected to a port on which nothing listens; the send queue holds 64 groups."""
    address = "tcp://127.0.0.1:9"
    opened = Sockets(
        wire.AnnouncementSubscriber(address),
        wire.RolloutSender(address, hwm=64),
        wire.GeneratorStatusSender(address),
    )
    with closing(opened.announcements), closing(opened.rollouts), closing(opened.statuses):
        yield opened
