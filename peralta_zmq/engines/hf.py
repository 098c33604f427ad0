"""Sampling through transformers' own `generate`: correct for every model, fast for none.

Knows a model and token ids; knows nothing of rewards, sockets or the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from peralta_zmq import policy
from peralta_zmq.rollout import Completion, Request, Sampling


class HfEngine:
    """Samples a batch of requests together; `step` names the weights it samples from."""

    def __init__(self, model: policy.Model, tokenizer: policy.Tokenizer, *, step: int = 0) -> None:
        self.step = step
        self._model, self._tokenizer = model, tokenizer
        self._end_ids = _end_ids(model, tokenizer)
        fillers = (tokenizer.pad_token_id, *self._end_ids, 0)
        self._pad_id = cast(int, next(each for each in fillers if each is not None))
        model.generation_config = GenerationConfig()  # its defaults would change our sampling

    def apply(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
        """Sample from `weights` from now on. Raises ValueError, with nothing changed, if they
        are of another model or not finite."""
        policy.apply_weights(self._model, weights)
        self.step = step

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """One completion per request, in their order."""
        step = self.step  # a caller may apply newer weights between two completions
        prompts = [request.prompt_ids.tolist() for request in requests]
        token_ids, attention_mask = self._padded_left(prompts)
        recorder = LogprobRecorder(sampling.temperature or 1.0)
        with torch.inference_mode():
            sequences = cast(Any, self._model).generate(
                input_ids=token_ids,
                attention_mask=attention_mask,
                generation_config=self._generation_config(sampling),
                logits_processor=LogitsProcessorList([recorder]),
            )
        generated = sequences[:, token_ids.shape[1] :]  # [B, T]
        logprobs = recorder.logprobs(generated)
        rows = zip(requests, generated.tolist(), logprobs.tolist(), strict=True)
        for request, ids, scores in rows:
            yield self._completion(request, ids, scores, step)

    def _padded_left(self, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, prompts))
        ids = [[self._pad_id] * (longest - len(each)) + each for each in prompts]
        mask = [[0] * (longest - len(each)) + [1] * len(each) for each in prompts]
        device = self._model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _generation_config(self, sampling: Sampling) -> GenerationConfig:
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k,
                 "top_p": sampling.top_p} if sampling.temperature else {}  # fmt: skip
        return GenerationConfig(
            do_sample=bool(drawn),
            max_new_tokens=sampling.max_completion_length,
            eos_token_id=self._end_ids,
            pad_token_id=self._pad_id,
            **drawn,
        )

    def _completion(
        self, request: Request, ids: list[int], logprobs: list[float], step: int
    ) -> Completion:
        ends = [position for position, token in enumerate(ids) if token in self._end_ids]
        length = ends[0] + 1 if ends else len(ids)
        return Completion(
            index=request.index,
            prompt_ids=request.prompt_ids,
            token_ids=np.array(ids[:length], np.int32),
            logprobs=np.array(logprobs[:length], np.float32),
            policy_steps=np.full(length, step, np.int32),
            finish_reason="stop" if ends else "length",
            text=cast(str, self._tokenizer.decode(ids[:length], skip_special_tokens=True)),
        )


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
        taken = policy.selected_logprobs(self._logits, tokens, temperature=self._temperature)
        self._taken.append(taken)


def _end_ids(model: policy.Model, tokenizer: policy.Tokenizer) -> list[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    several = configured if isinstance(configured, (list, tuple)) else [configured]
    return [cast(int, each) for each in several if each is not None]
