"""Logprobs and entropies of tokens from hidden states, without the logits of all tokens.

The head multiplies hidden states [N, H] by its weight [V, H] to logits [N, V]. `head_logprobs`
computes them for one chunk of the vocabulary at a time, and in the backward pass again. Each row of
the weight is then read once per pass, and its gradient is complete after one product.

If the weight is trained, up to `kept_bytes` of logits are kept for the backward pass. With a frozen
weight the gradient of a logprob with respect to the hidden state, weight[token] - sum(p weight), is
computed in the forward pass.

Letters in shapes: N tokens, V vocabulary, H hidden size, v tokens of a chunk of the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peralta_zmq.models.logprobs import (
    CHUNK_LOGITS,
    DEFAULT_CHUNK_LOGITS,
    MIN_LOGPROB,
    compute_dtype,
)

KEPT_BYTES = 256 << 20  # logits kept between the forward and the backward pass
NO_GRADIENTS = (None,) * 8  # gradients of the inputs after the hidden states
# Smaller logits, and the logsumexp of none, are this; finite, because inf - inf is not a number.
MIN_LOGIT = -1e30


def head_logprobs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    token_ids: Tensor,  # [N]
    *,
    temperature: Tensor | float = 1.0,  # a scalar, or [N]
    with_entropy: bool = False,
    chunk_tokens: int | None = None,  # tokens of a chunk of the vocabulary; None: by the device
    kept_bytes: int = KEPT_BYTES,
) -> Tensor:
    """Return log softmax(hidden @ weight.T / temperature) at `token_ids`, [1, N].

    With `with_entropy` the result is [2, N], with entropies of the softmax in nats. The dtype of
    the products is that of autocast if enabled, else that of `hidden`; sums and result are fp32, or
    float64 for a float64 `hidden`. A logit of -inf has probability 0. The backward pass adds to
    `weight.grad`, so it must be computed with `backward()`, not with `torch.autograd.grad`.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    temperatures = torch.as_tensor(temperature, dtype=compute_dtype(hidden), device=hidden.device)
    temperatures = temperatures.expand(len(hidden))[:, None]
    has_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if chunk_tokens is None:
        limit = CHUNK_LOGITS.get(weight.device.type, DEFAULT_CHUNK_LOGITS)
        # Multiples of 512: smaller matrix products are slower.
        chunk_tokens = max(512, limit // max(1, len(hidden)) // 512 * 512)
    options = (dtype, with_entropy, has_gradient, chunk_tokens, kept_bytes)
    return cast(Tensor, _HeadLogprobs.apply(hidden, weight, token_ids, temperatures, *options))


class _HeadLogprobs(torch.autograd.Function):
    """Forward and backward pass of `head_logprobs`; `temperature` is [N, 1].

    With logits z / temperature, their softmax p and entropy S, the gradient with respect to z is
    (one_hot - p) / temperature for a logprob and -p (log p + S) / temperature for an entropy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        temperature: Tensor,
        dtype: torch.dtype,
        with_entropy: bool,
        has_gradient: bool,
        chunk_tokens: int,
        kept_bytes: int,
    ) -> Tensor:
        inputs = hidden.to(dtype)
        ctx.is_direct = has_gradient and not (weight.requires_grad or with_entropy)
        ctx.chunk_tokens = chunk_tokens
        ctx.kept = list[Tensor]()  # logits [N, v] of the first chunks, for the backward pass
        max_kept = kept_bytes if has_gradient and not ctx.is_direct else 0
        selected = torch.zeros_like(temperature)
        entropy = torch.zeros_like(temperature)
        total = torch.full_like(temperature, MIN_LOGIT)  # logsumexp of the chunks up to here
        expected_row = torch.zeros_like(hidden, dtype=temperature.dtype) if ctx.is_direct else None
        for number, (start, rows) in enumerate(_chunks(weight, inputs, chunk_tokens)):
            logits = inputs @ rows.t()  # [N, v]
            num_bytes = sum(each.nbytes for each in (*ctx.kept, logits))
            if number == len(ctx.kept) and num_bytes <= max_kept:
                ctx.kept.append(logits)
            scaled = logits.to(temperature.dtype) / temperature
            index, is_inside = _index(token_ids, start, len(rows))
            selected = torch.where(is_inside, scaled.gather(1, index), selected)
            largest = scaled.clamp_(min=MIN_LOGIT).amax(1, keepdim=True)
            exponentials = scaled.sub_(largest).exp()
            sums = exponentials.sum(1, keepdim=True)
            chunk_total = largest + sums.log()
            previous_total = total
            total = torch.logaddexp(total, chunk_total)
            # logarithms of the probabilities of the earlier chunks, and of this one
            log_before = previous_total - total
            log_share = chunk_total - total
            if with_entropy:
                with torch.autocast(hidden.device.type, enabled=False):  # autocast narrows vecdot
                    weighted = torch.linalg.vecdot(exponentials, scaled)[:, None]
                chunk_entropy = sums.log() - weighted / sums
                entropy = log_before.exp() * (entropy - log_before)
                entropy += log_share.exp() * (chunk_entropy - log_share)
            if expected_row is not None:
                expected_row *= log_before.exp()
                expected_row += (exponentials.to(dtype) @ rows) * (log_share.exp() / sums)
        ctx.hidden_dtype = hidden.dtype
        ctx.weight = weight
        ctx.with_entropy = with_entropy
        if expected_row is not None:
            ctx.save_for_backward((weight[token_ids] - expected_row) / temperature)
        elif has_gradient:
            ctx.save_for_backward(inputs, weight, token_ids, temperature, total, entropy)
        results = [selected - total, entropy] if with_entropy else [selected - total]
        return torch.cat(results, 1).t()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        upstream = grads[0][..., None]  # [1 or 2, N, 1]
        if ctx.is_direct:
            (direction,) = ctx.saved_tensors
            return (upstream[0] * direction).to(ctx.hidden_dtype), *NO_GRADIENTS
        inputs, weight, token_ids, temperature, total, entropy = ctx.saved_tensors
        upstream = upstream / temperature
        gradient = torch.zeros_like(inputs, dtype=temperature.dtype)
        is_first = ctx.weight.requires_grad and ctx.weight.grad is None
        if is_first:
            ctx.weight.grad = torch.empty_like(ctx.weight)
        weight_grad = ctx.weight.grad if ctx.weight.requires_grad else None
        for start, rows in _chunks(weight, inputs, ctx.chunk_tokens):
            logits = ctx.kept.pop(0) if ctx.kept else inputs @ rows.t()
            logprobs = (logits.to(temperature.dtype) / temperature).sub_(total)
            part = logprobs.exp()
            if ctx.with_entropy:
                factor = logprobs.clamp_(min=MIN_LOGPROB).add_(entropy).mul_(upstream[1])
                part *= factor.add_(upstream[0]).neg_()
            else:
                part *= -upstream[0]
            index, is_inside = _index(token_ids, start, len(rows))
            part.scatter_add_(1, index, upstream[0] * is_inside)
            part = part.to(inputs.dtype)  # gradient of the logits
            gradient += part @ rows
            if weight_grad is not None:
                chunk = weight_grad[start : start + len(rows)]
                added = part.t() @ inputs
                chunk.copy_(added) if is_first else chunk.add_(added)
        return gradient.to(ctx.hidden_dtype), *NO_GRADIENTS


@contextlib.contextmanager
def sparse_embedding_gradient(model: Any) -> Generator[None, None, None]:
    """Save memory in the gradient of an input embedding that is tied to the head, on a CPU.

    autograd would add two gradients [V, H] of the tied weight: 0.6 GiB more for Qwen3-0.6B. A hook
    adds the gradients of the batch's tokens to the head's instead. It must be computed with
    `backward()`: `torch.autograd.grad` would return an incomplete one.
    """
    embedding = model.get_input_embeddings()
    weight: Any = getattr(embedding, "weight", None)
    tied = getattr(model.get_output_embeddings(), "weight", None) is weight
    plain = type(embedding) is torch.nn.Embedding and not embedding.scale_grad_by_freq
    if not (tied and plain and weight.requires_grad and weight.device.type == "cpu"):
        yield
        return

    def detach_rows(_: Any, inputs: tuple[Tensor], rows: Tensor) -> Tensor:
        if not rows.requires_grad:
            return rows
        rows = rows.detach().requires_grad_()
        rows.register_hook(partial(_add_row_gradient, embedding, inputs[0].flatten()))
        return rows

    handle = embedding.register_forward_hook(detach_rows)
    try:
        yield
    finally:
        handle.remove()


def _add_row_gradient(embedding: torch.nn.Embedding, token_ids: Tensor, gradient: Tensor) -> None:
    """Add the gradient [..., H] for `token_ids` [M] to `weight.grad` [V, H]."""
    weight = embedding.weight
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    gradient = gradient.reshape(len(token_ids), -1).to(weight.dtype)
    if embedding.padding_idx is not None:  # autograd gives the padding row no gradient either
        gradient = gradient.masked_fill((token_ids == embedding.padding_idx)[:, None], 0)
    weight.grad.index_add_(0, token_ids, gradient)


def _chunks(weight: Tensor, inputs: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """First token and rows [v, H] of each chunk of the vocabulary, in the dtype of `inputs`."""
    for start in range(0, len(weight), size):
        yield start, weight[start : start + size].to(inputs.dtype)


def _index(token_ids: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Index of each token in a chunk of the vocabulary, and whether it is in it, [N, 1] each."""
    index = token_ids[:, None] - start
    return index.clamp(0, size - 1), (index >= 0) & (index < size)
