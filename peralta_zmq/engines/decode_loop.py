"""Decode loop of the engines that sample one token per row and step: native and mlx.

A row holds one completion in progress. A decode step adds one token to every row. When the
completion of a row ends, another request takes the row at the next decode step. Running rows keep
their keys and values when newer weights are applied between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from peralta_zmq.engines.completion_rows import Rows
from peralta_zmq.errors import EngineError
from peralta_zmq.rollout import BoolArray, Completion, Request, Sampling


class RowDecoder(Protocol):
    """Computes logits [n, V], arrays of its own library, and keeps the keys and values of rows."""

    def start(self, requests: Sequence[Request], first_row: int) -> tuple[list[Request], Any]:
        """Fill the rows from `first_row` on with the prefixes of requests, one per row.

        Returns the requests in the order of their rows, and the logits of their next tokens.
        Requests whose prompts `decode` must compute first are left out.
        """
        ...

    def decode(self, tokens: np.ndarray, positions: np.ndarray, waiting: Sequence[Request]) -> Any:
        """Add a token to each of the first n rows, [n] each; returns the next tokens' logits.

        May compute prompts of `waiting`, the requests that `start` left out.
        """
        ...

    def sample(
        self,
        logits: Any,
        part: np.ndarray | slice,
        sampling: Sampling,
        uniforms: np.ndarray,
        *,
        seen: BoolArray | None,
        banned: BoolArray | None,
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
        """Drop what is kept for further rows; no row is in use.

        If `is_damaged`, the keys and values may have values that are not finite.
        """
        ...


class DecodeLoop:
    """Starts requests in `rows`, advances all rows, and removes ended rows."""

    def __init__(self, decoder: RowDecoder, rows: Rows) -> None:
        self._decoder, self._rows = decoder, rows
        self._submitted: list[Request] = []  # since the last decode step
        self._waiting: list[Request] = []  # for their prompts to be computed

    @property
    def num_in_flight(self) -> int:
        """Number of requests whose completions have not ended."""
        return self._rows.count + len(self._waiting) + len(self._submitted)

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests; there must be rows for them."""
        self._submitted += requests

    def advance(self, step: int) -> list[Completion]:
        """Sample a token for every row with the weights of policy step `step`.

        Returns the completions that have ended. Raises EngineError for logits that are not finite,
        which drops all requests.
        """
        if not self.num_in_flight:
            return []
        submitted, self._submitted = self._submitted, []
        try:
            self._start(submitted, step)
            completions = self._pop_ended()
            self._decode(step)
        except EngineError:
            self._rows.clear()
            self._waiting = []
            self._decoder.reset(is_damaged=True)
            raise
        completions += self._pop_ended()
        self._reset_if_idle()
        return completions

    def drop(self, ids: Collection[int]) -> list[Completion]:
        """Remove the requests with these indices; returns the partial completions with a token."""
        self._submitted = [request for request in self._submitted if request.index not in ids]
        self._waiting = [request for request in self._waiting if request.index not in ids]
        rows = [row for row, request in enumerate(self._rows.requests) if request.index in ids]
        completions = [replace(self._rows.completion(row), is_partial=True) for row in rows]
        for row in reversed(rows):
            self._remove(row)
        self._reset_if_idle()
        return completions

    def _start(self, requests: Sequence[Request], step: int) -> None:
        """Give each request a row and sample its first token, or let it wait for its prompt."""
        if not requests:
            return
        first_row = self._rows.count
        started, logits = self._decoder.start(requests, first_row)
        is_started = {id(request) for request in started}
        self._waiting += [request for request in requests if id(request) not in is_started]
        for request in started:
            self._rows.start(request)
        if started:
            self._sample(first_row, logits, step)

    def _decode(self, step: int) -> None:
        """Sample one more token for every row, and start requests whose prompts were computed."""
        waiting, self._waiting = self._waiting, []
        if not (waiting or self._rows.count):
            return
        logits = self._decoder.decode(*self._rows.newest(), waiting)
        if self._rows.count:
            self._sample(0, logits, step)
        self._start(waiting, step)

    def _sample(self, first_row: int, logits: Any, step: int) -> None:
        """Sample the next token of all rows from `first_row` on; `logits` are [n, V]."""
        rows, vocab_size = np.arange(first_row, self._rows.count), logits.shape[-1]
        tokens = np.empty(len(rows), np.int64)
        logprobs = np.empty(len(rows), np.float32)
        for sampling, part in self._rows.by_sampling(first_row, step):
            tokens[part], logprobs[part] = self._decoder.sample(
                logits,
                part,
                sampling,
                self._rows.next_uniforms(rows[part]),
                seen=self._rows.seen_tokens(rows[part], sampling, vocab_size),
                banned=self._rows.banned_tokens(rows[part], vocab_size),
            )
        self._rows.append(rows, tokens, logprobs, step=step)

    def _pop_ended(self) -> list[Completion]:
        """Remove and return the completions that have ended."""
        ended = self._rows.ended()
        completions = [self._rows.completion(row) for row in ended]
        for row in ended:
            # The keys and values of the last token are not computed.
            self._decoder.keep(self._rows.requests[row], row, self._rows.length(row) - 1)
            self._remove(row)
        return completions

    def _reset_if_idle(self) -> None:
        if not self.num_in_flight:
            self._decoder.reset()

    def _remove(self, row: int) -> None:
        last = self._rows.count - 1
        self._decoder.remove(row, last, self._rows.length(last))
        self._rows.remove(row)
