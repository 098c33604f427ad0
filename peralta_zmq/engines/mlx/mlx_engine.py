"""MLX engine: continuous batching of completions over mlx-lm's KV caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]
import numpy as np
import torch

from peralta_zmq import models
from peralta_zmq.engines.engine_models import (
    chosen_device,
    loading_errors,
    merger_of_files,
    open_files,
    read_config,
)
from peralta_zmq.engines.mlx.mlx_model import OTHERS, MlxModel, check_config
from peralta_zmq.engines.row_engine import RowEngine, Rows, SamplingInputs, check_cache_memory
from peralta_zmq.errors import ConfigError
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Request, Sampling


def open_engine(folder: Path, settings: EngineSettings, *, step: int) -> RowEngine:
    device, dtype = chosen_device(settings)
    mx.set_default_device(mlx_device(device))
    tokenizer, end_ids, weights = open_files(folder, settings)
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
        model = MlxModel(config, weights, dtype=dtype, quantize=settings.quantize)
    rounded_to = torch.float32 if settings.quantize else dtype  # quantized weights: another grid
    trust = {"trust_remote_code": settings.trust_remote_code}
    merger = merger_of_files(folder, rounded_to, **trust)
    check_cache_memory(
        model.row_bytes(max_model_len),
        slots=settings.slots,
        max_model_len=max_model_len,
        free_bytes=free_bytes(device, fraction),
    )
    rows = Rows(settings.slots, tokenizer, end_ids, max_model_len=max_model_len)
    return RowEngine(CachedRows(model), rows, step=step, merger=merger)


def mlx_device(device: torch.device) -> Any:
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
    if (needed := num_parameters * dtype.itemsize) > free_bytes:
        raise ConfigError(
            f"the model needs {needed / 2**30:.1f} GiB for its weights in "
            f"{str(dtype).removeprefix('torch.')}, {free_bytes / 2**30:.1f} GiB are free; choose a "
            "smaller model.name, or a machine with more memory"
        )


class CachedRows:
    """The rows of mlx-lm's caches (row_engine.RowDecoder)."""

    def __init__(self, model: MlxModel) -> None:
        self._model = model
        self._cache: list[Any] = []  # mlx-lm's cache of each layer
        self._entries: list[int] = []  # entry of the cache for each row
        self._is_scattered = False  # whether rows were freed since `_compact`

    def start(self, requests: Sequence[Request], first_row: int) -> tuple[list[Request], Any]:
        """Compute the prompts of all requests; equal ones once."""
        prompts = {request.prefix_ids.tobytes(): request.prefix_ids for request in requests}
        keys = list(prompts)
        logits, cache = self._model.prefill(list(prompts.values()))
        prompt_of_row = mx.array([keys.index(each.prefix_ids.tobytes()) for each in requests])
        for layer in cache:
            layer.filter(prompt_of_row)
        self._compact()
        for running, started in zip(self._cache, cache, strict=bool(self._cache)):
            running.extend(started)
        self._cache = self._cache or cache
        self._entries = list(range(first_row + len(requests)))
        return list(requests), logits[prompt_of_row]

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._model.apply(weights)

    def decode(self, tokens: np.ndarray, positions: np.ndarray, waiting: Sequence[Request]) -> Any:
        self._compact()
        return self._model.logits(tokens, self._cache)

    def sample(
        self, logits: Any, part: np.ndarray | slice, inputs: SamplingInputs
    ) -> tuple[np.ndarray, np.ndarray]:
        indices = part if isinstance(part, slice) else mx.array(part)
        tokens, logprobs = sample(logits[indices], inputs)
        return np.array(tokens), np.array(logprobs)

    def keep(self, request: Request, row: int, length: int) -> None:
        """Turns are not kept."""

    def remove(self, row: int, last: int, last_length: int) -> None:
        self._entries[row] = self._entries[last]
        self._entries.pop()
        self._is_scattered = True

    def reset(self, *, is_damaged: bool = False) -> None:
        self._cache = []
        self._entries = []
        self._is_scattered = False

    def _compact(self) -> None:
        """Remove the entries of all freed rows from the caches."""
        if not self._entries:
            self._cache = []
        elif self._is_scattered:
            for layer in self._cache:
                layer.filter(mx.array(self._entries))
        self._entries = list(range(len(self._entries)))
        self._is_scattered = False


def sample(logits: Any, inputs: SamplingInputs) -> tuple[Any, Any]:
    """Sample tokens [n] from logits [n, V]; returns them and their logprobs [n] in float32."""
    sampling = inputs.sampling
    logits = logits.astype(mx.float32)
    scaled = logits / (sampling.temperature or 1.0)
    adjusted = logits
    if inputs.seen is not None:
        penalty = sampling.repetition_penalty
        penalized = mx.where(logits < 0, logits * penalty, logits / penalty)
        adjusted = mx.where(mx.array(inputs.seen), penalized, logits)
    if inputs.banned is not None:
        adjusted = mx.where(mx.array(inputs.banned), -mx.inf, adjusted)
    if sampling.temperature == 0:
        tokens = mx.argmax(adjusted, axis=-1)
    else:
        tokens = _sample_tokens(adjusted, sampling, mx.array(inputs.uniforms)[:, None])
    chosen = mx.take_along_axis(scaled, tokens[:, None], axis=-1)
    return tokens, (chosen - mx.logsumexp(scaled, axis=-1, keepdims=True))[:, 0]


def _sample_tokens(logits: Any, sampling: Sampling, uniform: Any) -> Any:
    token_ids = None  # [n, k], most probable first; None = the whole vocabulary, in its order
    if sampling.top_k or sampling.top_p < 1:
        token_ids = mx.argsort(-logits, axis=-1)[:, : sampling.top_k or None]
        logits = mx.take_along_axis(logits, token_ids, axis=-1)
    probs = mx.softmax(logits / sampling.temperature, axis=-1)
    if sampling.top_p < 1:  # keeps the token at which the sum of probs crosses top_p
        probs = mx.where(mx.cumsum(probs, axis=-1) - probs >= sampling.top_p, 0, probs)
    if sampling.min_p > 0:
        probs = mx.where(probs < sampling.min_p * probs.max(-1, keepdims=True), 0, probs)
    # Sums of a parallel scan may decrease by rounding, so a token also needs a probability.
    cumulated = mx.cumsum(probs, axis=-1)
    is_above = (cumulated > uniform * cumulated[:, -1:]) & (probs > 0)
    index = mx.argmax(mx.where(is_above.any(-1, keepdims=True), is_above, probs), axis=-1)
    return index if token_ids is None else mx.take_along_axis(token_ids, index[:, None], -1)[:, 0]
