"""Sampling through transformers' own `generate`: correct for every model, fast for none.

Knows a model and token ids; knows nothing of rewards, sockets or the run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from peralta_zmq import models
from peralta_zmq.engines.requests import (
    check_request,
    check_sampling,
    completion_of,
    end_ids,
    said,
    where_stopped,
)
from peralta_zmq.errors import EngineError
from peralta_zmq.rollout import Completion, Request, Sampling


class HfEngine:
    """Samples up to `slots` requests together; `step` names the weights it samples from."""

    def __init__(
        self,
        model: models.Model,
        tokenizer: models.Tokenizer,
        *,
        step: int = 0,
        slots: int = 32,
        max_model_len: int = 512,
        live: bool = False,
    ) -> None:
        del live  # it keeps nothing of the weights
        self.step = step
        self._model, self._tokenizer = model, tokenizer
        self._slots = slots
        self._capacity = min(max_model_len, model.config.max_position_embeddings)
        self._end_ids = end_ids(model, tokenizer)
        self._cancelled = False
        fillers = (tokenizer.pad_token_id, *self._end_ids, 0)
        self._pad_id = cast(int, next(each for each in fillers if each is not None))
        model.generation_config = GenerationConfig()  # its defaults would change our sampling

    def apply(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
        """Sample from `weights` from now on. Raises ValueError, with nothing changed, if they
        are of another model."""
        models.apply_weights(self._model, weights)
        self.step = step

    def cancel(self) -> None:
        """Give up what is under way: `generate` ends after the batch that it computes."""
        self._cancelled = True

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """One completion per request, in their order; a step is a whole batch here.

        Raises ConfigError for a request that cannot be met, EngineError for logits that are not
        finite.
        """
        check_sampling(sampling)
        self._cancelled = False
        source, more = iter(requests), True
        while more and not self._cancelled:
            batch: list[Request] = []
            for request in islice(source, self._slots):
                if request is None:
                    break
                check_request(request, sampling, self._capacity)
                batch.append(request)
            else:
                more = len(batch) == self._slots
            if batch:
                yield from self._sample(batch, sampling)
            if between_steps is not None:
                between_steps()

    def _sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        step = self.step  # a caller may apply newer weights between two completions
        sampling = sampling.at(step)
        prompts = [request.prompt_ids.tolist() for request in requests]
        token_ids, attention_mask = self._padded_left(prompts)
        recorder = LogprobRecorder(sampling.temperature or 1.0)
        with torch.inference_mode(), torch.random.fork_rng():
            torch.manual_seed(zlib.crc32(f"{sampling.seed}/{requests[0].index}".encode()))
            sequences = cast(Any, self._model).generate(
                input_ids=token_ids,
                attention_mask=attention_mask,
                generation_config=self._generation_config(sampling),
                logits_processor=self._processors(recorder, sampling, token_ids.shape[1]),
                tokenizer=self._tokenizer,
            )
        generated = sequences[:, token_ids.shape[1] :]  # [B, T]
        logprobs = recorder.logprobs(generated)
        if not logprobs.isfinite().all():
            raise EngineError(f"the weights of step {step} give logits that are not finite")
        for request, ids, scores in zip(requests, generated, logprobs, strict=True):
            limit = request.max_completion_length
            length = self._length(ids[:limit].tolist(), sampling)
            yield completion_of(
                self._tokenizer, request, sampling,
                token_ids=ids[:length].cpu().numpy(),
                logprobs=scores[:length].cpu().numpy(),
                policy_steps=np.full(length, step, np.int32),
                ended=int(ids[length - 1]) in self._end_ids,
            )  # fmt: skip

    def _padded_left(self, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, prompts))
        ids = [[self._pad_id] * (longest - len(each)) + each for each in prompts]
        mask = [[0] * (longest - len(each)) + [1] * len(each) for each in prompts]
        device = self._model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _generation_config(self, sampling: Sampling) -> GenerationConfig:
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k,
                 "top_p": sampling.top_p, "min_p": sampling.min_p or None,
                 } if sampling.temperature else {}  # fmt: skip
        return GenerationConfig(
            do_sample=bool(drawn),
            max_new_tokens=sampling.max_completion_length,
            eos_token_id=self._end_ids,
            pad_token_id=self._pad_id,
            stop_strings=list(sampling.stop) or None,
            **drawn,
        )

    def _processors(
        self, recorder: LogprobRecorder, sampling: Sampling, num_prompt: int
    ) -> LogitsProcessorList:
        """The recorder first: what penalizes comes after it."""
        chosen: list[LogitsProcessor] = [recorder]
        if sampling.repetition_penalty != 1:
            chosen.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.min_tokens and self._end_ids:
            chosen.append(
                MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_tokens, self._end_ids)
            )
        return LogitsProcessorList(chosen)

    def _length(self, ids: list[int], sampling: Sampling) -> int:
        """Up to the end token, or to the token that completes a stop string."""
        for position, token in enumerate(ids):
            if token in self._end_ids:
                return position + 1
            if sampling.stop:
                text = said(self._tokenizer, np.array(ids[: position + 1]))
                if where_stopped(text, sampling.stop) is not None:
                    return position + 1
        return len(ids)


class LogprobRecorder(LogitsProcessor):
    """Takes each sampled token's logprob while sampling, before any truncation of the logits.

    transformers calls it with the logits of a step and the tokens chosen so far, so the token of
    a step is known one call later.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._logits: torch.Tensor | None = None  # of the step whose token is not yet known
        self._taken: list[torch.Tensor] = []  # one [B] per finished step

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> Any:
        if self._logits is not None:
            self._take(input_ids[:, -1])
        self._logits = scores
        return scores

    def logprobs(self, generated: torch.Tensor) -> torch.Tensor:
        """[B, T] for the generated tokens [B, T]; the last step's are taken here."""
        self._take(generated[:, -1])
        return torch.stack(self._taken, dim=1)

    def _take(self, tokens: torch.Tensor) -> None:
        assert self._logits is not None
        taken = models.selected_logprobs(self._logits, tokens, temperature=self._temperature)
        self._taken.append(taken)
