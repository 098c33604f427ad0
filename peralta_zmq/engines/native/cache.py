"""KV cache: keys and values of every row, allocated once.

Each row caches one sequence. A prefix that several rows have in common is stored once in the shared
part; a row's own part holds the rest of its sequence, from position 0 of the row on. Rows are
contiguous and only as wide as the longest own part needs: a CPU multiplies contiguous memory and
would copy anything else first.
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

WIDTH_STEP = 32  # positions by which rows grow
GIB = 2**30


class Span(NamedTuple):
    """The positions of the shared part that belong to a row's sequence: start <= p < end."""

    start: int
    end: int


EMPTY_SPAN = Span(0, 0)


class KVCache:
    """Memory for `num_rows` sequences of at most `capacity` tokens."""

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
        self.layout = 0  # changes whenever tensors move in memory
        self._set_width(0)
        self.drop_shared()

    def widen(self, length: int) -> None:
        """Make rows wide enough for `length` own tokens, keeping their content."""
        if length > self._capacity:
            raise ValueError(f"{length} tokens in a row of {self._capacity}")
        if length <= self.width:
            return
        old_layers, width = self.layers, self.width
        self._set_width(length)
        for old_layer, layer in zip(old_layers, self.layers, strict=True):
            for old, new in zip(old_layer, layer, strict=True):
                content = old.clone()  # both views use the same memory
                new.zero_()
                new[:, :, :width] = content

    def clear(self) -> None:
        """Zero everything: non-finite values would spread to other rows."""
        self._memory.zero_()
        self._set_width(0)
        self.drop_shared()

    def drop_shared(self) -> None:
        """Empty the shared part."""
        num_rows, num_heads, head_dim = self._shape
        self.layout += 1
        empty = self._memory.new_zeros((2, num_heads, 0, head_dim))
        self.shared = [(empty[0], empty[1]) for _ in self.layers]  # keys and values, [H, P, D]
        self.spans = np.zeros((num_rows, 2), np.int64)  # a Span for each row

    def share(self, row: int, length: int) -> Span:
        """Copy the first `length` tokens of `row`, whose span is empty, to the shared part.

        Drops what no row uses there. Returns EMPTY_SPAN if there is no room.
        """
        used: dict[int, int] = {}  # start -> end
        for start, end in self.spans[self.spans[:, 1] > 0].tolist():
            used[start] = max(end, used.get(start, 0))
        offsets, total = dict[int, int](), 0  # start -> how far it moves
        for start, end in used.items():
            offsets[start] = total - start
            total += end - start
        if total + length > self._capacity:
            return EMPTY_SPAN
        self.layout += 1
        for layer, own_part in enumerate(self.layers):
            keys, values = (
                torch.cat([*(shared[:, a:b] for a, b in used.items()), own[row, :, :length]], 1)
                for shared, own in zip(self.shared[layer], own_part, strict=True)
            )
            self.shared[layer] = keys, values
        old_spans = self.spans.copy()
        for start, offset in offsets.items():
            self.spans[(old_spans[:, 0] == start) & (old_spans[:, 1] > 0)] += offset
        return Span(total, total + length)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a sequence of `length` tokens from one row to another."""
        self.spans[target] = start, end = self.spans[source]
        own_length = length - (end - start)
        self._all[:, :, target, :, :own_length] = self._all[:, :, source, :, :own_length]

    def _set_width(self, length: int) -> None:
        self.layout += 1
        num_rows, num_heads, head_dim = self._shape
        self.width = min(self._capacity, -(-max(length, 1) // WIDTH_STEP) * WIDTH_STEP)
        shape = (num_rows, num_heads, self.width, head_dim)
        self._all = self._memory[:, :, : math.prod(shape)].unflatten(2, shape)
        self.layers = [(layer[0], layer[1]) for layer in self._all]  # each [rows, H, W, D]


class Part(NamedTuple):
    """Keys or values: of the shared part, and of the rows' own parts."""

    shared: Tensor  # [H, P, D]
    own: Tensor  # [n, H, W, D]


class RowWindow:
    """A range of rows in the interface of transformers' caches: `update` writes and reads."""

    def __init__(self, cache: KVCache, first_row: int, columns: Tensor) -> None:
        num_rows = len(columns)
        self._cache = cache
        self._slice = slice(first_row, first_row + num_rows)
        self._rows = torch.arange(first_row, first_row + num_rows, device=columns.device)[:, None]
        self._columns = columns  # [n, S], where in their rows the new tokens go

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Part, Part]:
        """Write keys and values of the new tokens [n, H, S, D]; return those of all tokens."""
        parts: list[Part] = []
        buffers = zip(self._cache.layers[layer], self._cache.shared[layer], strict=True)
        for (own, shared), new in zip(buffers, (keys, values), strict=True):
            own[self._rows, :, self._columns] = new.transpose(1, 2)
            parts.append(Part(shared, own[self._slice]))
        return parts[0], parts[1]

    def get_seq_length(self, layer: int = 0) -> int:
        """Some models call it when no positions are passed; ours always are."""
        return 0


def cache_shape(config: Any) -> dict[str, int]:
    """Number of layers, number of key-value heads and head_dim of a model."""
    head_dim = getattr(config, "head_dim", None)
    return {
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_key_value_heads,
        "head_dim": head_dim or config.hidden_size // config.num_attention_heads,
    }


def check_memory(model: models.Model, *, slots: int, extra_rows: int, capacity: int) -> None:
    """Raise ConfigError when keys and values of all rows do not fit into the free memory.

    Nothing else is counted: the model is loaded already, packing needs one more matrix at a time
    (and keeps a tied head twice), and the logits of a step are small in comparison.
    """
    row_bytes = capacity * 2 * math.prod(cache_shape(model.config).values()) * model.dtype.itemsize
    needed, free = row_bytes * (slots + extra_rows), free_bytes(model.device)
    if needed > free:
        max_slots = int(free // row_bytes) - extra_rows
        remedy = f"use engine.slots {max_slots}" if max_slots > 0 else "use less"
        raise ConfigError(
            f"engine.slots {slots} of engine.max_model_len {capacity} tokens need "
            f"{needed / GIB:.1f} GiB for keys and values, {free / GIB:.1f} GiB are free on "
            f"{model.device}; {remedy}, or a smaller engine.max_model_len"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still allocate, within the limits of its cgroup."""
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
