"""Linear layers that keep no copy of their weight in autocast's dtype.

autocast casts the fp32 weight of a linear layer, and autograd keeps the cast weight for the
backward pass: 0.9 GB for Qwen3-0.6B. The layers here cast it again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def replace_linears(model: Any) -> int:
    """Let fp32 linear layers of a transformers model cast twice; returns their number.

    Not the head (head.py), nor layers that are distributed over ranks.
    """
    num_replaced = 0
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is not nn.Linear or module is head:
            continue
        if type(module.weight) is nn.Parameter and module.weight.dtype == torch.float32:
            cast(Any, module).forward = partial(_forward, module)
            num_replaced += 1
    return num_replaced


def _forward(module: nn.Linear, rows: Tensor) -> Tensor:
    device = rows.device.type
    if not torch.is_autocast_enabled(device):
        return linear(rows, module.weight, module.bias)
    narrow = rows.to(torch.get_autocast_dtype(device))
    return _CastLinear.apply(narrow, module.weight, module.bias)  # pyright: ignore[reportReturnType]


class _CastLinear(torch.autograd.Function):
    """With y = x W.T + b and the gradient g of y, those of x, W and b are g W, g.T x and sum(g)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows_needed, weight_needed, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if weight_needed else None, weight if rows_needed else None)
        ctx.dtype = weight.dtype
        return linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        rows_needed, weight_needed, bias_needed = ctx.needs_input_grad
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        return (
            grads[0] @ weight.to(grads[0].dtype) if rows_needed else None,
            (flat.t() @ rows.reshape(-1, rows.shape[-1])).to(ctx.dtype) if weight_needed else None,
            flat.sum(0, dtype=ctx.dtype) if bias_needed else None,
        )
