"""Sampling: from logits to one token per row and its logprob.

The options have the same effect as in transformers, which applies them in this order: repetition
penalty, min_tokens (here `banned`), temperature, top_k, top_p, min_p. Here top_k comes before the
temperature. The result is the same, but the later operations process k values, which are already
sorted for top_p, instead of the whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peralta_zmq.rollout import Sampling

CHUNK_SIZE = 2**20  # logits per chunk, so that the fp32 copies of a chunk stay in the CPU cache
BLOCK_SIZE = 128  # logits per block of `_topk`


def sample(
    logits: Tensor,  # [n, V]
    sampling: Sampling,
    uniform: Tensor,  # [n], uniform in [0, 1)
    *,
    seen: Tensor | None = None,  # [n, V] bool, True: the repetition penalty applies
    banned: Tensor | None = None,  # [n, V] bool, True: must not be sampled
) -> tuple[Tensor, Tensor]:
    """Sample one token for each of n rows; returns tokens [n] and logprobs [n].

    Logprobs are computed as by the trainer (see Rollout.logprobs): from the original logits at the
    sampling temperature (1 if greedy), before penalties, bans and truncation by top_k, top_p and
    min_p.
    """
    adjusted = logits
    if seen is not None:
        adjusted, penalty = adjusted.float(), sampling.repetition_penalty
        penalized = torch.where(adjusted < 0, adjusted * penalty, adjusted / penalty)
        adjusted = torch.where(seen, penalized, adjusted)
    if banned is not None:
        adjusted = adjusted.masked_fill(banned, float("-inf"))
    if sampling.temperature == 0:
        tokens = adjusted.argmax(-1)
    else:
        tokens = _sample_tokens(adjusted, sampling, uniform)
    return tokens, _logprobs(logits, tokens, sampling.temperature or 1.0)


def _logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `tokens`, [n] in fp32."""
    num_rows = max(1, CHUNK_SIZE // logits.shape[-1])
    pairs = zip(logits.split(num_rows), tokens[:, None].split(num_rows), strict=True)
    # On a CPU, log_softmax (one fused kernel) takes half the time of logsumexp (several kernels).
    chunks = [(rows.float() / temperature).log_softmax(-1).gather(-1, ids) for rows, ids in pairs]
    return torch.cat(chunks)[:, 0]


def _topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`logits.topk(k)` of [n, V]: values and indices, [n, k] each, in descending order.

    The k largest logits are in the k blocks with the largest maxima. For a large vocabulary on a
    CPU, finding these blocks first takes half the time.
    """
    num_rows, vocab_size = logits.shape
    num_blocks, rest = divmod(vocab_size, BLOCK_SIZE)
    if logits.device.type != "cpu" or rest or num_blocks <= 2 * k:
        values, indices = logits.topk(k)
        return values, indices
    blocks = logits.view(num_rows, num_blocks, BLOCK_SIZE)
    largest = blocks.amax(-1).topk(k).indices  # [n, k], numbers of blocks
    candidates = blocks.gather(1, largest[..., None].expand(-1, -1, BLOCK_SIZE))
    values, indices = candidates.flatten(1).topk(k)  # indices in the k blocks
    return values, largest.gather(1, indices // BLOCK_SIZE) * BLOCK_SIZE + indices % BLOCK_SIZE


def _sample_tokens(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Sample from softmax(logits / temperature), truncated by top_k, top_p, min_p."""
    token_ids = None  # [n, k], most probable first; None = the whole vocabulary, in its order
    vocab_size = logits.shape[-1]
    if 0 < sampling.top_k < vocab_size:
        logits, token_ids = _topk(logits, sampling.top_k)
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
    # uniform is at most 1 - 2^-24 in fp32. Therefore the target, also when rounded, is below the
    # sum of all probs, and the index is below the number of probs.
    cumulated = probs.cumsum(-1)
    target = uniform[:, None] * cumulated[:, -1:]
    index = (cumulated <= target).sum(-1)
    return index if token_ids is None else token_ids.gather(-1, index[:, None])[:, 0]
