"""Log-probabilities and entropies of tokens from logits, at a temperature.

A logprob is the natural logarithm of a probability. The logits at token t predict token t + 1. This
module does not shift them: for a token, the caller must pass the logits at the token before it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

# Number of logits to convert to fp32 at a time, by device type. The value for a CPU is small (8 MiB
# of fp32), so that malloc reuses memory instead of requesting new pages.
CHUNK_LOGITS = {"cpu": 1 << 21}
DEFAULT_CHUNK_LOGITS = 1 << 26


def selected_logprobs(
    logits: Tensor,  # [..., V]
    token_ids: Tensor,  # [...]
    *,
    temperature: Tensor | float = 1.0,  # a scalar, or [...]
) -> Tensor:
    """Return log softmax(logits / temperature) at `token_ids`, shaped as `token_ids`.

    The result is fp32, or float64 for float64 logits.
    """
    return cast(Tensor, _SelectedLogprobs.apply(logits, token_ids, temperature))


def entropies(
    logits: Tensor,  # [..., V]
    *,
    temperature: Tensor | float = 1.0,  # a scalar, or [...]
) -> Tensor:
    """Return the entropy -sum(p log p) of p = softmax(logits / temperature).

    The result is in nats and has the shape [...].
    """
    if isinstance(temperature, Tensor):
        temperature = temperature.unsqueeze(-1)
    logprobs = (logits.to(_compute_dtype(logits)) / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


class _SelectedLogprobs(torch.autograd.Function):
    """Forward and backward pass of `selected_logprobs`.

    To save memory, both convert only a few rows to fp32 at a time.
    """

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
            part = (rows[chunk].to(temperatures.dtype) / temperatures[chunk]).softmax(1)
            # in place: upstream * (one_hot - softmax)
            part.mul_(-upstream[chunk]).scatter_add_(1, ids[chunk], upstream[chunk])
            gradient[chunk] = part
        return gradient.view(ctx.shape), None, None


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(rows: Tensor) -> list[slice]:
    """Slices of as many rows as the limit in CHUNK_LOGITS allows, at least one."""
    limit = CHUNK_LOGITS.get(rows.device.type, DEFAULT_CHUNK_LOGITS)
    size = max(1, limit // rows.shape[1])
    return [slice(start, start + size) for start in range(0, len(rows), size)]
