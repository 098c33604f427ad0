"""Native engine: continuous batching of completions over a KV cache.

A row of the decode loop has its keys and values in the KV cache. A decode step computes new prompts
in the same pass over the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.engines.completion_rows import Rows
from peralta_zmq.engines.decode_loop import DecodeLoop
from peralta_zmq.engines.engine_models import AdapterMerger, open_model
from peralta_zmq.engines.hf_engine import HfEngine
from peralta_zmq.engines.native.decoder import FAMILIES, Decoder, NewTokens
from peralta_zmq.engines.native.kv_cache import EMPTY_SPAN, check_memory
from peralta_zmq.engines.native.prefix_cache import PROMPT_ROWS, PrefixCache
from peralta_zmq.engines.native.token_sampler import sample
from peralta_zmq.engines.native.turn_cache import KEPT_FRACTION, TurnCache
from peralta_zmq.models.rotary import check_length
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import BoolArray, Completion, Int32Array, Request, Sampling

logger = logging.getLogger(__name__)


class NativeEngine:
    """Samples up to `slots` completions at the same time.

    Implements the protocol registry.Engine. `step` is the policy step of the weights in use.
    `max_model_len` is the maximum of prompt and completion together, in tokens. If `live`, a
    trainer owns and updates the model, while no request is in flight, and the engine has a KV cache
    only while requests are. Otherwise the engine owns the model and packs the weights (see
    packed_linears.py). With `keeps_turns`, it keeps the keys and values of completions that another
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
        self._rows: CachedRows | None = None  # both are None before the first request, and if live
        self._loop: DecodeLoop | None = None  # while no request is in flight

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

    def num_free(self) -> int:
        """Number of requests that can be submitted now."""
        return self._slots - (self._loop.num_in_flight if self._loop else 0)

    def submit(self, requests: Sequence[Request]) -> None:
        """Start requests at the next `advance`."""
        if self._loop is None:
            self._rows, self._loop = self._new_loop()
        self._loop.submit(requests)

    @torch.inference_mode()
    def advance(self) -> list[Completion]:
        """Take a decode step; see registry.Engine."""
        if self._loop is None:
            return []
        try:
            return self._loop.advance(self.step)
        finally:
            self._free_live_cache()

    def drop(self, ids: Collection[int]) -> list[Completion]:
        """End requests; returns the partial completions with a token."""
        completions = [] if self._loop is None else self._loop.drop(ids)
        self._free_live_cache()
        return completions

    def apply(self, update: WeightUpdate) -> None:
        """Sample from the new weights from the next token on.

        Raises ValueError, with nothing changed, if the weights belong to another model.
        """
        weights = update.tensors if self._merger is None else self._merger.weights_of(update)
        if self._decoder is None:
            models.apply_weights(self._model, weights)
        else:
            self._decoder.weights.apply(weights)
        if self._rows is not None:
            self._rows.invalidate()
        self.step = update.step

    def _free_live_cache(self) -> None:
        if self._live and self._loop is not None and not self._loop.num_in_flight:
            self._rows = self._loop = None

    def _new_loop(self) -> tuple[CachedRows, DecodeLoop]:
        max_kept = int(self._kept_fraction * self._slots * self.max_model_len)
        decoder = self._decoder or self._new_decoder()
        cached_rows = CachedRows(decoder, num_rows=self._slots, max_kept=max_kept)
        rows = Rows(self._slots, self._tokenizer, self._end_ids, max_model_len=self.max_model_len)
        return cached_rows, DecodeLoop(cached_rows, rows)

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


class CachedRows:
    """The rows of the KV cache, with the prefix cache and the turn cache (decode_loop.RowDecoder).

    Ended turns of at most `max_kept` tokens together are kept.
    """

    def __init__(self, decoder: Decoder, *, num_rows: int, max_kept: int) -> None:
        self._decoder = decoder
        self._prefix_cache = PrefixCache(decoder, first_row=num_rows)
        self._turn_cache = TurnCache(decoder, max_tokens=max_kept)

    def invalidate(self) -> None:
        """Compute prompts and turns again, because the weights have changed."""
        self._prefix_cache.invalidate()
        self._turn_cache.clear()

    def start(
        self, requests: Sequence[Request], first_row: int
    ) -> tuple[list[Request], Tensor | None]:
        """Fill rows with requests that continue a kept turn, or whose prompts are computed.

        Those of standalone requests are computed here: in the prefix cache, they would shorten the
        common prefix of the others.
        """
        started = [request for request in requests if request in self._turn_cache]
        others = [request for request in requests if request not in self._turn_cache]
        logits = list[Tensor]()
        for start in range(0, len(started), PROMPT_ROWS):
            batch = started[start : start + PROMPT_ROWS]
            logits += self._turn_cache.restore(batch, first_row=first_row + start)
        for request in others:
            row, prefix = first_row + len(started), request.prefix_ids
            if request.is_standalone:
                logits.append(self._prompt_logits(row, prefix))
            elif prefix in self._prefix_cache:
                logits.append(self._prefix_cache.copy_to(row, prefix))
            else:
                continue
            started.append(request)
        return started, torch.stack(logits) if logits else None

    def _prompt_logits(self, row: int, prompt: Int32Array) -> Tensor:
        """Compute a prompt in a free row; returns the next token's logits [V]."""
        tokens, positions = prompt[None].astype(np.int64), np.arange(len(prompt))[None]
        (hidden,) = self._decoder.hidden_states([NewTokens(tokens, positions, first_row=row)])
        return self._decoder.logits(hidden[:, -1])[0]

    def decode(
        self, tokens: np.ndarray, positions: np.ndarray, waiting: Sequence[Request]
    ) -> Tensor:
        """Compute the newest tokens of all rows, and prompts in the same pass."""
        newest = NewTokens(tokens[:, None], positions[:, None], first_row=0)
        running = [newest] if len(tokens) else []
        if waiting:
            return self._prefix_cache.compute([each.prefix_ids for each in waiting], running)
        (hidden,) = self._decoder.hidden_states(running)
        return self._decoder.logits(hidden[:, -1])

    def sample(
        self,
        logits: Tensor,
        part: np.ndarray | slice,
        sampling: Sampling,
        uniforms: np.ndarray,
        *,
        seen: BoolArray | None,
        banned: BoolArray | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample a token for each row of `part`."""
        tokens, logprobs = sample(
            logits[part],
            sampling,
            torch.from_numpy(uniforms).to(logits.device),
            seen=_on_device(seen, logits.device),
            banned=_on_device(banned, logits.device),
            library=self._decoder.library,
        )
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def keep(self, request: Request, row: int, length: int) -> None:
        """Keep the turn of `request` if another one may continue it."""
        self._turn_cache.keep(request, row, length)

    def remove(self, row: int, last: int, last_length: int) -> None:
        """Move row `last` to `row`."""
        if last != row:
            self._decoder.cache.copy(last, row, last_length)
        self._decoder.cache.spans[last] = EMPTY_SPAN  # the free row uses no shared prefix

    def reset(self, *, is_damaged: bool = False) -> None:
        """Prompts and turns are kept, unless they are damaged."""
        self._prefix_cache.allow_replacement()
        if is_damaged:
            self._decoder.cache.clear()
            self.invalidate()


def _on_device(mask: BoolArray | None, device: torch.device) -> Tensor | None:
    return None if mask is None else torch.from_numpy(mask).to(device)
