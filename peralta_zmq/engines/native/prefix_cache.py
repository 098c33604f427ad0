"""Prefix cache: computes tokens of prompts and earlier turns once, not once per completion.

The common prefix of all prompts is computed once, into the shared part of the KV cache, and the
rest of each prompt once per group, in a row reserved for prompts and in the same pass as the
running rows. A prompt that begins otherwise shortens the common prefix; only an idle engine gets
another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.engines.native.decoder import Decoder, NewTokens
from peralta_zmq.engines.native.kv_cache import EMPTY_SPAN, Span
from peralta_zmq.rollout import Int32Array, Request

PROMPT_ROWS = 8  # prompts computed together
# Size of the kept sequences relative to the rows of all slots. A turn is usually continued within a
# few decode steps; a sequence that was dropped is computed again.
KEPT_FRACTION = 0.25


class PrefixCache:
    """Keys and values of the latest prompts, in the PROMPT_ROWS rows from `first_row` on."""

    def __init__(self, decoder: Decoder, first_row: int) -> None:
        self._decoder = decoder
        self._cache = decoder.cache
        self._first_row = first_row
        self._prompt_rows = slice(first_row, first_row + PROMPT_ROWS)
        self._prefix = np.zeros(0, np.int32)
        self._may_replace = True  # the prefix, by that of the next prompts
        self._index: dict[bytes, int] = {}  # prompt as bytes -> its row, counted from `first_row`
        self._logits: Tensor | None = None  # [computed prompts, V], of each prompt's next token
        self._cache.drop_shared()

    def invalidate(self) -> None:
        """Drop all prompts and their prefix, which rows in progress keep."""
        self._index = {}
        self._cache.spans[self._prompt_rows] = EMPTY_SPAN  # `compute` then computes a new prefix

    def allow_replacement(self) -> None:
        """Let the next prompts have another common prefix, if they begin otherwise."""
        self._may_replace = True

    def __contains__(self, prompt: Int32Array) -> bool:
        return prompt.tobytes() in self._index

    def compute(self, prompts: Sequence[Int32Array], running: Sequence[NewTokens]) -> Tensor:
        """Compute the first PROMPT_ROWS distinct prompts; drops the earlier prompts.

        Returns the logits [n, V] of `running`, the newest tokens of other rows, which are computed
        in the same pass.
        """
        if self._decoder.is_hybrid:  # the state after a padded prompt would be another one
            prompts = [prompt for prompt in prompts if len(prompt) == len(prompts[0])]
        distinct = {prompt.tobytes(): prompt for prompt in prompts}
        prompts = list(distinct.values())[:PROMPT_ROWS]
        start = self._prepare_prefix(prompts)
        longest = max(len(prompt) for prompt in prompts)
        tokens = np.zeros((len(prompts), longest - start), np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt) - start] = prompt[start:]
        *others, hidden = self._decoder.hidden_states([*running, self._batch(tokens, start)])
        last = torch.tensor([len(prompt) - start - 1 for prompt in prompts], device=hidden.device)
        others = [other[:, -1] for other in others]
        hidden = hidden[torch.arange(len(prompts), device=hidden.device), last]
        logits = self._decoder.logits(torch.cat([*others, hidden]))
        self._index = {key: index for index, key in enumerate(islice(distinct, PROMPT_ROWS))}
        self._logits = logits[-len(prompts) :]
        return logits[: -len(prompts)]

    def copy_to(self, row: int, prompt: Int32Array) -> Tensor:
        """Copy a prompt to a row; returns the next token's logits [V]."""
        assert self._logits is not None
        index = self._index[prompt.tobytes()]
        self._cache.copy(self._first_row + index, row, len(prompt))
        return self._logits[index]

    def _prepare_prefix(self, prompts: Sequence[Int32Array]) -> int:
        """Shorten or replace the common prefix to fit `prompts`, and set the prompt rows' spans.

        Returns the number of tokens in the shared part; 0 if it has no room.
        """
        if self._decoder.is_hybrid:  # a shorter prefix has another state
            return 0
        prefix = _shortened(self._prefix, prompts)
        if self._may_replace and len(prefix) == 0:
            prefix = _shortened(prompts[0], prompts)
            self._cache.spans[self._prompt_rows] = EMPTY_SPAN
        self._may_replace = False
        self._prefix = prefix
        start, end = self._cache.spans[self._first_row].tolist()
        if start == end and len(prefix):  # the prefix is not in the shared part yet
            self._decoder.hidden_states([self._batch(prefix[None].astype(np.int64), 0)])
            start, end = self._cache.share(self._first_row, len(prefix))
        end = min(end, start + len(prefix))  # the stored prefix may be longer than the new one
        self._cache.spans[self._prompt_rows] = Span(start, end)
        return end - start

    def _batch(self, tokens: np.ndarray, start: int) -> NewTokens:
        positions = np.tile(np.arange(start, start + tokens.shape[1]), (len(tokens), 1))
        return NewTokens(tokens, positions, self._first_row)


def _shortened(prefix: Int32Array, prompts: Sequence[Int32Array]) -> Int32Array:
    """The tokens of `prefix` with which all prompts begin."""
    for prompt in prompts:
        # At least one token of every prompt remains to be computed, for its logits.
        prefix = prefix[: len(prompt) - 1]
        differing = np.flatnonzero(prefix != prompt[: len(prefix)])
        if len(differing):
            prefix = prefix[: differing[0]]
    # Computing a shorter prefix separately costs more than it saves.
    return prefix if len(prefix) >= 16 else prefix[:0]


class TurnCache:
    """The newest ended turns, of at most `max_tokens` tokens together."""

    def __init__(self, decoder: Decoder, *, max_tokens: int) -> None:
        self._decoder = decoder
        self._max_tokens = max_tokens
        self._sequences: dict[int, Tensor] = {}  # by Request.index, oldest first; see KVCache.read

    def clear(self) -> None:
        self._sequences.clear()

    def keep(self, request: Request, row: int, length: int) -> None:
        if not request.may_continue:
            return
        self._sequences[request.index] = self._decoder.cache.read(row, length)
        total = sum(sequence.shape[3] for sequence in self._sequences.values())
        while total > self._max_tokens:
            total -= self._sequences.pop(next(iter(self._sequences))).shape[3]

    def __contains__(self, request: Request) -> bool:
        return request.continues in self._sequences

    def restore(self, requests: Sequence[Request], first_row: int) -> Tensor:
        """Compute prompts in the rows from `first_row` on; returns the next logits [n, V]."""
        lengths = np.array([len(request.prompt_ids) for request in requests])
        num_new = 0  # tokens that are computed in every row
        for row, request in enumerate(requests, start=first_row):
            assert request.continues is not None
            sequence = self._sequences.pop(request.continues)
            self._decoder.cache.write(row, sequence)
            num_new = max(num_new, len(request.prompt_ids) - sequence.shape[3])
        # A row with fewer inserted tokens computes some of the kept ones again: padding after the
        # prompt could exceed the row.
        starts = np.maximum(lengths - num_new, 0)
        tokens = np.zeros((len(requests), num_new), np.int64)
        for row, (request, start) in enumerate(zip(requests, starts, strict=True)):
            tokens[row, : len(request.prompt_ids) - start] = request.prompt_ids[start:]
        positions = starts[:, None] + np.arange(num_new)
        (hidden,) = self._decoder.hidden_states([NewTokens(tokens, positions, first_row)])
        last = torch.from_numpy(lengths - starts - 1).to(hidden.device)
        return self._decoder.logits(hidden[torch.arange(len(requests), device=hidden.device), last])
