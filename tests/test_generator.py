"""Pace and hot reload, the two things a generator decides for itself.

.venv/bin/python -m pytest tests/test_generator.py
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_model

from peralta_zmq import durable, generator, policy, wire
from peralta_zmq.config import Config
from peralta_zmq.errors import StoreError
from peralta_zmq.generator import Pace, open_engine, refresh
from peralta_zmq.stores.directory import DirectoryStore, Version


class Clock:
    """Time that moves when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(generator.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def made(
    pace: Pace, *, step: int = 0, settled: int = 0, generators: int = 1, heard_at: float = 0.0
) -> int:
    """Groups that the pace allows before it says wait, when so many of all are settled."""
    before = pace.made
    while pace.made < before + 100 and pace.allows(
        step=step, under_way=pace.made - settled, generators=generators, heard_at=heard_at
    ):
        pace.count()
    return pace.made - before


def test_a_generator_alone_has_one_steps_worth_under_way(clock: Clock) -> None:
    assert made(Pace(groups_per_step=16, max_async_level=1)) == 16


def test_two_generators_share_it(clock: Clock) -> None:
    assert made(Pace(groups_per_step=16, max_async_level=1), generators=2) == 8


def test_what_is_settled_makes_room(clock: Clock) -> None:
    pace = Pace(groups_per_step=16, max_async_level=1)
    made(pace)
    assert made(pace, settled=5) == 5


def test_at_level_0_a_generator_makes_its_share_of_a_version_and_waits_for_the_next(
    clock: Clock,
) -> None:
    pace = Pace(groups_per_step=16, max_async_level=0)
    assert made(pace, step=3, settled=99, generators=2) == 8
    assert made(pace, step=4, settled=99, generators=2) == 8


def test_a_trainer_that_waits_too_gets_a_batch_after_two_seconds(clock: Clock) -> None:
    pace = Pace(groups_per_step=16, max_async_level=1)
    made(pace)
    clock.now += generator.TRICKLE_SECONDS + 0.1
    assert made(pace, heard_at=clock.now - 1.0) == 1


def test_a_trainer_that_is_not_heard_gets_one_only_after_long_silence(clock: Clock) -> None:
    pace = Pace(groups_per_step=16, max_async_level=1)
    made(pace)
    clock.now += generator.TRICKLE_SECONDS + 0.1
    assert made(pace) == 0
    clock.now += generator.SILENT_TRICKLE_SECONDS
    assert made(pace) == 1


class Spy:
    """An engine that keeps what it is given, unless it is not a model's."""

    def __init__(self) -> None:
        self.step = 0
        self.weights: dict[str, torch.Tensor] = {}

    def apply(self, weights: dict[str, torch.Tensor], step: int) -> None:
        if any(not tensor.isfinite().all() for tensor in weights.values()):
            raise ValueError("not finite")
        self.weights, self.step = dict(weights), step


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path)
    store.claim("run")
    return store


def published(store: DirectoryStore, step: int, value: float) -> Version:
    return store.publish(step, {"w": torch.full((4,), value)}, companions={})


def test_the_newest_version_is_applied(store: DirectoryStore) -> None:
    first = published(store, 1, 1.0)
    published(store, 2, 2.0)
    newest = published(store, 3, 3.0)
    engine = Spy()
    assert refresh(engine, store, first).number == newest.number
    assert engine.step == 3
    assert engine.weights["w"].tolist() == [3.0] * 4


def test_a_version_once_applied_is_not_applied_again(store: DirectoryStore) -> None:
    newest = published(store, 1, 1.0)
    engine = Spy()
    assert refresh(engine, store, newest) is newest
    assert engine.step == 0


def test_a_torn_version_changes_nothing_and_a_later_one_is_taken(store: DirectoryStore) -> None:
    first = published(store, 1, 1.0)
    torn = published(store, 2, 2.0).folder / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-4])
    engine = Spy()
    assert refresh(engine, store, first) is first
    assert engine.step == 0
    published(store, 3, 3.0)
    assert refresh(engine, store, first).step == 3


def test_a_version_that_the_model_refuses_is_not_offered_again(store: DirectoryStore) -> None:
    first = published(store, 1, 1.0)
    published(store, 2, float("nan"))
    engine = Spy()
    assert refresh(engine, store, first) is first
    offered = store.newest()
    assert offered is not None
    assert offered.number == 1


def test_the_versions_of_a_new_run_in_the_folder_are_newer_whatever_their_number(
    store: DirectoryStore, tmp_path: Path
) -> None:
    old = published(store, 7, 7.0)
    for each in (old.folder, tmp_path / "RUN.json"):
        durable.remove_folder(each)
    store.claim("another-run")
    new = published(store, 1, 1.0)
    engine = Spy()
    assert refresh(engine, store, old).run_id == new.run_id == "another-run"
    assert engine.step == 1


def test_a_real_model_serves_what_was_published_bit_for_bit(store: DirectoryStore) -> None:
    trained, serving = tiny_model(seed=1), tiny_model(seed=2)
    first = published(store, 0, 0.0)
    store.publish(5, policy.weights_of(trained), companions={})

    class Applies:
        step = 0

        def apply(self, weights: dict[str, torch.Tensor], step: int) -> None:
            policy.apply_weights(serving, weights)
            self.step = step

    version = refresh(Applies(), store, first)
    assert replace(version, number=0).step == 5
    for name, tensor in policy.weights_of(trained).items():
        assert torch.equal(policy.weights_of(serving)[name], tensor)


class PrunedOnce(DirectoryStore):
    """A store whose first read comes too late: the version was pruned meanwhile."""

    reads = 0

    def load(self, version: Version) -> Any:
        self.reads += 1
        if self.reads == 1:
            raise StoreError(f"version {version.number} is gone; look again")
        return super().load(version)


def test_a_generator_that_starts_while_the_trainer_prunes_looks_again(tmp_path: Path) -> None:
    store = PrunedOnce(tmp_path)
    store.claim("run")
    model = policy.load_model(
        policy.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32
    ).bfloat16()
    companions = policy.companion_files(policy.EMBEDDED)
    store.publish(4, policy.weights_of(model), companions=companions)
    with closing(wire.Listener("tcp://127.0.0.1:9")) as listener:
        version, engine, _ = open_engine(Config(), store, listener, "tcp://127.0.0.1:9")
    assert (version.step, engine.step, store.reads) == (4, 4, 2)
