"""The forward of Llama's kind of decoder, written out: fewer and larger operations a token.

Knows the modules of a transformers model and calls them; what it replaces is the code between
them, which takes a third of a small model's step. Llama, Qwen2 and Qwen3 differ in what modules
they have (norms of queries and keys, biases), not in this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from peralta_zmq.engines.native.cache import Window

FAMILIES = ("llama", "qwen2", "qwen3")
Attention = Callable[..., tuple[Tensor, None]]


def is_recordable(model: Any) -> bool:
    """Whether the forward of a model without its head is ours and asks for no number back, which
    a recording forbids; rotary embeddings that grow with the longest sequence do."""
    kind = getattr(model.rotary_emb, "rope_type", "default")
    grows = "dynamic" in kind or kind == "longrope"
    return model.config.model_type in FAMILIES and not grows


class Turn(NamedTuple):
    """Rotary position embedding: the factors of a head and of the head with its halves swapped."""

    cos: Tensor  # [n, 1, S, D]
    sin: Tensor  # the first half negated

    def of(self, heads: Tensor) -> Tensor:
        """Queries or keys [n, H, S, D] at their places (RoFormer, arXiv 2104.09864)."""
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * self.cos, swapped, self.sin)


def last_hidden(
    model: Any,  # without its head
    ids: Tensor,  # [n, S]
    places: Tensor,  # [n, S]
    window: Window,
    masks: Mapping[str, Tensor],  # for each kind of layer
    attention: Attention,
) -> Tensor:
    """Last hidden states [n, S, H] of `ids` at `places`; `window` takes in keys and values."""
    hidden = model.embed_tokens(ids)
    cos, sin = model.rotary_emb(hidden, places)
    low, high = sin.chunk(2, -1)
    turn = Turn(cos[:, None], torch.cat([-low, high], -1)[:, None])
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(model.layers)
    for layer, kind in zip(model.layers, kinds, strict=True):
        rows = _normed(layer.input_layernorm, hidden)
        hidden = hidden + _attend(layer.self_attn, rows, turn, window, masks[kind], attention)
        rows, mlp = _normed(layer.post_attention_layernorm, hidden), layer.mlp
        hidden = hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(rows)) * mlp.up_proj(rows))
    return _normed(model.norm, hidden)


def _attend(
    module: Any, rows: Tensor, turn: Turn, window: Window, mask: Tensor, attention: Attention
) -> Tensor:
    shape = (*rows.shape[:2], -1, module.head_dim)
    query, key, value = (
        project(rows).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = _normed(module.q_norm, query), _normed(module.k_norm, key)
    query, key = turn.of(query.transpose(1, 2)), turn.of(key.transpose(1, 2))
    keys, values = window.update(key, value.transpose(1, 2), module.layer_idx)
    out, _ = attention(module, query, keys, values, mask, scaling=module.scaling)
    return module.o_proj(out.flatten(2))


def _normed(norm: Any, rows: Tensor) -> Tensor:
    return rms_norm(rows, norm.weight.shape, norm.weight, norm.variance_epsilon)
