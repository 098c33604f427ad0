"""Engine that samples with transformers' `generate`.

Implements the protocol registry.Engine. Works for every model, but is slower than the native
engine: requests are sampled in batches of padded prompts, and the next batch begins when all of a
batch have ended. `generate` runs in a thread that pauses before each token, so that a caller can
apply newer weights then; keys and values of earlier tokens are kept.

Letters in shapes: B requests of a batch, P tokens of its longest prompt, T generated tokens of its
longest completion, V vocabulary.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from peralta_zmq import models
from peralta_zmq.engines.completion_rows import completion_of, has_stop, max_new_tokens
from peralta_zmq.engines.engine_models import AdapterMerger, open_model
from peralta_zmq.errors import EngineError
from peralta_zmq.models.rotary import check_length
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import Completion, Request, Sampling


class HfEngine:
    """Samples batches of up to `slots` requests at the same time.

    `max_model_len` is the maximum of prompt and completion together, in tokens. `step` is the
    policy step of the weights in use: their number of training steps.
    """

    def __init__(
        self,
        model: models.Model,
        tokenizer: models.Tokenizer,
        *,
        step: int = 0,
        slots: int = 32,
        max_model_len: int = 512,
        merger: AdapterMerger | None = None,
    ) -> None:
        self.step = step
        self._model, self._tokenizer, self._merger = model, tokenizer, merger
        self._slots = slots
        check_length(model.config, max_model_len)
        self.max_model_len = min(max_model_len, models.max_positions(model))
        self._end_ids = models.end_token_ids(model.generation_config, tokenizer)
        self._waiting: list[Request] = []
        self._batch: list[Request] = []  # that is sampled now
        self._call: SteppedCall | None = None  # of `generate` for this batch
        pad_id = cast("int | None", tokenizer.pad_token_id)
        vocab_size: int = model.config.get_text_config().vocab_size
        self._pad_id = 0 if pad_id is None or not 0 <= pad_id < vocab_size else pad_id
        # transformers would take the options that `_generation_config` leaves unset from the model.
        model.generation_config = GenerationConfig()

    @classmethod
    def open(cls, folder: Path, settings: EngineSettings, *, step: int = 0) -> HfEngine:
        """Open the model and tokenizer in `folder`."""
        model, tokenizer, merger = open_model(folder, settings)
        size = {"slots": settings.slots, "max_model_len": settings.max_model_len}
        return cls(model, tokenizer, step=step, merger=merger, **size)

    @classmethod
    def open_live(
        cls, model: models.Model, tokenizer: models.Tokenizer, settings: EngineSettings
    ) -> HfEngine:
        """Open a model that a trainer updates; `advance` uses the current weights."""
        return cls(model, tokenizer, slots=settings.slots, max_model_len=settings.max_model_len)

    def num_free(self) -> int:
        """Number of requests that can be submitted now."""
        return self._slots - len(self._waiting) - len(self._batch)

    def submit(self, requests: Sequence[Request]) -> None:
        """Start requests with the next batch."""
        self._waiting += requests

    def advance(self) -> list[Completion]:
        """Sample a token for each request of the batch; returns them when all have ended.

        A batch has the requests up to the first one with other sampling parameters, or a standalone
        request. Raises EngineError for non-finite logits.
        """
        if self._call is None:
            if not self._waiting:
                return []
            key = _batch_key(self._waiting[0])
            self._batch = list(takewhile(lambda each: _batch_key(each) == key, self._waiting))
            del self._waiting[: len(self._batch)]
            batch = tuple(self._batch)
            self._call = SteppedCall(lambda pause: self._sample(batch, pause))
        try:
            if (completions := self._call.advance()) is None:
                return []
        except Exception:  # the thread of the batch has ended
            self._waiting, self._batch, self._call = [], [], None
            raise
        wanted = {request.index for request in self._batch}
        self._batch, self._call = [], None
        return [completion for completion in completions if completion.index in wanted]

    def drop(self, ids: Collection[int]) -> list[Completion]:
        """End requests; their tokens are lost, because a batch cannot be resumed."""
        self._waiting = [request for request in self._waiting if request.index not in ids]
        self._batch = [request for request in self._batch if request.index not in ids]
        if self._call is not None and not self._batch:
            self._call.cancel()
            self._call = None
        return []

    def apply(self, update: WeightUpdate) -> None:
        """Sample from the new weights from the next token on.

        Raises ValueError, with nothing changed, if the weights belong to another model.
        """
        weights = update.tensors if self._merger is None else self._merger.weights_of(update)
        models.apply_weights(self._model, weights)
        self.step = update.step

    def _sample(self, requests: Sequence[Request], pause: Callable[[], None]) -> list[Completion]:
        """Sample one batch; returns the completions in the order of `requests`.

        `pause` is called before each token, when its logits are computed.
        """
        prompts = [torch.from_numpy(request.prompt_ids).long() for request in requests]
        token_ids = self._pad_left(prompts, self._pad_id)  # [B, P]
        attention_mask = self._pad_left([torch.ones_like(prompt) for prompt in prompts], 0)
        num_prompt = token_ids.shape[1]
        limits = [max_new_tokens(request, self.max_model_len) for request in requests]
        sampling = requests[0].sampling
        recorder = TokenRecorder(self, sampling, pause)
        # The recorder is first, because it records the logits before any penalty. transformers
        # appends the processors for truncation.
        processors = LogitsProcessorList([recorder])
        if sampling.repetition_penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.min_tokens and self._end_ids:
            processors.append(
                MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_tokens, self._end_ids)
            )
        is_greedy = recorder.temperature == 0
        if not is_greedy:
            processors.append(Temperature(recorder))
        with torch.inference_mode(), torch.random.fork_rng():
            index = 0 if requests[0].is_standalone else requests[0].index
            torch.manual_seed(zlib.crc32(f"{sampling.seed}/{index}".encode()))
            sequences = cast(Any, self._model).generate(
                input_ids=token_ids,
                attention_mask=attention_mask,
                generation_config=self._generation_config(
                    sampling, max(limits), is_greedy=is_greedy
                ),
                logits_processor=processors,
                tokenizer=self._tokenizer,
            )
        generated = sequences[:, num_prompt:]  # [B, T]
        logprobs = recorder.logprobs(generated)
        if not logprobs.isfinite().all():
            raise EngineError(f"the weights of step {self.step} give logits that are not finite")
        completions = list[Completion]()
        for request, limit, ids, id_logprobs in zip(
            requests, limits, generated, logprobs, strict=True
        ):
            length = self._completion_length(ids[:limit].tolist(), sampling)
            completions.append(
                completion_of(
                    self._tokenizer,
                    request,
                    token_ids=ids[:length].cpu().numpy(),
                    logprobs=id_logprobs[:length].cpu().numpy(),
                    policy_steps=np.array(recorder.policy_steps[:length], np.int32),
                    ended=int(ids[length - 1]) in self._end_ids,
                )
            )
        return completions

    def _pad_left(self, rows: list[torch.Tensor], value: int) -> torch.Tensor:
        """Pad rows of different lengths with `value` on the left, to [B, longest]."""
        padded = pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")
        return padded.to(self._model.device)

    def _generation_config(
        self, sampling: Sampling, max_new_tokens: int, *, is_greedy: bool
    ) -> GenerationConfig:
        """The options in `sampling` for which `_sample` does not add processors."""
        truncation: dict[str, Any] = {}
        if not is_greedy:
            truncation = {
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p or None,
            }
        return GenerationConfig(
            do_sample=not is_greedy,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._end_ids,
            pad_token_id=self._pad_id,
            stop_strings=list(sampling.stop) or None,
            **truncation,
        )

    def _completion_length(self, ids: list[int], sampling: Sampling) -> int:
        """Number of `ids` before the padding that `generate` appends to completed rows.

        The last token of a completion is its first end token, or the token that completes a stop
        string.
        """
        for position, token in enumerate(ids):
            length = position + 1
            if token in self._end_ids or has_stop(self._tokenizer, ids[:length], sampling.stop):
                return length
        return len(ids)


def _batch_key(request: Request) -> object:
    """Equal for requests that may be in one batch."""
    sampling = replace(request.sampling, max_completion_length=0)
    return sampling, request.index if request.is_standalone else None


class SteppedCall:
    """A call in a thread of its own that runs until it pauses, then until the next pause.

    `call` gets the function that pauses. Only one of the two threads runs at any time.
    """

    def __init__(self, call: Callable[[Callable[[], None]], list[Completion]]) -> None:
        self._call = call
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._is_cancelled = False
        self._result: list[Completion] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def advance(self) -> list[Completion] | None:
        """Run until the next pause, or the end: returns the result then, or raises the error."""
        self._may_run.release()
        self._has_paused.acquire()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its frames have the keys and values
        return self._result

    def cancel(self) -> None:
        """End the call at its pause."""
        self._is_cancelled = True
        self._may_run.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._wait()
            self._result = self._call(self._pause)
        except CancelledError:
            return
        except BaseException as error:  # noqa: BLE001  `advance` raises it
            self._error = error
        self._has_paused.release()

    def _pause(self) -> None:
        self._has_paused.release()
        self._wait()

    def _wait(self) -> None:
        self._may_run.acquire()
        if self._is_cancelled:
            raise CancelledError


class TokenRecorder(LogitsProcessor):
    """Records the logprob of each sampled token from the logits before any truncation.

    transformers calls the recorder with the tokens sampled so far and the logits of the next token.
    The token that was sampled from these logits is therefore known one call later. Then calls
    `pause`, during which newer weights may be applied: they compute the logits of the following
    token.
    """

    def __init__(self, engine: HfEngine, sampling: Sampling, pause: Callable[[], None]) -> None:
        self._engine, self._sampling, self._pause = engine, sampling, pause
        self.policy_steps: list[int] = []
        """Policy step of the weights behind each token sampled so far and the next one."""
        self.temperature = sampling.at(engine.step).temperature  # of the next token
        self._logits: torch.Tensor | None = None  # [B, V], of the token to be sampled next
        self._logprobs: list[torch.Tensor] = []  # [B] for each token sampled so far

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> Any:
        if self._logits is not None:
            self._record_token(input_ids[:, -1])
        self._logits = scores
        self.policy_steps.append(self._engine.step)
        self.temperature = self._sampling.at(self._engine.step).temperature
        self._pause()
        return scores

    def logprobs(self, generated: torch.Tensor) -> torch.Tensor:
        """The logprobs [B, T] of all generated tokens [B, T]; call once, after generation."""
        self._record_token(generated[:, -1])
        return torch.stack(self._logprobs, dim=1)

    def _record_token(self, tokens: torch.Tensor) -> None:
        """Record the logprobs of `tokens` [B], which were sampled from the stored logits."""
        assert self._logits is not None
        self._logprobs.append(
            models.selected_logprobs(self._logits, tokens, temperature=self.temperature or 1.0)
        )


class Temperature(LogitsProcessor):
    """Divides the logits by the temperature of the recorder's next token."""

    def __init__(self, recorder: TokenRecorder) -> None:
        self._recorder = recorder

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> Any:
        return scores / self._recorder.temperature
