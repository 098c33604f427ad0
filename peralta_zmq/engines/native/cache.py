"""Keys and values of every row, allocated once. Knows tensors; knows nothing of models.

A row holds one sequence from its first place on; place t speaks about token t.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
        shape = (num_layers, 2, num_rows, num_heads, capacity, head_dim)
        self._room = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [(each[0], each[1]) for each in self._room]  # two of [rows, H, C, D]

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of one row to another."""
        self._room[:, :, target, :, :length].copy_(self._room[:, :, source, :, :length])


class Window:
    """The rows from `first` on, as the cache that a transformers model writes to and reads."""

    def __init__(self, cache: KeyValues, first: int, positions: Tensor, length: int) -> None:
        count = len(positions)
        self._layers = cache.layers
        self._span = slice(first, first + count)
        self._rows = torch.arange(first, first + count, device=positions.device)[:, None]
        self._positions = positions  # [n, S], where the new tokens go
        self._length = length  # every row is read up to here

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Take in those of the new tokens [n, H, S, D]; give all, [n, H, length, D]."""
        both: list[Tensor] = []
        for room, new in zip(self._layers[layer], (keys, values), strict=True):
            room[self._rows, :, self._positions] = new.transpose(1, 2)
            both.append(room[self._span, :, : self._length])
        return both[0], both[1]

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked for by some models when no positions are given; ours always are."""
        return 0
