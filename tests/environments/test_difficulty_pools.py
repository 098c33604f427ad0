"""Problems rest when they are too easy or too hard, and never all of them."""

from __future__ import annotations

import json

import pytest

from peralta_zmq.environments.curriculum import DifficultyPools, is_excluded

IDS = ["a", "b", "c", "d", "a"]  # one problem stands in two places


def pools(**options: object) -> DifficultyPools:
    return DifficultyPools(IDS, **{"easy_threshold": 0.8, "hard_threshold": 0.2, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mean", "pool"),
    [(1.0, "easy"), (0.8, "easy"), (0.79, "normal"), (0.21, "normal"), (0.2, "hard"), (0, "hard")],
)
def test_the_thresholds_belong_to_the_pools(mean: float, pool: str) -> None:
    made = pools()
    made.update("b", mean)
    assert made.pool_of("b") == pool


def test_a_problem_rests_in_all_its_places() -> None:
    made = pools()
    assert made.excluded == b""
    made.update("a", 1.0)
    assert [is_excluded(made.excluded, position) for position in range(6)] == [
        True, False, False, False, True, False,
    ]  # fmt: skip
    assert made.sizes() == {"normal": 3, "easy": 1, "hard": 0}


def test_a_later_group_moves_a_problem_again() -> None:
    made = pools()
    for mean, pool in ((1.0, "easy"), (0.0, "hard"), (0.5, "normal")):
        made.update("a", mean)
        assert made.pool_of("a") == pool
    assert made.excluded == b""


def test_without_thresholds_nothing_rests() -> None:
    made = pools(easy_threshold=None, hard_threshold=None)
    for each in IDS:
        made.update(each, 1.0)
    assert not made.active
    assert made.excluded == b""


def test_one_threshold_is_enough() -> None:
    made = pools(hard_threshold=None)
    made.update("a", 0.0)
    made.update("b", 1.0)
    assert (made.pool_of("a"), made.pool_of("b")) == ("normal", "easy")


def test_an_empty_normal_pool_is_refilled_and_says_with_how_many() -> None:
    made = pools()
    assert [made.update(each, mean) for each, mean in zip("abc", (1, 0, 1), strict=True)] == [0] * 3
    assert made.update("d", 0.0) == 4
    assert made.sizes() == {"normal": 4, "easy": 0, "hard": 0}


def test_a_strange_problem_changes_nothing() -> None:
    made = pools()
    made.update("z", 1.0)
    assert made.saved() == {"easy": [], "hard": []}


def test_what_was_saved_is_restored_and_what_has_gone_is_left_out() -> None:
    made = pools()
    made.update("a", 1.0)
    made.update("b", 0.0)
    saved = json.loads(json.dumps(made.saved()))
    again, other = pools(), DifficultyPools(["b"], easy_threshold=1)
    again.restore(saved)
    other.restore(saved)
    assert again.saved() == made.saved() == {"easy": ["a"], "hard": ["b"]}
    assert again.excluded == made.excluded
    assert other.saved() == {"easy": [], "hard": ["b"]}


@pytest.mark.parametrize(
    ("easy", "hard", "sizes"), [(0, 0, (40, 20)), (0.5, 0.1, (20, 18)), (1, 1, (0, 0))]
)
def test_shares_of_the_pools_return(easy: float, hard: float, sizes: tuple[int, int]) -> None:
    names = [str(number) for number in range(100)]
    made = DifficultyPools(names, easy_threshold=0.8, hard_threshold=0.2)
    for number, name in enumerate(names):
        made.update(name, 1.0 if number < 40 else 0.0 if number < 60 else 0.5)
    back = made.return_some(easy_fraction=easy, hard_fraction=hard, seed=3)
    assert (made.sizes()["easy"], made.sizes()["hard"]) == sizes
    assert back == 60 - sum(sizes)
