"""Weights between the numbers of bfloat16 or float16, so that small updates survive rounding.

An update smaller than half a grid step disappears when the sum with a weight on the grid is
rounded. Noise moves each weight to a random place of the interval that rounds to it; a share
(update / grid step) of the sums then rounds to another number, and the rounded weights follow the
update in the mean (docs/rounding.md).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# Bits that the mantissa of fp32 has more than that of these dtypes.
MORE_BITS = {torch.bfloat16: 16, torch.float16: 13}


@torch.no_grad()
def grid_noise(weights: Tensor, dtype: torch.dtype, *, seed: str) -> Tensor:
    """int16 noise for `off_grid`, of the shape of `weights`, which depends on `seed`.

    It is 0 for zeros, infinities and NaN, for weights that are not on the grid of `dtype`, and for
    a `dtype` of 32 bits. It is uniform over the integers that fp32 numbers are in memory, so that
    an update has the same mean effect upwards and downwards.
    """
    noise = torch.zeros(weights.shape, dtype=torch.int16, device=weights.device)
    if dtype in MORE_BITS:
        digest = hashlib.sha256(seed.encode()).digest()
        random = torch.Generator(weights.device).manual_seed(int.from_bytes(digest[:7], "little"))
        limit = (1 << MORE_BITS[dtype] - 1) - 1  # the last number that is nearer to this weight
        noise.random_(-limit, limit + 1, generator=random)
        noise *= (weights.to(dtype) == weights) & (weights != 0) & weights.isfinite()
    return noise


def off_grid(weights: Tensor, noise: Tensor) -> Tensor:
    """fp32 weights with the result of `grid_noise`: they round to `weights`."""
    return (weights.float().view(torch.int32) + noise).view(torch.float32)
