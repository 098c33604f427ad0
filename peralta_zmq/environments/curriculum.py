"""Curriculum: order of problems, assignment to generators, difficulty pools.

The sample index, counted through the whole run, determines the problem of a sample. The trainer
divides the indices between the generators; without that, generator i of n draws i, i + n, i + 2n
and so on. A position is the index of a problem in the train set, all environments in a row.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from peralta_zmq.errors import TaskError

BLOCK_SIZE = 1000  # samples; each block has the configured ratios of the environments
MAX_POSITIONS = 1 << 19  # the trainer's bitmap of excluded problems has 64 KiB

Pool: TypeAlias = Literal["normal", "easy", "hard"]
EXCLUDED_POOLS: tuple[Pool, ...] = ("easy", "hard")


# Order of problems.


@functools.lru_cache(maxsize=8)
def problem_order(num_problems: int, *, seed: int, epoch: int, name: str = "") -> tuple[int, ...]:
    order = list(range(num_problems))
    random.Random(f"problem order {seed} {epoch}{name}").shuffle(order)
    return tuple(order)


class ProblemSampler:
    """Maps the index of a sample to a position in the train set.

    `ratios` (not all 0) divide the samples of every block between the environments, whose numbers
    of problems are `sizes`; without them, the whole train set is shuffled together. Every epoch has
    a new order. Raises TaskError for an empty train set.
    """

    def __init__(
        self, sizes: Sequence[int], *, seed: int, ratios: Sequence[float] | None = None
    ) -> None:
        if not sum(sizes):
            raise TaskError("no problems to sample; choose a data set that is not empty")
        self._seed = seed
        self._sizes = tuple(sizes)
        self._starts = (0, *accumulate(sizes))  # first position of each environment, and the end
        self._block_counts = apportion(ratios, BLOCK_SIZE) if ratios else None  # by environment

    def position(self, sample_index: int) -> int:
        if self._block_counts is None:
            return self._position_in_epoch(sample_index, self._starts[-1])
        block, within = divmod(sample_index, BLOCK_SIZE)
        order = _environment_order(self._block_counts, self._seed, block)
        env = order[within]
        num_earlier = block * self._block_counts[env] + order[:within].count(env)
        return self._starts[env] + self._position_in_epoch(num_earlier, self._sizes[env], f" {env}")

    def _position_in_epoch(self, index: int, size: int, name: str = "") -> int:
        """Entry `index` of an endless sequence of shuffled epochs of `size` problems."""
        epoch, within = divmod(index, size)
        return problem_order(size, seed=self._seed, epoch=epoch, name=name)[within]


def apportion(ratios: Sequence[float], total: int) -> tuple[int, ...]:
    """Divide `total` in proportion to `ratios`, each above 0 at least 1 (largest remainder)."""
    quotas = [total * ratio / sum(ratios) for ratio in ratios]
    counts = [max(int(quota), int(quota > 0)) for quota in quotas]
    by_remainder = sorted(range(len(ratios)), key=lambda env: counts[env] - quotas[env])
    for env in by_remainder[: max(0, total - sum(counts))]:
        counts[env] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


@functools.lru_cache(maxsize=4)
def _environment_order(counts: tuple[int, ...], seed: int, block: int) -> tuple[int, ...]:
    order = [env for env, count in enumerate(counts) for _ in range(count)]
    random.Random(f"environments {seed} {block}").shuffle(order)
    return tuple(order)


# Difficulty pools.


class DifficultyPools:
    """Assigns each problem to a pool by the mean reward of its newest group.

    Only problems of the normal pool are sampled. A mean reward of at least `easy_threshold` makes a
    problem easy, one of at most `hard_threshold` hard; None disables the pool. `ids` are the
    problem ids by position; equal ids are the same problem.
    """

    def __init__(
        self,
        ids: Sequence[str],
        *,
        easy_threshold: float | None = None,
        hard_threshold: float | None = None,
    ) -> None:
        self._easy_threshold = easy_threshold
        self._hard_threshold = hard_threshold
        self._positions: dict[str, list[int]] = {}  # by problem id
        for position, problem_id in enumerate(ids):
            self._positions.setdefault(problem_id, []).append(position)
        self._excluded: dict[str, Pool] = {}  # pool by problem id
        self._is_excluded = np.zeros(len(ids), np.bool_)  # by position

    def __contains__(self, problem_id: str) -> bool:
        return problem_id in self._positions

    @property
    def active(self) -> bool:
        return self._easy_threshold is not None or self._hard_threshold is not None

    @property
    def excluded(self) -> bytes:
        """Bitmap with 1 for each excluded position; empty if no problem is excluded."""
        return bitmap(self._is_excluded) if self._excluded else b""

    def sizes(self) -> dict[Pool, int]:
        counts = Counter(self._excluded.values())
        num_normal = len(self._positions) - len(self._excluded)
        return {"normal": num_normal, "easy": counts["easy"], "hard": counts["hard"]}

    def update(self, problem_id: str, mean_reward: float) -> int:
        """Move a problem to the pool for the mean reward of its newest group.

        If no normal problem is left, all become normal again; returns their number.
        """
        if problem_id not in self:
            return 0
        self._move(problem_id, self._pool_for_reward(mean_reward))
        if len(self._excluded) < len(self._positions):
            return 0
        for each in list(self._excluded):
            self._move(each, "normal")
        return len(self._positions)

    def saved(self) -> dict[str, list[str]]:
        return {
            pool: sorted(key for key, excluded in self._excluded.items() if excluded == pool)
            for pool in EXCLUDED_POOLS
        }

    def restore(self, saved: Mapping[str, Sequence[str]]) -> None:
        """Restore the pools from `saved()`; ignores ids that are not in the data any more."""
        for pool in EXCLUDED_POOLS:
            for problem_id in saved.get(pool, ()):
                if problem_id in self._positions:
                    self._move(problem_id, pool)

    def _pool_for_reward(self, mean_reward: float) -> Pool:
        if self._easy_threshold is not None and mean_reward >= self._easy_threshold:
            return "easy"
        if self._hard_threshold is not None and mean_reward <= self._hard_threshold:
            return "hard"
        return "normal"

    def _move(self, problem_id: str, pool: Pool) -> None:
        if pool == "normal":
            self._excluded.pop(problem_id, None)
        else:
            self._excluded[problem_id] = pool
        self._is_excluded[self._positions[problem_id]] = pool != "normal"


def bitmap(values: ArrayLike) -> bytes:
    """One bit for each of the booleans [N]: value i is bit `i % 8` of byte `i // 8`."""
    return np.packbits(np.asarray(values, np.bool_), bitorder="little").tobytes()


def is_in_bitmap(bits: bytes, position: int) -> bool:
    """Whether the bit of a position is 1; False beyond the end."""
    return position // 8 < len(bits) and bool(bits[position // 8] >> position % 8 & 1)
