"""Turn cache: keys and values of ended completions, for the requests that continue them.

Of the prompt of the next turn, only the inserted tokens are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.engines.native.decoder import Decoder, NewTokens
from peralta_zmq.rollout import Request

# Size of the kept sequences relative to the rows of all slots. A turn is usually continued within a
# few decode steps; a sequence that was dropped is computed again.
KEPT_FRACTION = 0.25


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
