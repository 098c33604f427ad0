"""A model's forward over our cache: our attention and linears, in transformers' code or in ours.

Knows the families whose cache and masks it has seen; `serves` says which.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from peralta_zmq import models
from peralta_zmq.engines.native import forward
from peralta_zmq.engines.native.cache import KVCache, Part, Window
from peralta_zmq.engines.native.graphs import Graphs, capture_for
from peralta_zmq.engines.native.kernels.decode_layer import OneToken, library_for
from peralta_zmq.engines.native.linears import Weights

ONE_MASK = ("gemma",)  # this takes one mask; the others one per kind of layer
FAMILIES = (*forward.FAMILIES, *ONE_MASK, "gemma2", "gemma3_text")
OURS = "peralta_zmq"  # the name of our attention among transformers'


class Decoder:
    """A model, room for the keys and values of its rows, and its weights in packed form.

    With `live`, the weights belong to somebody who changes them (a trainer): nothing is packed.
    """

    def __init__(self, model: models.Model, *, num_rows: int, capacity: int, live: bool) -> None:
        config = cast(Any, model.config)
        self._model, self._config = cast(Any, model), config
        self._one_mask = config.model_type in ONE_MASK
        self._window = _window(config)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self.device, self.dtype = model.device, model.dtype
        self.cache = KVCache(
            **cache_shape(config), num_rows=num_rows, capacity=capacity,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        self._places = torch.arange(capacity, device=self.device)
        self._like = torch.empty(0, dtype=self.dtype, device=self.device)
        self._weights = Weights(model, pack=not live)
        self._turns = _turns_for(model, self._places, self._like)
        self._compiled = _compiled_for(model)
        self._graphs = _graphs_for(model)

    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with `weights` from now on; ValueError, with nothing changed, if they differ
        in names or shapes."""
        self._weights.apply(weights)

    def hidden(self, tokens: np.ndarray, places: np.ndarray, *, first: int) -> Tensor:
        """Last hidden states [n, S, H] of `tokens` [n, S] at `places` [n, S] of their sequences,
        in the rows from `first` on."""
        spans = self.cache.spans[first : first + len(tokens)]
        begins = (spans[:, 1] - spans[:, 0])[:, None]  # of what stands in the row itself
        self.cache.widen(int((places - begins).max()) + 1)
        given = tokens, places, spans[:, :1], spans[:, 1:]
        if self._graphs is not None and tokens.shape[1] == 1:
            return self._graphs.run(
                partial(self._step, first), torch.from_numpy(np.stack(given)),
                kind=(first, len(tokens)), layout=self.cache.layout,
            )  # fmt: skip
        return self._hidden(first, *(torch.tensor(each, device=self.device) for each in given))

    def _step(self, first: int, given: Tensor) -> Tensor:
        """One token a row: ids, places, start and end of the spans, [4, n, 1]."""
        return self._hidden(first, *given)

    def _hidden(
        self,
        first: int,
        ids: Tensor,  # [n, S]
        positions: Tensor,  # [n, S]
        start: Tensor,  # [n, 1]
        end: Tensor,  # [n, 1]
    ) -> Tensor:
        if self._config.model_type in forward.FAMILIES:
            between = self._between(first, positions, start, end)
            return forward.last_hidden(self._model.model, ids, between)
        own = positions - (end - start)
        masks: Any = self._masks(own, start, end)
        with self._our_attention():
            out = self._model.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=Window(self.cache, first, own),
                attention_mask=masks["full_attention"] if self._one_mask else masks,
                use_cache=True,
            )
        return out.last_hidden_state

    def _between(
        self, first: int, positions: Tensor, start: Tensor, end: Tensor
    ) -> forward.Between:
        own = positions - (end - start)
        turned = self._turned(positions)
        if self._compiled is not None and positions.shape[1] == 1:
            return OneToken(
                self._compiled, self.cache, first, turned=turned, spans=(start, end), own=own
            )
        window, masks = Window(self.cache, first, own), self._masks(own, start, end)
        return forward.ByTorch(forward.Turn(*turned), window, masks, _attention)

    def _turned(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, S, D] of `positions`."""
        if self._turns is None:
            return self._model.model.rotary_emb(self._like, positions)
        return self._turns[0][positions], self._turns[1][positions]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] from [n, H]."""
        logits = self._model.lm_head(hidden)
        if self._softcap is None:
            return logits
        return torch.tanh(logits / self._softcap) * self._softcap

    def _masks(self, own: Tensor, start: Tensor, end: Tensor) -> dict[str, Tensor]:
        """For each kind of layer 0 or -inf, [n, 1, S, P + W]: common places, then the row's own.

        `own` [n, S] are the places of the new tokens in their rows; `start` and `end` [n, 1] say
        what of the common part belongs to the rows.
        """
        common = self._places[: self.cache.common[0][0].shape[1]]
        rows = self._places[: self.cache.width]
        strange = (common < start) | (common >= end)  # [n, P]
        strange = strange[:, None].expand(-1, own.shape[1], -1)
        unseen = torch.cat([strange, rows > own[..., None]], -1)  # [n, S, P + W]
        masks = {"full_attention": self._mask(unseen)}
        if self._window is not None:
            behind = torch.cat([common - end, rows.expand(len(own), -1)], -1)  # places after `end`
            gone = behind[:, None] <= own[..., None] - self._window
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


def _turns_for(model: Any, places: Tensor, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [capacity, D] of all places; None where they may change, or need not be
    known."""
    if not forward.is_recordable(model.model):
        return None
    cosines, sines = model.model.rotary_emb(like, places[None])
    return cosines[0], sines[0]


def _graphs_for(model: Any) -> Graphs | None:
    capture = capture_for(model.device)
    if capture is None or not forward.is_recordable(model.model):
        return None
    return Graphs(capture, model.device)


def _compiled_for(model: Any) -> ctypes.CDLL | None:
    config = model.config
    if config.model_type not in forward.FAMILIES or config.hidden_act != "silu":
        return None
    one_kind = all(each.dtype == model.dtype for each in model.parameters() if each.ndim == 1)
    if _window(config) is not None or not one_kind:
        return None
    shape = cache_shape(config)
    shared = config.num_attention_heads // shape["num_heads"]
    return library_for(model.dtype, model.device, shared=shared, width=shape["head_dim"])


def serves(model: models.Model) -> bool:
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
    key: Part,
    value: Part,
    mask: Tensor,  # [n, 1, S, P + W]
    *,
    scaling: float,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Query heads that share keys stand in line, so that no key is repeated."""
    n, heads, num_new, width = query.shape
    shared = heads // key.own.shape[1]
    lined = query.reshape(n, key.own.shape[1], shared * num_new, width)
    if num_new > 1 and shared > 1:
        mask = mask.repeat(1, 1, shared, 1)
    if softcap is not None or (num_new == 1 and not query.is_cuda):
        out = _attention_in_parts(lined, key, value, mask, scaling=scaling, softcap=softcap)
    else:
        out = _attention_at_once(lined, key, value, mask, scaling=scaling)
    return out.reshape(n, heads, num_new, width).transpose(1, 2), None


def _attention_at_once(
    query: Tensor,  # [n, H, G, D], the heads that share keys
    key: Part,
    value: Part,
    mask: Tensor,  # [n, 1, 1 or G, P + W]
    *,
    scaling: float,
) -> Tensor:
    """torch's own, a single kernel on CUDA; each row reads a copy of the common part."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, _whole(key), _whole(value), attn_mask=mask, scale=scaling
    )


def _attention_in_parts(
    query: Tensor,  # [n, H, G, D], the heads that share keys
    key: Part,
    value: Part,
    mask: Tensor,  # [n, 1, 1 or G, P + W]
    *,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """All rows together read the common keys and values once; each reads its own.

    For one new token a row these products of what lies dense take half the time of a CPU's SDPA;
    that of mps has read masks that are one for all heads wrongly (pytorch pull 184180).
    """
    n, num_heads, num_lined, width = query.shape
    num_common = key.common.shape[1]
    together = query.transpose(0, 1).reshape(num_heads, n * num_lined, width)
    ahead = torch.bmm(together, key.common.transpose(1, 2))  # [H, n * G, P]
    ahead = ahead.view(num_heads, n, num_lined, num_common).transpose(0, 1)
    own = torch.bmm(query.flatten(0, 1), key.own.flatten(0, 1).transpose(1, 2))  # [n * H, G, W]
    scores = torch.cat([ahead, own.unflatten(0, (n, num_heads))], -1).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    shares = torch.softmax(scores + mask, -1).to(query.dtype)
    of_common = shares[..., :num_common].transpose(0, 1)
    of_common = of_common.reshape(num_heads, n * num_lined, num_common)
    out = torch.bmm(of_common, value.common).view(num_heads, n, num_lined, width).transpose(0, 1)
    of_own = shares[..., num_common:].flatten(0, 1)
    return torch.bmm(of_own, value.own.flatten(0, 1)).view(query.shape) + out


def _whole(part: Part) -> Tensor:
    """[n, H, P + W, D]."""
    if not part.common.shape[1]:
        return part.own
    return torch.cat([part.common.expand(len(part.own), -1, -1, -1), part.own], 2)


AttentionInterface.register(OURS, _attention)
