"""Generators share the draws of a run without a word and resume without state."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice

import pytest

from peralta_zmq.environments.curriculum import (
    ProblemSampler,
    apportion,
    assigned_samples,
    problem_order,
)
from peralta_zmq.errors import TaskError


def drawn(draws: ProblemSampler, num_draws: int, **place: int) -> list[int]:
    """The first positions of a walk."""
    place = {"index": 0, "count": 1} | place
    return [position for _, position in islice(assigned_samples(draws, **place), num_draws)]


def test_an_epoch_holds_every_problem_once() -> None:
    assert sorted(problem_order(100, seed=1, epoch=0)) == list(range(100))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert problem_order(8, seed=0, epoch=0) == (5, 2, 3, 0, 7, 1, 4, 6)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"seed": 1, "epoch": 0}, {"seed": 1, "epoch": 1}),
        ({"seed": 1, "epoch": 0}, {"seed": 2, "epoch": 0}),
        ({"seed": 1, "epoch": 2}, {"seed": 2, "epoch": 1}),  # not summed
        ({"seed": 1, "epoch": 11}, {"seed": 11, "epoch": 1}),  # not run together
    ],
)
def test_another_seed_or_epoch_has_another_order(
    one: dict[str, int], other: dict[str, int]
) -> None:
    assert problem_order(100, **one) != problem_order(100, **other)


@pytest.mark.parametrize(("num_problems", "count"), [(100, 2), (100, 3), (10, 10), (7, 4), (3, 5)])
def test_the_generators_do_every_problem_once_before_one_comes_again(
    num_problems: int, count: int
) -> None:
    draws = ProblemSampler([num_problems], seed=5)
    made = chain.from_iterable(
        islice(assigned_samples(draws, index=index, count=count), 4 * num_problems)
        for index in range(count)
    )
    positions = [position for _, position in sorted(made)]
    for epoch in range(4):
        dealt = positions[epoch * num_problems : (epoch + 1) * num_problems]
        assert sorted(dealt) == list(range(num_problems))


def test_a_walk_goes_through_one_epoch_after_the_other() -> None:
    epochs = [problem_order(4, seed=9, epoch=epoch) for epoch in range(3)]
    assert drawn(ProblemSampler([4], seed=9), 12) == list(chain.from_iterable(epochs))


@pytest.mark.parametrize("index", [0, 1, 2, 6])
@pytest.mark.parametrize("skipped", [0, 1, 3, 29])
@pytest.mark.parametrize("ratios", [None, (1.0, 3.0)])
def test_a_walk_goes_on_after_any_draw(
    index: int, skipped: int, ratios: tuple[float, ...] | None
) -> None:
    draws = ProblemSampler([3, 2], seed=3, ratios=ratios)
    whole = list(islice(assigned_samples(draws, index=index, count=7), 40))
    rest = assigned_samples(draws, index=index, count=7, start=whole[skipped][0])
    assert list(islice(rest, 40 - skipped)) == whole[skipped:]


def test_a_walk_starts_with_its_first_own_draw_from_the_start_on() -> None:
    draws = ProblemSampler([100], seed=0)
    firsts = [
        next(assigned_samples(draws, index=index, count=3, start=10))[0] for index in range(3)
    ]
    assert firsts == [12, 10, 11]


def test_a_walk_far_ahead_starts_at_once() -> None:
    assert len(drawn(ProblemSampler([5], seed=0), 3, start=10**15)) == 3
    assert len(drawn(ProblemSampler([5, 2], seed=0, ratios=(1, 1)), 3, start=10**15)) == 3


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(TaskError, match="no problems"):
        ProblemSampler([0], seed=0)


# Several environments.


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((1, 1), (500, 500)),
        ((1, 2), (333, 667)),
        ((1, 1, 1), (334, 333, 333)),
        ((0, 5), (0, 1000)),
        ((1, 1e9), (1, 999)),
    ],
)
def test_shares_come_out_in_every_thousand_draws(
    ratios: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert apportion(ratios, 1000) == expected
    sizes = [7] * len(ratios)
    draws = ProblemSampler(sizes, seed=1, ratios=ratios)
    for block in range(2):
        found = Counter(
            draws.environment(position) for position in drawn(draws, 1000, start=1000 * block)
        )
        assert tuple(found[env] for env in range(len(ratios))) == expected


def test_without_ratios_every_problem_has_the_same_share() -> None:
    draws = ProblemSampler([30, 10], seed=2)
    found = Counter(draws.environment(position) for position in drawn(draws, 40))
    assert found == {0: 30, 1: 10}


def test_each_environment_is_dealt_out_before_it_comes_again() -> None:
    draws = ProblemSampler([50, 4], seed=2, ratios=(1, 1))
    small = [p for p in drawn(draws, 1000) if draws.environment(p) == 1]
    for epoch in range(len(small) // 4):
        assert sorted(small[4 * epoch : 4 * epoch + 4]) == [50, 51, 52, 53]


def test_a_draw_is_the_same_for_every_number_of_generators() -> None:
    draws = ProblemSampler([9, 5], seed=4, ratios=(2, 1))
    alone = dict(islice(assigned_samples(draws, index=0, count=1), 300))
    for index in range(4):
        for draw, position in islice(assigned_samples(draws, index=index, count=4), 50):
            assert alone[draw] == position


# Resting problems.


def test_resting_problems_are_passed_over() -> None:
    draws = ProblemSampler([10], seed=0)
    awake = assigned_samples(draws, index=0, count=1, excluded=lambda position: position < 8)
    assert {position for _, position in islice(awake, 20)} == {8, 9}


def test_a_walk_where_all_rest_does_not_hang() -> None:
    draws = ProblemSampler([10], seed=0)
    asleep = assigned_samples(
        draws, index=0, count=1, excluded=lambda position: True, max_skipped=100
    )
    assert [draw for draw, _ in islice(asleep, 2)] == [99, 199]
