"""MLX engine: continuous batching of completions over mlx-lm's models and KV caches.

In shapes: n rows, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]
import mlx.nn as nn  # pyright: ignore[reportMissingImports]
import numpy as np
import torch
from mlx_lm.models.cache import make_prompt_cache  # pyright: ignore[reportMissingImports]
from mlx_lm.utils import MODEL_REMAPPING, _get_classes  # pyright: ignore

from peralta_zmq import models
from peralta_zmq.engines.engine_models import (
    chosen_device,
    loading_errors,
    merger_of_files,
    open_files,
    read_config,
)
from peralta_zmq.engines.row_engine import RowEngine, Rows, SamplingInputs, check_cache_memory
from peralta_zmq.errors import ConfigError
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Request, Sampling

OTHERS = "set engine.name to native or hf"
GROUP_SIZE = 64  # weights that share a scale when quantized


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


def check_config(config: Mapping[str, Any], *, max_model_len: int) -> None:
    """Raise ConfigError for a config.json that mlx-lm does not compute as transformers does."""
    family = config.get("model_type")
    if not supports(config):
        raise ConfigError(f"engine 'mlx' has no model '{family}' in mlx-lm; {OTHERS}")
    if family == "gemma2":  # its attention applies the mask of one completion to another
        raise ConfigError(f"engine 'mlx': mlx-lm's {family} cannot batch completions; {OTHERS}")
    if "auto_map" in config:
        raise ConfigError(f"engine 'mlx' does not run custom Python code of a model; {OTHERS}")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    layer_types = config.get("layer_types") or ["sliding_attention"]
    if window is None or window >= max_model_len or "sliding_attention" not in layer_types:
        return
    if not any(hasattr(each, "max_size") for each in make_prompt_cache(_new_model(config))):
        raise ConfigError(
            f"engine 'mlx' computes {family} without its sliding window; set "
            f"engine.max_model_len to at most {window}, or {OTHERS}"
        )


def supports(config: Mapping[str, Any]) -> bool:
    family = str(config.get("model_type"))
    module = f"mlx_lm.models.{MODEL_REMAPPING.get(family, family)}"
    return importlib.util.find_spec(module) is not None


class MlxModel:
    """mlx-lm's model for a config.json with the weights of a folder, in `dtype`.

    `quantize` is the number of bits of quantized weights. Raises ValueError for foreign weights.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        quantize: int | None = None,
    ) -> None:
        self._model = _new_model(config)
        self._dtype = dtype
        if quantize:

            def is_quantizable(path: str, module: Any) -> bool:
                return hasattr(module, "to_quantized") and not module.weight.shape[-1] % GROUP_SIZE

            nn.quantize(self._model, GROUP_SIZE, quantize, class_predicate=is_quantizable)
        self._shapes = {name: tensor.shape for name, tensor in weights.items()}
        # `sanitize` renames, transposes or stacks the tensors of some families, for each version.
        # For all others it is called once: in some it fails when it is called again.
        arrays = self._arrays(weights)
        sanitized = self._sanitized(arrays)
        self._names = [name for name in sanitized if sanitized[name] is arrays.get(name)]
        self._keeps_names = len(self._names) == len(sanitized)
        self._load(sanitized)

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights. Raises ValueError, with nothing changed, if they do not fit."""
        models.check_weights(self._shapes, tensors)
        arrays = self._arrays(tensors)
        kept = {name: arrays[name] for name in self._names}
        self._load(kept if self._keeps_names else self._sanitized(arrays))

    def logits(self, tokens: np.ndarray, cache: list[Any]) -> Any:
        """Logits [n, V] after `tokens` [n], which are added to the cache of n rows."""
        return self._model(mx.array(tokens)[:, None], cache=cache)[:, -1]

    def prefill(self, prompts: Sequence[np.ndarray]) -> tuple[Any, list[Any]]:
        """Logits [n, V] after n prompts, and the cache with one row for each."""
        lengths = np.array([len(prompt) - 1 for prompt in prompts])
        caches = [make_prompt_cache(self._model) for _ in prompts]
        cache = [layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]
        longest = int(lengths.max())
        if longest:
            padding = longest - lengths
            padded = np.zeros((len(prompts), longest), np.int32)
            for row, prompt in enumerate(prompts):
                padded[row, : lengths[row]] = prompt[:-1]
            for each in cache:
                each.prepare(lengths=lengths.tolist(), right_padding=padding.tolist())
            width = max(1, 2048 // len(prompts))  # limits the memory of a forward pass
            for start in range(0, longest, width):
                self._model(mx.array(padded[:, start : start + width]), cache=cache)
                mx.eval([each.state for each in cache])
            for each in cache:
                each.finalize()
        return self.logits(np.array([prompt[-1] for prompt in prompts]), cache), cache

    def row_bytes(self, max_model_len: int) -> int:
        _, cache = self.prefill([np.zeros(1, np.int32)])
        return sum(_cache_bytes(each, max_model_len) for each in cache)

    def _arrays(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {name: _array_of(tensors[name].to(self._dtype)) for name in tensors}

    def _sanitized(self, arrays: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(self._model, "sanitize"):
            return dict(arrays)
        return self._model.sanitize(dict(arrays))

    def _load(self, arrays: dict[str, Any]) -> None:
        for path, module in self._model.named_modules():
            if hasattr(module, "bits") and f"{path}.weight" in arrays:
                quantized = mx.quantize(arrays[f"{path}.weight"], GROUP_SIZE, module.bits)
                names = (f"{path}.{name}" for name in ("weight", "scales", "biases"))
                arrays |= dict(zip(names, quantized, strict=True))
        self._model.load_weights(list(arrays.items()))
        mx.eval(self._model.parameters())


def _new_model(config: Mapping[str, Any]) -> Any:
    """A model whose random weights take no memory, because MLX computes on demand."""
    config = {**config, **_mlx_settings(config)}
    model_class, settings_class = _get_classes(config)
    model = model_class(settings_class.from_dict(config))
    model.eval()
    return model


def _mlx_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that transformers 5 nests in `rope_parameters`, under the names of mlx-lm."""
    rope = config.get("rope_parameters") or {}
    settings: dict[str, Any] = {}
    if "full_attention" in rope:
        local = rope.get("sliding_attention", {})
        rope = rope["full_attention"]
        settings["rope_local_base_freq"] = local.get("rope_theta")
    if rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = dict(rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        settings[name] = rope.get(name)
    layer_types = config.get("layer_types") or []
    if {"sliding_attention", "full_attention"} == set(layer_types):
        settings["sliding_window_pattern"] = layer_types.index("full_attention") + 1
    return {name: value for name, value in settings.items() if value is not None}


def _cache_bytes(cache: Any, max_model_len: int) -> int:
    if not hasattr(cache, "keys"):  # a state that does not grow
        return cache.nbytes
    length = min(max_model_len, getattr(cache, "max_size", max_model_len))  # sliding window
    return cache.nbytes // cache.keys.shape[2] * length


def _array_of(tensor: torch.Tensor) -> Any:
    """A copy of a CPU tensor. NumPy has no bfloat16, so its bits are copied."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())
