"""MLX engine: continuous batching of completions over mlx-lm's KV caches.

A row holds one completion in progress: row i is entry i of the cache of every layer. A decode step
adds one token to every row. Between two decode steps the caller may apply newer weights: running
rows keep their keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]
import numpy as np
import torch

from peralta_zmq import models
from peralta_zmq.engines.loading import (
    AdapterMerger,
    loading_errors,
    merger_of_files,
    read_config,
)
from peralta_zmq.engines.mlx.model import OTHERS, MlxModel, check_config
from peralta_zmq.engines.mlx.sampler import sample
from peralta_zmq.engines.rows import (
    GIB,
    Rows,
    check_cache_memory,
    read_requests,
)
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
    logger.info("device=%s dtype=%s (%s)%s", device, name, reason, quantized)
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
        self._cancelled = False

    def apply(self, update: WeightUpdate) -> None:
        """Sample from the new weights from the next token on.

        Raises ValueError, with nothing changed, if the weights belong to another model.
        """
        self._model.apply(self._merger.weights_of(update))
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
        """Yield each completion when it ends; see registry.Engine."""
        self._cancelled = False
        rows = Rows(
            self._slots,
            self._tokenizer,
            sampling,
            self._end_ids,
            max_model_len=self.max_model_len,
        )
        loop = DecodeLoop(self._model, rows)
        source, has_more = iter(requests), True
        while not self._cancelled and (has_more or rows.count):
            if has_more:
                batch, has_more = read_requests(
                    source,
                    sampling,
                    limit=self._slots - rows.count,
                    max_model_len=self.max_model_len,
                )
                loop.start(batch, step=self.step)
                yield from loop.pop_ended()
            loop.advance(step=self.step)
            yield from loop.pop_ended()
            if between_steps is not None:
                between_steps()
        yield from rows.partial_completions()


class DecodeLoop:
    """One `generate` call: starts rows, advances all rows, removes ended rows."""

    def __init__(self, model: MlxModel, rows: Rows) -> None:
        self._model, self._rows = model, rows
        self._cache: list[Any] = []  # of each layer

    def start(self, requests: Sequence[Request], *, step: int) -> None:
        """Give each request a row and sample its first token; computes equal prompts once."""
        if not requests:
            return
        prompts = {request.prefix_ids.tobytes(): request.prefix_ids for request in requests}
        numbers = {key: number for number, key in enumerate(prompts)}
        logits, cache = self._model.prefill(list(prompts.values()))
        prompt_of_row = mx.array([numbers[request.prefix_ids.tobytes()] for request in requests])
        for layer in cache:
            layer.filter(prompt_of_row)
        for running, started in zip(self._cache, cache, strict=bool(self._cache)):
            running.extend(started)
        self._cache = self._cache or cache
        first_row = self._rows.count
        for request in requests:
            self._rows.start(request)
        self._sample(first_row, logits[prompt_of_row], step)

    def advance(self, *, step: int) -> None:
        """Sample one more token for every row."""
        if self._rows.count:
            tokens, _ = self._rows.newest()
            self._sample(0, self._model.logits(tokens, self._cache), step)

    def pop_ended(self) -> list[Completion]:
        """The completions that have ended; their rows are free after the call."""
        completions: list[Completion] = []
        kept = list(range(self._rows.count))
        for row in self._rows.ended():
            completions.append(self._rows.completion(row))
            kept[row] = kept[self._rows.remove(row)]
            kept.pop()
        if not kept:
            self._cache = []
        elif completions:
            for layer in self._cache:
                layer.filter(mx.array(kept))
        return completions

    def _sample(self, first_row: int, logits: Any, step: int) -> None:
        """Sample the next token of all rows from `first_row` on; `logits` are [n, V]."""
        rows, vocab_size = np.arange(first_row, self._rows.count), logits.shape[-1]
        tokens, logprobs = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
        for sampling, part in self._rows.by_sampling(rows, step):
            sampled_tokens, sampled_logprobs = sample(
                logits[part if isinstance(part, slice) else mx.array(part)],
                sampling,
                mx.array(self._rows.next_uniforms(rows[part])),
                seen=_array(self._rows.seen_tokens(rows[part], sampling, vocab_size)),
                banned=_array(self._rows.banned_tokens(rows[part], vocab_size)),
            )
            tokens[part], logprobs[part] = np.array(sampled_tokens), np.array(sampled_logprobs)
        self._rows.append(rows, tokens, logprobs, step=step)


def _array(mask: BoolArray | None) -> Any:
    return None if mask is None else mx.array(mask)
