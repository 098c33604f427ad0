"""Prompt work done once: the common prefix per weights, a prompt per group of siblings.

The keys and values of the longest common prefix of all prompts seen so far, which only shrinks,
stand in the cache's common part; a prompt computes its own rest, in one of the rows kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.engines.native.cache import NOTHING, Span
from peralta_zmq.engines.native.decoder import Decoder
from peralta_zmq.rollout import Int32Array

ROWS = 8  # prompts computed together
SHORT = 16  # a prefix of fewer tokens costs more to compute apart than it saves


class Prompts:
    """The prompts computed last, in the rows from `first` on."""

    def __init__(self, decoder: Decoder, first: int) -> None:
        self._decoder, self._cache, self._first = decoder, decoder.cache, first
        self._prefix: Int32Array | None = None
        self._at: dict[bytes, int] = {}
        self._logits: Tensor | None = None  # [n, V], after each prompt
        self._cache.forget()

    def forget(self) -> None:
        """The weights have changed."""
        self._at = {}
        self._cache.spans[self._ours] = NOTHING

    def has(self, prompt: Int32Array) -> bool:
        """Whether it is among those computed last."""
        return prompt.tobytes() in self._at

    def compute(self, prompts: Sequence[Int32Array]) -> None:
        """At most ROWS prompts, together; those before are given up."""
        start = self._prepare_prefix(prompts)
        longest = max(len(each) for each in prompts)
        tokens = np.zeros((len(prompts), longest - start), np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt) - start] = prompt[start:]
        hidden = self._forward(tokens, start)  # what stands beyond a shorter prompt is never read
        last = torch.tensor([len(each) - start - 1 for each in prompts], device=hidden.device)
        chosen = hidden[torch.arange(len(prompts), device=hidden.device), last]
        self._logits = self._decoder.logits(chosen)
        self._at = {prompt.tobytes(): row for row, prompt in enumerate(prompts)}

    def hand_out(self, prompt: Int32Array, row: int) -> Tensor:
        """Copy a computed prompt to `row` of the cache; returns its logits [V]."""
        assert self._logits is not None
        place = self._at[prompt.tobytes()]
        self._cache.copy(self._first + place, row, len(prompt))
        return self._logits[place]

    @property
    def _ours(self) -> slice:
        return slice(self._first, self._first + ROWS)

    def _prepare_prefix(self, prompts: Sequence[Int32Array]) -> int:
        """The length of the prefix that all our rows read in the common part."""
        prefix = prompts[0] if self._prefix is None else self._prefix
        for prompt in prompts:
            prefix = prefix[: min(_common(prefix, prompt), len(prompt) - 1)]
        self._prefix = prefix = prefix if len(prefix) >= SHORT else prefix[:0]
        start, end = self._cache.spans[self._first].tolist()
        if start == end and len(prefix):
            self._forward(prefix[None].astype(np.int64), 0)
            start, end = self._cache.share(self._first, len(prefix))
        end = min(end, start + len(prefix))
        self._cache.spans[self._ours] = Span(start, end)
        return end - start

    def _forward(self, tokens: np.ndarray, start: int) -> Tensor:
        places = np.tile(np.arange(start, start + tokens.shape[1]), (len(tokens), 1))
        return self._decoder.hidden(tokens, places, first=self._first)


def _common(one: Int32Array, other: Int32Array) -> int:
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter
