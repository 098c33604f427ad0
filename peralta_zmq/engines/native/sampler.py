"""From logits to one token per row and its logprob. Knows tensors only.

Order as in transformers: repetition penalty and min_tokens, temperature, top_k, top_p, min_p.
Top-k comes first, so that only k logits are sorted instead of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peralta_zmq.rollout import Sampling

CHUNK = 2**20  # logits whose fp32 forms stay in the processor's cache


def draw(
    logits: Tensor,  # [n, V]
    sampling: Sampling,
    chance: Tensor,  # [n], uniform in [0, 1)
    *,
    seen: Tensor | None = None,  # [n, V] bool, tokens that a repetition penalty punishes
    barred: Tensor | None = None,  # [n, V] bool, tokens that may not come yet
) -> tuple[Tensor, Tensor]:
    """The tokens [n] and their logprobs [n] as defined on Rollout.logprobs.

    The logprob is that of the plain logits at the sampling temperature (1 when greedy), whatever
    was penalized, barred or cut off: it is what the trainer computes.
    """
    allowed = _penalized(logits, sampling, seen, barred)
    greedy = sampling.temperature == 0
    tokens = allowed.argmax(-1) if greedy else _drawn(allowed, sampling, chance)
    return tokens, _logprobs(logits, tokens, sampling.temperature or 1.0)


def _logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `tokens` in fp32, [n]; some rows at a time."""
    rows = max(1, CHUNK // logits.shape[-1])
    taken = [
        (some.float() / temperature)
        .log_softmax(-1)  # in one pass, twice as fast as logsumexp
        .gather(-1, chosen)
        for some, chosen in zip(logits.split(rows), tokens[:, None].split(rows), strict=True)
    ]
    return torch.cat(taken)[:, 0]


def _penalized(
    logits: Tensor, sampling: Sampling, seen: Tensor | None, barred: Tensor | None
) -> Tensor:
    if seen is not None:
        penalty, logits = sampling.repetition_penalty, logits.float()
        logits = torch.where(
            seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits
        )
    if barred is not None:
        logits = logits.masked_fill(barred, float("-inf"))
    return logits


def _drawn(logits: Tensor, sampling: Sampling, chance: Tensor) -> Tensor:
    likeliest = None  # [n, k] token ids, the likeliest first; None = all, in their own order
    num_tokens = logits.shape[-1]
    if 0 < sampling.top_k < num_tokens:
        logits, likeliest = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, likeliest = logits.float().sort(descending=True)
    shares = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:  # the token that crosses the line stays
        before = shares.cumsum(-1) - shares
        shares = shares.masked_fill(before >= sampling.top_p, 0)
    if sampling.min_p > 0:
        least = sampling.min_p * shares.amax(-1, keepdim=True)
        shares = shares.masked_fill(shares < least, 0)
    places = _place(shares, chance)
    return places if likeliest is None else likeliest.gather(-1, places[:, None])[:, 0]


def _place(shares: Tensor, chance: Tensor) -> Tensor:
    """The place [n] that `chance` falls on when the shares [n, k] lie side by side."""
    until = shares.cumsum(-1)
    target = chance[:, None] * until[:, -1:]  # below the last, for chance is at most 1 - 2^-24
    return (until <= target).sum(-1)
