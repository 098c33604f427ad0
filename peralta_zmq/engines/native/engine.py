"""Native engine: continuous batching of completions over a KV cache.

A row holds one completion in progress, with its keys and values in the KV cache. A decode step adds
one token to every row. When the completion of a row ends, a new request takes the row at the next
decode step. Between two decode steps the caller may apply newer weights: running rows keep their
keys and values, and each token records its policy step, the number of training steps that the
weights had when they sampled the token.
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
from peralta_zmq.engines.requests import completion_of, end_token_ids, has_stop, read_requests
from peralta_zmq.errors import EngineError
from peralta_zmq.rollout import Completion, Request, Sampling

logger = logging.getLogger(__name__)


class NativeEngine:
    """Samples up to `slots` completions at the same time.

    Implements the protocol registry.Engine. `step` is the policy step of the weights in use.
    `max_model_len` is the maximum of prompt and completion together, in tokens. If `live`, a
    trainer owns and updates the model: each `generate` uses the model's current weights, and frees
    the KV cache at the end. Otherwise the engine owns the model and packs the weights (see
    linears.py). Raises ConfigError if the keys and values do not fit into memory.
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
        self._loop: DecodeLoop | None = None  # of the running `generate`
        # One extra row for the shared part of the KV cache, which has at most the size of a row.
        check_memory(model, slots=slots, extra_rows=PROMPT_ROWS + 1, capacity=self._capacity)
        self._decoder = None if live else self._new_decoder()

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> NativeEngine | HfEngine:
        """Open the model and tokenizer in `folder`; options as for the constructor.

        Returns an HfEngine for an architecture that the native decoder does not support.
        """
        trust = {"trust_remote_code": trust_remote_code}
        model = models.load_model(folder, device=device, dtype=dtype, **trust)
        return _engine_for(model, models.load_tokenizer(folder, **trust), **options)

    @classmethod
    def open_live(
        cls, model: models.Model, tokenizer: models.Tokenizer, **options: Any
    ) -> NativeEngine | HfEngine:
        """Open a model that a trainer updates, without a second copy of its weights."""
        return _engine_for(model, tokenizer, live=True, **options)

    def apply(
        self, weights: Mapping[str, Tensor], *, step: int, folder: Path | None = None
    ) -> None:
        """Sample from `weights` from the next token on.

        `folder`, which has the files of the weights, is not used. Raises ValueError, with nothing
        changed, if the weights belong to another model.
        """
        if self._decoder is None:
            models.apply_weights(self._model, weights)
        else:
            self._decoder.weights.apply(weights)
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

        Requests are read when rows become free; a request of None means that no request is
        available now. `between_steps` is called after each decode step. Raises ConfigError for a
        request longer than `max_model_len`, and EngineError for non-finite logits; both drop the
        completions in flight.
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
            if self._loop is loop:  # otherwise a later call of `generate` has set its own loop
                self._loop = None  # frees the KV cache of a live engine

    def _new_decoder(self) -> Decoder:
        num_rows = self._slots + PROMPT_ROWS
        return Decoder(self._model, num_rows=num_rows, capacity=self._capacity, live=self._live)


def _engine_for(
    model: models.Model, tokenizer: models.Tokenizer, *, live: bool = False, **options: Any
) -> NativeEngine | HfEngine:
    """A NativeEngine; an HfEngine if the decoder does not support the model."""
    family = cast(Any, model.config).model_type
    if family in FAMILIES:
        return NativeEngine(model, tokenizer, live=live, **options)
    logger.info("engine native does not support %s; using transformers' generate", family)
    return HfEngine(model, tokenizer, **options)


class DecodeLoop:
    """One `generate` call: starts rows, advances all rows, removes ended rows."""

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
        first_row, logits = self.rows.count, list[Tensor]()
        prompts = [request.prompt_ids for request in requests]
        for index, request in enumerate(requests):
            if request.prompt_ids not in self.prefix_cache:
                self.prefix_cache.compute(prompts[index:])
            row = self.rows.start(request)
            logits.append(self.prefix_cache.copy_to(row, request.prompt_ids))
        self._sample(first_row, torch.stack(logits), step)

    @torch.inference_mode()
    def advance(self, *, step: int) -> None:
        """Sample one more token for every row."""
        if not self.rows.count:
            return
        tokens, positions = (column[:, None] for column in self.rows.newest())
        hidden = self._decoder.hidden_states(tokens, positions, first_row=0)
        self._sample(0, self._decoder.logits(hidden[:, -1]), step)

    def pop_ended(self) -> Iterator[Completion]:
        """Yield the completions that have ended, and free their rows."""
        for row in self._ended_rows():
            completion = self._completion(row)
            last = self.rows.remove(row)
            if last != row:  # `remove` has moved row `last` to `row`
                self._decoder.cache.copy(last, row, self.rows.length(row))
            self._decoder.cache.spans[last] = EMPTY_SPAN  # the free row uses no shared prefix
            yield completion

    def _sample(self, first_row: int, logits: Tensor, step: int) -> None:
        """Sample the next token of all rows from `first_row` on; `logits` are [n, V]."""
        rows = np.arange(first_row, self.rows.count)
        tokens, logprobs = sample(
            logits,
            self._sampling.at(step),
            torch.from_numpy(self.rows.next_uniforms(rows)).to(logits.device),
            seen=self._seen_tokens(rows, logits),
            banned=self._banned_tokens(rows, logits),
            library=self._decoder.library,
        )
        logprob_values = logprobs.cpu().numpy()
        is_finite = np.isfinite(logprob_values)
        if not is_finite.all():
            self._decoder.cache.clear()
            raise EngineError(
                f"the weights of step {step} give logits that are not finite in "
                f"{int((~is_finite).sum())} of {len(rows)} completions"
            )
        self.rows.append(rows, tokens.cpu().numpy(), logprob_values, step=step)

    def _seen_tokens(self, rows: np.ndarray, logits: Tensor) -> Tensor | None:
        """[n, V], True: the repetition penalty applies; None if the penalty is off."""
        if self._sampling.repetition_penalty == 1:
            return None
        seen = np.zeros(logits.shape, np.bool_)
        for index, row in enumerate(rows):
            seen[index, self.rows.requests[row].prompt_ids] = True
            seen[index, self.rows.tokens[row, : self.rows.num_tokens[row]]] = True
        return torch.from_numpy(seen).to(logits.device)

    def _banned_tokens(self, rows: np.ndarray, logits: Tensor) -> Tensor | None:
        """[n, V], True for end tokens in rows below min_tokens; None without such rows."""
        is_short = self.rows.num_tokens[rows] < self._sampling.min_tokens
        if not is_short.any():
            return None
        banned = np.zeros(logits.shape, np.bool_)
        banned[np.ix_(is_short, self._end_ids)] = True
        return torch.from_numpy(banned).to(logits.device)

    def _ended_rows(self) -> list[int]:
        """Rows whose completion has ended, in descending order.

        `Rows.remove` moves the last row into the place of the removed row. The descending order
        ensures that the moved row is still running.
        """
        tokens, _ = self.rows.newest()
        ended = (tokens[:, None] == self._end_ids).any(1)
        ended |= (self.rows.num_tokens == self.rows.limits)[: self.rows.count]
        if self._sampling.stop:
            stopped = map(self._has_stopped, range(self.rows.count))
            ended |= np.fromiter(stopped, np.bool_)  # np.array([]) would be of another dtype
        return np.flatnonzero(ended)[::-1].tolist()

    def _has_stopped(self, row: int) -> bool:
        """Whether a row has at least min_tokens tokens and contains a stop string."""
        length = int(self.rows.num_tokens[row])
        if length < self._sampling.min_tokens:
            return False
        token_ids = self.rows.tokens[row, :length].tolist()
        return has_stop(self._tokenizer, token_ids, self._sampling.stop)

    def _completion(self, row: int) -> Completion:
        """The completion of a row that has ended."""
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
    """The completions in progress as arrays with one entry per row.

    The first `count` rows are running, the remaining rows are free.
    """

    def __init__(self, num_rows: int, sampling: Sampling) -> None:
        shape = (num_rows, sampling.max_completion_length)
        self._seed, self._max_length = sampling.seed, sampling.max_completion_length
        self.count = 0
        self.requests: list[Request] = []
        self.tokens = np.zeros(shape, np.int64)  # generated tokens
        self.logprobs = np.zeros(shape, np.float32)
        self.steps = np.zeros(shape, np.int32)  # policy step of each token
        self.num_tokens = np.zeros(num_rows, np.int64)  # number of tokens generated so far
        self.num_prompt = np.zeros(num_rows, np.int64)  # length of the prompt
        self.limits = np.zeros(num_rows, np.int64)  # maximum of num_tokens
        self._uniforms = np.zeros(shape, np.float32)  # random numbers for sampling, one per token

    def start(self, request: Request) -> int:
        """Put `request` into the next free row; returns the row.

        The random numbers of a completion depend only on the seed and the index of its request.
        """
        row, self.count = self.count, self.count + 1
        self.requests.append(request)
        self.num_tokens[row], self.num_prompt[row] = 0, len(request.prompt_ids)
        limit = request.max_completion_length
        self.limits[row] = self._max_length if limit is None else min(limit, self._max_length)
        generator = np.random.Generator(np.random.Philox(key=[self._seed, request.index]))
        self._uniforms[row] = generator.random(self._max_length, dtype=np.float32)
        return row

    def next_uniforms(self, rows: np.ndarray) -> np.ndarray:
        """A random number in [0, 1) for the next token of each of `rows`."""
        return self._uniforms[rows, self.num_tokens[rows]]

    def append(
        self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, *, step: int
    ) -> None:
        """Add one token to each of `rows`, sampled by the weights of policy step `step`."""
        columns = self.num_tokens[rows]
        self.tokens[rows, columns] = tokens
        self.logprobs[rows, columns] = logprobs
        self.steps[rows, columns] = step
        self.num_tokens[rows] = columns + 1

    def newest(self) -> tuple[np.ndarray, np.ndarray]:
        """The newest token of each running row and its position, [count] each."""
        last = self.num_tokens[: self.count] - 1
        return self.tokens[np.arange(self.count), last], self.num_prompt[: self.count] + last

    def remove(self, row: int) -> int:
        """Remove `row`, move the last running row there, return that row's old index."""
        self.count -= 1
        last = self.count
        tables = self.tokens, self.logprobs, self.steps, self._uniforms
        for array in (*tables, self.num_tokens, self.num_prompt, self.limits):
            array[row] = array[last]
        self.requests[row] = self.requests[last]
        self.requests.pop()
        return last

    def length(self, row: int) -> int:
        """Number of tokens of prompt and completion."""
        return int(self.num_prompt[row] + self.num_tokens[row])
