"""vLLM engine: continuous batching in a process with vLLM (core.py), one step at a time.

Running completions keep their keys and values when newer weights are applied between two steps.
Adapters are merged, because vLLM cannot exchange the adapter of a running completion.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from peralta_zmq import models
from peralta_zmq.engines.engine_models import (
    chosen_device,
    loading_errors,
    merger_of_files,
    open_files,
)
from peralta_zmq.engines.row_engine import Rows, check_cache_memory, max_new_tokens
from peralta_zmq.engines.vllm.core import NewRequest, Token
from peralta_zmq.engines.vllm.process import CoreError, CoreProcess
from peralta_zmq.engines.vllm.refusals import OTHERS, check_arguments, check_sampling
from peralta_zmq.errors import (
    ConfigError,
    EngineError,
    EngineProcessError,
    OutageError,
    StoreError,
)
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import Completion, Request


class VllmEngine:
    """Samples up to `slots` completions at the same time; implements registry.Engine."""

    def __init__(self, folder: Path, settings: EngineSettings, *, step: int) -> None:
        device, dtype = chosen_device(settings)
        check_device(device)
        check_arguments(settings.vllm_args)
        files = open_files(folder, settings)
        trust = {"trust_remote_code": settings.trust_remote_code}
        with loading_errors(folder):
            self._shapes = {name: tensor.shape for name, tensor in files.weights.items()}
            config = AutoConfig.from_pretrained(folder, **trust).get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or settings.max_model_len
        self.step = step
        self.max_model_len = min(settings.max_model_len, limit)
        self._arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature
            "async_scheduling": False,  # would begin the next step before newer weights are applied
            "enable_prefix_caching": True,
            "generation_config": "vllm",  # not the sampling options of the model's folder
            "disable_log_stats": True,
            **trust,
        }
        if settings.gpu_memory_utilization is not None:
            self._arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
        elif device.type == "cpu":
            self._arguments["kv_cache_memory_bytes"] = cache_bytes(
                config, dtype, slots=settings.slots, max_model_len=self.max_model_len
            )
        # The trainer computes logits in float32, too.
        overrides = {"head_dtype": "float32", **settings.vllm_args.get("hf_overrides", {})}
        self._arguments |= {**settings.vllm_args, "hf_overrides": overrides}
        self._folder = folder
        self._slots = settings.slots
        self._end_ids = files.end_ids
        self._merger = merger_of_files(folder, dtype, **trust)
        self._rows = Rows(
            settings.slots, files.tokenizer, files.end_ids, max_model_len=self.max_model_len
        )
        self._waiting: dict[int, Request] = {}  # by index; requests without a token yet
        self._submitted: list[Request] = []  # waiting requests that the process does not have
        self._dropped: list[int] = []  # completions that ended here, but not in the process
        self._core: CoreProcess | None = self._start()

    @classmethod
    def open(cls, folder: Path, settings: EngineSettings, *, step: int = 0) -> VllmEngine:
        return cls(folder, settings, step=step)

    def apply(self, update: WeightUpdate) -> None:
        weights = self._merger.weights_of(update)
        models.check_weights(self._shapes, weights)
        core = self._core = self._core or self._restart()
        has_files = update.folder is not None and not update.is_adapter
        with nullcontext(update.folder) if has_files else saved(weights) as folder:
            self._call(core, "reload", str(folder))
            if (name := self._call(core, "differing_tensor", str(folder))) is not None:
                self.close()
                raise EngineProcessError(
                    f"vLLM still has other values in {name} after loading the weights of step "
                    f"{update.step}"
                )
        self.step = update.step

    def close(self) -> None:
        """End the process; `apply` starts it again."""
        if self._core is not None:
            self._core.kill()
            self._core = None

    def __del__(self) -> None:
        with suppress(AttributeError):  # vLLM did not start
            self.close()

    def num_free(self) -> int:
        return self._slots - self._rows.count - len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises ConfigError for sampling options of groups that vLLM lacks."""
        for request in requests:
            if not request.is_standalone:
                check_sampling(request.sampling)
        self._waiting |= {request.index: request for request in requests}
        self._submitted += requests

    def advance(self) -> list[Completion]:
        if not (self._waiting or self._rows.count):
            return []
        if self._core is None:
            raise EngineProcessError("the process of vLLM has failed")
        started = [new_request(request, self.max_model_len) for request in self._submitted]
        prompts = {request.prompt_ids.tobytes(): request for request in self._waiting.values()}
        num_new = sum(len(request.prompt_ids) for request in prompts.values())
        tokens = self._call(self._core, "step", started, self._dropped, prompt_tokens=num_new)
        self._submitted = []
        try:
            self._append(tokens)
        except EngineError:
            self._clear()
            self.close()  # keys and values that are not finite would stay in its cache
            raise
        ended = self._rows.ended()
        completions = [self._rows.completion(row) for row in ended]
        for row in ended:
            self._rows.remove(row)
        # vLLM ignores stop strings.
        self._dropped = [completion.index for completion in completions]
        return completions

    def drop(self, ids: Collection[int]) -> list[Completion]:
        """End requests; also returns the partial completions of a failed process."""
        self._submitted = [request for request in self._submitted if request.index not in ids]
        self._waiting = {
            index: request for index, request in self._waiting.items() if index not in ids
        }
        rows = self._rows.find(ids)
        completions = [self._rows.completion(row) for row in rows]
        for row in rows:
            self._rows.remove(row)
        self._dropped += ids
        return completions

    def _clear(self) -> None:
        self._rows.clear()
        self._waiting = {}
        self._submitted = []
        self._dropped = []

    def _append(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            if token.index in self._waiting:
                self._rows.start(self._waiting.pop(token.index))
        row_of = {request.index: row for row, request in enumerate(self._rows.requests)}
        self._rows.append(
            np.array([row_of[token.index] for token in tokens], np.int64),
            np.array([token.token_id for token in tokens], np.int64),
            np.array([token.logprob for token in tokens], np.float32),
            step=self.step,
        )

    def _start(self) -> CoreProcess:
        arguments = {**self._arguments, "max_num_seqs": self._slots}
        try:
            return CoreProcess(arguments, self._end_ids, threads=torch.get_num_threads())
        except CoreError as error:
            raise start_error(error, self._folder, self._slots) from None

    def _restart(self) -> CoreProcess:
        """Start the process again; a failure may pass, as when memory is still in use."""
        self._clear()
        try:
            return self._start()
        except (ConfigError, StoreError) as error:
            raise EngineProcessError(str(error)) from None

    def _call(
        self, core: CoreProcess, name: str, *arguments: Any, prompt_tokens: int | None = None
    ) -> Any:
        """The result of a method of the process; too little memory halves the slots."""
        try:
            return core.call(name, *arguments, prompt_tokens=prompt_tokens)
        except EngineProcessError:
            self._core = None
            raise
        except CoreError as error:
            self._core = None
            if not error.is_out_of_memory:
                raise EngineProcessError(f"vLLM raised {error.kind}: {error}") from None
            if self._slots == 1:
                raise memory_error(error, self._slots) from None
            self._slots //= 2
            raise EngineProcessError(
                f"vLLM is out of memory, continuing with {self._slots} slots; lower engine.slots "
                f"or engine.gpu_memory_utilization ({error})"
            ) from None


@contextmanager
def saved(weights: Mapping[str, torch.Tensor]) -> Generator[Path]:
    """A temporary folder with `weights`. Raises OutageError if it cannot be written."""
    with ExitStack() as stack:
        try:
            scratch = tempfile.TemporaryDirectory(prefix="peralta-vllm-")
            folder = Path(stack.enter_context(scratch))
            models.save_weights(weights, folder)
        except OSError as error:
            raise OutageError(
                f"temporary files of weights for vLLM cannot be written: {error}; make room for "
                "them or set TMPDIR"
            ) from None
        yield folder


def new_request(request: Request, max_model_len: int) -> NewRequest:
    """A request for vLLM, whose seed depends on the run, the index and the resumed tokens."""
    sampling = request.sampling
    number = f"{sampling.seed}" if request.is_standalone else f"{sampling.seed}/{request.index}"
    num_resumed = 0 if request.resumes is None else len(request.resumes.token_ids)
    if num_resumed:  # vLLM would draw the random numbers of the first tokens again
        number += f"/{num_resumed}"
    arguments = {
        "max_tokens": max_new_tokens(request, max_model_len) - num_resumed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": zlib.crc32(number.encode()),
    }
    return NewRequest(request.index, request.prefix_ids.tolist(), arguments)


def start_error(error: CoreError, folder: Path, slots: int) -> ConfigError | StoreError:
    text = str(error)
    if error.is_out_of_memory or "memory" in text or "KV cache" in text:
        return memory_error(error, slots)
    unknown = ("Model architectures", "not supported", "no vLLM implementation")
    if any(words in text for words in unknown):
        return ConfigError(f"engine 'vllm' cannot serve the model in {folder}: {text}; {OTHERS}")
    if error.kind == "TypeError" and "EngineArgs" in text:
        return ConfigError(f"engine.vllm_args: {text}; use the names of vLLM's EngineArgs")
    return StoreError(f"model folder {folder} cannot be loaded: {error.kind}: {text}")


def memory_error(error: CoreError, slots: int) -> ConfigError:
    return ConfigError(
        f"engine 'vllm' is out of memory with engine.slots {slots}: {error}; change "
        "engine.gpu_memory_utilization, engine.max_model_len or engine.slots"
    )


def check_device(device: torch.device) -> None:
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"engine 'vllm' does not run on device {device}; {OTHERS}")
    if device.index:
        raise ConfigError(
            f"engine 'vllm' uses the first GPUs, not model.device {device}; set model.device to "
            f"cuda and start the generator with CUDA_VISIBLE_DEVICES={device.index}"
        )


def cache_bytes(config: Any, dtype: torch.dtype, *, slots: int, max_model_len: int) -> int:
    """Bytes of vLLM's cache of keys and values on a CPU. Raises ConfigError if too large."""
    # As a dict, because an attribute that differs between layers raises an error.
    sizes: dict[str, Any] = config.to_dict()
    heads = sizes["num_attention_heads"]
    widths = sizes.get("head_dim") or sizes["hidden_size"] // heads, sizes.get("global_head_dim")
    kv_heads = sizes.get("num_key_value_heads") or heads
    head_dim = max(width for width in widths if width)
    token_bytes = 2 * sizes["num_hidden_layers"] * kv_heads * head_dim * dtype.itemsize
    block = 128  # tokens of a block of vLLM's cache on a CPU
    row_bytes = token_bytes * block * -(-max_model_len // block)
    free_bytes = models.free_bytes(torch.device("cpu"))
    size = {"slots": slots, "max_model_len": max_model_len, "extra_rows": 1}
    check_cache_memory(row_bytes, free_bytes=free_bytes, **size)
    return row_bytes * (slots + 1)
