"""Keys and values of every row, allocated once. Knows tensors; knows nothing of models.

A row holds one sequence. What it begins with may lie in a common part that all rows read, stored
once for all of them; the rest stands in the row itself, from its first place on. Rows lie side by
side and are only as wide as the longest rest needs: a CPU multiplies what lies dense, and copies
anything else first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

WIDTH = 32  # places by which rows grow


class Span(NamedTuple):
    """The places of the common part that a row reads: from `start` to before `end`."""

    start: int
    end: int


NOTHING = Span(0, 0)


class KVCache:
    """Room for `num_rows` sequences of at most `capacity` tokens."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = num_rows * num_heads * capacity * head_dim
        self._room = torch.zeros((num_layers, 2, size), dtype=dtype, device=device)
        self._shape, self._capacity = (num_rows, num_heads, head_dim), capacity
        self.layout = 0  # another number whenever something moves
        self._lay_out(0)
        self.forget()

    @property
    def width(self) -> int:
        """Places of a row as it lies now."""
        return self._width

    def widen(self, length: int) -> None:
        """Make rows wide enough for `length` tokens of their own; what they hold stays."""
        if length > self._capacity:
            raise ValueError(f"{length} tokens in a row of {self._capacity}")
        if length <= self._width:
            return
        before, width = self.layers, self._width
        self._lay_out(length)
        for old, new in zip(before, self.layers, strict=True):
            for source, target in zip(old, new, strict=True):
                held = source.clone()  # the two lie in the same room
                target.zero_()
                target[:, :, :width] = held

    def clear(self) -> None:
        """Forget everything: numbers that are not finite would spread to other rows."""
        self._room.zero_()
        self._lay_out(0)
        self.forget()

    def forget(self) -> None:
        """No row reads the common part, and nothing is in it."""
        num_rows, num_heads, head_dim = self._shape
        self.layout += 1
        nothing = self._room.new_zeros((2, num_heads, 0, head_dim))
        self.common = [(nothing[0], nothing[1]) for _ in self.layers]  # two of [H, P, D]
        self.spans = np.zeros((num_rows, 2), np.int64)  # a Span for each row

    def share(self, row: int, length: int) -> Span:
        """Put the first `length` tokens of `row`, which has no span, into the common part.

        What no row reads is given up there; NOTHING when there is no room.
        """
        kept: dict[int, int] = {}  # start -> end, of what rows read
        for start, end in self.spans[self.spans[:, 1] > 0].tolist():
            kept[start] = max(end, kept.get(start, 0))
        moved, total = dict[int, int](), 0  # start -> how far it moves
        for start, end in kept.items():
            moved[start] = total - start
            total += end - start
        if total + length > self._capacity:
            return NOTHING
        self.layout += 1
        for layer, rows in enumerate(self.layers):
            keys, values = (
                torch.cat([*(held[:, a:b] for a, b in kept.items()), own[row, :, :length]], 1)
                for held, own in zip(self.common[layer], rows, strict=True)
            )
            self.common[layer] = keys, values
        before = self.spans.copy()
        for start, way in moved.items():
            self.spans[(before[:, 0] == start) & (before[:, 1] > 0)] += way
        return Span(total, total + length)

    def copy(self, source: int, target: int, length: int) -> None:
        """A sequence of `length` tokens from one row to another."""
        self.spans[target] = start, end = self.spans[source]
        own = length - (end - start)
        self._all[:, :, target, :, :own] = self._all[:, :, source, :, :own]

    def _lay_out(self, length: int) -> None:
        self.layout += 1
        num_rows, num_heads, head_dim = self._shape
        self._width = min(self._capacity, -(-max(length, 1) // WIDTH) * WIDTH)
        shape = (num_rows, num_heads, self._width, head_dim)
        used = num_rows * num_heads * self._width * head_dim
        self._all = self._room[:, :, :used].unflatten(2, shape)  # [layers, 2, rows, H, W, D]
        self.layers = [(each[0], each[1]) for each in self._all]  # two of [rows, H, W, D]


class Part(NamedTuple):
    """Keys or values: of the common part, and of the rows themselves."""

    common: Tensor  # [H, P, D]
    own: Tensor  # [n, H, W, D]


class Window:
    """The rows from `first` on, as the cache that a transformers model writes to and reads."""

    def __init__(self, cache: KVCache, first: int, places: Tensor) -> None:
        count = len(places)
        self._cache = cache
        self._span = slice(first, first + count)
        self._rows = torch.arange(first, first + count, device=places.device)[:, None]
        self._places = places  # [n, S], where in their rows the new tokens go

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Part, Part]:
        """Take in those of the new tokens [n, H, S, D]; give all."""
        both: list[Part] = []
        held = zip(self._cache.layers[layer], self._cache.common[layer], strict=True)
        for (room, common), new in zip(held, (keys, values), strict=True):
            room[self._rows, :, self._places] = new.transpose(1, 2)
            both.append(Part(common, room[self._span]))
        return both[0], both[1]

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked for by some models when no positions are given; ours always are."""
        return 0
