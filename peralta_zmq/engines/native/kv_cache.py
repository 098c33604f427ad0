"""KV cache: keys and values of every row, and the states of recurrent layers.

Each row caches one sequence. A prefix that several rows have in common is stored once, in the
shared part; the row's own part holds the rest and starts at column 0. Rows are only as wide as the
longest own part needs, so that they are contiguous, which CPU matmuls need.

Letters in shapes: n rows, H key heads, P positions of the shared part, W width of a row in columns
(one per token), D head_dim, S new tokens per row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

RECURRENT_LAYERS = ("linear_attention", "conv")  # types of layers without keys and values


class Span(NamedTuple):
    """The range of the shared part that a row's sequence begins with, `end` excluded."""

    start: int
    end: int


EMPTY_SPAN = Span(0, 0)


class KVCache:
    """Keys and values of `num_rows` sequences of at most `capacity` tokens.

    `layers[i]` is the pair (keys, values) of the i-th layer with attention for the own parts,
    [n, H, W, D]; `shared[i]` for the shared part, [H, P, D]. `layout` changes whenever these
    tensors move in memory. `states` has the states [n, ...] of recurrent layers, by kind and layer;
    a row's are those after its last token.
    """

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
        # Not zeros: untouched memory costs nothing, and rows are often narrower than `capacity`.
        self._memory = torch.empty((num_layers, 2, size), dtype=dtype, device=device)
        self._shape = (num_rows, num_heads, head_dim)
        self.capacity = capacity
        self.layout = 0
        self.clear()

    def widen(self, length: int) -> None:
        """Make rows wide enough for `length` own tokens; new columns are zero."""
        assert length <= self.capacity, (length, self.capacity)
        if length <= self.width:
            return
        old_layers = self.layers
        width = self.width
        self._set_width(length)
        for old_layer, layer in zip(old_layers, self.layers, strict=True):
            for old, new in zip(old_layer, layer, strict=True):
                content = old.clone()  # `old` and `new` are views of the same memory
                new.zero_()
                new[:, :, :width] = content

    def clear(self) -> None:
        """Make all keys and values zero, and empty the shared part.

        Needed after non-finite values: a masked position has the probability 0, and 0 * inf is NaN.
        """
        self._set_width(0)
        self._own.zero_()
        self.states = dict[tuple[str, int], Tensor]()
        self.drop_shared()

    def drop_shared(self) -> None:
        num_rows, num_heads, head_dim = self._shape
        self.layout += 1
        empty = self._memory.new_zeros((2, num_heads, 0, head_dim))
        self.shared = [(empty[0], empty[1]) for _ in self.layers]
        self.spans = np.zeros((num_rows, 2), np.int64)  # a Span for each row

    def share(self, row: int, length: int) -> Span:
        """Copy the first `length` tokens of `row`, without a span, to the end of the shared part.

        Returns their Span, which the caller assigns to rows; EMPTY_SPAN, with nothing changed, if
        the shared part would exceed the capacity. Also removes ranges that no row uses.
        """
        # Rows with the same start read one shared prefix, some of them only its beginning. Spans
        # with different starts do not overlap.
        used: dict[int, int] = {}  # start of each used range -> its end
        for start, end in self.spans[self.spans[:, 1] > 0].tolist():
            used[start] = max(end, used.get(start, 0))
        offsets = dict[int, int]()  # start of each used range -> distance it moves
        total = 0
        for start, end in used.items():
            offsets[start] = total - start
            total += end - start
        if total + length > self.capacity:
            return EMPTY_SPAN
        self.layout += 1
        for layer, own_part in enumerate(self.layers):
            keys, values = (
                torch.cat(
                    [*(shared[:, start:end] for start, end in used.items()), own[row, :, :length]],
                    dim=1,
                )
                for shared, own in zip(self.shared[layer], own_part, strict=True)
            )
            self.shared[layer] = keys, values
        old_spans = self.spans.copy()
        for start, offset in offsets.items():
            self.spans[(old_spans[:, 0] == start) & (old_spans[:, 1] > 0)] += offset
        return Span(total, total + length)

    def copy(self, source: int, target: int, length: int) -> None:
        start, end = self.spans[source]
        self.spans[target] = start, end
        own_length = length - (end - start)
        self._own[:, :, target, :, :own_length] = self._own[:, :, source, :, :own_length]
        for state in self.states.values():
            state[target] = state[source]

    def read(self, row: int, length: int) -> Tensor:
        """A copy of the sequence of `length` tokens in a row, [layers, 2, H, length, D]."""
        start, end = self.spans[row]
        own = self._own[:, :, row, :, : length - (end - start)]
        shared = [torch.stack([part[:, start:end] for part in pair]) for pair in self.shared]
        return torch.cat([torch.stack(shared), own], dim=3)

    def write(self, row: int, sequence: Tensor) -> None:
        length = sequence.shape[3]
        self.widen(length)
        self.spans[row] = EMPTY_SPAN
        self._own[:, :, row, :, :length] = sequence

    def _set_width(self, length: int) -> None:
        """Set the width of the rows to at least `length`; their content becomes invalid."""
        self.layout += 1
        num_rows, num_heads, head_dim = self._shape
        # Multiples of 32, so that rows seldom grow.
        self.width = min(self.capacity, -(-max(length, 1) // 32) * 32)
        shape = (num_rows, num_heads, self.width, head_dim)
        # The own parts as a view of the memory: [layers, 2 (keys and values), n, H, W, D].
        self._own = self._memory[:, :, : math.prod(shape)].unflatten(2, shape)
        self.layers = [(layer[0], layer[1]) for layer in self._own]


class Part(NamedTuple):
    """Keys or values of n rows: the shared part, and the rows' own parts."""

    shared: Tensor  # [H, P, D]
    own: Tensor  # [n, H, W, D]


class RowWindow:
    """The rows from `first_row` on, in place of transformers' `Cache`.

    `columns` [n, S] are the columns of the new tokens. Only the native decoder's attention can use
    the Parts that `update` returns. `indices` has those in the cache of the layers with attention;
    None = all layers have it. The others begin without a state if `is_new`; if not, there is one
    new token per row.
    """

    def __init__(
        self,
        cache: KVCache,
        first_row: int,
        columns: Tensor,
        *,
        indices: Mapping[int, int] | None = None,
        is_new: bool = False,
    ) -> None:
        num_rows = len(columns)
        self._cache = cache
        self._is_new = is_new
        self._indices = indices
        self._slice = slice(first_row, first_row + num_rows)
        self._rows = torch.arange(first_row, first_row + num_rows, device=columns.device)[:, None]
        self._columns = columns

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Part, Part]:
        """Write keys and values [n, H, S, D] of new tokens; returns all keys and values."""
        index = self._indices[layer] if self._indices else layer
        own_keys, own_values = self._cache.layers[index]
        own_keys[self._rows, :, self._columns] = keys.transpose(1, 2)
        own_values[self._rows, :, self._columns] = values.transpose(1, 2)
        shared_keys, shared_values = self._cache.shared[index]
        return (
            Part(shared_keys, own_keys[self._slice]),
            Part(shared_values, own_values[self._slice]),
        )

    def get_seq_length(self, layer: int = 0) -> int:
        """Required by transformers, but not used: the decoder passes all positions."""
        return 0

    # States of recurrent layers, as in transformers' `Cache`; a layer has one of each kind.

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs [n, C, K] of a convolution, which the layer replaces in place."""
        return self._state("conv", layer)

    def update_conv_state(
        self, inputs: Tensor, layer: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Keep the last of the first inputs [n, C, S] of new rows; returns them, padded to K."""
        padded = pad(inputs, (max(0, conv_kernel_size - inputs.shape[-1]), 0))
        self._keep("conv", layer, padded[..., -conv_kernel_size:])
        return padded

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self._state("recurrent", layer)

    def update_recurrent_state(self, state: Tensor, layer: int, state_idx: int = 0) -> None:
        self._keep("recurrent", layer, state)

    def is_recording_past(self, layer: int) -> bool:
        return False

    def _state(self, kind: str, layer: int) -> Tensor | None:
        return None if self._is_new else self._cache.states[kind, layer][self._slice]

    def _keep(self, kind: str, layer: int, state: Tensor) -> None:
        states = self._cache.states
        if (kind, layer) not in states:
            states[kind, layer] = state.new_zeros(len(self._cache.spans), *state.shape[1:])
        states[kind, layer][self._slice] = state


def attending_layers(config: Any) -> list[int]:
    """The layers that have keys and values."""
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [layer for layer, each in enumerate(types) if each not in RECURRENT_LAYERS]


def cache_shape(config: Any) -> dict[str, int]:
    """The arguments of KVCache that the model's config determines."""
    head_dim = getattr(config, "head_dim", None)
    return {
        "num_layers": len(attending_layers(config)),
        "num_heads": config.num_key_value_heads,
        "head_dim": head_dim or config.hidden_size // config.num_attention_heads,
    }
