"""Native engine: continuous batching of completions over a KV cache.

A decode step computes new prompts in the same pass over the weights as the running rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.engines import hf_engine
from peralta_zmq.engines.engine_models import AdapterMerger, open_model
from peralta_zmq.engines.native.decoder import FAMILIES, HYBRID_FAMILIES, Decoder, NewTokens
from peralta_zmq.engines.native.kv_cache import EMPTY_SPAN, cache_shape
from peralta_zmq.engines.native.prefix_cache import (
    KEPT_FRACTION,
    PROMPT_ROWS,
    PrefixCache,
    TurnCache,
)
from peralta_zmq.engines.native.token_sampler import sample_rows
from peralta_zmq.engines.row_engine import RowEngine, Rows, SamplingInputs, check_cache_memory
from peralta_zmq.models.rotary import check_length
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Request

logger = logging.getLogger(__name__)


def open(folder: Path, settings: EngineSettings, *, step: int = 0) -> RowEngine:
    model, tokenizer, merger = open_model(folder, settings)
    return native_engine(model, tokenizer, settings, step=step, merger=merger)


def open_live(
    model: models.Model, tokenizer: models.Tokenizer, settings: EngineSettings
) -> RowEngine:
    """Open a model that a trainer updates, without a second copy of its weights."""
    return native_engine(model, tokenizer, settings, live=True)


def native_engine(
    model: models.Model,
    tokenizer: models.Tokenizer,
    settings: EngineSettings,
    *,
    step: int = 0,
    live: bool = False,
    merger: AdapterMerger | None = None,
) -> RowEngine:
    """A native engine, or engine hf for an architecture that the decoder does not support.

    If `live`, a trainer owns and updates the model, so its weights are not packed. Raises
    ConfigError if the keys and values do not fit into the free memory.
    """
    family = cast(Any, model.config).model_type
    if family not in FAMILIES:
        logger.info("engine native does not support %s; using transformers' code", family)
        return hf_engine.open_live(model, tokenizer, settings, step=step, merger=merger)
    check_length(model.config, settings.max_model_len)
    length = min(settings.max_model_len, models.max_positions(model))
    is_hybrid = family in HYBRID_FAMILIES
    fraction = KEPT_FRACTION if settings.keeps_turns and not is_hybrid else 0.0
    num_values = length * 2 * math.prod(cache_shape(model.config).values())
    # Without logits, and the packing of weights.
    check_cache_memory(
        num_values * model.dtype.itemsize + (_state_bytes(model) if is_hybrid else 0),
        slots=settings.slots,
        max_model_len=length,
        rows_per_slot=1 + fraction,
        # One for the shared part of the KV cache, which has at most the size of a row.
        extra_rows=PROMPT_ROWS + 1,
        free_bytes=models.free_bytes(model.device, fraction=settings.gpu_memory_utilization),
    )
    end_ids = models.end_token_ids(model.generation_config, tokenizer)
    decoder = Decoder(model, num_rows=settings.slots + PROMPT_ROWS, capacity=length, live=live)
    cached_rows = CachedRows(
        decoder, num_rows=settings.slots, max_kept=int(fraction * settings.slots * length)
    )
    rows = Rows(settings.slots, tokenizer, end_ids, max_model_len=length)
    return RowEngine(cached_rows, rows, step=step, merger=merger)


@torch.inference_mode()
def _state_bytes(model: models.Model) -> int:
    """Size of the states of a row, as one token gives it."""
    decoder = Decoder(model, num_rows=1, capacity=1, live=True)
    first = np.zeros((1, 1), np.int64)
    decoder.hidden_states([NewTokens(first, first, first_row=0)])
    return sum(state.nbytes for state in decoder.cache.states.values())


class CachedRows:
    """The rows of the KV cache, with prompts and at most `max_kept` tokens of ended turns.

    Implements row_engine.RowDecoder.
    """

    def __init__(self, decoder: Decoder, *, num_rows: int, max_kept: int) -> None:
        self._decoder = decoder
        self._prefix_cache = PrefixCache(decoder, first_row=num_rows)
        self._turn_cache = TurnCache(decoder, max_tokens=max_kept)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._decoder.weights.apply(weights)
        self.invalidate()

    def invalidate(self) -> None:
        """Drop the keys and values of prompts and turns."""
        self._prefix_cache.invalidate()
        self._turn_cache.clear()

    def start(
        self, requests: Sequence[Request], first_row: int
    ) -> tuple[list[Request], Tensor | None]:
        """Fill rows with requests that continue a kept turn, or whose prompts are computed.

        Those of standalone requests are computed here: in the prefix cache, they would shorten the
        common prefix of the others.
        """
        # One of several requests that continue the same turn; the others compute their prompts.
        kept = {each.continues: each for each in requests if each in self._turn_cache}
        started = list(kept.values())
        others = [each for each in requests if each is not kept.get(each.continues)]
        logits = list[Tensor]()
        for start in range(0, len(started), PROMPT_ROWS):
            batch = started[start : start + PROMPT_ROWS]
            logits += self._turn_cache.restore(batch, first_row=first_row + start)
        for request in others:
            row = first_row + len(started)
            prefix = request.prefix_ids
            if request.is_standalone:
                positions = np.arange(len(prefix))[None]
                tokens = NewTokens(prefix[None].astype(np.int64), positions, first_row=row)
                (hidden,) = self._decoder.hidden_states([tokens])
                logits.append(self._decoder.logits(hidden[:, -1])[0])
            elif prefix in self._prefix_cache:
                logits.append(self._prefix_cache.copy_to(row, prefix))
            else:
                continue
            started.append(request)
        return started, torch.stack(logits) if logits else None

    def decode(
        self, tokens: np.ndarray, positions: np.ndarray, waiting: Sequence[Request]
    ) -> Tensor:
        newest = NewTokens(tokens[:, None], positions[:, None], first_row=0)
        running = [newest] if len(tokens) else []
        if waiting:
            return self._prefix_cache.compute([each.prefix_ids for each in waiting], running)
        (hidden,) = self._decoder.hidden_states(running)
        return self._decoder.logits(hidden[:, -1])

    def sample(
        self, logits: Tensor, part: np.ndarray | slice, inputs: SamplingInputs
    ) -> tuple[np.ndarray, np.ndarray]:
        return sample_rows(logits[part], inputs, library=self._decoder.library)

    def keep(self, request: Request, row: int, length: int) -> None:
        self._turn_cache.keep(request, row, length)

    def remove(self, row: int, last: int, last_length: int) -> None:
        if last != row:
            self._decoder.cache.copy(last, row, last_length)
        self._decoder.cache.spans[last] = EMPTY_SPAN  # the free row uses no shared prefix

    def reset(self, *, is_damaged: bool = False) -> None:
        self._prefix_cache.allow_replacement()
        if is_damaged:
            self._decoder.cache.clear()
            self.invalidate()
