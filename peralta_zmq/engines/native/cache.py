"""Keys and values of every row, allocated once. Knows tensors; knows nothing of models.

A row holds one sequence from its first place on; place t speaks about token t. Rows lie side by
side and are only as wide as the longest sequence needs: a CPU multiplies what lies dense, and
copies anything else first.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 32  # places by which rows grow


class KeyValues:
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
        self._lay_out(0)

    @property
    def width(self) -> int:
        """Places of a row as it lies now."""
        return self._width

    def widen(self, length: int) -> None:
        """Make rows wide enough for `length` tokens; what they hold stays."""
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

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of one row to another."""
        for each in self.layers:
            for rows in each:
                rows[target, :, :length] = rows[source, :, :length]

    def _lay_out(self, length: int) -> None:
        num_rows, num_heads, head_dim = self._shape
        self._width = min(self._capacity, -(-max(length, 1) // WIDTH) * WIDTH)
        shape = (num_rows, num_heads, self._width, head_dim)
        rows = self._room[:, :, : num_rows * num_heads * self._width * head_dim].unflatten(2, shape)
        self.layers = [(each[0], each[1]) for each in rows]  # two of [rows, H, W, D]


class Window:
    """The rows from `first` on, as the cache that a transformers model writes to and reads."""

    def __init__(self, cache: KeyValues, first: int, positions: Tensor) -> None:
        count = len(positions)
        self._layers = cache.layers
        self._span = slice(first, first + count)
        self._rows = torch.arange(first, first + count, device=positions.device)[:, None]
        self._positions = positions  # [n, S], where the new tokens go

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Take in those of the new tokens [n, H, S, D]; give all, [n, H, W, D]."""
        both: list[Tensor] = []
        for room, new in zip(self._layers[layer], (keys, values), strict=True):
            room[self._rows, :, self._positions] = new.transpose(1, 2)
            both.append(room[self._span])
        return both[0], both[1]

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked for by some models when no positions are given; ours always are."""
        return 0
