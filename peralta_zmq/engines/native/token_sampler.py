"""Sampling: from logits to one token per row and its logprob.

The options have the same effect as in transformers, which applies them in this order: repetition
penalty, min_tokens (here `banned`), temperature, top_k (here exactly k tokens, also if several tie
for the last place), top_p, min_p.

On a CPU, a large vocabulary is divided into blocks. One pass computes each block's largest logit
and sum of exponentials, after which logprobs, a small top_k and plain sampling read few blocks.

Letters in shapes: n rows, V vocabulary, b blocks of B logits.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from peralta_zmq.engines.native.kernels.decode_layer import BLOCK_SIZE, sum_blocks
from peralta_zmq.engines.row_engine import SamplingInputs
from peralta_zmq.rollout import Sampling

CHUNK_SIZE = 2**20  # logits per chunk, so that the fp32 copies of a chunk stay in the CPU cache
MIN_BLOCKS = 64  # a vocabulary of fewer blocks is not divided


def sample_rows(
    logits: Tensor, inputs: SamplingInputs, *, library: ctypes.CDLL | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Sample a token for each row of `logits` [n, V]; returns tokens [n] and logprobs [n].

    Logprobs are as defined on Rollout.logprobs: at the sampling temperature (1 if greedy), before
    penalties, bans and truncation. `library` is decode_layer.c for the dtype of the logits.
    """
    sampling = inputs.sampling
    temperature = sampling.temperature or 1.0
    blocks = LogitBlocks(logits, temperature, library) if LogitBlocks.supports(logits) else None
    uniforms, seen, banned = (
        None if array is None else torch.from_numpy(array).to(logits.device)
        for array in (inputs.uniforms, inputs.seen, inputs.banned)
    )
    assert uniforms is not None
    adjusted = logits
    if seen is not None:
        adjusted = adjusted.float()
        penalty = sampling.repetition_penalty
        penalized = torch.where(adjusted < 0, adjusted * penalty, adjusted / penalty)
        adjusted = torch.where(seen, penalized, adjusted)
    if banned is not None:
        adjusted = adjusted.masked_fill(banned, float("-inf"))
    if sampling.temperature == 0:
        tokens = adjusted.argmax(-1)
    else:
        allowed = blocks if adjusted is logits else None
        tokens = _sample_tokens(adjusted, sampling, uniforms, allowed)
    logprobs = blocks.logprobs(tokens) if blocks else _logprobs(logits, tokens, temperature)
    return tokens.cpu().numpy(), logprobs.cpu().numpy()


class LogitBlocks:
    """Logits [n, V] in blocks, computed by `library`, or else by torch."""

    def __init__(self, logits: Tensor, temperature: float, library: ctypes.CDLL | None) -> None:
        self._logits = logits.unflatten(-1, (-1, BLOCK_SIZE))
        self._temperature = temperature
        if library is not None:
            self._largest, sums = sum_blocks(library, logits, temperature)  # [n, b]
        else:
            parts = self._logits.split(max(1, CHUNK_SIZE // logits.shape[-1]))
            least = torch.finfo(torch.float32).min  # not -inf, which would give inf - inf
            self._largest = torch.cat([part.amax(-1).float().clamp_(min=least) for part in parts])
            maxima = self._largest.split([len(part) for part in parts])
            sums = torch.cat([
                ((part.float() - largest[..., None]) / temperature).exp_().sum(-1)
                for part, largest in zip(parts, maxima, strict=True)
            ])  # fmt: skip
        self.max = self._largest.amax(-1, keepdim=True)  # [n, 1]
        # Sums of exp((logit - max) / temperature), [n, b].
        self.sums = sums * ((self._largest - self.max) / temperature).exp()

    @staticmethod
    def supports(logits: Tensor) -> bool:
        num_blocks, rest = divmod(logits.shape[-1], BLOCK_SIZE)
        return (
            logits.device.type == "cpu"
            and logits.is_contiguous()
            and num_blocks >= MIN_BLOCKS
            and not rest
        )

    def logprobs(self, tokens: Tensor) -> Tensor:
        logits = self._logits.flatten(1).gather(1, tokens[:, None]).float()
        return ((logits - self.max) / self._temperature - self.sums.sum(-1, True).log())[:, 0]

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits and their tokens, [n, k] each, in descending order."""
        blocks = self._largest.topk(k).indices  # [n, k], which contain all of them
        values, indices = self._block(blocks).flatten(1).topk(k)  # indices in these blocks
        return values, blocks.gather(1, indices // BLOCK_SIZE) * BLOCK_SIZE + indices % BLOCK_SIZE

    def sample(self, uniform: Tensor) -> Tensor:
        """Tokens [n] from softmax(logits / temperature)."""
        sums = pad(self.sums.cumsum(-1), (1, 0))  # [n, b + 1], before each block, and the total
        target = uniform[:, None] * sums[:, -1:]
        block = _first_above(sums[:, 1:], target)[:, None]
        logits = self._block(block)[:, 0].float()
        in_block = ((logits - self.max) / self._temperature).exp().cumsum(-1)
        token = _first_above(in_block, target - sums.gather(1, block))
        # The sums of blocks round differently, so that no sum in the block may be above the target.
        # Then this is the last token that increases them.
        last = (in_block < in_block[:, -1:]).sum(-1)
        return block[:, 0] * BLOCK_SIZE + torch.minimum(token, last)

    def _block(self, blocks: Tensor) -> Tensor:
        return self._logits.gather(1, blocks[..., None].expand(-1, -1, BLOCK_SIZE))


def _logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `tokens`, [n] in fp32."""
    num_rows = max(1, CHUNK_SIZE // logits.shape[-1])
    pairs = zip(logits.split(num_rows), tokens[:, None].split(num_rows), strict=True)
    # On a CPU, log_softmax (one fused kernel) takes half the time of logsumexp (several kernels).
    chunks = [(rows.float() / temperature).log_softmax(-1).gather(-1, ids) for rows, ids in pairs]
    return torch.cat(chunks)[:, 0]


def _sample_tokens(
    logits: Tensor, sampling: Sampling, uniform: Tensor, blocks: LogitBlocks | None
) -> Tensor:
    """Sample from softmax(logits / temperature), truncated by top_k, top_p, min_p."""
    token_ids = None  # [n, k], most probable first; None = the whole vocabulary, in its order
    vocab_size = logits.shape[-1]
    if 0 < sampling.top_k < vocab_size:
        source = logits if blocks is None or sampling.top_k > MIN_BLOCKS else blocks
        logits, token_ids = source.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, token_ids = logits.float().sort(descending=True)
    elif sampling.min_p == 0 and blocks is not None:
        return blocks.sample(uniform)
    probs = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:  # keeps the token at which the sum of probs crosses top_p
        preceding = probs.cumsum(-1) - probs
        probs = probs.masked_fill(preceding >= sampling.top_p, 0)
    if sampling.min_p > 0:
        threshold = sampling.min_p * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < threshold, 0)
    # Inverse transform sampling: the first index at which the cumulated probs exceed the target.
    cumulated = probs.cumsum(-1)
    index = _first_above(cumulated, uniform[:, None] * cumulated[:, -1:])
    return index if token_ids is None else token_ids.gather(-1, index[:, None])[:, 0]


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """Index [n] of the first of the non-decreasing `sums` [n, k] that is above `target` [n, 1]."""
    # It is below k: a target is the last sum times a random number of at most 1 - 2^-24.
    return (sums <= target).sum(-1)
