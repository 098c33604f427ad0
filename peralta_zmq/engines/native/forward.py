"""The forward of Llama's kind of decoder, written out: fewer and larger operations a token.

Knows the modules of a transformers model and calls them; what it replaces is the code between
them, which takes a third of a small model's step. Llama, Qwen2 and Qwen3 differ in what modules
they have (norms of queries and keys, biases), not in this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

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


class Turn:
    """Rotary position embedding, by the cosines and sines [n, S, D] of the places."""

    def __init__(self, cosines: Tensor, sines: Tensor) -> None:
        low, high = sines.chunk(2, -1)
        self._cos, self._sin = cosines[:, None], torch.cat([-low, high], -1)[:, None]

    def of(self, heads: Tensor) -> Tensor:
        """Queries or keys [n, H, S, D] at their places (RoFormer, arXiv 2104.09864)."""
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        return torch.addcmul(heads * self._cos, swapped, self._sin)


class Between(Protocol):
    """What a decoder layer computes between its products of matrices."""

    def norm(self, norm: Any, hidden: Tensor) -> Tensor:
        """RMS norm of [n, S, H]."""
        ...

    def attend(self, module: Any, kind: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[n, S, heads * D] each, of new tokens in an attention layer of that kind."""
        ...

    def gate(self, mlp: Any, gates: Tensor, ups: Tensor) -> Tensor:
        """[n, S, I] each."""
        ...


class ByTorch(NamedTuple):
    """That in torch's operators."""

    turn: Turn
    window: Window  # takes in keys and values
    masks: Mapping[str, Tensor]  # for each kind of layer
    attention: Attention

    def norm(self, norm: Any, hidden: Tensor) -> Tensor:
        """As Between says."""
        return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

    def gate(self, mlp: Any, gates: Tensor, ups: Tensor) -> Tensor:
        """As Between says."""
        return mlp.act_fn(gates) * ups

    def attend(self, module: Any, kind: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As Between says."""
        query, key, value = (
            each.unflatten(-1, (-1, module.head_dim)) for each in (query, key, value)
        )
        if hasattr(module, "q_norm"):
            query, key = self.norm(module.q_norm, query), self.norm(module.k_norm, key)
        query, key = self.turn.of(query.transpose(1, 2)), self.turn.of(key.transpose(1, 2))
        keys, values = self.window.update(key, value.transpose(1, 2), module.layer_idx)
        mask = self.masks[kind]
        out, _ = self.attention(module, query, keys, values, mask, scaling=module.scaling)
        return out.flatten(2)


def last_hidden(model: Any, ids: Tensor, between: Between) -> Tensor:
    """Last hidden states [n, S, H] of `ids` [n, S], of a model without its head."""
    hidden = model.embed_tokens(ids)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(model.layers)
    for layer, kind in zip(model.layers, kinds, strict=True):
        rows, own = between.norm(layer.input_layernorm, hidden), layer.self_attn
        heads = own.q_proj(rows), own.k_proj(rows), own.v_proj(rows)
        hidden = hidden + own.o_proj(between.attend(own, kind, *heads))
        rows, mlp = between.norm(layer.post_attention_layernorm, hidden), layer.mlp
        gated = between.gate(mlp, mlp.gate_proj(rows), mlp.up_proj(rows))
        hidden = hidden + mlp.down_proj(gated)
    return between.norm(model.norm, hidden)
