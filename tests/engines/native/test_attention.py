"""Attention in two parts (decode steps on a CPU) against torch's SDPA over the joined parts."""

from __future__ import annotations

import pytest
import torch
from exactness import is_as_exact_as_torch
from torch.nn.functional import scaled_dot_product_attention

from peralta_zmq.engines.native import decoder
from peralta_zmq.engines.native.kv_cache import Part

ROWS, HEADS, GROUP, WIDTH, OWN = 3, 2, 4, 8, 32


@pytest.mark.parametrize("num_shared", [0, 5])
def test_attention_in_parts_is_as_exact_as_sdpa(num_shared: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    key, value = (
        Part(random(HEADS, num_shared, WIDTH), random(ROWS, HEADS, OWN, WIDTH)) for _ in range(2)
    )
    query = random(ROWS, HEADS, GROUP, WIDTH)
    masked = torch.arange(num_shared + OWN) > torch.tensor([[9], [20], [36]])  # one line per row
    masked[1, :num_shared] = True  # row 1 does not use the shared part
    mask = torch.zeros(masked.shape).masked_fill(masked, float("-inf"))[:, None, None]
    keys, values = (
        torch.cat([part.shared.expand(ROWS, -1, -1, -1), part.own], 2) for part in (key, value)
    )
    exact = (each.double() for each in (query, keys, values))
    expected = scaled_dot_product_attention(*exact, attn_mask=mask.double(), scale=0.3)
    in_parts = decoder.attention_in_parts(query, key, value, mask, scaling=0.3, softcap=None)
    torchs = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3)
    assert is_as_exact_as_torch(in_parts, torchs, expected)
    assert not torch.allclose(expected[0], expected[1], atol=0.1)
