"""Who does which problem when, agreed on without a word between generators.

All draws of a run are numbered; generator `index` of `count` makes those whose number leaves
`index` when divided by `count`. A number alone tells the problem. Knows seeds, sizes and shares;
keeps no state and knows no rewards.
"""

from __future__ import annotations

import functools
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from itertools import count as count_from

from peralta_zmq.errors import TaskError

BLOCK = 1000  # draws in which the shares of the environments come out


@functools.lru_cache(maxsize=8)
def problem_order(num_problems: int, *, seed: int, epoch: int, name: str = "") -> tuple[int, ...]:
    """The problems of one epoch in the order of their draws, each once."""
    order = list(range(num_problems))
    random.Random(f"problem order {seed} {epoch}{name}").shuffle(order)
    return tuple(order)


class ProblemSampler:
    """From the number of a draw to a position in the train set, which is the environments'
    problems one after the other.

    With `ratios` (one for each environment, not all 0) an environment has its share of every
    1000 draws; without, the whole train set is one deck. Every deck is dealt out before it is
    shuffled anew. Raises TaskError when there is nothing to draw from.
    """

    def __init__(
        self, sizes: Sequence[int], *, seed: int, ratios: Sequence[float] | None = None
    ) -> None:
        if not sum(sizes):
            raise TaskError("no problems to draw; name a data set that is not empty")
        self._seed, self._sizes = seed, tuple(sizes)
        self._starts = (0, *accumulate(sizes))
        self._counts = shares(ratios, BLOCK) if ratios else None

    def position(self, draw: int) -> int:
        """Where in the train set the problem of this draw stands."""
        if self._counts is None:
            return self._dealt(draw, self._starts[-1])
        block, within = divmod(draw, BLOCK)
        turns = _turns(self._counts, self._seed, block)
        env = turns[within]
        earlier = block * self._counts[env] + turns[:within].count(env)
        return self._starts[env] + self._dealt(earlier, self._sizes[env], f" {env}")

    def environment(self, position: int) -> int:
        """The number of the environment that a position belongs to."""
        return bisect_right(self._starts, position) - 1

    def _dealt(self, draw: int, size: int, name: str = "") -> int:
        epoch, within = divmod(draw, size)
        return problem_order(size, seed=self._seed, epoch=epoch, name=name)[within]


def walk(
    draws: ProblemSampler,
    *,
    index: int,
    count: int,
    start: int = 0,
    resting: Callable[[int], bool] = lambda position: False,
    patience: int = 1_000_000,
) -> Iterator[tuple[int, int]]:
    """A generator's draws and their positions without end, from draw number `start` on.

    Resting positions are passed over; after `patience` of them in a row one is given all the same.
    """
    assert 0 <= index < count
    passed = 0
    for draw in count_from(start + (index - start) % count, count):
        position = draws.position(draw)
        passed = passed + 1 if resting(position) else 0
        if not 0 < passed < patience:
            passed = 0
            yield draw, position


def shares(ratios: Sequence[float], total: int) -> tuple[int, ...]:
    """`total` split in these proportions by the largest remainders; a ratio above 0 gets 1."""
    whole = sum(ratios)
    exact = [total * ratio / whole for ratio in ratios]
    counts = [max(int(each), int(ratio > 0)) for each, ratio in zip(exact, ratios, strict=True)]
    by_need = sorted(range(len(ratios)), key=lambda env: counts[env] - exact[env])
    for env in by_need[: max(0, total - sum(counts))]:
        counts[env] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


@functools.lru_cache(maxsize=4)
def _turns(counts: tuple[int, ...], seed: int, block: int) -> tuple[int, ...]:
    """Whose turn it is in each draw of a block."""
    turns = [env for env, count in enumerate(counts) for _ in range(count)]
    random.Random(f"environments {seed} {block}").shuffle(turns)
    return tuple(turns)
