"""Prompt work done once: the common prefix per weights, a prompt per group of siblings.

Some rows of the cache are kept for it. All of them begin with the keys and values of the longest
common prefix of all prompts seen so far, which only shrinks: a prompt computes its own rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.engines.native.decoder import Decoder
from peralta_zmq.rollout import Int32Array

ROWS = 8  # prompts computed together


class Prompts:
    """The prompts computed last, in the rows from `first` on."""

    def __init__(self, decoder: Decoder, first: int) -> None:
        self._decoder, self._first = decoder, first
        self._prefix: Int32Array | None = None
        self._has_prefix = False  # in the rows, for the present weights
        self._at: dict[bytes, int] = {}
        self._logits: Tensor | None = None  # [n, V], after each prompt

    def forget(self) -> None:
        """The weights have changed."""
        self._has_prefix = False
        self._at = {}

    def has(self, prompt: Int32Array) -> bool:
        """Whether it is among those computed last."""
        return prompt.tobytes() in self._at

    def compute(self, prompts: Sequence[Int32Array]) -> None:
        """At most ROWS prompts, together; those before are given up."""
        start = self._prepare_prefix(prompts)
        lengths = torch.tensor([len(each) for each in prompts], device=self._decoder.device)
        longest = max(len(each) for each in prompts)
        tokens = np.zeros((len(prompts), longest - start), np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt) - start] = prompt[start:]
        hidden = self._forward(tokens, start)  # what stands beyond a shorter prompt is never read
        last = hidden[torch.arange(len(prompts), device=hidden.device), lengths - start - 1]
        self._logits = self._decoder.logits(last)
        self._at = {prompt.tobytes(): row for row, prompt in enumerate(prompts)}

    def hand_out(self, prompt: Int32Array, row: int) -> Tensor:
        """Copy a computed prompt to `row` of the cache; returns its logits [V]."""
        assert self._logits is not None
        place = self._at[prompt.tobytes()]
        self._decoder.cache.copy(self._first + place, row, len(prompt))
        return self._logits[place]

    def _prepare_prefix(self, prompts: Sequence[Int32Array]) -> int:
        """The length of the prefix that stands in all our rows."""
        prefix = prompts[0] if self._prefix is None else self._prefix
        for prompt in prompts:
            prefix = prefix[: min(_common(prefix, prompt), len(prompt) - 1)]
        self._prefix = prefix
        if len(prefix) and not self._has_prefix:
            self._forward(prefix[None].astype(np.int64), 0)
            for row in range(1, ROWS):
                self._decoder.cache.copy(self._first, self._first + row, len(prefix))
            self._has_prefix = True
        return len(prefix)

    def _forward(self, tokens: np.ndarray, start: int) -> Tensor:
        ids = torch.from_numpy(tokens).to(self._decoder.device)
        end = start + ids.shape[1]
        positions = torch.arange(start, end, device=ids.device).expand(ids.shape)
        return self._decoder.hidden(ids, positions, first=self._first, length=end)


def _common(one: Int32Array, other: Int32Array) -> int:
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter
