"""Attention in parts (decode steps on a CPU) against SDPA (everything else)."""

from __future__ import annotations

import pytest
import torch

from peralta_zmq.engines.native import decoder
from peralta_zmq.engines.native.cache import Part

ROWS, HEADS, SHARED, WIDTH, OWN = 3, 2, 4, 8, 32


@pytest.mark.parametrize("num_common", [0, 5])
def test_attention_in_parts_matches_sdpa(num_common: int) -> None:
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    key, value = (
        Part(drawn(HEADS, num_common, WIDTH), drawn(ROWS, HEADS, OWN, WIDTH)) for _ in range(2)
    )
    query = drawn(ROWS, HEADS, SHARED, WIDTH)
    hidden = torch.arange(num_common + OWN) > torch.tensor([[9], [20], [36]])  # a row each
    hidden[1, :num_common] = True  # this one reads nothing of the common part
    mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[:, None, None]
    at_once = decoder._attention_at_once(query, key, value, mask, scaling=0.3)
    in_parts = decoder._attention_in_parts(query, key, value, mask, scaling=0.3, softcap=None)
    assert torch.allclose(at_once, in_parts, atol=1e-6)
    assert not torch.allclose(at_once[0], at_once[1], atol=0.1)
