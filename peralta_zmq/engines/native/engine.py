"""Native engine: continuous batching of completions over a KV cache.

A row holds one completion in progress, with its keys and values in the KV cache. A decode step adds
one token to every row, and computes new prompts in the same pass over the weights. When the
completion of a row ends, a new request takes the row at the next decode step. Between two decode
steps the caller may apply newer weights: running rows keep their keys and values, and each token
records its policy step, the number of training steps that the weights had when they sampled the
token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.engines.hf import HfEngine
from peralta_zmq.engines.loading import AdapterMerger, open_model
from peralta_zmq.engines.native.cache import EMPTY_SPAN, check_memory
from peralta_zmq.engines.native.decoder import FAMILIES, Decoder, NewTokens
from peralta_zmq.engines.native.prefix_cache import PROMPT_ROWS, PrefixCache
from peralta_zmq.engines.native.sampler import sample
from peralta_zmq.engines.native.turn_cache import KEPT_FRACTION, TurnCache
from peralta_zmq.engines.rows import Rows, read_requests
from peralta_zmq.errors import EngineError
from peralta_zmq.models.rotary import check_length
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import BoolArray, Completion, Int32Array, Request, Sampling

logger = logging.getLogger(__name__)


class NativeEngine:
    """Samples up to `slots` completions at the same time.

    Implements the protocol registry.Engine. `step` is the policy step of the weights in use.
    `max_model_len` is the maximum of prompt and completion together, in tokens. If `live`, a
    trainer owns and updates the model: each `generate` uses the model's current weights, and frees
    the KV cache at the end. Otherwise the engine owns the model and packs the weights (see
    linears.py). With `keeps_turns`, it keeps the keys and values of completions that another
    request may continue. Raises ConfigError if the keys and values do not fit into memory, or into
    what this process has left of `memory_fraction` of it.
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
        keeps_turns: bool = False,
        memory_fraction: float | None = None,
        merger: AdapterMerger | None = None,
    ) -> None:
        self.step = step
        self._model, self._tokenizer, self._live, self._merger = model, tokenizer, live, merger
        self._slots = slots
        check_length(model.config, max_model_len)
        self.max_model_len = min(max_model_len, models.max_positions(model))
        self._end_ids = models.end_token_ids(model.generation_config, tokenizer)
        self._cancelled = False
        self._loop: DecodeLoop | None = None  # of the running `generate`
        self._kept_fraction = KEPT_FRACTION if keeps_turns else 0.0
        check_memory(
            model,
            slots=slots,
            rows_per_slot=1 + self._kept_fraction,
            # One for the shared part of the KV cache, which has at most the size of a row.
            extra_rows=PROMPT_ROWS + 1,
            capacity=self.max_model_len,
            memory_fraction=memory_fraction,
        )
        self._decoder = None if live else self._new_decoder()

    @classmethod
    def open(
        cls, folder: Path, settings: EngineSettings, *, step: int = 0
    ) -> NativeEngine | HfEngine:
        """Open the model and tokenizer in `folder`.

        Returns an HfEngine for an architecture that the native decoder does not support.
        """
        model, tokenizer, merger = open_model(folder, settings)
        return _engine_for(model, tokenizer, settings, step=step, merger=merger)

    @classmethod
    def open_live(
        cls, model: models.Model, tokenizer: models.Tokenizer, settings: EngineSettings
    ) -> NativeEngine | HfEngine:
        """Open a model that a trainer updates, without a second copy of its weights."""
        return _engine_for(model, tokenizer, settings, live=True)

    def apply(self, update: WeightUpdate) -> None:
        """Sample from the new weights from the next token on.

        Raises ValueError, with nothing changed, if the weights belong to another model.
        """
        weights = update.tensors if self._merger is None else self._merger.weights_of(update)
        if self._decoder is None:
            models.apply_weights(self._model, weights)
        else:
            self._decoder.weights.apply(weights)
        if self._loop is not None:
            self._loop.prefix_cache.invalidate()
            self._loop.turn_cache.clear()
        self.step = update.step

    def cancel(self) -> None:
        """End `generate` after the current decode step; it yields what is in flight."""
        self._cancelled = True

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield each completion when it ends.

        Requests are read when rows become free; a request of None means that no request is
        available now. `between_steps` is called after each decode step. Raises EngineError for
        non-finite logits, which drops the completions in flight.
        """
        self._cancelled = False
        decoder = self._decoder or self._new_decoder()
        rows = Rows(
            self._slots,
            self._tokenizer,
            sampling,
            self._end_ids,
            max_model_len=self.max_model_len,
        )
        max_kept = int(self._kept_fraction * self._slots * self.max_model_len)
        self._loop = loop = DecodeLoop(decoder, rows, self._slots, max_kept=max_kept)
        source, has_more = iter(requests), True
        try:
            while not self._cancelled and (has_more or loop.num_started):
                if has_more:
                    num_free = self._slots - loop.num_started
                    batch, has_more = read_requests(
                        source, sampling, limit=num_free, max_model_len=self.max_model_len
                    )
                    loop.start(batch, step=self.step)
                    yield from loop.pop_ended()
                loop.advance(step=self.step)
                yield from loop.pop_ended()
                if between_steps is not None:
                    between_steps()
            yield from rows.partial_completions()
        finally:
            if self._loop is loop:  # otherwise a later call of `generate` has set its own loop
                self._loop = None  # frees the KV cache of a live engine

    def _new_decoder(self) -> Decoder:
        num_rows = self._slots + PROMPT_ROWS
        return Decoder(self._model, num_rows=num_rows, capacity=self.max_model_len, live=self._live)


def _engine_for(
    model: models.Model,
    tokenizer: models.Tokenizer,
    settings: EngineSettings,
    *,
    live: bool = False,
    **options: Any,
) -> NativeEngine | HfEngine:
    """A NativeEngine; an HfEngine if the decoder does not support the model."""
    options |= {"slots": settings.slots, "max_model_len": settings.max_model_len}
    family = cast(Any, model.config).model_type
    if family in FAMILIES:
        return NativeEngine(
            model,
            tokenizer,
            live=live,
            keeps_turns=settings.keeps_turns,
            memory_fraction=settings.gpu_memory_utilization,
            **options,
        )
    logger.info("engine native does not support %s; using transformers' generate", family)
    return HfEngine(model, tokenizer, **options)


class DecodeLoop:
    """One `generate` call: starts rows, advances all rows, removes ended rows.

    Ended turns of at most `max_kept` tokens together are kept.
    """

    def __init__(self, decoder: Decoder, rows: Rows, slots: int, *, max_kept: int) -> None:
        self._decoder, self.rows = decoder, rows
        self.prefix_cache = PrefixCache(decoder, first_row=slots)
        self.turn_cache = TurnCache(decoder, max_tokens=max_kept)
        self._waiting: list[Request] = []  # for their prompts to be computed

    @property
    def num_started(self) -> int:
        """Number of completions that have been started and have not ended."""
        return self.rows.count + len(self._waiting)

    @torch.inference_mode()
    def start(self, requests: Sequence[Request], *, step: int) -> None:
        """Give each request a row and sample its first token, if its prompt is computed.

        Requests that continue a kept turn are started, too. `advance` computes the other prompts,
        and starts their requests.
        """
        continued = [request for request in requests if request in self.turn_cache]
        others = [request for request in requests if request not in self.turn_cache]
        started, waiting = list[Request](), list[Request]()
        for request in others:
            # In the prefix cache, the prompt of a standalone request would shorten the common
            # prefix of the others.
            may_start = request.is_standalone or request.prefix_ids in self.prefix_cache
            (started if may_start else waiting).append(request)
        self._waiting += waiting
        if not (continued or started):
            return
        first_row, logits = self.rows.count, list[Tensor]()
        for start in range(0, len(continued), PROMPT_ROWS):
            batch = continued[start : start + PROMPT_ROWS]
            rows = [self.rows.start(request) for request in batch]
            logits += self.turn_cache.restore(batch, first_row=rows[0])
        for request in started:
            row = self.rows.start(request)
            if request.is_standalone:
                logits.append(self._prompt_logits(row, request.prefix_ids))
                continue
            logits.append(self.prefix_cache.copy_to(row, request.prefix_ids))
        self._sample(first_row, torch.stack(logits), step)

    def _prompt_logits(self, row: int, prompt: Int32Array) -> Tensor:
        """Compute a prompt in a free row; returns the next token's logits [V]."""
        tokens, positions = prompt[None].astype(np.int64), np.arange(len(prompt))[None]
        (hidden,) = self._decoder.hidden_states([NewTokens(tokens, positions, first_row=row)])
        return self._decoder.logits(hidden[:, -1])[0]

    @torch.inference_mode()
    def advance(self, *, step: int) -> None:
        """Sample one more token for every row, and compute prompts of waiting requests."""
        waiting, self._waiting = self._waiting, []
        tokens, positions = (column[:, None] for column in self.rows.newest())
        running = [NewTokens(tokens, positions, first_row=0)] if self.rows.count else []
        if waiting:
            logits = self.prefix_cache.compute([each.prefix_ids for each in waiting], running)
        elif running:
            (hidden,) = self._decoder.hidden_states(running)
            logits = self._decoder.logits(hidden[:, -1])
        else:
            return
        if running:
            self._sample(0, logits, step)
        self.start(waiting, step=step)

    def pop_ended(self) -> Iterator[Completion]:
        """Yield the completions that have ended, and free their rows."""
        for row in self.rows.ended():
            completion = self.rows.completion(row)
            # The keys and values of the last token are not computed.
            self.turn_cache.keep(self.rows.requests[row], row, self.rows.length(row) - 1)
            last = self.rows.remove(row)
            if last != row:  # `remove` has moved row `last` to `row`
                self._decoder.cache.copy(last, row, self.rows.length(row))
            self._decoder.cache.spans[last] = EMPTY_SPAN  # the free row uses no shared prefix
            yield completion

    def _sample(self, first_row: int, logits: Tensor, step: int) -> None:
        """Sample the next token of all rows from `first_row` on; `logits` are [n, V]."""
        rows, vocab_size = np.arange(first_row, self.rows.count), logits.shape[-1]
        tokens, logprobs = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
        for sampling, part in self.rows.by_sampling(rows, step):
            seen = self.rows.seen_tokens(rows[part], sampling, vocab_size)
            banned = self.rows.banned_tokens(rows[part], vocab_size)
            sampled_tokens, sampled_logprobs = sample(
                logits[part],
                sampling,
                torch.from_numpy(self.rows.next_uniforms(rows[part])).to(logits.device),
                seen=_on_device(seen, logits.device),
                banned=_on_device(banned, logits.device),
                library=self._decoder.library,
            )
            tokens[part] = sampled_tokens.cpu().numpy()
            logprobs[part] = sampled_logprobs.cpu().numpy()
        try:
            self.rows.append(rows, tokens, logprobs, step=step)
        except EngineError:
            self._decoder.cache.clear()  # of keys and values that are not finite
            raise


def _on_device(mask: BoolArray | None, device: torch.device) -> Tensor | None:
    return None if mask is None else torch.from_numpy(mask).to(device)
