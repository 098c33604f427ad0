"""Order of problems, split between generators, and difficulty pools."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain

import pytest

from peralta_zmq.environments.curriculum import (
    DifficultyPools,
    ProblemSampler,
    apportion,
    is_in_bitmap,
    problem_order,
)
from peralta_zmq.errors import TaskError


def positions_of(sampler: ProblemSampler, num_samples: int, *, start: int = 0) -> list[int]:
    return [sampler.position(index) for index in range(start, start + num_samples)]


def test_problem_order_is_the_same_on_all_machines() -> None:
    assert problem_order(8, seed=0, epoch=0) == (5, 2, 3, 0, 7, 1, 4, 6)


@pytest.mark.parametrize(("one", "other"), [
    ({"seed": 1, "epoch": 0}, {"seed": 1, "epoch": 1}),
    ({"seed": 1, "epoch": 0}, {"seed": 2, "epoch": 0}),
    ({"seed": 1, "epoch": 2}, {"seed": 2, "epoch": 1}),  # equal sums
    ({"seed": 1, "epoch": 11}, {"seed": 11, "epoch": 1}),  # equal digits
])  # fmt: skip
def test_problem_order_depends_on_seed_and_epoch(
    one: dict[str, int], other: dict[str, int]
) -> None:
    assert problem_order(100, **one) != problem_order(100, **other)


@pytest.mark.parametrize("ratios", [None, (1.0,)])
def test_samples_visit_epochs_in_order(ratios: tuple[float, ...] | None) -> None:
    name = " 0" if ratios else ""
    epochs = [problem_order(4, seed=9, epoch=epoch, name=name) for epoch in range(3)]
    sampler = ProblemSampler([4], seed=9, ratios=ratios)
    assert positions_of(sampler, 12) == list(chain.from_iterable(epochs))
    assert len(positions_of(sampler, 3, start=10**15)) == 3  # at once


def test_empty_train_set_is_refused() -> None:
    with pytest.raises(TaskError, match="no problems"):
        ProblemSampler([0], seed=0)


# Several environments.


@pytest.mark.parametrize(("ratios", "expected"), [
    ((1, 1), (500, 500)),
    ((1, 2), (333, 667)),
    ((1, 1, 1), (334, 333, 333)),
    ((0, 5), (0, 1000)),
    ((1, 1e9), (1, 999)),
])  # fmt: skip
def test_ratios_are_exact_in_every_block(
    ratios: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert apportion(ratios, 1000) == expected
    sizes = [7] * len(ratios)
    sampler = ProblemSampler(sizes, seed=1, ratios=ratios)
    for block in range(2):
        positions = positions_of(sampler, 1000, start=1000 * block)
        counts = Counter(position // 7 for position in positions)
        assert tuple(counts[env] for env in range(len(ratios))) == expected


def test_each_environment_has_its_own_epochs() -> None:
    sampler = ProblemSampler([50, 4], seed=2, ratios=(1, 1))
    small = [position for position in positions_of(sampler, 1000) if position >= 50]
    for epoch in range(len(small) // 4):
        assert sorted(small[4 * epoch : 4 * epoch + 4]) == [50, 51, 52, 53]


# Difficulty pools.

IDS = ["a", "b", "c", "d", "a"]  # "a" is at two positions


def new_pools(**options: object) -> DifficultyPools:
    return DifficultyPools(IDS, **{"easy_threshold": 0.8, "hard_threshold": 0.2, **options})  # type: ignore[arg-type]


def pool_of(pools: DifficultyPools, problem_id: str) -> str:
    saved = pools.saved()
    return next((pool for pool, ids in saved.items() if problem_id in ids), "normal")


def test_newest_group_determines_the_pool() -> None:
    pools = new_pools()
    for mean, pool in (
        *((1.0, "easy"), (0.8, "easy"), (0.79, "normal")),
        *((0.0, "hard"), (0.2, "hard"), (0.21, "normal")),
    ):
        pools.update("a", mean)
        assert pool_of(pools, "a") == pool
    assert pools.excluded == b""


def test_problem_is_excluded_at_all_its_positions() -> None:
    pools = new_pools()
    assert pools.excluded == b""
    pools.update("a", 1.0)
    assert [is_in_bitmap(pools.excluded, position) for position in range(6)] == [
        True, False, False, False, True, False,
    ]  # fmt: skip
    assert pools.sizes() == {"normal": 3, "easy": 1, "hard": 0}


def test_threshold_of_none_disables_its_pool() -> None:
    pools = new_pools(hard_threshold=None)
    pools.update("a", 0.0)
    pools.update("b", 1.0)
    assert (pool_of(pools, "a"), pool_of(pools, "b")) == ("normal", "easy")
    pools = new_pools(easy_threshold=None, hard_threshold=None)
    pools.update("b", 1.0)
    assert not pools.active and pools.excluded == b""


def test_empty_normal_pool_is_refilled() -> None:
    pools = new_pools()
    for problem_id, mean in (("a", 1.0), ("b", 0.0), ("c", 1.0)):
        assert pools.update(problem_id, mean) == 0
    assert pools.update("d", 0.0) == 4
    assert pools.sizes() == {"normal": 4, "easy": 0, "hard": 0}


def test_saved_pools_are_restored_without_missing_problems() -> None:
    pools = new_pools()
    pools.update("unknown", 1.0)
    pools.update("a", 1.0)
    pools.update("b", 0.0)
    saved = json.loads(json.dumps(pools.saved()))
    again, other = new_pools(), DifficultyPools(["b"], easy_threshold=1)
    again.restore(saved)
    other.restore(saved)
    assert again.saved() == pools.saved() == {"easy": ["a"], "hard": ["b"]}
    assert again.excluded == pools.excluded
    assert other.saved() == {"easy": [], "hard": ["b"]}
