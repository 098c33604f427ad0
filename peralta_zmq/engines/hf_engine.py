"""Engine on transformers' forward pass and cache, for every model (engine.name hf).

It is slower than the native engine: prompts are padded to one length, and the next batch of
requests starts when all rows of a batch have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peralta_zmq import models
from peralta_zmq.engines.engine_models import AdapterMerger, open_model
from peralta_zmq.engines.native.token_sampler import sample_rows
from peralta_zmq.engines.row_engine import RowEngine, Rows, SamplingInputs
from peralta_zmq.models.rotary import check_length
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Request

# Names of a cache in the inputs and outputs of transformers' models; the second is Mamba's.
CACHES = ("past_key_values", "cache_params")


def open(folder: Path, settings: EngineSettings, *, step: int = 0) -> RowEngine:
    model, tokenizer, merger = open_model(folder, settings)
    return open_live(model, tokenizer, settings, step=step, merger=merger)


def open_live(
    model: models.Model,
    tokenizer: models.Tokenizer,
    settings: EngineSettings,
    *,
    step: int = 0,
    merger: AdapterMerger | None = None,
) -> RowEngine:
    check_length(model.config, settings.max_model_len)
    length = min(settings.max_model_len, models.max_positions(model))
    end_ids = models.end_token_ids(model.generation_config, tokenizer)
    rows = Rows(settings.slots, tokenizer, end_ids, max_model_len=length)
    return RowEngine(HfRows(model), rows, step=step, merger=merger)


class HfRows:
    """The rows of one batch in the cache of a transformers model (row_engine.RowDecoder).

    Entry i of the batch, [B] entries of L tokens padded on the left, is the i-th request that was
    started. An entry whose row was removed gets padding as further tokens.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._options = models.forward_options(model)
        self._cache: dict[str, Any] = {}
        self._ids = torch.empty(0, 0)  # [B, L]
        self._is_token = torch.empty(0, 0)  # [B, L], 1 for tokens, 0 for padding
        self._entries = np.zeros(0, np.int64)  # entry of each row

    def start(
        self, requests: Sequence[Request], first_row: int
    ) -> tuple[list[Request], Tensor | None]:
        """Compute the prefixes of all requests, unless rows are in use."""
        if first_row:
            return [], None
        prefixes = [torch.from_numpy(request.prefix_ids).long() for request in requests]
        self._ids, self._is_token = (
            pad_sequence(rows, batch_first=True, padding_side="left").to(self._model.device)
            for rows in (prefixes, [torch.ones_like(prefix) for prefix in prefixes])
        )
        self._entries = np.arange(len(requests))
        self._cache = {}
        return list(requests), self._logits()

    def decode(
        self, tokens: np.ndarray, positions: np.ndarray, waiting: Sequence[Request]
    ) -> Tensor | None:
        if not len(tokens):
            return None
        newest = self._ids.new_zeros(len(self._ids), 1)
        newest[self._entries, 0] = torch.from_numpy(tokens).to(newest.device)
        is_token = torch.zeros_like(newest)
        is_token[self._entries] = 1
        self._ids = torch.cat([self._ids, newest], 1)
        self._is_token = torch.cat([self._is_token, is_token], 1)
        return self._logits()[self._entries]

    def _logits(self) -> Tensor:
        """Logits [B, V] after the last token of each entry; without a cache, computes all."""
        inputs: dict[str, Any] = {"logits_to_keep": 1}
        inputs["position_ids"] = (self._is_token.cumsum(1) - 1) * self._is_token
        output = self._model(
            **self._model.prepare_inputs_for_generation(
                self._ids,
                next_sequence_length=1 if self._cache else None,
                attention_mask=self._is_token,
                is_first_iteration=not self._cache,
                use_cache=True,
                **self._cache,
                **{name: value for name, value in inputs.items() if name in self._options},
            )
        )
        found = {name: getattr(output, name, None) for name in CACHES}
        self._cache = {name: cache for name, cache in found.items() if cache is not None}
        return output.logits[:, -1].float()

    def sample(
        self, logits: Tensor, part: np.ndarray | slice, inputs: SamplingInputs
    ) -> tuple[np.ndarray, np.ndarray]:
        return sample_rows(logits[part], inputs)

    def keep(self, request: Request, row: int, length: int) -> None:
        """Turns are not kept."""

    def remove(self, row: int, last: int, last_length: int) -> None:
        self._entries[row] = self._entries[last]
        self._entries = self._entries[:-1]

    def reset(self, *, is_damaged: bool = False) -> None:
        self._cache = {}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        models.apply_weights(self._model, weights)
