"""KV cache: keys and values of every row, allocated once.

Each row caches one sequence. A prefix that several rows have in common is stored once, in the
shared part; the row's own part holds the rest of the sequence and starts at column 0. Rows are
contiguous and only as wide as the longest own part needs, because a CPU matmul would copy memory
that is not contiguous.

Letters in shapes: n rows, H key heads, P positions of the shared part, W width of a row, D
head_dim, S new tokens per row.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.errors import ConfigError

WIDTH_STEP = 32  # columns by which rows grow
GIB = 2**30


class Span(NamedTuple):
    """The positions of the shared part that belong to a row's sequence: start <= p < end."""

    start: int
    end: int


EMPTY_SPAN = Span(0, 0)


class KVCache:
    """Keys and values of `num_rows` sequences of at most `capacity` tokens.

    `layers[i]` and `shared[i]` hold the keys and the values of layer i: own parts [n, H, W, D] and
    shared part [H, P, D]. `layout` changes whenever these tensors move in memory.
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
        self._memory = torch.zeros((num_layers, 2, size), dtype=dtype, device=device)
        self._shape, self._capacity = (num_rows, num_heads, head_dim), capacity
        self.layout = 0
        self._set_width(0)
        self.drop_shared()

    def widen(self, length: int) -> None:
        """Make rows wide enough for `length` own tokens, keeping their content.

        Raises ValueError if `length` exceeds the capacity.
        """
        if length > self._capacity:
            raise ValueError(f"{length} tokens in a row of {self._capacity}")
        if length <= self.width:
            return
        old_layers, width = self.layers, self.width
        self._set_width(length)
        for old_layer, layer in zip(old_layers, self.layers, strict=True):
            for old, new in zip(old_layer, layer, strict=True):
                content = old.clone()  # `old` and `new` are views of the same memory
                new.zero_()
                new[:, :, :width] = content

    def clear(self) -> None:
        """Zero all keys and values; a non-finite value would spread to rows that use its memory."""
        self._memory.zero_()
        self._set_width(0)
        self.drop_shared()

    def drop_shared(self) -> None:
        """Empty the shared part, and with it the span of every row."""
        num_rows, num_heads, head_dim = self._shape
        self.layout += 1
        empty = self._memory.new_zeros((2, num_heads, 0, head_dim))
        self.shared = [(empty[0], empty[1]) for _ in self.layers]
        self.spans = np.zeros((num_rows, 2), np.int64)  # a Span for each row

    def share(self, row: int, length: int) -> Span:
        """Append the first `length` tokens of `row`, whose span must be empty, to the shared part.

        Removes the parts of the shared part that no row uses, and moves the spans of the rows
        accordingly. Returns the span of the new tokens; EMPTY_SPAN, with nothing changed, if there
        is no room for them.
        """
        used: dict[int, int] = {}  # start of each used range -> its end
        for start, end in self.spans[self.spans[:, 1] > 0].tolist():
            used[start] = max(end, used.get(start, 0))
        offsets, total = dict[int, int](), 0  # start of each used range -> distance it moves
        for start, end in used.items():
            offsets[start] = total - start
            total += end - start
        if total + length > self._capacity:
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
        """Copy a sequence of `length` tokens from row `source` to row `target`."""
        self.spans[target] = start, end = self.spans[source]
        own_length = length - (end - start)
        self._all[:, :, target, :, :own_length] = self._all[:, :, source, :, :own_length]

    def _set_width(self, length: int) -> None:
        self.layout += 1
        num_rows, num_heads, head_dim = self._shape
        self.width = min(self._capacity, -(-max(length, 1) // WIDTH_STEP) * WIDTH_STEP)
        shape = (num_rows, num_heads, self.width, head_dim)
        self._all = self._memory[:, :, : math.prod(shape)].unflatten(2, shape)
        self.layers = [(layer[0], layer[1]) for layer in self._all]


class Part(NamedTuple):
    """Keys or values of n rows: the shared part, and the rows' own parts."""

    shared: Tensor  # [H, P, D]
    own: Tensor  # [n, H, W, D]


class RowWindow:
    """Consecutive rows of the cache with the interface of transformers' `Cache`.

    `columns` [n, S] are the columns of the new tokens in the rows from `first_row` on.
    """

    def __init__(self, cache: KVCache, first_row: int, columns: Tensor) -> None:
        num_rows = len(columns)
        self._cache = cache
        self._slice = slice(first_row, first_row + num_rows)
        self._rows = torch.arange(first_row, first_row + num_rows, device=columns.device)[:, None]
        self._columns = columns

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Part, Part]:
        """Write keys and values of the new tokens, [n, H, S, D]; return keys and values of all."""
        own_keys, own_values = self._cache.layers[layer]
        own_keys[self._rows, :, self._columns] = keys.transpose(1, 2)
        own_values[self._rows, :, self._columns] = values.transpose(1, 2)
        shared_keys, shared_values = self._cache.shared[layer]
        return (
            Part(shared_keys, own_keys[self._slice]),
            Part(shared_values, own_values[self._slice]),
        )

    def get_seq_length(self, layer: int = 0) -> int:
        """Required by transformers, but the result is unused: the engine passes all positions."""
        return 0


def cache_shape(config: Any) -> dict[str, int]:
    """The arguments of KVCache that the model's config determines."""
    head_dim = getattr(config, "head_dim", None)
    return {
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_key_value_heads,
        "head_dim": head_dim or config.hidden_size // config.num_attention_heads,
    }


def check_memory(model: models.Model, *, slots: int, extra_rows: int, capacity: int) -> None:
    """Raise ConfigError if keys and values of all rows do not fit into the free memory.

    Counts keys and values only: the model is loaded already, packing needs memory for one more
    matrix at a time (and keeps a tied head twice), and the logits of a decode step are small.
    """
    row_bytes = capacity * 2 * math.prod(cache_shape(model.config).values()) * model.dtype.itemsize
    needed, free = row_bytes * (slots + extra_rows), free_bytes(model.device)
    if needed > free:
        max_slots = int(free // row_bytes) - extra_rows
        remedy = f"use engine.slots {max_slots}" if max_slots > 0 else "use fewer"
        raise ConfigError(
            f"engine.slots {slots} of engine.max_model_len {capacity} tokens need "
            f"{needed / GIB:.1f} GiB for keys and values, {free / GIB:.1f} GiB are free on "
            f"{model.device}; {remedy}, or a smaller engine.max_model_len"
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate on a device, within the limit of its cgroup."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    free, cgroup = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    limit = cgroup / "memory.max"
    if not limit.exists() or limit.read_text("ascii").strip() == "max":
        return free
    used = int((cgroup / "memory.current").read_text("ascii"))
    lines = (cgroup / "memory.stat").read_text("ascii").splitlines()
    reclaimable = int(dict(line.split() for line in lines)["inactive_file"])
    return min(free, int(limit.read_text("ascii")) - used + reclaimable)
