"""The model's own forward over our cache: transformers' code, our attention and our linears.

Knows the families whose cache and masks it has seen; `serves` says which.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface

from peralta_zmq import policy
from peralta_zmq.engines.native.cache import KeyValues, Window
from peralta_zmq.engines.native.linears import Weights

ONE_MASK = ("llama", "gemma")  # these take one mask; the others one per kind of layer
FAMILIES = (*ONE_MASK, "qwen2", "qwen3", "gemma2", "gemma3_text")
OURS = "peralta_zmq"  # the name of our attention among transformers'


class Decoder:
    """A model, room for the keys and values of its rows, and its weights in packed form.

    With `live`, the weights belong to somebody who changes them (a trainer): nothing is packed.
    """

    def __init__(self, model: policy.Model, *, num_rows: int, capacity: int, live: bool) -> None:
        config = cast(Any, model.config)
        self._model, self._config = cast(Any, model), config
        self._one_mask = config.model_type in ONE_MASK
        self._window = _window(config)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self.device, self.dtype = model.device, model.dtype
        self.cache = KeyValues(
            **cache_shape(config), num_rows=num_rows, capacity=capacity,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        self._places = torch.arange(capacity, device=self.device)
        self._weights = Weights(model, pack=not live)

    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with `weights` from now on; ValueError, with nothing changed, if they differ
        in names or shapes or are not finite."""
        self._weights.apply(weights)

    def hidden(self, tokens: Tensor, positions: Tensor, *, first: int, length: int) -> Tensor:
        """Last hidden states [n, S, H] of `tokens` [n, S] in the rows from `first` on.

        `length` is the number of tokens that the longest row then holds.
        """
        self.cache.widen(length)
        masks: Any = self._masks(positions)
        with self._our_attention():
            out = self._model.model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=Window(self.cache, first, positions),
                attention_mask=masks["full_attention"] if self._one_mask else masks,
                use_cache=True,
            )
        return out.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] from [n, H]."""
        logits = self._model.lm_head(hidden)
        if self._softcap is None:
            return logits
        return torch.tanh(logits / self._softcap) * self._softcap

    def _masks(self, positions: Tensor) -> dict[str, Tensor]:
        places = self._places[: self.cache.width]
        unseen = places > positions[..., None]  # [n, S, W]
        masks = {"full_attention": self._mask(unseen)}
        if self._window is not None:
            gone = places <= positions[..., None] - self._window
            masks["sliding_attention"] = self._mask(unseen | gone)
        return masks

    def _mask(self, hidden: Tensor) -> Tensor:
        zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(hidden, float("-inf"))[:, None]

    @contextmanager
    def _our_attention(self) -> Generator[None, None, None]:
        theirs = self._config._attn_implementation  # a trainer goes on with this one
        self._config._attn_implementation = OURS
        try:
            yield
        finally:
            self._config._attn_implementation = theirs


def serves(model: policy.Model) -> bool:
    """Whether the model is of a family that Decoder computes exactly."""
    return cast(Any, model.config).model_type in FAMILIES


def cache_shape(config: Any) -> dict[str, int]:
    """Layers, heads and width of the keys of a model."""
    head_dim = getattr(config, "head_dim", None)
    return {
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_key_value_heads,
        "head_dim": head_dim or config.hidden_size // config.num_attention_heads,
    }


def _window(config: Any) -> int | None:
    kinds = getattr(config, "layer_types", None) or []
    return config.sliding_window if "sliding_attention" in kinds else None


def _attention(
    module: Any,
    query: Tensor,  # [n, heads, S, D]
    key: Tensor,  # [n, H, T, D]
    value: Tensor,
    mask: Tensor,  # [n, 1, S, T]
    *,
    scaling: float,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Query heads that share keys stand in line, so that no key is repeated."""
    n, heads, num_new, width = query.shape
    shared = heads // key.shape[1]
    lined = query.reshape(n, key.shape[1], shared * num_new, width)
    if num_new > 1 and shared > 1:
        mask = mask.repeat(1, 1, shared, 1)
    if num_new == 1 and softcap is None and query.device.type == "cpu":
        out = _attention_of_one(lined, key, value, mask, scaling=scaling)
    elif softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            lined, key, value, attn_mask=mask, scale=scaling
        )
    else:
        scores = lined @ key.transpose(2, 3) * scaling
        scores = torch.tanh(scores / softcap) * softcap + mask
        out = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value
    return out.reshape(n, heads, num_new, width).transpose(1, 2), None


def _attention_of_one(
    query: Tensor,  # [n, H, G, D], the heads that share keys
    key: Tensor,  # [n, H, T, D]
    value: Tensor,
    mask: Tensor,  # [n, 1, 1, T]
    *,
    scaling: float,
) -> Tensor:
    """For one new token a row, two products of what lies dense: half the time of a CPU's SDPA."""
    scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2))  # [n * H, G, T]
    scores = scores.unflatten(0, key.shape[:2]).float() * scaling + mask
    shares = torch.softmax(scores, -1).to(query.dtype)
    return torch.bmm(shares.flatten(0, 1), value.flatten(0, 1)).view(query.shape)


AttentionInterface.register(OURS, _attention)
