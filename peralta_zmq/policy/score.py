"""Logprobs of the tokens of a row of segments, with gradient: what the trainer learns from.

A row holds each prompt once and its completions after it. Knows the model, its attention and its
number format; knows nothing of losses. The token before the first one of a completion is the
last of the prompt: tokens are shifted here and in `policy.token_logprobs`, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from peralta_zmq.policy import DTYPES, Model, choose_dtype, entropies, selected_logprobs
from peralta_zmq.rollout import Segment

OURS = "peralta_zmq_segments"  # the name of our attention among transformers'
TOLERANCE = 1e-3  # of logprobs, packed against padded, in fp32
NARROW = 512  # hidden size from which bfloat16 is faster on a CPU; see benchmarks/training.py
TRIED = (Segment(5, (3, 1, 4)), Segment(2, (2, 6)))  # rows on which a model is tried


def training_dtype(model: Model, name: str = "auto") -> tuple[torch.dtype, str]:
    """Number format of the trainer's matrix products, and the reason for it.

    `auto` decides by the machine and the model alone, so that a replay decides alike. On a CPU
    that multiplies bfloat16, small matrices lose more by the casts than they gain.
    """
    if name != "auto":
        return DTYPES[name], "as train.dtype says"
    native, reason = choose_dtype(model.device)
    if native != torch.bfloat16:
        return torch.float32, reason
    width = int(getattr(model.config, "hidden_size", NARROW))
    if model.device.type == "cpu" and width < NARROW:
        return torch.float32, f"auto: faster on a CPU below hidden size {NARROW}"
    return native, reason


class Scorer:
    """Scores rows packed, or padded when the model's attention cannot take the segments.

    `dtype` bfloat16 computes under autocast over the fp32 weights; float32 is exact. `note` says
    in one line why rows are padded; it is empty when they are packed.
    """

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
    ) -> None:
        self._model, self._dtype = cast(Any, model), dtype
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        if gradient_checkpointing:
            _checkpoint_layers(model)
        self.note = self._try()

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the matrix products."""
        return self._dtype

    @property
    def packs(self) -> bool:
        """Whether a prompt is computed once for all of its completions."""
        return not self.note

    def __call__(
        self,
        token_ids: Tensor,  # [M]
        segments: Sequence[Segment],  # in the order of the row, M tokens together
        scored: Tensor,  # [N], where in the row; tokens of completions
        *,
        temperature: Tensor | float = 1.0,  # one for all, or that of each scored token [N]
    ) -> Tensor:
        """log p of the scored tokens given what is before them, at the temperature, [N]."""
        logits = self._logits(token_ids, segments, scored)
        return selected_logprobs(logits, token_ids[scored], temperature=temperature)

    def with_entropy(
        self,
        token_ids: Tensor,
        segments: Sequence[Segment],
        scored: Tensor,
        *,
        temperature: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The same, and the entropy of what could have stood there, in nats, both [N]."""
        logits = self._logits(token_ids, segments, scored)
        chosen = selected_logprobs(logits, token_ids[scored], temperature=temperature)
        return chosen, entropies(logits, temperature=temperature)

    def _logits(self, token_ids: Tensor, segments: Sequence[Segment], scored: Tensor) -> Tensor:
        """[N, V] at the tokens before the scored ones."""
        predict = self._packed if self.packs else self._padded
        return predict(token_ids, segments, scored)

    def _packed(self, token_ids: Tensor, segments: Sequence[Segment], scored: Tensor) -> Tensor:
        layout = _Layout.of(segments, token_ids.device)
        with _attention_over(self._model.config), self._autocast(token_ids.device):
            out = self._model(
                input_ids=token_ids[None],
                position_ids=layout.positions[None],
                attention_mask=layout.no_mask,
                logits_to_keep=layout.previous[scored],
                use_cache=False,
                segments=layout,
            )
        return out.logits[0]

    def _padded(self, token_ids: Tensor, segments: Sequence[Segment], scored: Tensor) -> Tensor:
        places, attention, cell = _unpacked(segments, token_ids.device)
        row, column = cell[scored].unbind(1)
        kept = int(attention.shape[1] - (column.min() - 1)) if len(scored) else 1
        options = {"logits_to_keep": kept} if self._keeps else {}
        with self._autocast(token_ids.device):
            out = self._model(
                input_ids=token_ids[places] * attention, attention_mask=attention,
                use_cache=False, **options,
            )  # fmt: skip
        return out.logits[row, column - 1 - (attention.shape[1] - out.logits.shape[1])]

    def _autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32)

    @torch.no_grad()
    def _try(self) -> str:
        """Why rows cannot be packed; empty when both ways agree on a row of random tokens."""
        if not self._keeps:
            return "padded rows: the model cannot leave out logits"
        kinds = set(getattr(self._model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            return f"padded rows: the model has {', '.join(sorted(kinds))}"
        scored = torch.from_numpy(np.flatnonzero(_Places.of(TRIED).owner > 0))
        scored = scored.to(self._model.device)
        random, vocab = torch.Generator().manual_seed(0), int(self._model.config.vocab_size)
        length = sum(each.num_tokens for each in TRIED)
        tokens = torch.randint(vocab, (length,), generator=random).to(self._model.device)
        chosen, self._dtype = self._dtype, torch.float32
        try:
            packed, padded = (
                selected_logprobs(way(tokens, TRIED, scored), tokens[scored])
                for way in (self._packed, self._padded)
            )
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            return f"padded rows: {str(error).splitlines()[0]}"
        finally:
            self._dtype = chosen
        apart = float((packed - padded).abs().max())
        return "" if apart < TOLERANCE else f"padded rows: packed ones differ by {apart:.2g}"


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each token of a row is; arrays of [M]."""

    position: Any  # in its own sequence
    previous: Any  # place in the row of the token before it; its own for the first of a prompt
    owner: Any  # 0 on a prompt, k on its k-th completion

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> _Places:
        positions, previous, owners, start = list[Any](), list[Any](), list[Any](), 0
        for segment in segments:
            prompt = segment.num_prompt
            lengths = (prompt, *segment.lengths)
            first = np.cumsum([0, *lengths[:-1]])
            for number, length in enumerate(lengths):
                offset = np.arange(length)
                before = start + first[number] + offset - 1
                before[:1] = start + prompt - 1 if number else start
                positions.append(offset + (prompt if number else 0))
                previous.append(before)
                owners.append(np.full(length, number))
            start += segment.num_tokens
        return cls(*(np.concatenate(each) for each in (positions, previous, owners)))


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a packed forward needs beside the tokens; every layer's attention gets it."""

    positions: Tensor  # int64 [M]
    previous: Tensor  # int64 [M]
    sizes: list[int]  # tokens of each segment
    masks: list[Tensor]  # bool [T, T] of each segment, True where a token sees another
    no_mask: Tensor  # four dimensions, so that transformers makes no mask of its own

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> _Layout:
        places = _Places.of(segments)
        positions, previous, owner = (
            torch.from_numpy(each).to(device)
            for each in (places.position, places.previous, places.owner)
        )
        sizes = [segment.num_tokens for segment in segments]
        masks = [_sees(each) for each in owner.split(sizes)]
        no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return cls(positions, previous, sizes, masks, no_mask)


def _sees(owner: Tensor) -> Tensor:
    """[T, T] of one segment: what came before, of the prompt or of the same completion."""
    same = (owner == 0) | (owner[:, None] == owner)
    return same.tril_()


def _unpacked(segments: Sequence[Segment], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Each completion after its prompt, a row each, padded on the right.

    Returns places in the packed row [S, T], attention mask [S, T], and of each token of a
    completion in the packed row where it is now [M, 2].
    """
    lengths = [each.num_prompt + length for each in segments for length in each.lengths]
    shape = (len(lengths), max(lengths))
    places, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    cell = np.zeros((sum(each.num_tokens for each in segments), 2), np.int64)
    row, start = 0, 0
    for segment in segments:
        prompt, first = segment.num_prompt, start + segment.num_prompt
        for length in segment.lengths:
            total = prompt + length
            places[row, :prompt] = np.arange(start, start + prompt)
            places[row, prompt:total] = np.arange(first, first + length)
            attention[row, :total] = 1
            cell[first : first + length, 0] = row
            cell[first : first + length, 1] = np.arange(prompt, total)
            row, first = row + 1, first + length
        start += segment.num_tokens
    found = (torch.from_numpy(each).to(device) for each in (places, attention, cell))
    return cast("tuple[Tensor, Tensor, Tensor]", tuple(found))


def _attention(
    module: Any,
    query: Tensor,  # [1, heads, M, D]
    key: Tensor,  # [1, H, M, D]
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float,
    segments: _Layout,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Segment by segment, so that no token is compared with another segment's."""
    if softcap is not None:
        raise ValueError("the model caps its attention scores")
    parts = zip(*(each.split(segments.sizes, 2) for each in (query, key, value)), strict=True)
    shared = query.shape[1] != key.shape[1]
    seen = [
        torch.nn.functional.scaled_dot_product_attention(
            *each, attn_mask=sees, scale=scaling, enable_gqa=shared
        )
        for each, sees in zip(parts, segments.masks, strict=True)
    ]
    return torch.cat(seen, 2).transpose(1, 2), None


@contextmanager
def _attention_over(config: Any) -> Generator[None, None, None]:
    theirs = config._attn_implementation  # an engine over the same model goes on with this one
    config._attn_implementation = OURS
    try:
        yield
    finally:
        config._attn_implementation = theirs


def _checkpoint_layers(model: Model) -> None:
    """Keep only the inputs of layers, and compute each again in the backward pass.

    transformers does so in training mode only; the modules inside stay without dropout.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


AttentionInterface.register(OURS, _attention)
