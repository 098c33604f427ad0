"""Log-probabilities and entropies of tokens from logits, at a temperature.

A logprob is the natural logarithm of a probability. The logits at token t predict token t + 1: the
callers pass the logits of the token before.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

# Numbers of logits converted to fp32 at a time. On a CPU 8 MiB, which malloc reuses without
# requesting new memory pages.
CHUNK_LOGITS = {"cpu": 1 << 21}
DEFAULT_CHUNK_LOGITS = 1 << 26


def selected_logprobs(
    logits: Tensor,  # [..., V]
    token_ids: Tensor,  # [...]
    *,
    temperature: Tensor | float = 1.0,  # a scalar, or [...]
) -> Tensor:
    """log softmax(logits / temperature) at `token_ids`, [...]; fp32, or float64 from float64."""
    return cast(Tensor, _SelectedLogprobs.apply(logits, token_ids, temperature))


def entropies(
    logits: Tensor,  # [..., V]
    *,
    temperature: Tensor | float = 1.0,  # a scalar, or [...]
) -> Tensor:
    """Entropies -sum(p log p) of p = softmax(logits / temperature), in nats, [...]."""
    if isinstance(temperature, Tensor):
        temperature = temperature.unsqueeze(-1)
    logprobs = (logits.to(_compute_dtype(logits)) / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


class _SelectedLogprobs(torch.autograd.Function):
    """`selected_logprobs` with few rows at a time in fp32, in both passes, to save memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: Tensor | float) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        temperatures = torch.as_tensor(
            temperature, dtype=_compute_dtype(logits), device=logits.device
        )
        temperatures = temperatures.expand(token_ids.shape).reshape(-1, 1)
        ids = token_ids.reshape(-1, 1)
        logprobs = torch.empty_like(temperatures)
        for chunk in _chunks(rows):
            scaled = rows[chunk].to(temperatures.dtype) / temperatures[chunk]
            logprobs[chunk] = scaled.gather(1, ids[chunk]) - scaled.logsumexp(1, keepdim=True)
        ctx.save_for_backward(rows, ids, temperatures)
        ctx.shape = logits.shape
        return logprobs.view(token_ids.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, ids, temperatures = ctx.saved_tensors
        upstream = grads[0].reshape(-1, 1) / temperatures
        gradient = torch.empty_like(rows)
        for chunk in _chunks(rows):
            softmax = (rows[chunk].to(temperatures.dtype) / temperatures[chunk]).softmax(1)
            softmax.mul_(-upstream[chunk]).scatter_add_(1, ids[chunk], upstream[chunk])
            gradient[chunk] = softmax
        return gradient.view(ctx.shape), None, None


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(rows: Tensor) -> list[slice]:
    limit = CHUNK_LOGITS.get(rows.device.type, DEFAULT_CHUNK_LOGITS)
    size = max(1, limit // rows.shape[1])
    return [slice(start, start + size) for start in range(0, len(rows), size)]
