"""Differentiable logprobs of packed token sequences: the trainer's forward pass.

Completions of one problem share their prompt. A `PrefixTree` (rollout.py) stores a shared prefix
once. Its tokens form spans; a span continues after its parent, which is an earlier token of the
tree, or starts a sequence (parent -1). A packed row is several trees, one after the other.
Attention runs per tree, with a mask that lets a token attend only to itself and its ancestors in
the tree. If a model cannot compute packed rows correctly, each sequence becomes a row of its own,
padded to the longest sequence.

The logits at a token predict the next token of the sequence. Only this module accounts for this
shift: it takes the logits at the predecessor of each token.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from peralta_zmq.models.loading import Model
from peralta_zmq.models.logprobs import entropies, selected_logprobs
from peralta_zmq.models.norms import replace_norms
from peralta_zmq.rollout import Int64Array, PrefixTree, TreeSpan

TREE_ATTENTION = "peralta_zmq_trees"  # name under which transformers finds `_attention`
BASE_ATTENTION = "sdpa"  # the attention of transformers that `_attention` replaces
TOLERANCE = 1e-3  # largest difference between packed and padded logprobs in fp32
MATMUL_LENGTHS = range(128, 513)  # sizes of a tree, in tokens, for which matmuls beat SDPA on a CPU
# A row for the comparison of packed with padded logprobs; its first tree branches inside a
# completion. TRIAL_SCORED has the indices of the tokens to compare.
TRIAL_TREES = (
    PrefixTree((TreeSpan(-1, 5), TreeSpan(4, 3), TreeSpan(5, 4))),
    PrefixTree((TreeSpan(-1, 2), TreeSpan(1, 6))),
)
TRIAL_SCORED = (*range(5, 12), *range(14, 20))


class Scorer:
    """Computes the logprobs of tokens in packed rows under one model.

    With `dtype` float32 the model computes in fp32; any other dtype is used by autocast, with fp32
    weights. `padding_reason` is empty if the model computes packed rows correctly; otherwise the
    text says why sequences are padded instead.
    """

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
    ) -> None:
        self._model, self._dtype = cast(Any, model), dtype
        self._has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        if gradient_checkpointing:
            _checkpoint_layers(model)
        replace_norms(model)
        self.padding_reason = self._find_padding_reason()

    @property
    def packs(self) -> bool:
        """Whether a shared prefix is computed once for all of its completions."""
        return not self.padding_reason

    def __call__(
        self,
        token_ids: Tensor,  # [M]
        trees: Sequence[PrefixTree],  # in the order of the row; M tokens in total
        scored: Tensor,  # [N], indices in the row; no first token of a sequence
        *,
        temperature: Tensor | float = 1.0,  # a scalar, or one per scored token [N]
    ) -> Tensor:
        """Logprobs [N] of the tokens at `scored`, given the tokens before them."""
        if isinstance(temperature, Tensor):
            logits = self._logits(token_ids, trees, scored)
            return selected_logprobs(logits, token_ids[scored], temperature=temperature)
        # `scored` repeats the index of a token that completions share; compute its logits once.
        unique, inverse = scored.unique(return_inverse=True)
        logits = self._logits(token_ids, trees, unique)
        return selected_logprobs(logits, token_ids[unique], temperature=temperature)[inverse]

    def with_entropy(
        self,
        token_ids: Tensor,
        trees: Sequence[PrefixTree],
        scored: Tensor,
        *,
        temperature: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs [N] as in `__call__`, and entropies [N] in nats.

        An entropy is that of the predicted distribution.
        """
        logits = self._logits(token_ids, trees, scored)
        logprobs = selected_logprobs(logits, token_ids[scored], temperature=temperature)
        return logprobs, entropies(logits, temperature=temperature)

    def _logits(self, token_ids: Tensor, trees: Sequence[PrefixTree], scored: Tensor) -> Tensor:
        """Logits [N, V] that predict the scored tokens."""
        forward = self._packed if self.packs else self._padded
        return forward(token_ids, trees, scored)

    def _packed(self, token_ids: Tensor, trees: Sequence[PrefixTree], scored: Tensor) -> Tensor:
        """Logits [N, V] that predict the scored tokens, computed on the packed row."""
        layout = _PackedLayout.of(trees, token_ids.device)
        logits = self._forward(
            token_ids[None],
            # transformers builds its own mask unless it gets a mask of 4 dimensions
            torch.ones(1, 1, 1, 1, dtype=torch.bool, device=token_ids.device),
            position_ids=layout.positions[None],
            logits_to_keep=layout.previous[scored],
            packed_layout=layout,  # transformers passes this option to `_attention`
        )
        return logits[0]

    def _padded(self, token_ids: Tensor, trees: Sequence[PrefixTree], scored: Tensor) -> Tensor:
        """Logits [N, V] that predict the scored tokens, computed on padded rows."""
        indices, attention, cells = _padded_layout(trees, token_ids.device)
        row, column = cells[scored].unbind(1)
        width = indices.shape[1]
        options = dict[str, Any]()
        if self._has_logits_to_keep:
            options["logits_to_keep"] = width - int(column.min()) + 1
        logits = self._forward(token_ids[indices] * attention, attention, **options)
        first_column = width - logits.shape[1]  # of `logits`, if the model kept only the last ones
        return logits[row, column - 1 - first_column]

    def _forward(self, token_ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
        """Logits [B, T, V] of the model for token ids [B, T]."""
        is_narrow = self._dtype != torch.float32
        autocast = torch.autocast(token_ids.device.type, self._dtype, enabled=is_narrow)
        with autocast, _sparse_embedding_gradient(self._model):
            return self._model(token_ids, attention_mask=mask, use_cache=False, **options).logits

    @torch.no_grad()
    def _find_padding_reason(self) -> str:
        """Return why rows must be padded, or '' if packed and padded logprobs agree.

        The logprobs are those of random tokens.
        """
        if not self._has_logits_to_keep:
            return "padded rows: the model has no logits_to_keep"
        layer_types = set(getattr(self._model.config, "layer_types", None) or ["full_attention"])
        if layer_types != {"full_attention"}:
            return f"padded rows: the model has {', '.join(sorted(layer_types))}"
        attention = self._model.config._attn_implementation
        if attention not in (BASE_ATTENTION, TREE_ATTENTION):
            return f"padded rows: the model's attention is {attention}"
        scored = torch.tensor(TRIAL_SCORED, device=self._model.device)
        random, vocab_size = torch.Generator().manual_seed(0), int(self._model.config.vocab_size)
        length = sum(tree.num_tokens for tree in TRIAL_TREES)
        tokens = torch.randint(vocab_size, (length,), generator=random).to(self._model.device)
        dtype, self._dtype = self._dtype, torch.float32
        self._model.config._attn_implementation = TREE_ATTENTION
        try:
            packed, padded = (
                selected_logprobs(forward(tokens, TRIAL_TREES, scored), tokens[scored])
                for forward in (self._packed, self._padded)
            )
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            return f"padded rows: {str(error).splitlines()[0]}"
        finally:
            self._dtype = dtype
        gap = float((packed - padded).abs().max())
        return "" if gap < TOLERANCE else f"padded rows: packed logprobs differ by {gap:.2g}"


class _TreeLayout:
    """Positions and attention mask of one tree; index t of an array is for token t."""

    def __init__(self, tree: PrefixTree) -> None:
        length, self.num_spans = tree.num_tokens, len(tree.spans)
        self.position = np.zeros(length, np.int64)  # of the token in its sequence
        self.previous = np.zeros(length, np.int64)  # predecessor's index; own index at the start
        self.span = np.zeros(length, np.int64)  # index of the token's span
        self.mask = np.zeros((length, length), np.bool_)  # True where row attends to column
        start = 0
        for index, (parent, size) in enumerate(tree.spans):
            end, depth = start + size, 0 if parent < 0 else self.position[parent] + 1
            self.position[start:end] = np.arange(depth, depth + size)
            self.previous[start:end] = np.arange(start - 1, end - 1)
            self.previous[start] = start if parent < 0 else parent
            self.span[start:end] = index
            self.mask[start:end, start:end] = np.tri(size, dtype=np.bool_)
            if parent >= 0:
                self.mask[start:end, :start] = self.mask[parent, :start]
            start = end

    def path(self, span: int) -> Int64Array:
        """Indices of the sequence that ends with the last token of a span."""
        return np.flatnonzero(self.mask[np.flatnonzero(self.span == span)[-1]])


class _PackedLayout(NamedTuple):
    """Positions, predecessors and attention masks of a packed row."""

    positions: Tensor  # int64 [M], of each token in its sequence
    previous: Tensor  # int64 [M], index in the row of each token's predecessor
    sizes: list[int]  # tokens of each tree
    masks: list[Tensor]  # bool [T, T] of each tree, True where row attends to column

    @classmethod
    def of(cls, trees: Sequence[PrefixTree], device: torch.device) -> _PackedLayout:
        layouts = [_TreeLayout(tree) for tree in trees]
        sizes = [tree.num_tokens for tree in trees]
        starts = np.cumsum([0, *sizes[:-1]])
        previous = [layout.previous + start for layout, start in zip(layouts, starts, strict=True)]
        positions = np.concatenate([layout.position for layout in layouts])
        return cls(
            positions=torch.from_numpy(positions).to(device),
            previous=torch.from_numpy(np.concatenate(previous)).to(device),
            sizes=sizes,
            masks=[torch.from_numpy(layout.mask).to(device) for layout in layouts],
        )


def _padded_layout(
    trees: Sequence[PrefixTree], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Layout of padded rows: one row per span, from its sequence's start to its end.

    Returns, for S spans whose sequences have at most T tokens: the index in the packed row of each
    padded token, int64 [S, T]; the attention mask, int64 [S, T], 1 on tokens and 0 on padding; and
    the padded row and column of each token of the packed row, int64 [M, 2].
    """
    paths, cells, start = list[Int64Array](), list[Int64Array](), 0
    for tree in trees:
        layout = _TreeLayout(tree)
        cells.append(np.stack([len(paths) + layout.span, layout.position], 1))
        paths += [start + layout.path(span) for span in range(layout.num_spans)]
        start += tree.num_tokens
    indices = np.zeros((len(paths), max(map(len, paths))), np.int64)
    attention = np.zeros_like(indices)
    for row, path in enumerate(paths):
        indices[row, : len(path)] = path
        attention[row, : len(path)] = 1
    return (
        torch.from_numpy(indices).to(device),
        torch.from_numpy(attention).to(device),
        torch.from_numpy(np.concatenate(cells)).to(device),
    )


def _attention(
    module: Any,
    query: Tensor,  # [1, heads, M, D]
    key: Tensor,  # [1, key heads, M, D]
    value: Tensor,
    mask: Tensor | None,
    *,
    packed_layout: _PackedLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention per tree of a packed row, as a function for transformers.

    Without `packed_layout` it is the original attention: an engine may sample from the same model
    object, without trees.
    """
    if packed_layout is None:
        return AttentionInterface()[BASE_ATTENTION](module, query, key, value, mask, **options)
    if options.get("softcap") is not None:
        raise ValueError("the model caps its attention scores")
    sizes = packed_layout.sizes
    queries, keys, values = (tensor.split(sizes, 2) for tensor in (query, key, value))
    outputs = [
        _tree_attention(*inputs, scaling=options["scaling"])
        for inputs in zip(queries, keys, values, packed_layout.masks, strict=True)
    ]
    return torch.cat(outputs, 2).transpose(1, 2), None


def _tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float
) -> Tensor:
    """Attention of one tree, by SDPA or `_matmul_attention`.

    SDPA in bfloat16 on a CPU is not used, because its backward pass is slow.
    """
    if query.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        is_grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=is_grouped
        )
    if len(mask) in MATMUL_LENGTHS:
        return _matmul_attention(query, key, value, mask, scaling=scaling)
    with torch.autocast("cpu", enabled=False):
        return _tree_attention(query.float(), key.float(), value.float(), mask, scaling=scaling)


def _matmul_attention(
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, key heads, T, D]
    value: Tensor,
    mask: Tensor,  # [T, T]
    *,
    scaling: float,
) -> Tensor:
    """Attention as bfloat16 matmuls; query heads that share a key head are stacked."""
    _, heads, length, width = query.shape
    stacked = (query * scaling).reshape(key.shape[1], -1, width)
    bias = torch.zeros(length, length).masked_fill_(~mask, float("-inf"))
    scores = torch.bmm(stacked, key[0].transpose(1, 2)).view(
        -1, heads // key.shape[1], length, length
    )
    probs = (scores + bias).softmax(-1).view(len(stacked), -1, length)
    return torch.bmm(probs, value[0]).view(1, heads, length, width)


@contextlib.contextmanager
def _sparse_embedding_gradient(model: Any) -> Generator[None, None, None]:
    """Save memory in the gradient of an input embedding that is tied to the head.

    On a CPU only, for forward passes in the block. autograd would allocate two gradients [V, H] of
    the tied weight and add them: 0.6 GiB more for Qwen3-0.6B. Instead a hook adds the gradients of
    the batch's tokens to the head's gradient. The gradient must be computed with `backward()`,
    because `torch.autograd.grad` would return an incomplete one.
    """
    embedding = model.get_input_embeddings()
    weight: Any = getattr(embedding, "weight", None)
    tied = getattr(model.get_output_embeddings(), "weight", None) is weight
    plain = type(embedding) is torch.nn.Embedding and not embedding.scale_grad_by_freq
    if not (tied and plain and weight.requires_grad and weight.device.type == "cpu"):
        yield
        return

    def detach_rows(_: Any, inputs: tuple[Tensor], rows: Tensor) -> Tensor:
        if not rows.requires_grad:
            return rows
        rows = rows.detach().requires_grad_()
        rows.register_hook(partial(_add_row_gradient, embedding, inputs[0].flatten()))
        return rows

    handle = embedding.register_forward_hook(detach_rows)
    try:
        yield
    finally:
        handle.remove()


def _add_row_gradient(embedding: torch.nn.Embedding, token_ids: Tensor, gradient: Tensor) -> None:
    """Add the gradient [..., H] for `token_ids` [M] to `weight.grad` [V, H]."""
    weight = embedding.weight
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    gradient = gradient.reshape(len(token_ids), -1).to(weight.dtype)
    if embedding.padding_idx is not None:  # autograd gives the padding row no gradient either
        gradient = gradient.masked_fill((token_ids == embedding.padding_idx)[:, None], 0)
    weight.grad.index_add_(0, token_ids, gradient)


def _checkpoint_layers(model: Model) -> None:
    """Store only each layer's input and recompute the layer in the backward pass.

    transformers does this only for layers in training mode, so the layers are set to training mode.
    Their submodules stay in evaluation mode, without dropout.
    """
    cast(Any, model).activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


AttentionInterface.register(TREE_ATTENTION, _attention)
AttentionMaskInterface.register(TREE_ATTENTION, AttentionMaskInterface()[BASE_ATTENTION])
