"""What sequences begin with in common, once. Knows token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from peralta_zmq.rollout import Int32Array, PackedSequence, PrefixSpan

Int64Array: TypeAlias = NDArray[np.int64]


class PrefixTree:
    """Sequences are added one by one; each brings a branch where it leaves the others."""

    def __init__(self) -> None:
        self.places: list[Int64Array] = []  # of each sequence, where its tokens are in the row
        self._tokens: list[int] = []
        self._branches: list[PrefixSpan] = []
        self._next: dict[tuple[int, int], int] = {}  # (place, token after it) -> its place

    @property
    def num_tokens(self) -> int:
        """Tokens of the row so far."""
        return len(self._tokens)

    @property
    def token_ids(self) -> Int32Array:
        """The row, [T]."""
        return np.array(self._tokens, np.int32)

    @property
    def segment(self) -> PackedSequence:
        """How the sequences lie in the row."""
        return PackedSequence(tuple(self._branches))

    def num_new(self, tokens: Sequence[int]) -> int:
        """Tokens that a sequence would add to the row."""
        return len(tokens) - len(self._known(tokens))

    def add(self, tokens: Sequence[int]) -> None:
        """Take in a sequence."""
        places = self._known(tokens)
        after, start = places[-1] if places else -1, len(self._tokens)
        rest = tokens[len(places) :]
        if rest:
            self._branches.append(PrefixSpan(after, len(rest)))
        for place, token in enumerate(rest, start=start):
            self._next[(after, token)] = after = place
        self._tokens += rest
        self.places.append(np.array([*places, *range(start, len(self._tokens))], np.int64))

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Places of the longest beginning that is in the row already."""
        place, found = -1, list[int]()
        for token in tokens:
            following = self._next.get((place, token))
            if following is None:
                break
            found.append(place := following)
        return found
