"""Forward pass of a Hugging Face decoder model over the engine's KV cache.

Llama, Qwen2 and Qwen3 run through `decoder_forward`, which has fewer and larger operations than
transformers' code. The other families run transformers' code with this module's attention.

Letters in shapes: n rows, S new tokens per row, T new tokens of all rows, P positions of the shared
part of the KV cache, W positions of a row's own part, H key heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import AttentionInterface

from peralta_zmq import models
from peralta_zmq.engines.native.graphs import Capture, GraphCache, capture_for
from peralta_zmq.engines.native.kernels.decode_layer import (
    CompiledLayerOps,
    CompiledLayers,
    can_compile,
    library_for,
)
from peralta_zmq.engines.native.kv_cache import (
    RECURRENT_LAYERS,
    KVCache,
    Part,
    RowWindow,
    attending_layers,
    cache_shape,
)
from peralta_zmq.engines.native.packed_linears import ModelWeights

# Values of model_type. Llama families differ only in biases and in norms of query and key heads.
LLAMA_FAMILIES = ("llama", "qwen2", "qwen3")
# The others run transformers' code, which takes one mask, or one per layer type.
ONE_MASK_FAMILIES = ("gemma", "mistral", "ministral3", "olmo2", "qwen3_moe")
MASKS_FAMILIES = ("gemma2", "gemma3_text", "olmo3", "smollm3")
# Some of their layers are recurrent.
HYBRID_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2")
FAMILIES = (*LLAMA_FAMILIES, *ONE_MASK_FAMILIES, *MASKS_FAMILIES, *HYBRID_FAMILIES)
ATTENTION_NAME = "peralta_zmq"  # name of `_attention` in transformers' registry


class NewTokens(NamedTuple):
    """Tokens to compute: S for each of the n rows from `first_row` on."""

    ids: np.ndarray  # [n, S]
    positions: np.ndarray  # [n, S], in the sequences
    first_row: int


class Decoder:
    """A model and the KV cache of `num_rows` sequences of at most `capacity` tokens.

    The weights are packed unless a trainer owns and updates them (`live`). `max_scores` is the
    number of new tokens of a row times positions up to which attention in C is faster than matmuls.
    `in_one_call`: compute all layers in one call of C if possible.
    """

    def __init__(
        self,
        model: models.Model,
        *,
        num_rows: int,
        capacity: int,
        live: bool = False,
        max_scores: int = 1 << 16,
        in_one_call: bool = True,
        capture: Capture | None = None,
    ) -> None:
        config = cast(Any, model.config)
        self._model = cast(Any, model)
        self._config = config
        self._max_scores = max_scores
        self._sliding_window = _sliding_window(config)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self.device = model.device
        self.dtype = model.dtype
        self.cache = KVCache(
            **cache_shape(config),
            num_rows=num_rows,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
        )
        self._positions = torch.arange(capacity, device=self.device)
        self.weights = ModelWeights(model, pack=not live)
        # Cosines and sines [capacity, D] of all positions; transformers' code computes its own.
        is_llama = config.model_type in LLAMA_FAMILIES
        self.is_hybrid = config.model_type in HYBRID_FAMILIES
        self._indices = {layer: index for index, layer in enumerate(attending_layers(config))}
        self._rotary_table: Sequence[Tensor] = ()
        if is_llama:
            dtype_and_device = torch.empty(0, dtype=self.dtype, device=self.device)
            rotary = self._model.model.rotary_emb(dtype_and_device, self._positions[None])
            self._rotary_table = [table[0] for table in rotary]
        self.library = _library_for(model)  # C kernels, or None
        self._compiled_layers = None
        if in_one_call and self.library is not None and can_compile(self._model.model):
            self._compiled_layers = CompiledLayers(self.library, self._model.model, self.cache)
        capture = capture or capture_for(model.device)
        self._graphs = GraphCache(capture, model.device) if capture and is_llama else None

    def hidden_states(self, batches: Sequence[NewTokens]) -> list[Tensor]:
        """Last hidden states [n, S, hidden_size] of each of `batches`, added to the KV cache.

        Of a hybrid model, a batch has one new token per row, or whole prompts without padding.
        """
        for ids, positions, first_row in batches:
            start, end = self._spans(first_row, len(ids))
            self.cache.widen(int((positions - (end - start)).max()) + 1)
        if self.library is not None and all(self._is_short(ids.shape[1]) for ids, _, _ in batches):
            return self._forward_by_kernels(self.library, batches)  # reads the weights once
        if len(batches) > 1:
            # Cloned, because the result of a graph is valid until the next one runs.
            return [hidden.clone() for batch in batches for hidden in self.hidden_states([batch])]
        ids, positions, first_row = batches[0]
        inputs = ids, positions, *self._spans(first_row, len(ids))
        if self._graphs is not None and ids.shape[1] == 1:
            hidden = self._graphs.run(
                lambda stacked: self._forward(first_row, *stacked),
                torch.from_numpy(np.stack(inputs)),  # [4, n, 1]
                key=(first_row, len(ids)),
                layout=self.cache.layout,
            )
            return [hidden]
        tensors = (torch.tensor(each, device=self.device) for each in inputs)
        return [self._forward(first_row, *tensors, is_new=positions[0, 0] == 0)]

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.lm_head(hidden)
        if self._softcap is None:
            return logits
        return torch.tanh(logits / self._softcap) * self._softcap

    def _spans(self, first_row: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        spans = self.cache.spans[first_row : first_row + num_rows]
        return spans[:, :1], spans[:, 1:]

    def _forward_by_kernels(
        self, library: ctypes.CDLL, batches: Sequence[NewTokens]
    ) -> list[Tensor]:
        inputs: list[np.ndarray] = []  # [6, n * S] of each batch
        for tokens, positions, first_row in batches:
            start, end = self._spans(first_row, len(tokens))
            rows = np.arange(first_row, first_row + len(tokens))[:, None]
            arrays = tokens, positions, rows, positions - (end - start), start, end
            inputs.append(np.stack(np.broadcast_arrays(*arrays)).reshape(6, -1))
        flat = torch.from_numpy(np.concatenate(inputs, 1))  # [6, T]
        ids, positions = flat[:2]
        rotary = self._rotary(positions)
        ops = CompiledLayerOps(library, self.cache, rotary=rotary, places=flat[2:])
        model = self._model.model
        if self._compiled_layers is None:
            hidden = decoder_forward(model, ids, ops)
        else:
            hidden = self._compiled_layers(model.embed_tokens(ids), ops)  # [T, hidden_size]
        parts = hidden.split([batch.ids.size for batch in batches])
        return [
            part.unflatten(0, batch.ids.shape) for part, batch in zip(parts, batches, strict=True)
        ]

    def _forward(
        self,
        first_row: int,
        ids: Tensor,  # [n, S]
        positions: Tensor,  # [n, S], in the sequence
        start: Tensor,  # [n, 1], start of the row's span in the shared part
        end: Tensor,  # [n, 1], end of the row's span, excluded
        *,
        is_new: bool = False,  # the sequences begin here
    ) -> Tensor:
        columns = positions - (end - start)  # [n, S], positions in the row's own part
        masks: Any = self._masks(columns, start, end)
        if self._config.model_type in LLAMA_FAMILIES:
            rotary = self._rotary(positions)
            window = RowWindow(self.cache, first_row, columns)
            ops = TorchLayerOps(RotaryEmbedding(*rotary), window, masks)
            return decoder_forward(self._model.model, ids, ops)
        if self._config.model_type in ONE_MASK_FAMILIES:
            masks = masks.get("sliding_attention", masks["full_attention"])
        previous = self._config._attn_implementation  # restored for the trainer of a live model
        self._config._attn_implementation = ATTENTION_NAME
        try:
            return self._model.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=RowWindow(
                    self.cache, first_row, columns, indices=self._indices, is_new=is_new
                ),
                attention_mask=masks,
                use_cache=True,
            ).last_hidden_state
        finally:
            self._config._attn_implementation = previous

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self._rotary_table
        return cosines[positions], sines[positions]

    def _is_short(self, num_new: int) -> bool:
        """Whether attention in C is faster for `num_new` new tokens per row."""
        num_positions = self.cache.shared[0][0].shape[1] + self.cache.width
        return num_new == 1 or num_new * num_positions <= self._max_scores

    def _masks(self, columns: Tensor, start: Tensor, end: Tensor) -> dict[str, Any]:
        """Additive masks (0 or -inf), [n, 1, S, P + W], by layer type; None if it is recurrent."""
        shared = self._positions[: self.cache.shared[0][0].shape[1]]  # [P]
        own = self._positions[: self.cache.width]  # [W]
        outside_span = (shared < start) | (shared >= end)  # [n, P]
        outside_span = outside_span[:, None].expand(-1, columns.shape[1], -1)
        masked = torch.cat([outside_span, own > columns[..., None]], -1)  # [n, S, P + W]
        masks = {"full_attention": self._additive_mask(masked), **dict.fromkeys(RECURRENT_LAYERS)}
        if self._sliding_window is not None:
            # The span ends where the own part begins: positions of the span get negative columns.
            all_columns = torch.cat([shared - end, own.expand(len(columns), -1)], -1)  # [n, P + W]
            too_old = all_columns[:, None] <= columns[..., None] - self._sliding_window
            masks["sliding_attention"] = self._additive_mask(masked | too_old)
        return masks

    def _additive_mask(self, masked: Tensor) -> Tensor:
        zeros = torch.zeros(masked.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(masked, float("-inf"))[:, None]


def _library_for(model: Any) -> ctypes.CDLL | None:
    config = model.config
    if config.model_type not in LLAMA_FAMILIES or config.hidden_act != "silu":
        return None
    # The C code reads the weights of the norms, which are vectors, in the dtype of the model.
    one_dtype = all(
        parameter.dtype == model.dtype for parameter in model.parameters() if parameter.ndim == 1
    )
    if _sliding_window(config) is not None or not one_dtype:
        return None
    shape = cache_shape(config)
    queries_per_head = config.num_attention_heads // shape["num_heads"]
    return library_for(
        model.dtype, model.device, queries_per_head=queries_per_head, head_dim=shape["head_dim"]
    )


def _sliding_window(config: Any) -> int | None:
    """Tokens that a layer with sliding attention attends to; None without such layers."""
    if config.model_type in ONE_MASK_FAMILIES:  # all layers have the same attention
        return getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or []
    return config.sliding_window if "sliding_attention" in layer_types else None


def decoder_forward(model: Any, ids: Tensor, ops: TorchLayerOps | CompiledLayerOps) -> Tensor:
    """Last hidden states [..., hidden_size] of `ids` [...] for a Llama-family model."""
    hidden = model.embed_tokens(ids)
    num_layers = len(model.layers)
    layer_types = getattr(model.config, "layer_types", None) or ["full_attention"] * num_layers
    for layer, layer_type in zip(model.layers, layer_types, strict=True):
        normed = ops.norm(layer.input_layernorm, hidden)
        attention = layer.self_attn
        qkv = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
        hidden = hidden + attention.o_proj(ops.attend(attention, layer_type, *qkv))
        normed = ops.norm(layer.post_attention_layernorm, hidden)
        mlp = layer.mlp
        gated = ops.gate(mlp, mlp.gate_proj(normed), mlp.up_proj(normed))
        hidden = hidden + mlp.down_proj(gated)
    return ops.norm(model.norm, hidden)


class RotaryEmbedding:
    """Rotary position embedding (RoFormer, arXiv 2104.09864); cosines and sines are [n, S, D]."""

    def __init__(self, cosines: Tensor, sines: Tensor) -> None:
        low, high = sines.chunk(2, -1)
        self._cos = cosines[:, None]
        self._sin = torch.cat([-low, high], -1)[:, None]

    def rotate(self, heads: Tensor) -> Tensor:
        swapped = heads.roll(heads.shape[-1] // 2, -1)  # both halves of each head exchanged
        return torch.addcmul(heads * self._cos, swapped, self._sin)


class TorchLayerOps(NamedTuple):
    """The computations of a decoder layer between its matmuls, with torch's operators."""

    rotary: RotaryEmbedding
    window: RowWindow
    masks: Mapping[str, Tensor]  # by layer type

    def norm(self, norm: Any, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

    def gate(self, mlp: Any, gates: Tensor, ups: Tensor) -> Tensor:
        return mlp.act_fn(gates) * ups

    def attend(
        self, module: Any, layer_type: str, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attention of the new tokens; query, key and value are [n, S, heads * D]."""
        query, key, value = (
            joined.unflatten(-1, (-1, module.head_dim)) for joined in (query, key, value)
        )  # [n, S, heads, D]
        if hasattr(module, "q_norm"):
            query = self.norm(module.q_norm, query)
            key = self.norm(module.k_norm, key)
        query, key = (self.rotary.rotate(heads.transpose(1, 2)) for heads in (query, key))
        keys, values = self.window.update(key, value.transpose(1, 2), module.layer_idx)
        out, _ = _attention(
            module, query, keys, values, self.masks[layer_type], scaling=module.scaling
        )
        return out.flatten(2)


def _attention(
    module: Any,
    query: Tensor,  # [n, heads, S, D]
    key: Part,
    value: Part,
    mask: Tensor,  # [n, 1, S, P + W]
    *,
    scaling: float,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Grouped-query attention of the new tokens; the signature is transformers'."""
    n, heads, num_new, head_dim = query.shape
    group_size = heads // key.own.shape[1]  # query heads per key head
    stacked = query.reshape(n, key.own.shape[1], group_size * num_new, head_dim)
    if num_new > 1 and group_size > 1:
        mask = mask.repeat(1, 1, group_size, 1)
    if softcap is not None or (num_new == 1 and not query.is_cuda):
        out = attention_in_parts(stacked, key, value, mask, scaling=scaling, softcap=softcap)
    else:
        # On CUDA, this is a single kernel, for which each row gets a copy of the shared part.
        out = scaled_dot_product_attention(
            stacked, _concatenated(key), _concatenated(value), attn_mask=mask, scale=scaling
        )
    return out.reshape(n, heads, num_new, head_dim).transpose(1, 2), None


def attention_in_parts(
    query: Tensor,  # [n, H, G, D], G = query heads of one key head * S
    key: Part,
    value: Part,
    mask: Tensor,  # [n, 1, 1 or G, P + W]
    *,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attention with separate matmuls for the shared part and the own parts.

    One matmul reads the shared part for all rows. For one new token per row, this takes half the
    time of torch's attention on a CPU, which on mps was wrong for masks that are broadcast over
    heads (pytorch pull 184180).
    """
    n, num_heads, num_queries, head_dim = query.shape
    num_shared = key.shared.shape[1]
    all_queries = query.transpose(0, 1).reshape(num_heads, n * num_queries, head_dim)
    shared = torch.bmm(all_queries, key.shared.transpose(1, 2))  # [H, n * G, P]
    shared = shared.view(num_heads, n, num_queries, num_shared).transpose(0, 1)
    own = torch.bmm(query.flatten(0, 1), key.own.flatten(0, 1).transpose(1, 2))  # [n * H, G, W]
    scores = torch.cat([shared, own.unflatten(0, (n, num_heads))], -1).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    probs = torch.softmax(scores + mask, -1).to(query.dtype)
    shared_probs = probs[..., :num_shared].transpose(0, 1)
    shared_probs = shared_probs.reshape(num_heads, n * num_queries, num_shared)
    out = torch.bmm(shared_probs, value.shared)
    out = out.view(num_heads, n, num_queries, head_dim).transpose(0, 1)
    own_probs = probs[..., num_shared:].flatten(0, 1)
    return torch.bmm(own_probs, value.own.flatten(0, 1)).view(query.shape) + out


def _concatenated(part: Part) -> Tensor:
    if not part.shared.shape[1]:
        return part.own
    return torch.cat([part.shared.expand(len(part.own), -1, -1, -1), part.own], 2)


AttentionInterface.register(ATTENTION_NAME, _attention)
