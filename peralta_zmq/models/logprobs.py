"""Log-probabilities and entropies of tokens from the logits at the tokens before them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

# Logits to convert to fp32 at a time, by device type: on a CPU 8 MiB, so that malloc reuses memory.
CHUNK_LOGITS = {"cpu": 1 << 21}
DEFAULT_CHUNK_LOGITS = 1 << 26
MIN_LOGPROB = -1e4  # limit of log p in p log p: p is 0 there, but 0 * -inf is not a number


def logprobs_and_entropies(
    logits: Tensor,  # [..., V]
    token_ids: Tensor,  # [...]
    *,
    temperature: Tensor | float = 1.0,  # a scalar, or [...]
    with_entropy: bool = True,
    chunk_logits: int | None = None,  # logits to convert to fp32 at a time; None: by device
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) at `token_ids`, and the entropies of the softmax in nats.

    Both are fp32, or float64 for float64 logits.
    """
    result = _TokenStatistics.apply(logits, token_ids, temperature, with_entropy, chunk_logits)
    return cast("tuple[Tensor, Tensor | None]", result)


class _TokenStatistics(torch.autograd.Function):
    """Forward and backward pass; both convert only a few rows to fp32 at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        token_ids: Tensor,
        temperature: Tensor | float,
        with_entropy: bool,
        chunk_logits: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        rows = logits.reshape(-1, logits.shape[-1])
        temperatures = torch.as_tensor(
            temperature, dtype=compute_dtype(logits), device=logits.device
        )
        temperatures = temperatures.expand(token_ids.shape).reshape(-1, 1)
        ids = token_ids.reshape(-1, 1)
        logprobs = torch.empty_like(temperatures)
        entropies = torch.empty_like(temperatures) if with_entropy else None
        for chunk in _chunks(rows, chunk_logits):
            scaled = rows[chunk].to(temperatures.dtype) / temperatures[chunk]
            total = scaled.logsumexp(1, keepdim=True)
            logprobs[chunk] = scaled.gather(1, ids[chunk]) - total
            if entropies is not None:
                every = scaled.sub_(total).clamp_(min=MIN_LOGPROB)
                entropies[chunk, 0] = -torch.linalg.vecdot(every.exp(), every)
        ctx.save_for_backward(rows, ids, temperatures, entropies)
        ctx.shape = logits.shape
        ctx.chunk_logits = chunk_logits
        shape = token_ids.shape
        return logprobs.view(shape), None if entropies is None else entropies.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        rows, ids, temperatures, entropies = ctx.saved_tensors
        upstream, *of_entropy = (
            each.reshape(-1, 1) / temperatures for each in grads if each is not None
        )
        gradient = torch.empty_like(rows)
        for chunk in _chunks(rows, ctx.chunk_logits):
            scaled = rows[chunk].to(temperatures.dtype) / temperatures[chunk]
            part = scaled.softmax(1)
            factor = upstream[chunk]
            if of_entropy:
                every = scaled.log_softmax(1).clamp_(min=MIN_LOGPROB)
                factor = every.add_(entropies[chunk]).mul_(of_entropy[0][chunk]).add_(factor)
            # upstream * (one_hot - p) - of_entropy * p * (log p + entropy)
            gradient[chunk] = part.mul_(-factor).scatter_add_(1, ids[chunk], upstream[chunk])
        return gradient.view(ctx.shape), None, None, None, None


def compute_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _chunks(rows: Tensor, limit: int | None) -> list[slice]:
    limit = limit or CHUNK_LOGITS.get(rows.device.type, DEFAULT_CHUNK_LOGITS)
    size = max(1, limit // rows.shape[1])
    return [slice(start, start + size) for start in range(0, len(rows), size)]
