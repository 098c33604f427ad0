"""Sampling: from logits to one token per row and its logprob.

Same order as in transformers: repetition penalty and min_tokens, temperature, top_k, top_p, min_p.
top_k comes first in the code, so that only k logits are sorted instead of the whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peralta_zmq.rollout import Sampling

CHUNK = 2**20  # logits whose fp32 copies stay in the processor's cache


def sample(
    logits: Tensor,  # [n, V]
    sampling: Sampling,
    uniform: Tensor,  # [n], uniform in [0, 1)
    *,
    seen: Tensor | None = None,  # [n, V] bool, tokens with a repetition penalty
    banned: Tensor | None = None,  # [n, V] bool, tokens that are not allowed yet
) -> tuple[Tensor, Tensor]:
    """The sampled tokens [n] and their logprobs [n] as defined on Rollout.logprobs.

    The logprob is that of the original logits at the sampling temperature (1 when greedy), before
    penalties, bans and truncation: the trainer computes the same.
    """
    allowed = logits
    if seen is not None:
        allowed, penalty = allowed.float(), sampling.repetition_penalty
        penalized = torch.where(allowed < 0, allowed * penalty, allowed / penalty)
        allowed = torch.where(seen, penalized, allowed)
    if banned is not None:
        allowed = allowed.masked_fill(banned, float("-inf"))
    if sampling.temperature == 0:
        tokens = allowed.argmax(-1)
    else:
        tokens = _sample_tokens(allowed, sampling, uniform)
    return tokens, _logprobs(logits, tokens, sampling.temperature or 1.0)


def _logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `tokens` in fp32, [n]; a chunk of rows at a time."""
    num_rows = max(1, CHUNK // logits.shape[-1])
    pairs = zip(logits.split(num_rows), tokens[:, None].split(num_rows), strict=True)
    # log_softmax needs one pass: twice as fast as logsumexp.
    chunks = [(rows.float() / temperature).log_softmax(-1).gather(-1, ids) for rows, ids in pairs]
    return torch.cat(chunks)[:, 0]


def _sample_tokens(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    token_ids = None  # [n, k], most probable first; None = all tokens in vocabulary order
    vocab_size = logits.shape[-1]
    if 0 < sampling.top_k < vocab_size:
        logits, token_ids = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, token_ids = logits.float().sort(descending=True)
    probs = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:  # the token that crosses top_p stays
        preceding = probs.cumsum(-1) - probs
        probs = probs.masked_fill(preceding >= sampling.top_p, 0)
    if sampling.min_p > 0:
        threshold = sampling.min_p * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < threshold, 0)
    # Inverse transform sampling: the first index at which the cumulated probs exceed the target.
    cumulated = probs.cumsum(-1)
    target = uniform[:, None] * cumulated[:, -1:]  # below the sum: uniform is at most 1 - 2^-24
    index = (cumulated <= target).sum(-1)
    return index if token_ids is None else token_ids.gather(-1, index[:, None])[:, 0]
