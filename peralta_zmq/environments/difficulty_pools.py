"""Which problems rest: the easy and the hard ones, by the mean reward of their latest group.

Knows identities, positions and rewards; knows nothing of generators or models.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

Pool: TypeAlias = Literal["normal", "easy", "hard"]
RESTING: tuple[Pool, ...] = ("easy", "hard")
MAX_POSITIONS = 1 << 19  # in a bitmap: 64 KiB in every announcement


class DifficultyPools:
    """Every problem is in one of three pools; only the normal one is drawn.

    `ids` are the identities of the train set by position; equal ones rest together. A threshold
    of None is off.
    """

    def __init__(
        self,
        ids: Sequence[str],
        *,
        easy_threshold: float | None = None,
        hard_threshold: float | None = None,
    ) -> None:
        self._easy_threshold, self._hard_threshold = easy_threshold, hard_threshold
        self._positions: dict[str, list[int]] = {}
        for position, each in enumerate(ids):
            self._positions.setdefault(each, []).append(position)
        self._resting: dict[str, Pool] = {}
        self._bits = bytearray(-(-len(ids) // 8))  # bit p % 8 of byte p // 8

    @property
    def active(self) -> bool:
        """Whether there is a threshold at all."""
        return self._easy_threshold is not None or self._hard_threshold is not None

    @property
    def resting(self) -> bytes:
        """A bit for each position that is not drawn; empty when all are."""
        return bytes(self._bits) if self._resting else b""

    def pool_of(self, problem_id: str) -> Pool:
        """Where a problem is now."""
        return self._resting.get(problem_id, "normal")

    def sizes(self) -> dict[Pool, int]:
        """Problems in each pool."""
        easy = sum(pool == "easy" for pool in self._resting.values())
        hard = len(self._resting) - easy
        return {"normal": len(self._positions) - easy - hard, "easy": easy, "hard": hard}

    def judge(self, problem_id: str, mean_reward: float) -> int:
        """Move a problem to where the mean reward of its newest group puts it.

        Returns how many problems were brought back because none was left to draw: all the easy
        and hard ones, or 0.
        """
        if not self.active or problem_id not in self._positions:
            return 0
        self._put(problem_id, self._pool_for(mean_reward))
        if len(self._resting) < len(self._positions):
            return 0
        return self._bring_back(list(self._resting))

    def return_some(self, *, easy_fraction: float, hard_fraction: float, seed: int) -> int:
        """Bring a share of the easy and hard problems back to normal; returns how many."""
        chosen: list[str] = []
        for pool, fraction in (("easy", easy_fraction), ("hard", hard_fraction)):
            there = sorted(each for each, found in self._resting.items() if found == pool)
            wanted = round(fraction * len(there))
            chosen += random.Random(f"return {pool} {seed}").sample(there, wanted)
        return self._bring_back(chosen)

    def restore(self, saved: Mapping[str, Sequence[str]]) -> None:
        """Put back what `saved` gave; problems that have gone since are left out."""
        for pool in RESTING:
            for each in saved.get(pool, ()):
                if each in self._positions:
                    self._put(each, pool)

    def saved(self) -> dict[str, list[str]]:
        """As JSON, for a checkpoint."""
        return {
            pool: sorted(each for each, found in self._resting.items() if found == pool)
            for pool in RESTING
        }

    def _pool_for(self, mean_reward: float) -> Pool:
        if self._easy_threshold is not None and mean_reward >= self._easy_threshold:
            return "easy"
        if self._hard_threshold is not None and mean_reward <= self._hard_threshold:
            return "hard"
        return "normal"

    def _put(self, problem_id: str, pool: Pool) -> None:
        if pool == "normal":
            self._resting.pop(problem_id, None)
        else:
            self._resting[problem_id] = pool
        for position in self._positions[problem_id]:
            bit = 1 << position % 8
            if pool == "normal":
                self._bits[position // 8] &= ~bit
            else:
                self._bits[position // 8] |= bit

    def _bring_back(self, chosen: Iterable[str]) -> int:
        count = 0
        for each in chosen:
            self._put(each, "normal")
            count += 1
        return count


def is_excluded(bits: bytes, position: int) -> bool:
    """Whether a position's bit is set; what lies beyond the bits is not."""
    return position // 8 < len(bits) and bool(bits[position // 8] >> position % 8 & 1)
