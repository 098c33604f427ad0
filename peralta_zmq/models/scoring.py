"""Differentiable logprobs of packed token sequences: the trainer's forward pass.

Completions of one problem share their prompt: a packed row is several prefix trees, one after the
other, in which a token attends only to itself and its ancestors (tree_attention.py). If a model
cannot compute packed rows correctly, each sequence becomes a row of its own, padded to the longest
sequence.

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

from peralta_zmq.models.head import head_logprobs, sparse_embedding_gradient
from peralta_zmq.models.layer_ops import replace_norms, replace_rotary
from peralta_zmq.models.linears import replace_linears
from peralta_zmq.models.loading import Model
from peralta_zmq.models.logprobs import logprobs_and_entropies, selected_logprobs
from peralta_zmq.models.tree_attention import (
    BASE_ATTENTION,
    TREE_ATTENTION,
    PackedLayout,
    TreeLayout,
)
from peralta_zmq.rollout import Int64Array, PrefixTree, TreeSpan

TOLERANCE = 1e-3  # largest difference of logprobs in fp32 between two ways to compute them
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
        replace_rotary(model)
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
        layout = PackedLayout.of(trees, token_ids.device)
        return _Inputs(
            token_ids[None],
            # transformers builds its own mask unless it gets a mask of 4 dimensions
            torch.ones(1, 1, 1, 1, dtype=torch.bool, device=token_ids.device),
            options={
                "position_ids": layout.positions[None],
                "logits_to_keep": layout.previous[scored],
                "packed_layout": layout,  # transformers passes this option to the attention
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
        layout = TreeLayout(tree)
        cells.append(np.stack([len(paths) + layout.span, layout.position], 1))
        paths += [start + layout.path(span) for span in range(len(tree.spans))]
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
