"""Continuous batching: requests fill free rows, every step adds one token to each row.

A row whose completion ends is refilled at the next step. Between two steps the caller may apply
newer weights: running rows keep their keys and values, and each token records the step of the
weights that sampled it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.engines.hf import HfEngine
from peralta_zmq.engines.native.cache import EMPTY_SPAN, check_memory
from peralta_zmq.engines.native.decoder import FAMILIES, Decoder
from peralta_zmq.engines.native.prefix_cache import PROMPT_ROWS, PrefixCache
from peralta_zmq.engines.native.sampler import sample
from peralta_zmq.engines.requests import (
    completion_of,
    decode,
    end_token_ids,
    find_stop,
    read_requests,
)
from peralta_zmq.errors import EngineError
from peralta_zmq.rollout import Completion, Request, Sampling

logger = logging.getLogger(__name__)


class NativeEngine:
    """Samples up to `slots` sequences of at most `max_model_len` tokens together.

    With `live` the model belongs to a trainer: its weights are used as they are at each `generate`,
    and no cache is held in between. Otherwise the engine owns the model and packs its weights.
    Raises ConfigError when keys and values do not fit into memory.
    """

    def __init__(
        self,
        model: models.Model,
        tokenizer: models.Tokenizer,
        *,
        step: int = 0,
        slots: int = 32,
        max_model_len: int = 512,
        live: bool = False,
    ) -> None:
        self.step = step
        self._model, self._tokenizer, self._live = model, tokenizer, live
        self._slots = slots
        self._capacity = min(max_model_len, model.config.max_position_embeddings)
        self._end_ids = end_token_ids(model, tokenizer)
        self._cancelled = False
        self._loop: DecodeLoop | None = None
        check_memory(model, slots=slots, extra_rows=PROMPT_ROWS + 1, capacity=self._capacity)
        self._decoder = None if live else self._new_decoder()

    @classmethod
    def open(
        cls, folder: Path, *, device: torch.device, dtype: torch.dtype, **options: Any
    ) -> NativeEngine | HfEngine:
        """An engine on the model and tokenizer in `folder`; options as for the constructor.

        Architectures that the native decoder does not support get transformers' engine.
        """
        model = models.load_model(folder, device=device, dtype=dtype)
        return _supporting_engine(model, models.load_tokenizer(folder), **options)

    @classmethod
    def open_live(
        cls, model: models.Model, tokenizer: models.Tokenizer, **options: Any
    ) -> NativeEngine | HfEngine:
        """An engine on a model in training, without a second copy of its weights."""
        return _supporting_engine(model, tokenizer, live=True, **options)

    def apply(
        self, weights: Mapping[str, Tensor], *, step: int, folder: Path | None = None
    ) -> None:
        """Sample from `weights` from the next token on.

        Raises ValueError, with nothing changed, if they belong to another model.
        """
        del folder
        if self._decoder is None:
            models.apply_weights(self._model, weights)
        else:
            self._decoder.apply(weights)
        if self._loop is not None:
            self._loop.prefix_cache.invalidate()
        self.step = step

    def cancel(self) -> None:
        """End `generate` after the current decode step; completions in flight are dropped."""
        self._cancelled = True

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield each completion when it ends.

        Requests are read as rows become free; None means that no request is available now. Raises
        ConfigError for a request that does not fit and EngineError for non-finite logits; the
        completions in flight are then lost.
        """
        self._cancelled = False
        decoder = self._decoder or self._new_decoder()
        self._loop = loop = DecodeLoop(
            decoder, self._tokenizer, sampling, self._end_ids, self._slots
        )
        source, has_more = iter(requests), True
        try:
            while not self._cancelled and (has_more or loop.rows.count):
                if has_more:
                    num_free = self._slots - loop.rows.count
                    batch, has_more = read_requests(
                        source, sampling, limit=num_free, max_model_len=self._capacity
                    )
                    loop.start(batch, step=self.step)
                    yield from loop.pop_ended()
                loop.advance(step=self.step)
                yield from loop.pop_ended()
                if between_steps is not None:
                    between_steps()
        finally:
            if self._loop is loop:  # no later call of generate has replaced it
                self._loop = None  # releases the cache of a live engine

    def _new_decoder(self) -> Decoder:
        num_rows = self._slots + PROMPT_ROWS
        return Decoder(self._model, num_rows=num_rows, capacity=self._capacity, live=self._live)


def _supporting_engine(
    model: models.Model, tokenizer: models.Tokenizer, *, live: bool = False, **options: Any
) -> NativeEngine | HfEngine:
    family = cast(Any, model.config).model_type
    if family in FAMILIES:
        return NativeEngine(model, tokenizer, live=live, **options)
    logger.info("engine native does not support %s; using transformers' generate", family)
    return HfEngine(model, tokenizer, **options)


class DecodeLoop:
    """One `generate` call: starts rows, advances all rows together, removes those that ended."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: models.Tokenizer,
        sampling: Sampling,
        end_ids: Sequence[int],
        slots: int,
    ) -> None:
        self._decoder, self._tokenizer, self._sampling = decoder, tokenizer, sampling
        self._end_ids = np.array(end_ids, np.int64)
        self.rows = Rows(slots, sampling)
        self.prefix_cache = PrefixCache(decoder, first_row=slots)

    @torch.inference_mode()
    def start(self, requests: Sequence[Request], *, step: int) -> None:
        """Give each request a row and sample its first token."""
        if not requests:
            return
        first, logits = self.rows.count, list[Tensor]()
        for number, request in enumerate(requests):
            if request.prompt_ids not in self.prefix_cache:
                self.prefix_cache.compute([later.prompt_ids for later in requests[number:]])
            row = self.rows.start(request)
            logits.append(self.prefix_cache.copy_to(row, request.prompt_ids))
        self._sample(first, torch.stack(logits), step)

    @torch.inference_mode()
    def advance(self, *, step: int) -> None:
        """Sample one more token for every row."""
        if not self.rows.count:
            return
        tokens, positions = (column[:, None] for column in self.rows.newest())
        hidden = self._decoder.hidden(tokens, positions, first_row=0)
        self._sample(0, self._decoder.logits(hidden[:, -1]), step)

    def pop_ended(self) -> Iterator[Completion]:
        """Yield the completions that ended in this step and free their rows."""
        for row in self._ended_rows():
            completion = self._completion(row)
            last = self.rows.remove(row)
            if last != row:
                self._decoder.cache.copy(last, row, self.rows.length(row))
            self._decoder.cache.spans[last] = EMPTY_SPAN
            yield completion

    def _sample(self, first: int, logits: Tensor, step: int) -> None:
        """Sample a token for every row from `first` on."""
        rows = np.arange(first, self.rows.count)
        tokens, logprobs = sample(
            logits,
            self._sampling.at(step),
            torch.from_numpy(self.rows.next_uniforms(rows)).to(logits.device),
            seen=self._seen_tokens(rows, logits),
            banned=self._banned_tokens(rows, logits),
        )
        values = logprobs.cpu().numpy()
        is_finite = np.isfinite(values)
        if not is_finite.all():
            self._decoder.cache.clear()
            raise EngineError(
                f"the weights of step {step} give logits that are not finite in "
                f"{int((~is_finite).sum())} of {len(rows)} completions"
            )
        self.rows.append(rows, tokens.cpu().numpy(), values, step=step)

    def _seen_tokens(self, rows: np.ndarray, logits: Tensor) -> Tensor | None:
        """[n, V], True for tokens of prompt and completion; None without a repetition penalty."""
        if self._sampling.repetition_penalty == 1:
            return None
        seen = np.zeros(logits.shape, np.bool_)
        for number, row in enumerate(rows):
            seen[number, self.rows.requests[row].prompt_ids] = True
            seen[number, self.rows.tokens[row, : self.rows.num_tokens[row]]] = True
        return torch.from_numpy(seen).to(logits.device)

    def _banned_tokens(self, rows: np.ndarray, logits: Tensor) -> Tensor | None:
        """[n, V], True for end tokens in rows shorter than min_tokens; None if there are none."""
        is_short = self.rows.num_tokens[rows] < self._sampling.min_tokens
        if not is_short.any():
            return None
        banned = np.zeros(logits.shape, np.bool_)
        banned[np.ix_(is_short, self._end_ids)] = True
        return torch.from_numpy(banned).to(logits.device)

    def _ended_rows(self) -> list[int]:
        """Rows whose newest token is their last, in descending order."""
        tokens, _ = self.rows.newest()
        ended = (tokens[:, None] == self._end_ids).any(1)
        ended |= (self.rows.num_tokens == self.rows.limits)[: self.rows.count]
        if self._sampling.stop:
            ended |= np.array([self._has_stopped(row) for row in range(self.rows.count)])
        return np.flatnonzero(ended)[::-1].tolist()

    def _has_stopped(self, row: int) -> bool:
        length = int(self.rows.num_tokens[row])
        if length < self._sampling.min_tokens:
            return False
        text = decode(self._tokenizer, self.rows.tokens[row, :length])
        return find_stop(text, self._sampling.stop) is not None

    def _completion(self, row: int) -> Completion:
        length = self.rows.num_tokens[row]
        return completion_of(
            self._tokenizer,
            self.rows.requests[row],
            self._sampling,
            token_ids=self.rows.tokens[row, :length],
            logprobs=self.rows.logprobs[row, :length],
            policy_steps=self.rows.steps[row, :length],
            ended=bool((self.rows.tokens[row, length - 1] == self._end_ids).any()),
        )


class Rows:
    """The completions in flight as arrays, index = row; the first `count` rows are running."""

    def __init__(self, num_rows: int, sampling: Sampling) -> None:
        shape = (num_rows, sampling.max_completion_length)
        self._seed, self._max_length = sampling.seed, sampling.max_completion_length
        self.count = 0
        self.requests: list[Request] = []
        self.tokens = np.zeros(shape, np.int64)
        self.logprobs = np.zeros(shape, np.float32)
        self.steps = np.zeros(shape, np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.limits = np.zeros(num_rows, np.int64)  # greatest allowed num_tokens
        self._uniforms = np.zeros(shape, np.float32)

    def start(self, request: Request) -> int:
        """Give `request` the next row. Its random numbers depend on seed and index only."""
        row, self.count = self.count, self.count + 1
        self.requests.append(request)
        self.num_tokens[row], self.num_prompt[row] = 0, len(request.prompt_ids)
        limit = request.max_completion_length
        self.limits[row] = self._max_length if limit is None else min(limit, self._max_length)
        generator = np.random.Generator(np.random.Philox(key=[self._seed, request.index]))
        self._uniforms[row] = generator.random(self._max_length, dtype=np.float32)
        return row

    def next_uniforms(self, rows: np.ndarray) -> np.ndarray:
        """A number in [0, 1) for the next token of each row."""
        return self._uniforms[rows, self.num_tokens[rows]]

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, *, step: int
    ) -> None:
        """Add a token to each of `rows`, sampled by the weights of `step`."""
        columns = self.num_tokens[rows]
        self.tokens[rows, columns] = tokens
        self.logprobs[rows, columns] = logprobs
        self.steps[rows, columns] = step
        self.num_tokens[rows] = columns + 1

    def newest(self) -> tuple[np.ndarray, np.ndarray]:
        """The newest token of each running row and its position in the sequence, [count] each."""
        last = self.num_tokens[: self.count] - 1
        return self.tokens[np.arange(self.count), last], self.num_prompt[: self.count] + last

    def remove(self, row: int) -> int:
        """Free a row by moving the last running row into it; returns the last row's number."""
        self.count -= 1
        last = self.count
        tables = self.tokens, self.logprobs, self.steps, self._uniforms
        for array in (*tables, self.num_tokens, self.num_prompt, self.limits):
            array[row] = array[last]
        self.requests[row] = self.requests[last]
        self.requests.pop()
        return last

    def length(self, row: int) -> int:
        """Tokens of prompt and completion."""
        return int(self.num_prompt[row] + self.num_tokens[row])
