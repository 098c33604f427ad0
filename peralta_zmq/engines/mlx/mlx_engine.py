"""MLX engine: continuous batching of completions over mlx-lm's KV caches.

Row i of the decode loop is entry i of the cache of every layer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]
import numpy as np
import torch

from peralta_zmq import models
from peralta_zmq.engines.completion_rows import GIB, Rows, check_cache_memory
from peralta_zmq.engines.decode_loop import DecodeLoop
from peralta_zmq.engines.engine_models import (
    AdapterMerger,
    loading_errors,
    merger_of_files,
    read_config,
)
from peralta_zmq.engines.mlx.mlx_model import OTHERS, MlxModel, check_config
from peralta_zmq.engines.mlx.mlx_token_sampler import sample
from peralta_zmq.errors import ConfigError
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import BoolArray, Completion, Request, Sampling

logger = logging.getLogger(__name__)


def open_engine(folder: Path, settings: EngineSettings, *, step: int) -> Engine:
    """An engine with the weights in `folder`; errors as in registry.EngineFactory."""
    device = models.choose_device(settings.device)
    mx.set_default_device(mlx_device(device))
    dtype, reason = models.choose_dtype(device, settings.dtype)
    name, bits = str(dtype).removeprefix("torch."), settings.quantize
    quantized = f" quantize={bits}" if bits else ""
    logger.debug("device=%s dtype=%s (%s)%s", device, name, reason, quantized)
    models.check_code(folder, trust_remote_code=settings.trust_remote_code)
    with loading_errors(folder):
        tokenizer = models.load_tokenizer(folder, trust_remote_code=settings.trust_remote_code)
        end_ids = models.folder_end_ids(folder, tokenizer)
        weights = models.folder_weights(folder)
    config = read_config(folder)
    sizes = {**config, **config.get("text_config", {})}
    limit = sizes.get("max_position_embeddings") or settings.max_model_len
    max_model_len = min(settings.max_model_len, limit)
    check_config(config, max_model_len=max_model_len)
    num_parameters = sum(tensor.numel() for tensor in weights.values())
    fraction = settings.gpu_memory_utilization
    if fraction is not None:
        mx.set_memory_limit(int(fraction * models.total_bytes(device)))
    check_weights_memory(num_parameters, dtype, free_bytes(device, fraction))
    with loading_errors(folder):
        model = MlxModel(config, weights, dtype=dtype, quantize=bits)
    rounded_to = torch.float32 if bits else dtype  # quantized weights have another grid
    trust = settings.trust_remote_code
    merger = merger_of_files(folder, rounded_to, trust_remote_code=trust)
    check_cache_memory(
        model.row_bytes(max_model_len),
        slots=settings.slots,
        max_model_len=max_model_len,
        free_bytes=free_bytes(device, fraction),
    )
    size = {"slots": settings.slots, "max_model_len": max_model_len}
    return Engine(model, tokenizer, end_ids, merger, step=step, **size)


def mlx_device(device: torch.device) -> Any:
    """MLX's name for a device of torch. Raises ConfigError for CUDA."""
    if device.type == "cuda":
        raise ConfigError(
            f"engine 'mlx' does not run on device {device}; set model.device to cpu, or {OTHERS}"
        )
    return mx.cpu if device.type == "cpu" else mx.gpu


def free_bytes(device: torch.device, fraction: float | None) -> int:
    """Bytes that MLX can allocate. torch does not count what MLX has allocated on a GPU."""
    free = models.free_bytes(device, fraction=fraction)
    return free - (0 if device.type == "cpu" else mx.get_active_memory())


def check_weights_memory(num_parameters: int, dtype: torch.dtype, free_bytes: int) -> None:
    """Raise ConfigError if the weights do not fit into the free memory."""
    if (needed := num_parameters * dtype.itemsize) > free_bytes:
        raise ConfigError(
            f"the model needs {needed / GIB:.1f} GiB for its weights in "
            f"{str(dtype).removeprefix('torch.')}, {free_bytes / GIB:.1f} GiB are free; choose a "
            "smaller model.name, or a machine with more memory"
        )


class Engine:
    """Samples up to `slots` completions at the same time; implements registry.Engine."""

    def __init__(
        self,
        model: MlxModel,
        tokenizer: models.Tokenizer,
        end_ids: Sequence[int],
        merger: AdapterMerger,
        *,
        step: int,
        slots: int,
        max_model_len: int,
    ) -> None:
        self.step = step
        self._model, self._tokenizer = model, tokenizer
        self._slots, self.max_model_len = slots, max_model_len
        self._end_ids, self._merger = end_ids, merger
        self._loop: DecodeLoop | None = None  # before the first request

    def num_free(self) -> int:
        """Number of requests that can be submitted now."""
        return self._slots - (self._loop.num_in_flight if self._loop else 0)

    def submit(self, requests: Sequence[Request]) -> None:
        """Start requests at the next `advance`."""
        if self._loop is None:
            rows = Rows(
                self._slots, self._tokenizer, self._end_ids, max_model_len=self.max_model_len
            )
            self._loop = DecodeLoop(CachedRows(self._model), rows)
        self._loop.submit(requests)

    def advance(self) -> list[Completion]:
        """Take a decode step; see registry.Engine."""
        return [] if self._loop is None else self._loop.advance(self.step)

    def drop(self, ids: Collection[int]) -> list[Completion]:
        """End requests; returns the partial completions with a token."""
        return [] if self._loop is None else self._loop.drop(ids)

    def apply(self, update: WeightUpdate) -> None:
        """Sample from the new weights from the next token on.

        Raises ValueError, with nothing changed, if the weights belong to another model.
        """
        self._model.apply(self._merger.weights_of(update))
        self.step = update.step


class CachedRows:
    """The rows of mlx-lm's caches (decode_loop.RowDecoder)."""

    def __init__(self, model: MlxModel) -> None:
        self._model = model
        self._cache: list[Any] = []  # of each layer
        self._entries: list[int] = []  # entry of the cache for each row
        self._is_scattered = False  # whether rows were freed since `_compact`

    def start(self, requests: Sequence[Request], first_row: int) -> tuple[list[Request], Any]:
        """Compute the prompts of all requests; equal ones once."""
        prompts = {request.prefix_ids.tobytes(): request.prefix_ids for request in requests}
        numbers = {key: number for number, key in enumerate(prompts)}
        logits, cache = self._model.prefill(list(prompts.values()))
        prompt_of_row = mx.array([numbers[request.prefix_ids.tobytes()] for request in requests])
        for layer in cache:
            layer.filter(prompt_of_row)
        self._compact()
        for running, started in zip(self._cache, cache, strict=bool(self._cache)):
            running.extend(started)
        self._cache = self._cache or cache
        self._entries = list(range(first_row + len(requests)))
        return list(requests), logits[prompt_of_row]

    def decode(self, tokens: np.ndarray, positions: np.ndarray, waiting: Sequence[Request]) -> Any:
        """Compute the newest tokens of all rows; no request is waiting."""
        self._compact()
        return self._model.logits(tokens, self._cache)

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
        """Sample a token for each row of `part`."""
        tokens, logprobs = sample(
            logits[part if isinstance(part, slice) else mx.array(part)],
            sampling,
            mx.array(uniforms),
            seen=_array(seen),
            banned=_array(banned),
        )
        return np.array(tokens), np.array(logprobs)

    def keep(self, request: Request, row: int, length: int) -> None:
        """Turns are not kept."""

    def remove(self, row: int, last: int, last_length: int) -> None:
        """Let `row` use the entry of row `last`."""
        self._entries[row] = self._entries[last]
        self._entries.pop()
        self._is_scattered = True

    def reset(self, *, is_damaged: bool = False) -> None:
        """Drop the caches."""
        self._cache = []
        self._entries = []
        self._is_scattered = False

    def _compact(self) -> None:
        """Remove the entries of freed rows from the caches, once for all rows freed together."""
        if not self._entries:
            self._cache = []
        elif self._is_scattered:
            for layer in self._cache:
                layer.filter(mx.array(self._entries))
        self._entries = list(range(len(self._entries)))
        self._is_scattered = False


def _array(mask: BoolArray | None) -> Any:
    return None if mask is None else mx.array(mask)
