"""Sampling: from logits to one token per row and its logprob.

The options have the same effect as in transformers, which applies them in this order: repetition
penalty, min_tokens (here `banned`), temperature, top_k, top_p, min_p. Here top_k comes before the
temperature. The result is the same, but the later operations process k values, which are already
sorted for top_p, instead of the whole vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from peralta_zmq.rollout import Sampling

CHUNK_SIZE = 2**20  # logits per chunk, so that the fp32 copies of a chunk stay in the CPU cache
BLOCK_SIZE = 128  # logits or probs per block of `_topk` and `_inverse_transform`


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
    elif adjusted is logits and not _truncates(sampling):
        return _sample_untruncated(logits, sampling.temperature, uniform)
    else:
        tokens = _sample_tokens(adjusted, sampling, uniform)
    return tokens, _logprobs(logits, tokens, sampling.temperature or 1.0)


def _truncates(sampling: Sampling) -> bool:
    """Whether top_k, top_p or min_p is on."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `tokens`, [n] in fp32."""
    num_rows = max(1, CHUNK_SIZE // logits.shape[-1])
    pairs = zip(logits.split(num_rows), tokens[:, None].split(num_rows), strict=True)
    # On a CPU, log_softmax (one fused kernel) takes half the time of logsumexp (several kernels).
    chunks = [(rows.float() / temperature).log_softmax(-1).gather(-1, ids) for rows, ids in pairs]
    return torch.cat(chunks)[:, 0]


def _sample_untruncated(
    logits: Tensor, temperature: float, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens from softmax(logits / temperature), and their logprobs; one pass over the logits."""
    num_rows = max(1, CHUNK_SIZE // logits.shape[-1])
    tokens, selected = list[Tensor](), list[Tensor]()
    for rows, numbers in zip(logits.split(num_rows), uniform.split(num_rows), strict=True):
        logprobs = (rows.float() / temperature).log_softmax(-1)
        tokens.append(_inverse_transform(logprobs.exp(), numbers))
        selected.append(logprobs.gather(-1, tokens[-1][:, None])[:, 0])
    return torch.cat(tokens), torch.cat(selected)


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
    index = _inverse_transform(probs, uniform)
    return index if token_ids is None else token_ids.gather(-1, index[:, None])[:, 0]


def _inverse_transform(probs: Tensor, uniform: Tensor) -> Tensor:
    """For each row of `probs` [n, k], the first index at which their sum exceeds a target, [n].

    The target is `uniform` times the sum of the row; zeros in `probs` are never selected. In a
    large vocabulary, sums are compared per block first, and then in one block, because a cumulated
    sum of all probs takes as long as the softmax.
    """
    num_rows, length = probs.shape
    if length % BLOCK_SIZE:
        sums = probs.cumsum(-1)
        return _first_above(sums, uniform[:, None] * sums[:, -1:])
    blocks = probs.view(num_rows, -1, BLOCK_SIZE)
    sums = pad(blocks.sum(-1).cumsum(-1), (1, 0))  # [n, b + 1], before each of b blocks; total
    target = uniform[:, None] * sums[:, -1:]
    block = _first_above(sums[:, 1:], target)[:, None]
    in_block = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK_SIZE))[:, 0].cumsum(-1)
    index = _first_above(in_block, target - sums.gather(1, block))
    # The sums in the block are rounded otherwise than those of the blocks, and may all be below the
    # target; then this is the last prob above 0.
    last = (in_block < in_block[:, -1:]).sum(-1)
    return block[:, 0] * BLOCK_SIZE + torch.minimum(index, last)


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """Index of the first of the increasing `sums` [n, k] that is above `target` [n, 1]; [n].

    It is below k if the target is the last sum times a `uniform`, which is at most 1 - 2^-24 in
    fp32: then the target, also when rounded, is below the last sum.
    """
    return (sums <= target).sum(-1)
