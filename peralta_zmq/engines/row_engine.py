"""Engine that samples one token per row and decode step, over a decoder of native, hf or mlx.

A row holds one completion in progress. When it ends, another request takes the row at a later step.
Running rows keep their keys and values when newer weights are applied between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from peralta_zmq.engines.completion_rows import Rows, SamplingInputs
from peralta_zmq.engines.engine_models import AdapterMerger
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.rollout import Completion, Request


class RowDecoder(Protocol):
    """Computes logits [n, V], arrays of its own library, and keeps the keys and values of rows."""

    def start(self, requests: Sequence[Request], first_row: int) -> tuple[list[Request], Any]:
        """Fill the rows from `first_row` on with prefixes of requests, one per row.

        Returns the requests that were started, in the order of their rows, and the logits of their
        next tokens. All others wait, and are passed again.
        """
        ...

    def decode(self, tokens: np.ndarray, positions: np.ndarray, waiting: Sequence[Request]) -> Any:
        """Add a token to each of the first n rows, [n] each; returns the next tokens' logits.

        May compute the prompts of requests that wait.
        """
        ...

    def sample(
        self, logits: Any, part: np.ndarray | slice, inputs: SamplingInputs
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and logprobs sampled from the logits of `part`: see native/token_sampler.py."""
        ...

    def keep(self, request: Request, row: int, length: int) -> None:
        """The completion of `request` has ended; `length` tokens of its row are computed."""
        ...

    def remove(self, row: int, last: int, last_length: int) -> None:
        """Free `row` by moving row `last` there, which has `last_length` tokens."""
        ...

    def reset(self, *, is_damaged: bool = False) -> None:
        """No row is in use. If `is_damaged`, keys and values may be not finite: drop them."""
        ...

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights. Raises ValueError, with nothing changed, if they do not fit."""
        ...


class RowEngine:
    """Samples a completion in each of `rows`; implements registry.Engine.

    `step` is the policy step of the weights. Without a `merger`, adapters cannot be applied.
    """

    def __init__(
        self, decoder: RowDecoder, rows: Rows, *, step: int = 0, merger: AdapterMerger | None = None
    ) -> None:
        self.step = step
        self.max_model_len = rows.max_model_len
        self._decoder = decoder
        self._rows = rows
        self._merger = merger
        self._waiting: list[Request] = []

    def num_free(self) -> int:
        return self._rows.num_rows - self._rows.count - len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    @torch.inference_mode()
    def advance(self) -> list[Completion]:
        """Sample a token for every row; returns the completions that have ended.

        Raises EngineError for logits that are not finite. An exception drops all requests.
        """
        if self.num_free() == self._rows.num_rows:
            return []
        try:
            self._start()
            completions = self._pop_ended()
            if self._rows.count or self._waiting:
                logits = self._decoder.decode(*self._rows.newest(), self._waiting)
                if self._rows.count:
                    self._sample(0, logits)
                self._start()
        except Exception:
            self._rows.clear()
            self._waiting = []
            self._decoder.reset(is_damaged=True)
            raise
        completions += self._pop_ended()
        self._reset_if_idle()
        return completions

    def drop(self, ids: Collection[int]) -> list[Completion]:
        self._waiting = [request for request in self._waiting if request.index not in ids]
        rows = self._rows.find(ids)
        completions = [self._rows.completion(row, is_partial=True) for row in rows]
        for row in rows:
            self._remove(row)
        self._reset_if_idle()
        return completions

    def apply(self, update: WeightUpdate) -> None:
        """Sample from the new weights from the next token on.

        Raises ValueError, with nothing changed, if the weights belong to another model.
        """
        self._decoder.load(self._merger.weights_of(update) if self._merger else update.tensors)
        self.step = update.step

    def _start(self) -> None:
        if not self._waiting:
            return
        first_row = self._rows.count
        started, logits = self._decoder.start(self._waiting, first_row)
        is_started = {request.index for request in started}
        self._waiting = [each for each in self._waiting if each.index not in is_started]
        for request in started:
            self._rows.start(request)
        if started:
            self._sample(first_row, logits)

    def _sample(self, first_row: int, logits: Any) -> None:
        """Sample the next tokens of the rows from `first_row` on; `logits` are [n, V]."""
        rows = np.arange(first_row, self._rows.count)
        tokens = np.empty(len(rows), np.int64)
        logprobs = np.empty(len(rows), np.float32)
        for part, inputs in self._rows.sampling_inputs(first_row, logits.shape[-1]):
            tokens[part], logprobs[part] = self._decoder.sample(logits, part, inputs)
        self._rows.append(rows, tokens, logprobs, step=self.step)

    def _pop_ended(self) -> list[Completion]:
        ended = self._rows.ended()
        completions = [self._rows.completion(row) for row in ended]
        for row in ended:
            # The keys and values of the last token are not computed.
            self._decoder.keep(self._rows.requests[row], row, self._rows.length(row) - 1)
            self._remove(row)
        return completions

    def _reset_if_idle(self) -> None:
        if self.num_free() == self._rows.num_rows:
            self._decoder.reset()

    def _remove(self, row: int) -> None:
        last = self._rows.count - 1
        self._decoder.remove(row, last, self._rows.length(last))
        self._rows.remove(row)
