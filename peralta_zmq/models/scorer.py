"""Differentiable logprobs of packed token sequences: the trainer's forward pass.

A packed row is several prefix trees (tree_attention.py). If a model cannot compute packed rows
correctly, each sequence becomes a row of its own, padded to the longest sequence.

The hidden state at a token predicts the next token of the sequence. Only this module accounts for
this shift. During a forward pass, `head_logprobs` (head.py) replaces the output head, so that the
model returns logprobs; a model for which this is not correct computes whole logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.errors import ConfigError
from peralta_zmq.models.cast_linears import replace_linears
from peralta_zmq.models.device import is_out_of_memory
from peralta_zmq.models.head import head_logprobs, sparse_embedding_gradient
from peralta_zmq.models.layer_ops import replace_norms, replace_rotary
from peralta_zmq.models.logprobs import logprobs_and_entropies
from peralta_zmq.models.model_folders import Model, forward_options
from peralta_zmq.models.rotary import length_limit, split_rotary
from peralta_zmq.models.tree_attention import (
    BASE_ATTENTION,
    TREE_ATTENTION,
    PackedLayout,
    TreeLayout,
    packed_row,
)
from peralta_zmq.rollout import Int64Array, PrefixTree, TreeSpan

# A row of sequences to compare; the second tree continues the first, and branches in a completion.
TRIAL_TREES = (
    PrefixTree((TreeSpan(-1, 3),)),
    PrefixTree((TreeSpan(-1, 2), TreeSpan(1, 3), TreeSpan(2, 4)), after=3),
    PrefixTree((TreeSpan(-1, 2), TreeSpan(1, 6))),
)
# Types of layers in which tokens exchange values only by attention.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Settings in a config with a number of tokens from which on a model may compute differently.
LENGTHS = re.compile(
    r'"\w*(?:window|chunk|original_max_position_embeddings|floor_scale)\w*": (\d+)'
)
TRIAL_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)


class Scorer:
    """Computes the logprobs of tokens in packed rows under one model.

    A `dtype` other than float32 is used by autocast, with fp32 weights. `padding_reason` says why
    sequences are padded, `whole_logits_reason` why whole logits are computed; both are empty for
    the fast way. They are found by a comparison with the logprobs of each sequence alone, among
    them one that is longer than windows below `max_length`. Raises ConfigError if no way agrees.
    """

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
        max_length: int = 512,
    ) -> None:
        self._model = cast(Any, model)
        self._dtype = dtype
        self._has_logits_to_keep = "logits_to_keep" in forward_options(model)
        # A row with a longer sequence is padded: a shared prefix would have two embeddings.
        self._packed_length = length_limit(self._model.config.get_text_config())
        trials = self._trials(max_length)  # before anything is replaced
        if gradient_checkpointing:
            _checkpoint_layers(model)
        replace_norms(model)
        replace_rotary(model)
        split_rotary(model)
        if dtype != torch.float32:
            replace_linears(model)
        self.padding_reason, self.whole_logits_reason = self._find_reasons(trials)

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
        return self._compute(token_ids, trees, scored, temperature=temperature)[0]

    def with_entropy(
        self,
        token_ids: Tensor,
        trees: Sequence[PrefixTree],
        scored: Tensor,
        *,
        temperature: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs [N] as in `__call__`, and entropies [N] in nats of the distributions."""
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
        inverse: Tensor | slice = slice(None)
        if not isinstance(temperature, Tensor):
            # `scored` repeats the index of a token that completions share; compute it once.
            scored, inverse = scored.unique(return_inverse=True)
        inputs = self._inputs(token_ids, trees, scored)
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
        logits = inputs.select(self._forward(inputs))
        results = logprobs_and_entropies(
            logits, targets, temperature=temperature, with_entropy=with_entropy
        )
        return [each for each in results if each is not None]

    def _inputs(self, token_ids: Tensor, trees: Sequence[PrefixTree], scored: Tensor) -> _Inputs:
        """Inputs of the forward pass on the packed row, or on padded rows if that is not exact."""
        layout = PackedLayout.of(trees, token_ids.device) if self.packs else None
        limit = self._packed_length
        if layout is None or (limit is not None and int(layout.positions.max()) >= limit):
            return self._padded(token_ids, trees, scored)
        return _Inputs(
            token_ids[None],
            torch.ones_like(token_ids)[None],
            {"position_ids": layout.positions[None], "logits_to_keep": layout.previous[scored]},
            select=itemgetter(0),
            layout=layout,
        )

    def _padded(self, token_ids: Tensor, trees: Sequence[PrefixTree], scored: Tensor) -> _Inputs:
        indices, attention, cells = _padded_layout(trees, token_ids.device)
        row, column = cells[scored].unbind(1)
        width = indices.shape[1]
        options = dict[str, Any]()
        if self._has_logits_to_keep:
            options["logits_to_keep"] = width - int(column.min()) + 1
        if self._packed_length is not None:
            options["position_ids"] = (attention.cumsum(1) - 1) * attention

        def select(kept: Tensor) -> Tensor:
            first_column = width - kept.shape[1]  # if the model keeps only the last ones
            return kept[row, column - 1 - first_column]

        return _Inputs(token_ids[indices] * attention, attention, options, select)

    def _forward(self, inputs: _Inputs) -> Tensor:
        """Output of the model's head: logits [B, K, V] of the kept tokens, unless replaced."""
        is_narrow = self._dtype != torch.float32
        autocast = torch.autocast(inputs.token_ids.device.type, self._dtype, enabled=is_narrow)
        with autocast, sparse_embedding_gradient(self._model), packed_row(inputs.layout):
            logits = self._model(
                inputs.token_ids, attention_mask=inputs.mask, use_cache=False, **inputs.options
            ).logits
        num_layers = self._model.config.get_text_config().num_hidden_layers
        if inputs.layout is not None and len(inputs.layout.attended) < num_layers:
            raise ValueError(f"{len(inputs.layout.attended)} of {num_layers} layers have attention")
        return logits

    def _find_reasons(self, trials: Sequence[_Trial]) -> tuple[str, str]:
        """Return `padding_reason` and `whole_logits_reason` of the fastest way that is correct."""
        config = self._model.config
        head = self._model.get_output_embeddings()
        attention = config._attn_implementation
        unpackable = self._unpackable()
        needs_logits = ""
        difference = ""
        if not isinstance(head, torch.nn.Linear) or getattr(head, "bias", None) is not None:
            needs_logits = "whole logits: the output head has a bias or is not torch.nn.Linear"
        for packs, in_chunks in product((True, False), repeat=2):
            if (packs and unpackable) or (in_chunks and needs_logits):
                continue
            padding = unpackable or f"padded rows: {difference}"
            whole = needs_logits or f"whole logits: {difference}"
            self.padding_reason = "" if packs else padding
            self.whole_logits_reason = "" if in_chunks else whole
            config._attn_implementation = TREE_ATTENTION if packs else attention
            difference = next(filter(None, map(self._difference, trials)), "")
            if not difference:
                return self.padding_reason, self.whole_logits_reason
        raise self._untrainable(difference)

    def _untrainable(self, reason: str) -> ConfigError:
        name = self._model.config.name_or_path
        return ConfigError(f"model {name} cannot be trained: {reason}; choose another model")

    def _unpackable(self) -> str:
        """Return why the model cannot compute packed rows, or '' if the trial decides."""
        if not self._has_logits_to_keep:
            return "padded rows: the model has no logits_to_keep"
        config: Any = self._model.config.get_text_config()
        layer_types = getattr(config, "layer_types", None) or ()
        if others := sorted({*layer_types} - ATTENTION_LAYERS):
            return f"padded rows: the model has layers of type {', '.join(others)}"
        if any(isinstance(module, torch.nn.Conv1d) for module in self._model.modules()):
            return "padded rows: the model has convolutions over its tokens"
        attention = self._model.config._attn_implementation
        if attention not in (BASE_ATTENTION, TREE_ATTENTION):
            return f"padded rows: the model's attention is {attention}"
        return ""

    def _trials(self, max_length: int) -> list[_Trial]:
        """A row of short sequences, and one with a sequence longer than the model's windows."""
        settings = self._model.config.get_text_config().to_json_string(use_diff=False)
        lengths = [*map(int, LENGTHS.findall(settings)), self._packed_length or max_length]
        rows: list[tuple[PrefixTree, ...]] = [TRIAL_TREES]
        if lengths := [length for length in lengths if 0 < length < max_length]:
            rows.append((TRIAL_TREES[-1], PrefixTree((TreeSpan(-1, max(lengths) + 8),))))
        try:
            return list(map(self._new_trial, rows))
        except TRIAL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            raise self._untrainable(_first_line(error)) from error

    @torch.no_grad()
    def _new_trial(self, trees: tuple[PrefixTree, ...]) -> _Trial:
        config = self._model.config.get_text_config()
        random = torch.Generator().manual_seed(0)
        length = sum(tree.num_tokens for tree in trees)
        token_ids = torch.randint(int(config.vocab_size), (length,), generator=random)
        token_ids = token_ids.to(self._model.device)
        start = 0
        scored = list[Tensor]()
        logprobs = list[Tensor]()
        for tree in trees:
            layout = TreeLayout(tree)
            for span, (parent, _) in enumerate(tree.spans):
                if parent < 0 and len(tree.spans) > 1:  # a prefix of the next sequences
                    continue
                path = torch.from_numpy(layout.path(span, start)).to(token_ids.device)
                # At most 32 tokens, evenly spaced.
                kept = torch.linspace(0, len(path) - 2, min(len(path) - 1, 32)).long()
                options = {"logits_to_keep": kept} if self._has_logits_to_keep else {}
                logits = self._model(token_ids[path][None], use_cache=False, **options).logits[0]
                logits = logits if self._has_logits_to_keep else logits[kept]
                scored.append(path[kept + 1])
                logprobs.append(logprobs_and_entropies(logits, token_ids[scored[-1]])[0])
            start += tree.num_tokens
        return _Trial(trees, token_ids, torch.cat(scored), torch.cat(logprobs))

    @torch.no_grad()
    def _difference(self, trial: _Trial) -> str:
        """Compare the logprobs of the current way, in fp32, with a trial; '' if they agree."""
        dtype = self._dtype
        self._dtype = torch.float32
        try:
            (found,) = self._compute(trial.token_ids, trial.trees, trial.scored, temperature=1.0)
        except TRIAL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            return _first_line(error)
        finally:
            self._dtype = dtype
        if torch.allclose(found, trial.logprobs, rtol=0, atol=1e-3, equal_nan=True):
            return ""
        gap = float((found - trial.logprobs).abs().max())
        return f"logprobs of random tokens differ by {gap:.2g}"


class _Trial(NamedTuple):
    trees: tuple[PrefixTree, ...]
    token_ids: Tensor  # int64 [M]
    scored: Tensor  # int64 [N], indices in the row
    logprobs: Tensor  # fp32 [N]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class _Inputs(NamedTuple):
    token_ids: Tensor  # int64 [B, T]
    mask: Tensor  # attention mask
    options: dict[str, Any]  # other options of the model
    select: Callable[[Tensor], Tensor]  # [B, K, W] of the tokens that the model keeps -> [N, W]
    layout: PackedLayout | None = None  # None: padded rows


def _padded_layout(
    trees: Sequence[PrefixTree], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Layout of padded rows: one row per span, from its sequence's start to its end.

    Returns the index in the packed row of each padded token, int64 [S, T]; the attention mask,
    int64 [S, T]; and the padded row and column of each token of the packed row, int64 [M, 2].
    """
    paths = list[Int64Array]()
    cells = list[Int64Array]()
    start = 0
    for tree in trees:
        layout = TreeLayout(tree)
        cells.append(np.stack([len(paths) + layout.span, layout.position], 1))
        paths += [layout.path(span, start) for span in range(len(tree.spans))]
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

    Newer releases of transformers 5 call this activation checkpointing.
    """
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if enabled:
        getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{name}_checkpointing_disable")()


def _checkpoint_layers(model: Model) -> None:
    """Checkpoint layers, which must be in training mode; submodules stay in evaluation mode."""
    set_checkpointing(model, enabled=True)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
