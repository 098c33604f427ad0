"""The trainer hands over and goes on; the newest weights win; failures are told and tried again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_sets import COMPANIONS, published, same, weights_at

from peralta_zmq.stores import publisher as publishing
from peralta_zmq.stores.directory import WEIGHTS, DirectoryStore
from peralta_zmq.stores.publisher import Publisher
from peralta_zmq.stores.store import WeightStore
from peralta_zmq.stores.tensors import MappedTensors

Opener = Callable[..., Publisher]


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    opened = DirectoryStore(tmp_path / "weights")
    opened.claim("run-1")
    return opened


@pytest.fixture
def open_publisher(store: WeightStore) -> Iterator[Opener]:
    opened: list[Publisher] = []

    def open_one(**options: Any) -> Publisher:
        opened.append(Publisher(store, companions=COMPANIONS, **options))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close(timeout=5)


def masters(step: int) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in weights_at(step).items()}


def test_chains_are_as_long_as_told_and_every_version_is_bit_exact(
    store: WeightStore, open_publisher: Opener
) -> None:
    publisher = open_publisher(keyframe_interval=3)
    kinds = []
    for step in range(7):
        publisher.publish(step, masters(step))
        (report,) = published(publisher)
        assert report.version is not None
        kinds.append(report.version.kind)
        with store.load(report.version) as folder:
            assert same(MappedTensors(folder / WEIGHTS), weights_at(step))
    assert kinds == ["keyframe", "delta", "delta"] * 2 + ["keyframe"]


def test_last_version_is_whole_when_asked(open_publisher: Opener) -> None:
    publisher = open_publisher()
    publisher.publish(0, masters(0))
    published(publisher)
    publisher.publish(1, masters(1), whole=True)
    (report,) = published(publisher)
    assert report.version is not None and report.version.kind == "keyframe"


def test_snapshot_is_taken_at_once(store: WeightStore, open_publisher: Opener) -> None:
    publisher = open_publisher()
    weights = masters(1)
    publisher.publish(1, weights)
    weights["wide"].zero_()  # the next step
    (report,) = published(publisher)
    assert report.version is not None
    with store.load(report.version) as folder:
        assert same(MappedTensors(folder / WEIGHTS), weights_at(1))


def test_float32_is_published_whole(open_publisher: Opener) -> None:
    publisher = open_publisher(dtype=torch.float32)
    for step in range(2):
        publisher.publish(step, masters(step))
        (report,) = published(publisher)
        assert report.version is not None and report.version.kind == "keyframe"


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        time.sleep(seconds)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_trainer_does_not_wait_for_a_slow_disk_and_the_newest_wins(
    open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher()
    slow_disk(monkeypatch, 0.1)  # half a second for each version
    publisher.publish(0, masters(0))
    while publisher._pending:
        time.sleep(0.001)
    stalls = [publisher.publish(step, masters(step)) for step in range(1, 10)]
    assert max(stalls) < 0.3
    steps = [report.step for report in published(publisher)]
    assert steps == [0, 9]


def test_failure_is_told_and_tried_again_until_it_works(
    store: WeightStore,
    open_publisher: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "FIRST_DELAY", 0.05)
    publisher = open_publisher()
    store.folder.rename(tmp_path / "away")
    publisher.publish(1, masters(1))
    failed, *_ = published(publisher)
    assert failed.version is None
    assert "cannot publish step 1" in failed.reason and "is it mounted?" in failed.reason
    assert not store.folder.exists()
    (tmp_path / "away").rename(store.folder)
    while not (reports := [each for each in publisher.take_reports() if each.version]):
        publisher.wait(0.1)
    assert [each.step for each in reports] == [1]


def test_after_a_failure_the_next_delta_is_made_from_what_is_published(
    store: WeightStore, open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher()
    publisher.publish(0, masters(0))
    published(publisher)
    with monkeypatch.context() as full:
        full.setattr(store.place, "free_bytes", lambda: 0)
        publisher.publish(1, masters(1))
        assert [each.version for each in published(publisher)] == [None]
    publisher.publish(2, masters(2))
    report = published(publisher)[-1]
    assert report.version is not None and report.version.parent == 0
    with store.load(report.version) as folder:
        assert same(MappedTensors(folder / WEIGHTS), weights_at(2))


def test_pace_holds_on_average(open_publisher: Opener) -> None:
    publisher = open_publisher(max_mbit_per_s=1.0)
    started = time.monotonic()
    publisher.publish(0, {"w": torch.randn(50_000)})  # 100 kB, 0.8 s
    publisher.wait(30)
    publisher.publish(1, {"w": torch.randn(50_000)})
    assert publisher.wait(30)
    assert 0.7 < time.monotonic() - started < 10


def test_closing_waits_for_the_last_version_without_its_pace(
    store: WeightStore, open_publisher: Opener
) -> None:
    publisher = open_publisher(max_mbit_per_s=0.001)
    with closing(publisher):
        publisher.publish(3, masters(3))
    newest = store.newest()
    assert newest is not None and newest.step == 3


def test_a_bug_in_the_thread_stops_the_trainer(open_publisher: Opener) -> None:
    publisher = open_publisher()
    publisher.publish(0, {"w": torch.zeros(3)})
    published(publisher)
    publisher._store = None  # type: ignore[assignment]
    publisher.publish(1, {"w": torch.zeros(3)})
    assert publisher.wait(30)
    with pytest.raises(AttributeError):
        publisher.take_reports()
    publisher._store = DirectoryStore(Path("nowhere"))
