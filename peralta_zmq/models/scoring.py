"""Differentiable logprobs of packed token sequences: the trainer's forward pass.

Completions of one problem share their prompt. A `PrefixTree` (rollout.py) stores a shared prefix
once. Its tokens form spans; a span continues after its parent, which is an earlier token of the
tree, or starts a sequence (parent -1). A packed row is several trees, one after the other.
Attention runs per tree, with a mask that lets a token attend only to itself and its ancestors in
the tree. If a model cannot compute packed rows correctly, each sequence becomes a row of its own,
padded to the longest sequence.

The hidden state at a token predicts the next token of the sequence. Only this module accounts for
this shift: it takes the hidden state at the predecessor of each token. The output head of the model
is replaced by `head_logprobs` (head.py) during a forward pass, so that it returns logprobs instead
of logits. A model for which this is not correct computes whole logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from peralta_zmq.models.head import head_logprobs, sparse_embedding_gradient
from peralta_zmq.models.linears import replace_linears
from peralta_zmq.models.loading import Model
from peralta_zmq.models.logprobs import logprobs_and_entropies, selected_logprobs
from peralta_zmq.models.norms import replace_norms
from peralta_zmq.rollout import Int64Array, PrefixTree, TreeSpan

TREE_ATTENTION = "peralta_zmq_trees"  # name under which transformers finds `_attention`
BASE_ATTENTION = "sdpa"  # the attention of transformers that `_attention` replaces
TOLERANCE = 1e-3  # largest difference of logprobs in fp32 between two ways to compute them
MATMUL_LENGTHS = range(128, 513)  # sizes of a tree, in tokens, for which matmuls beat SDPA on a CPU
# A row for these comparisons; its first tree branches inside a completion. TRIAL_SCORED has the
# indices of the tokens to compare.
TRIAL_TREES = (
    PrefixTree((TreeSpan(-1, 5), TreeSpan(4, 3), TreeSpan(5, 4))),
    PrefixTree((TreeSpan(-1, 2), TreeSpan(1, 6))),
)
TRIAL_SCORED = (*range(5, 12), *range(14, 20))


class Scorer:
    """Computes the logprobs of tokens in packed rows under one model.

    With `dtype` float32 the model computes in fp32; any other dtype is used by autocast, with fp32
    weights. `padding_reason` is empty if the model computes packed rows correctly; otherwise the
    text says why sequences are padded instead. `whole_logits_reason` is empty if the head is
    computed in chunks; otherwise the text says why whole logits are.
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
        if dtype != torch.float32:
            replace_linears(model)
        self.whole_logits_reason = "whole logits: not compared yet"
        self.padding_reason = self._find_padding_reason()
        self.whole_logits_reason = self._find_whole_logits_reason()

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
        return self._compute(token_ids, trees, scored, temperature=temperature)[0]

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
        logprobs, entropies = self._compute(
            token_ids, trees, scored, temperature=temperature, with_entropy=True
        )
        return logprobs, entropies

    def _compute(
        self,
        token_ids: Tensor,
        trees: Sequence[PrefixTree],
        scored: Tensor,
        *,
        temperature: Tensor | float,
        with_entropy: bool = False,
    ) -> Sequence[Tensor]:
        """Logprobs [N] of the scored tokens, and with `with_entropy` entropies [N]."""
        inverse: Tensor | slice = slice(None)
        if not isinstance(temperature, Tensor):
            # `scored` repeats the index of a token that completions share; compute it once.
            scored, inverse = scored.unique(return_inverse=True)
        inputs = (self._packed if self.packs else self._padded)(token_ids, trees, scored)
        compute = self._from_whole_logits if self.whole_logits_reason else self._from_chunks
        results = compute(inputs, token_ids[scored], temperature, with_entropy=with_entropy)
        return [each[inverse] for each in results]

    def _from_chunks(
        self, inputs: _Inputs, targets: Tensor, temperature: Tensor | float, *, with_entropy: bool
    ) -> Sequence[Tensor]:
        """Results of `_compute`, computed in place of the logits by the model's output head."""
        head = self._model.get_output_embeddings()

        def compute(hidden: Tensor) -> Tensor:
            return head_logprobs(
                inputs.select(hidden),
                head.weight,  # within the model's forward pass, in which FSDP has gathered it
                targets,
                temperature=temperature,
                with_entropy=with_entropy,
            )

        head.forward = compute
        try:
            return self._forward(inputs).unbind()
        finally:
            del head.forward

    def _from_whole_logits(
        self, inputs: _Inputs, targets: Tensor, temperature: Tensor | float, *, with_entropy: bool
    ) -> Sequence[Tensor]:
        """Results of `_compute`, computed from the logits of all scored tokens."""
        logits = inputs.select(self._forward(inputs))
        if with_entropy:
            return logprobs_and_entropies(logits, targets, temperature=temperature)
        return (selected_logprobs(logits, targets, temperature=temperature),)

    def _packed(self, token_ids: Tensor, trees: Sequence[PrefixTree], scored: Tensor) -> _Inputs:
        """Inputs of the forward pass on the packed row."""
        layout = _PackedLayout.of(trees, token_ids.device)
        return _Inputs(
            token_ids[None],
            # transformers builds its own mask unless it gets a mask of 4 dimensions
            torch.ones(1, 1, 1, 1, dtype=torch.bool, device=token_ids.device),
            options={
                "position_ids": layout.positions[None],
                "logits_to_keep": layout.previous[scored],
                "packed_layout": layout,  # transformers passes this option to `_attention`
            },
            select=itemgetter(0),
        )

    def _padded(self, token_ids: Tensor, trees: Sequence[PrefixTree], scored: Tensor) -> _Inputs:
        """Inputs of the forward pass on padded rows."""
        indices, attention, cells = _padded_layout(trees, token_ids.device)
        row, column = cells[scored].unbind(1)
        width = indices.shape[1]
        options = dict[str, Any]()
        if self._has_logits_to_keep:
            options["logits_to_keep"] = width - int(column.min()) + 1

        def select(kept: Tensor) -> Tensor:
            first_column = width - kept.shape[1]  # of `kept`, if the model keeps only the last ones
            return kept[row, column - 1 - first_column]

        return _Inputs(token_ids[indices] * attention, attention, options, select)

    def _forward(self, inputs: _Inputs) -> Tensor:
        """Output of the model's head: logits [B, K, V] of the kept tokens, unless replaced."""
        is_narrow = self._dtype != torch.float32
        autocast = torch.autocast(inputs.token_ids.device.type, self._dtype, enabled=is_narrow)
        with autocast, sparse_embedding_gradient(self._model):
            return self._model(
                inputs.token_ids, attention_mask=inputs.mask, use_cache=False, **inputs.options
            ).logits

    def _find_padding_reason(self) -> str:
        """Return why rows must be padded, or '' if packed rows give the same logprobs."""
        if not self._has_logits_to_keep:
            return "padded rows: the model has no logits_to_keep"
        layer_types = set(getattr(self._model.config, "layer_types", None) or ["full_attention"])
        if layer_types != {"full_attention"}:
            return f"padded rows: the model has {', '.join(sorted(layer_types))}"
        attention = self._model.config._attn_implementation
        if attention not in (BASE_ATTENTION, TREE_ATTENTION):
            return f"padded rows: the model's attention is {attention}"
        self._model.config._attn_implementation = TREE_ATTENTION
        difference = self._trial_difference("padding_reason")
        return difference and f"padded rows: {difference}"

    def _find_whole_logits_reason(self) -> str:
        """Return why whole logits are needed, or '' if `head_logprobs` gives the same logprobs."""
        head = self._model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or getattr(head, "bias", None) is not None:
            return "whole logits: the output head has a bias or is not torch.nn.Linear"
        difference = self._trial_difference("whole_logits_reason")
        return difference and f"whole logits: {difference}"

    @torch.no_grad()
    def _trial_difference(self, attribute: str) -> str:
        """Compare logprobs of random tokens in fp32 with the optimized path (`attribute` empty) and
        the fallback.

        Returns '' if they agree, else the difference or the error of either run.
        """
        scored = torch.tensor(TRIAL_SCORED, device=self._model.device)
        random, vocab_size = torch.Generator().manual_seed(0), int(self._model.config.vocab_size)
        length = sum(tree.num_tokens for tree in TRIAL_TREES)
        tokens = torch.randint(vocab_size, (length,), generator=random).to(self._model.device)
        found = list[Tensor]()
        dtype, self._dtype = self._dtype, torch.float32
        try:
            for text in ("", "tried"):
                setattr(self, attribute, text)
                found.append(self._compute(tokens, TRIAL_TREES, scored, temperature=1.0)[0])
            gap = float((found[0] - found[1]).abs().max())
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            return str(error).splitlines()[0]
        finally:
            self._dtype = dtype
        return "" if gap < TOLERANCE else f"logprobs of random tokens differ by {gap:.2g}"


class _Inputs(NamedTuple):
    """Inputs of a forward pass."""

    token_ids: Tensor  # int64 [B, T]
    mask: Tensor  # attention mask
    options: dict[str, Any]  # other options of the model
    select: Callable[[Tensor], Tensor]  # [B, K, W] of the tokens that the model keeps -> [N, W]


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


def set_checkpointing(model: Model, *, enabled: bool) -> None:
    """Let the model store only each layer's input and recompute the layer, or all activations.

    Older releases of transformers 5 call this gradient checkpointing, newer ones deprecate that.
    """
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if enabled:
        getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{name}_checkpointing_disable")()


def _checkpoint_layers(model: Model) -> None:
    """Store only each layer's input and recompute the layer in the backward pass.

    transformers does this only for layers in training mode, so the layers are set to training mode.
    Their submodules stay in evaluation mode, without dropout.
    """
    set_checkpointing(model, enabled=True)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


AttentionInterface.register(TREE_ATTENTION, _attention)
AttentionMaskInterface.register(TREE_ATTENTION, AttentionMaskInterface()[BASE_ATTENTION])
