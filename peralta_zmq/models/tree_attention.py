"""Attention within the prefix trees of a packed row, for transformers.

A `PrefixTree` (rollout.py) stores a shared prefix once; its spans continue after an earlier token
(parent), or start a sequence (parent -1). A packed row is several trees, one after the other. A
token attends only to itself and its ancestors in its tree.

A small tree is computed as a whole, with a mask. With K long completions this takes about K times
the work that the sequences need. In larger trees the tokens of each span therefore attend to a copy
of the keys on their path from the root, unless that needs too many copies.

A model may mask more tokens, for example outside a sliding window, by a function of the indices of
query and key; here it gets the positions in the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from peralta_zmq.rollout import Int64Array, PrefixTree

TREE_ATTENTION = "peralta_zmq_trees"  # name under which transformers finds `_attention`
BASE_ATTENTION = "sdpa"  # the attention of transformers that `_attention` replaces
MATMUL_LENGTHS = range(128, 513)  # numbers of keys for which matmuls beat SDPA on a CPU
# Options of an attention that `_attention` follows, or that its mask contains.
KNOWN_OPTIONS = ("scaling", "sliding_window", "position_ids", "is_causal", "use_cache")
WHOLE_TREE = 256  # a tree of at most this number of tokens is computed as a whole


def attends_by_span(num_tokens: int, path_tokens: float) -> bool:
    """Whether the spans of a tree, whose paths have `path_tokens`, are computed one by one.

    With more than two copies per key, a tree is computed as a whole to save memory.
    """
    return num_tokens > WHOLE_TREE and path_tokens <= 2 * num_tokens


class TreeLayout:
    """Positions and paths of one tree; index t of an array is for token t."""

    def __init__(self, tree: PrefixTree) -> None:
        length = tree.num_tokens
        self.after = tree.after
        self.position = np.zeros(length, np.int64)  # position in the sequence
        self.previous = np.zeros(length, np.int64)  # predecessor's index; own index at the start
        self.span = np.zeros(length, np.int64)  # index of the token's span
        self.paths = list[list[slice]]()  # slices of the tree by span; the last is its own
        start = 0
        for index, (parent, size) in enumerate(tree.spans):
            end = start + size
            depth = tree.after
            path = list[slice]()
            if parent >= 0:
                *path, last = self.paths[self.span[parent]]
                path.append(slice(last.start, parent + 1))
                depth = self.position[parent] + 1
            self.position[start:end] = np.arange(depth, depth + size)
            self.previous[start:end] = np.arange(start - 1, end - 1)
            self.previous[start] = start if parent < 0 else parent
            self.span[start:end] = index
            self.paths.append([*path, slice(start, end)])
            start = end

    def path(self, span: int, start: int = 0) -> Int64Array:
        """Indices in the row of the tokens of a sequence, if the tree begins at `start`."""
        own = [np.arange(start + each.start, start + each.stop) for each in self.paths[span]]
        return np.concatenate([np.arange(self.after), *own])

    def previous_in_row(self, start: int) -> Int64Array:
        """`previous` as indices in the row, if the tree begins at `start`."""
        is_first = self.previous == np.arange(len(self.previous))
        return np.where(is_first & (self.after > 0), self.after - 1, start + self.previous)


class _Part(NamedTuple):
    segments: list[int]  # indices of the segments with the keys
    mask: Tensor  # bool [tokens, keys], True where row attends to column


class PackedLayout(NamedTuple):
    positions: Tensor  # int64 [M], of each token in its sequence
    previous: Tensor  # int64 [M], index in the row of each token's predecessor
    segment_sizes: list[int]  # the row is cut into segments, so that each path is a list of them
    parts: list[_Part]  # in the order of the row
    attended: set[int]  # ids of the attention modules that have used this layout

    @classmethod
    def of(
        cls,
        trees: Sequence[PrefixTree],
        device: torch.device,
        *,
        is_by_span: Callable[[int, float], bool] = attends_by_span,
    ) -> PackedLayout:
        layouts = [TreeLayout(tree) for tree in trees]
        starts = np.cumsum([0, *(tree.num_tokens for tree in trees[:-1])])
        previous = [
            layout.previous_in_row(start) for layout, start in zip(layouts, starts, strict=True)
        ]
        positions = np.concatenate([layout.position for layout in layouts])
        sizes = list[int]()
        parts = list[_Part]()
        for layout in layouts:
            tree_sizes, tree_parts = _parts_of(
                layout, first_segment=len(sizes), device=device, is_by_span=is_by_span
            )
            sizes += tree_sizes
            parts += [_after(part, layout.after) for part in tree_parts]
        return cls(
            positions=torch.from_numpy(positions).to(device),
            previous=torch.from_numpy(np.concatenate(previous)).to(device),
            segment_sizes=sizes,
            parts=parts,
            attended=set(),
        )


_layout = ContextVar[PackedLayout | None]("_layout", default=None)


@contextmanager
def packed_row(layout: PackedLayout | None) -> Generator[None]:
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def _parts_of(
    layout: TreeLayout,
    *,
    first_segment: int,
    device: torch.device,
    is_by_span: Callable[[int, float], bool],
) -> tuple[list[int], list[_Part]]:
    """Sizes of the segments of a tree, whose first one has this index, and its parts."""
    num_tokens = len(layout.span)
    lengths = [sum(map(_size, path)) for path in layout.paths]
    if not is_by_span(num_tokens, sum(lengths)):
        mask = torch.from_numpy(_mask_of(layout)).to(device)
        return [num_tokens], [_Part([first_segment], mask)]
    cuts = sorted({0, *(each.stop for path in layout.paths for each in path)})
    segment_at = {cut: first_segment + number for number, cut in enumerate(cuts)}
    parts = list[_Part]()
    for path, length in zip(layout.paths, lengths, strict=True):
        ranges = (range(segment_at[each.start], segment_at[each.stop]) for each in path)
        mask = torch.ones(_size(path[-1]), length, dtype=torch.bool, device=device)
        parts.append(_Part([*chain.from_iterable(ranges)], mask.tril_(length - len(mask))))
    return [end - start for start, end in pairwise(cuts)], parts


def _after(part: _Part, num_tokens: int) -> _Part:
    """The part with the keys of the first tokens of the row, which are its first segment."""
    if not num_tokens:
        return part
    mask = part.mask.new_ones(len(part.mask), num_tokens)
    return _Part([0, *part.segments], torch.cat([mask, part.mask], 1))


def _size(tokens: slice) -> int:
    return tokens.stop - tokens.start


def _mask_of(layout: TreeLayout) -> NDArray[np.bool_]:
    """The mask of a whole tree, bool [T, T], True where row attends to column."""
    mask = np.zeros((len(layout.span), len(layout.span)), np.bool_)
    for *before, own in layout.paths:
        for each in before:
            mask[own, each] = True
        mask[own, own] = np.tri(_size(own), dtype=np.bool_)
    return mask


def _mask(*, mask_function: Any, use_vmap: bool = False, **options: Any) -> Any:
    """Mask for `_attention`, as a function for transformers: the layout of a packed row.

    Its parts leave out the keys that the model masks.
    """
    layout = _layout.get()
    if layout is None:
        base = AttentionMaskInterface()[BASE_ATTENTION]
        return base(mask_function=mask_function, use_vmap=use_vmap, **options)
    if use_vmap:
        raise ValueError("the model adds a rule of its own to its attention mask")
    if mask_function is causal_mask_function:
        return layout
    queries = layout.positions.split([len(part.mask) for part in layout.parts])
    segments = layout.positions.split(layout.segment_sizes)
    parts = list[_Part]()
    for part, query in zip(layout.parts, queries, strict=True):
        key = torch.cat([segments[index] for index in part.segments])
        parts.append(part._replace(mask=part.mask & mask_function(0, 0, query[:, None], key)))
    return layout._replace(parts=parts)


def _attention(
    module: Any,
    query: Tensor,  # [1, heads, M, D]
    key: Tensor,  # [1, key heads, M, D]
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, as a function for transformers.

    Outside of `packed_row` it is the original attention: an engine may sample from the same model.
    """
    if not isinstance(attention_mask, PackedLayout):
        if _layout.get() is not None:
            raise ValueError("the model changes its attention mask")
        base = AttentionInterface()[BASE_ATTENTION]
        return base(module, query, key, value, attention_mask, **options)
    for name, option in options.items():
        if name not in KNOWN_OPTIONS and (isinstance(option, Tensor) or option):
            raise ValueError(f"the model's attention has the option {name}")
    attention_mask.attended.add(id(module))
    parts = attention_mask.parts
    queries = query.split([len(part.mask) for part in parts], 2)
    sizes = attention_mask.segment_sizes
    # In float32, or float64, the gradients of a shared prompt add up.
    wide = torch.promote_types(key.dtype, torch.float32)
    keys, values = (each.to(wide).split(sizes, 2) for each in (key, value))
    scaling = options.get("scaling") or query.shape[-1] ** -0.5

    def attend(query: Tensor, part: _Part) -> Tensor:
        own_keys, own_values = (_joined(each, part.segments) for each in (keys, values))
        return _part_attention(query, own_keys, own_values, part.mask, scaling=scaling)

    outputs = list(map(attend, queries, parts))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _joined(segments: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    chosen = [segments[index] for index in indices]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, 2)


def _part_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float
) -> Tensor:
    """Attention of one part. SDPA in bfloat16 on a CPU is not used: its backward pass is slow."""
    if query.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        is_grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=is_grouped
        )
    if key.shape[2] in MATMUL_LENGTHS:
        return _matmul_attention(query, key, value, mask, scaling=scaling)
    with torch.autocast("cpu", enabled=False):
        return _part_attention(query.float(), key.float(), value.float(), mask, scaling=scaling)


def _matmul_attention(
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, key heads, S, D]
    value: Tensor,
    mask: Tensor,  # [T, S]
    *,
    scaling: float,
) -> Tensor:
    _, heads, _, width = query.shape
    stacked = (query * scaling).reshape(key.shape[1], -1, width)
    bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    scores = torch.bmm(stacked, key[0].transpose(1, 2)).view(1, heads, *mask.shape)
    probs = (scores + bias).softmax(-1).view(len(stacked), -1, key.shape[2])
    return torch.bmm(probs, value[0]).view(*query.shape[:-1], -1)


AttentionInterface.register(TREE_ATTENTION, _attention)
AttentionMaskInterface.register(TREE_ATTENTION, _mask)
