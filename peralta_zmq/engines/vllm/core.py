"""Process that runs vLLM for a generator: one reply to each call that arrives on a socket.

A message is a pickled tuple (name of a method of Core, arguments); the reply is (None, result) or
(name of an exception, its text), after (COMPILING, None) for each function that torch compiles.
vLLM samples only during `step`, so the generator knows which weights sampled each token.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from peralta_zmq import models

COMPILING = "compiling"  # torch begins to compile a function, which takes longer than a usual step


@dataclass(frozen=True, slots=True)
class NewRequest:
    index: int
    prompt_ids: list[int]
    sampling: dict[str, Any]  # arguments of vllm.SamplingParams


@dataclass(frozen=True, slots=True)
class Token:
    index: int  # of the request
    token_id: int
    logprob: float


class Core:
    """vLLM's engine with the arguments of vllm.EngineArgs; `end_ids` end completions."""

    def __init__(self, arguments: Mapping[str, Any], end_ids: Sequence[int]) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams  # pyright: ignore
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore

        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._make_sampling: Any = SamplingParams
        self._output_kind = RequestOutputKind.DELTA
        self._end_ids = list(end_ids)
        self._ids: dict[int, str] = {}  # index of a running request -> its id in vLLM
        self._num_reloads = 0

    def step(self, started: Sequence[NewRequest], dropped: Sequence[int]) -> list[Token]:
        """Start and drop requests, then sample at most one token for each running request."""
        ids = [self._ids.pop(index) for index in dropped if index in self._ids]
        self._engine.abort_request(ids, internal=True)
        for request in started:
            # The salt keeps vLLM from using keys and values of earlier weights for a new prompt;
            # reset_prefix_cache() would have no effect while other requests are running.
            prompt = {"prompt_token_ids": request.prompt_ids, "cache_salt": str(self._num_reloads)}
            sampling = self._make_sampling(
                **request.sampling,
                stop_token_ids=self._end_ids,
                ignore_eos=True,  # the end tokens of vLLM may be others than `end_ids`
                logprobs=0,  # of the sampled token only
                detokenize=False,
                output_kind=self._output_kind,
            )
            number = str(request.index)
            self._ids[request.index] = self._engine.add_request(number, prompt, sampling)
        tokens: list[Token] = []
        for output in self._engine.step():
            index = int(output.request_id)
            (sampled,) = output.outputs
            for token_id, logprobs in zip(sampled.token_ids, sampled.logprobs, strict=True):
                tokens.append(Token(index, token_id, logprobs[token_id].logprob))
            if output.finished:
                del self._ids[index]
        return tokens

    def reload(self, folder: str) -> None:
        """Replace the weights; running requests keep their keys and values."""
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._engine.apply_model(pack_shared_head)
        self._num_reloads += 1

    def differing_tensor(self, folder: str) -> str | None:
        """Name of a tensor whose value in use is not the one in `folder`, if there is one."""
        return next(filter(None, self._engine.apply_model(partial(differing, folder))), None)


def pack_shared_head(model: torch.nn.Module) -> None:
    """Repack an output layer that shares the embeddings' weight, which vLLM's reload does not."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore
        UnquantizedEmbeddingMethod,
    )

    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


def differing(folder: str, model: torch.nn.Module) -> str | None:
    """Compare a sample of a model's tensors with those in a folder.

    Only tensors that vLLM keeps unquantized under their names and shapes: it fuses some linear
    layers, repacks all on a CPU, and divides matrices with tensor parallelism.
    """
    published = models.folder_weights(Path(folder))
    for name, parameter in model.named_parameters():
        if name not in published or published[name].shape != parameter.shape:
            continue
        if parameter.dtype.itemsize == 1:  # quantized
            continue
        stride = max(1, parameter.numel() // 1024)
        ours = parameter.detach().flatten()[::stride].cpu()
        if not torch.equal(ours, published[name].flatten()[::stride].to(ours.dtype)):
            return name
    return None


def main(descriptor: int) -> None:
    """Make calls until the socket with this file descriptor, or the generator, ends."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    connection = Connection(descriptor)
    core = None
    from torch._dynamo.callback import callback_handler  # slow to import

    callback_handler.register_start_callback(lambda _: connection.send((COMPILING, None)))
    with suppress(EOFError, OSError):  # the generator has ended
        while True:
            name, arguments = connection.recv()
            try:
                if name == "open":
                    core = Core(*arguments)
                    result = None
                else:
                    result = getattr(core, name)(*arguments)
            except Exception as error:  # noqa: BLE001  (the generator reports it)
                connection.send((type(error).__name__, str(error)))
            else:
                connection.send((None, result))
    os.killpg(0, signal.SIGKILL)


def _exit_with_parent() -> None:
    """Kill this process and vLLM's own when stdin ends, as it does when the generator ends."""
    os.read(0, 1)  # not sys.stdin, whose lock would be held when this process ends
    os.killpg(0, signal.SIGKILL)
