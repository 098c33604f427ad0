"""What every engine here does with a request and its tokens. Knows tokenizers, no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from peralta_zmq import models
from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Completion, Request, Sampling


def check_sampling(sampling: Sampling) -> None:
    """Raise ConfigError for a sampling that can give no completion."""
    if sampling.max_completion_length < 1:
        raise ConfigError(
            f"sampling.max_completion_length {sampling.max_completion_length} leaves no room for "
            "a token; use 1 or more"
        )


def check_request(request: Request, sampling: Sampling, max_model_len: int) -> None:
    """Raise ConfigError unless prompt and completion fit into `max_model_len` tokens."""
    num_prompt = len(request.prompt_ids)
    needed = num_prompt + sampling.max_completion_length
    if num_prompt == 0:
        raise ConfigError("a prompt has no token; check the chat template of the tokenizer")
    if needed > max_model_len:
        raise ConfigError(
            f"a prompt of {num_prompt} tokens and sampling.max_completion_length "
            f"{sampling.max_completion_length} do not fit into {max_model_len} tokens; raise "
            f"engine.max_model_len to {needed} if the model allows it, or shorten one of them"
        )


def completion_of(
    tokenizer: models.Tokenizer,
    request: Request,
    sampling: Sampling,
    *,
    token_ids: NDArray[np.integer],
    logprobs: NDArray[np.floating],
    policy_steps: NDArray[np.integer],
    ended: bool,  # by an end token, which is the last of token_ids
) -> Completion:
    """The generated tokens of one request; its text ends before a stop string."""
    text = said(tokenizer, token_ids)
    stopped = where_stopped(text, sampling.stop)
    return Completion(
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=token_ids.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        policy_steps=policy_steps.astype(np.int32),
        finish_reason="stop" if ended or stopped is not None else "length",
        text=text[:stopped],
    )


def said(tokenizer: models.Tokenizer, token_ids: NDArray[np.integer]) -> str:
    """The text of generated tokens, as rewards and stop strings see it: no special tokens."""
    return cast(str, tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))


def where_stopped(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins in `text`; None when there is none."""
    return min((text.find(each) for each in stop if each in text), default=None)


def end_ids(model: models.Model, tokenizer: models.Tokenizer) -> list[int]:
    """The tokens that end a completion."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    several = configured if isinstance(configured, (list, tuple)) else [configured]
    return [cast(int, each) for each in several if each is not None]
