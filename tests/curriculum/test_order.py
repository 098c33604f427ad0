"""Generators share an epoch without a word and resume without state."""

from __future__ import annotations

from itertools import chain, islice

import pytest

from peralta_zmq.curriculum.order import problem_order, walk
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Problem


def problems(count: int) -> list[Problem]:
    return [Problem(id=str(n), task="t", messages=(), answer="") for n in range(count)]


def ids(num_problems: int, num_steps: int, **place: int) -> list[str]:
    """The first problems of a walk."""
    place = {"seed": 0, "index": 0, "count": 1} | place
    return [each.id for each in islice(walk(problems(num_problems), **place), num_steps)]


def test_an_epoch_holds_every_problem_once() -> None:
    assert sorted(problem_order(100, seed=1, epoch=0)) == list(range(100))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert problem_order(8, seed=0, epoch=0) == [5, 2, 3, 0, 7, 1, 4, 6]


def test_another_epoch_has_another_order() -> None:
    assert problem_order(100, seed=1, epoch=0) != problem_order(100, seed=1, epoch=1)


def test_another_seed_has_another_order() -> None:
    assert problem_order(100, seed=1, epoch=0) != problem_order(100, seed=2, epoch=0)


def test_seed_and_epoch_are_not_summed() -> None:
    assert problem_order(100, seed=1, epoch=2) != problem_order(100, seed=2, epoch=1)


def test_seed_and_epoch_are_not_run_together() -> None:
    assert problem_order(100, seed=1, epoch=11) != problem_order(100, seed=11, epoch=1)


@pytest.mark.parametrize(("num_problems", "count"), [(100, 2), (100, 3), (10, 10), (7, 4)])
def test_the_generators_of_an_epoch_do_every_problem_once_between_them(
    num_problems: int, count: int
) -> None:
    shares = [
        problem_order(num_problems, seed=5, epoch=3, index=index, count=count)
        for index in range(count)
    ]
    assert sorted(chain.from_iterable(shares)) == list(range(num_problems))


def test_no_generator_does_two_problems_more_than_another() -> None:
    sizes = {len(problem_order(11, seed=0, epoch=0, index=i, count=4)) for i in range(4)}
    assert sizes == {2, 3}


def test_a_generator_without_a_share_does_the_whole_epoch() -> None:
    spare = problem_order(3, seed=0, epoch=0, index=4, count=5)
    assert spare == problem_order(3, seed=0, epoch=0)


def test_a_walk_goes_through_one_epoch_after_the_other() -> None:
    epochs = [problem_order(4, seed=9, epoch=epoch) for epoch in range(3)]
    assert ids(4, 12, seed=9) == [str(number) for number in chain.from_iterable(epochs)]


def test_two_walks_never_meet_within_an_epoch() -> None:
    for epoch in range(4):
        shares = [ids(10, 5, index=index, count=2, start=5 * epoch) for index in range(2)]
        assert set(shares[0]).isdisjoint(shares[1])


@pytest.mark.parametrize("index", [0, 1, 2, 6])
@pytest.mark.parametrize("start", [0, 1, 3, 4, 7, 29])
def test_a_walk_goes_on_where_it_stopped(index: int, start: int) -> None:
    place = {"seed": 3, "index": index, "count": 7}
    assert ids(5, 40, **place)[start:] == ids(5, 40 - start, start=start, **place)


def test_a_walk_far_ahead_starts_at_once() -> None:
    assert len(ids(5, 3, start=10**15)) == 3


def test_a_walk_without_problems_is_refused() -> None:
    with pytest.raises(TaskError, match="no problems"):
        ids(0, 1)
