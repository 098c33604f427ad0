"""Which versions the pruner keeps: new ones, their parents, and those that readers need."""

from __future__ import annotations

import pytest
from weight_sets import publish, publish_chain

from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.store import WeightStore


def test_pruning_keeps_the_chain_of_a_kept_delta_also_after_a_restart(store: WeightStore) -> None:
    newest = publish_chain(store, 4)[-1]
    pruner = Pruner(WeightStore.open(store.folder), Retention(last=1))
    pruner.prune(newest)
    assert store.numbers() == [0, 1, 2, 3]
    publish(store, 4, pruner=pruner)
    assert store.numbers() == [4]


def test_pruning_keeps_the_newest_and_every_nth_version(store: WeightStore) -> None:
    pruner = Pruner(store, Retention(last=2, interval=3))
    for step in range(9):
        publish(store, step, pruner=pruner)
    assert store.numbers() == [0, 3, 6, 7, 8]


def test_pruning_spares_slow_readers_and_versions_being_read(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("peralta_zmq.weights.publisher.time.monotonic", lambda: now[0])
    pruner = Pruner(store, Retention(last=1, seconds=60))

    def numbers_after(step: int) -> list[int]:
        publish(store, step, pruner=pruner)
        return store.numbers()

    assert numbers_after(1) == [1]
    assert numbers_after(2) == [1, 2]
    now[0] += 59
    assert numbers_after(3) == [1, 2, 3]
    now[0] += 2
    with store.backend.locks.reading("step_00000001"):
        assert numbers_after(4) == [1, 2, 3, 4]  # 2 has been spare for 59 s
        now[0] += 100  # this load takes at least 101 s
        assert numbers_after(5) == [1, 4, 5]
    now[0] += 1
    assert numbers_after(6) == [1, 4, 5, 6]  # others are kept for 3 x 101 s
    now[0] += 150
    assert numbers_after(7) == [4, 5, 6, 7]  # 1 has been spare for 312 s
