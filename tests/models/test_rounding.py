"""Noise that moves weights off the grid of bfloat16 or float16: interval, seed, adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peralta_zmq.engines.engine_models import AdapterMerger
from peralta_zmq.models import lora
from peralta_zmq.models.frozen_base import BaseWeights
from peralta_zmq.models.rounding import grid_noise, off_grid
from peralta_zmq.registry import WeightUpdate

# Powers of two, below which the grid is finer; both zeros; the smallest and largest numbers.
SPECIAL = [1.0, -1.0, 2.0**-14, 2.0**-24, -(2.0**-15), 0.0, -0.0, 65504.0, 0.05, -0.375]


def moved(weights: Tensor, dtype: torch.dtype = torch.bfloat16, seed: str = "0/w") -> Tensor:
    return off_grid(weights, grid_noise(weights, dtype, seed=seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noisy_weights_round_to_their_base(dtype: torch.dtype) -> None:
    base = torch.tensor(SPECIAL * 1000).to(dtype).float()
    found = moved(base, dtype)
    assert torch.equal(found.to(dtype).float(), base)
    assert not found[base == 0].any()
    # With float16 the noise is one of 8,191 numbers, also 0: expected once in 8,000, and more than
    # eight times with a probability of 1e-6.
    assert (found == base)[base != 0].sum() <= 8


def test_noise_fills_the_interval_on_both_sides() -> None:
    noise = moved(torch.ones(200_000)) - 1.0
    above, below = 2.0**-8, 2.0**-9  # half of the grid steps above and below 1
    # The farthest of 100,000 on a side is closer with a probability of 0.995 ** 100_000.
    assert 0.995 * above < noise.max() < above
    assert 0.995 * below < -noise.min() < below


def test_noise_depends_on_the_seed() -> None:
    weights = torch.full((50,), 0.5)
    assert torch.equal(moved(weights), moved(weights))
    assert not torch.equal(moved(weights), moved(weights, seed="1/w"))
    assert not torch.equal(moved(weights), moved(weights, seed="0/v"))


def test_weights_off_the_grid_and_wide_dtypes_have_no_noise() -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(moved(weights), weights)
    on_grid = weights.bfloat16().float()
    assert torch.equal(moved(on_grid, torch.float32), on_grid)


def test_infinities_and_nan_stay_as_they_are() -> None:
    weights = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert torch.equal(moved(weights)[:2], weights[:2]) and moved(weights)[2].isnan()


def test_small_adapter_survives_merging_only_with_noise() -> None:
    """The share of the adapter's product that the merged weights in bfloat16 have."""
    random = torch.Generator().manual_seed(0)
    base = {"w.weight": (0.1 * torch.randn(400, 300, generator=random)).bfloat16()}
    a = torch.randn(4, 300, generator=random)
    b = 1e-5 * torch.randn(400, 4, generator=random)
    adapter = {lora.PREFIX + "w" + lora.A: a, lora.PREFIX + "w" + lora.B: b}
    update = WeightUpdate(1, adapter, is_adapter=True, base_dtype="bfloat16")
    product = (b.double() @ a.double()).flatten()

    def share(dtype: torch.dtype) -> float:
        """The share in the weights of an engine of this dtype, rounded to bfloat16."""
        merger = AdapterMerger(lambda _: BaseWeights(base, None), dtype)
        merged = merger.weights_of(update)["w.weight"].bfloat16()
        change = (merged.double() - base["w.weight"].double()).flatten()
        return float(change @ product / (product @ product))

    # 120,000 weights change by a grid step of about 5e-4 with a probability of about 4 %: the
    # standard error of the share is below 0.03.
    assert abs(share(torch.bfloat16) - 1) < 0.15
    assert share(torch.float32) < 0.2  # an engine in float32 does not round, and gets no noise
