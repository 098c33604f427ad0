"""Sampling: from logits to one token per row and its logprob.

The options have the same effect and order as in transformers: repetition penalty, min_tokens,
temperature, top_k, top_p, min_p. The code selects the top k logits before it applies the
temperature, which does not change the result and saves sorting the whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peralta_zmq.rollout import Sampling

CHUNK_SIZE = 2**20  # logits; a chunk's fp32 copies stay in the processor's cache


def sample(
    logits: Tensor,  # [n, V]
    sampling: Sampling,
    uniform: Tensor,  # [n], uniform in [0, 1)
    *,
    seen: Tensor | None = None,  # [n, V] bool, tokens with a repetition penalty
    banned: Tensor | None = None,  # [n, V] bool, tokens that are not allowed yet
) -> tuple[Tensor, Tensor]:
    """Sample one token for each of n rows; returns tokens [n] and logprobs [n].

    Logprobs are computed as by the trainer (see Rollout.logprobs): from the original logits at the
    sampling temperature (1 if greedy), before penalties, bans and truncation.
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
    """log softmax(logits / temperature) at `tokens`, [n] in fp32; one chunk of rows at a time."""
    num_rows = max(1, CHUNK_SIZE // logits.shape[-1])
    pairs = zip(logits.split(num_rows), tokens[:, None].split(num_rows), strict=True)
    # log_softmax takes half the time of logsumexp, because it needs one pass.
    chunks = [(rows.float() / temperature).log_softmax(-1).gather(-1, ids) for rows, ids in pairs]
    return torch.cat(chunks)[:, 0]


def _sample_tokens(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Sample from softmax(logits / temperature) after truncation by top_k, top_p and min_p."""
    token_ids = None  # [n, k], most probable first; None = the whole vocabulary, in its order
    vocab_size = logits.shape[-1]
    if 0 < sampling.top_k < vocab_size:
        logits, token_ids = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, token_ids = logits.float().sort(descending=True)
    probs = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:  # keeps the token at which the sum of probs crosses top_p
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
