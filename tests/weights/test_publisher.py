"""The trainer hands over and goes on; the newest weights win; failures are told and tried again."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weight_sets import COMPANIONS, published, same, weights_at

from peralta_zmq import models
from peralta_zmq.learning.optimizer import make_optimizer, set_learning_rate
from peralta_zmq.weights import publisher as publishing
from peralta_zmq.weights.publisher import WeightPublisher
from peralta_zmq.weights.replica import load_version
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber
from peralta_zmq.weights.tensors import MappedTensors
from peralta_zmq.weights.version import WEIGHTS

Opener = Callable[..., WeightPublisher]


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    opened = WeightStore.open(tmp_path / "weights")
    opened.claim("run-1")
    return opened


@pytest.fixture
def open_publisher(store: WeightStore) -> Iterator[Opener]:
    opened: list[WeightPublisher] = []

    def open_one(**options: Any) -> WeightPublisher:
        opened.append(WeightPublisher(store, companions=COMPANIONS, **options))
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
        with load_version(store, report.version) as folder:
            assert same(MappedTensors(folder / WEIGHTS), weights_at(step))
    assert kinds == ["keyframe", "delta", "delta"] * 2 + ["keyframe"]


def test_last_version_is_whole_when_asked(open_publisher: Opener) -> None:
    publisher = open_publisher()
    publisher.publish(0, masters(0))
    published(publisher)
    publisher.publish(1, masters(1), keyframe=True)
    (report,) = published(publisher)
    assert report.version is not None and report.version.kind == "keyframe"


def test_snapshot_is_taken_at_once(store: WeightStore, open_publisher: Opener) -> None:
    publisher = open_publisher()
    weights = masters(1)
    publisher.publish(1, weights)
    weights["wide"].zero_()  # the next step
    (report,) = published(publisher)
    assert report.version is not None
    with load_version(store, report.version) as folder:
        assert same(MappedTensors(folder / WEIGHTS), weights_at(1))


def test_what_is_still_under_way_is_published_when_it_is_here(
    store: WeightStore, open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's copies land in their buffers at any time before `arrive` returns."""
    copy = publishing._copy

    def slow_copy(*given: Any) -> Any:
        landed, arrive = copy(*given)
        buffers = {name: torch.zeros_like(each) for name, each in landed.items()}

        def land() -> None:
            arrive()
            for name, each in landed.items():
                buffers[name].copy_(each)

        return buffers, land

    monkeypatch.setattr(publishing, "_copy", slow_copy)
    publisher = open_publisher()
    for step in range(3):
        publisher.publish(step, masters(step))
        (report,) = published(publisher)
        assert report.version is not None
        with load_version(store, report.version) as folder:
            assert same(MappedTensors(folder / WEIGHTS), weights_at(step))


def test_float32_is_published_whole(open_publisher: Opener) -> None:
    publisher = open_publisher(dtype=torch.float32)
    for step in range(2):
        publisher.publish(step, masters(step))
        (report,) = published(publisher)
        assert report.version is not None and report.version.kind == "keyframe"


@pytest.mark.parametrize("fails", [False, True])
def test_asked_keyframe_is_not_lost_with_the_snapshot_it_was_asked_with(
    store: WeightStore, open_publisher: Opener, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    publisher = open_publisher(keyframe_interval=100)
    for step in range(2):
        publisher.publish(step, masters(step))
        (report,) = published(publisher)
    assert report.version is not None and report.version.kind == "delta"
    moves = threading.Event()
    if fails:
        with monkeypatch.context() as full:
            full.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=1))
            publisher.publish(2, masters(2), keyframe=True)
            (report,) = published(publisher)
            assert report.version is None
    else:
        moves = stuck_disk(monkeypatch, publisher)
        publisher.publish(91, masters(91), keyframe=True)
    publisher.publish(92, masters(92))
    moves.set()
    while report.step != 92 or report.version is None:
        (*_, report) = published(publisher)
    assert report.version.kind == "keyframe"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hundred_versions_of_a_model_in_training_are_bit_exact(
    store: WeightStore, open_publisher: Opener, tmp_path: Path
) -> None:
    model = models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)
    named = dict(model.named_parameters())
    optimizer = make_optimizer(named, betas=(0.9, 0.95), weight_decay=0.0)
    set_learning_rate(optimizer, 2e-6)
    random = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.vocab_size)
    publisher = open_publisher(keyframe_interval=1000)
    kinds: list[str] = []
    with closing(WeightSubscriber(store, tmp_path / "copy", poll_seconds=0.01)) as follower:
        for step in range(101):
            publisher.publish(step, models.weights_of(model))
            (report,) = published(publisher)
            assert report.version is not None
            kinds.append(report.version.kind)
            staged = follower.poll(timeout=30)
            assert staged is not None and staged.version.weights_id == report.version.weights_id
            assert hashes(staged.tensors) == hashes(models.weights_of(model))
            follower.accept()
            tokens = torch.randint(0, vocabulary, (2, 24), generator=random)
            scores = models.token_logprobs(model, tokens, torch.ones_like(tokens))
            (-scores[:, 1:].mean()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert kinds == ["keyframe", *["delta"] * 100]
    first, last = store.find(0), store.find(100)
    assert first is not None and last is not None and last.depth == 100
    with load_version(store, last) as folder:  # a joiner reads all hundred
        assert hashes(MappedTensors(folder / WEIGHTS)) == hashes(staged.tensors)
    assert hashes(staged.tensors) != hashes(models.weights_of(model))


def hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """sha256 of each tensor as bf16."""
    return {
        name: hashlib.sha256(
            tensors[name].detach().bfloat16().view(torch.int16).numpy()
        ).hexdigest()
        for name in tensors
    }


def stuck_disk(monkeypatch: pytest.MonkeyPatch, publisher: WeightPublisher) -> threading.Event:
    """A disk that keeps the thread busy with version 90 until this is set."""
    real, moves = os.fsync, threading.Event()

    def fsync(descriptor: int) -> None:
        moves.wait(10)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    publisher.publish(90, masters(90))
    while publisher._waiting:
        time.sleep(0.001)
    return moves


def test_trainer_does_not_wait_for_a_disk_that_stands_still_and_the_newest_wins(
    open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher()
    moves = stuck_disk(monkeypatch, publisher)
    stalls = [publisher.publish(step, masters(step)) for step in range(91, 100)]
    assert max(stalls) < 5
    moves.set()
    steps = [report.step for report in published(publisher)]
    assert steps == [90, 99]


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
        full.setattr(store.backend, "free_bytes", lambda: 0)
        publisher.publish(1, masters(1))
        assert [each.version for each in published(publisher)] == [None]
    publisher.publish(2, masters(2))
    report = published(publisher)[-1]
    assert report.version is not None and report.version.parent == 0
    with load_version(store, report.version) as folder:
        assert same(MappedTensors(folder / WEIGHTS), weights_at(2))


def test_pace_holds_on_average(open_publisher: Opener) -> None:
    publisher = open_publisher(max_mbit_per_s=1.0)
    started = time.monotonic()
    publisher.publish(0, {"w": torch.randn(50_000)})  # 100 kB, 0.8 s
    publisher.wait(30)
    publisher.publish(1, {"w": torch.randn(50_000)})
    assert publisher.wait(30)
    assert 0.7 < time.monotonic() - started < 30


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
    publisher._store = WeightStore.open(Path("nowhere"))
