from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface

from peralta_zmq.models.tree_attention import TREE_ATTENTION, PackedLayout
from peralta_zmq.rollout import PrefixTree, TreeSpan

CPU = torch.device("cpu")
# A prompt of 4 tokens and 64 completions of 5, which are computed by span.
TREE = PrefixTree((TreeSpan(-1, 4), *[TreeSpan(3, 5)] * 64))


def attention(layout: PackedLayout, *dtypes: torch.dtype) -> list[Tensor]:
    """Attention of random queries, keys and values in these dtypes, and its gradients.

    There are two query heads per key head.
    """
    random, length = torch.Generator().manual_seed(0), len(layout.positions)
    query, key, value = (
        torch.randn(1, heads, length, 8, generator=random).bfloat16().to(dtype).requires_grad_()
        for heads, dtype in zip((4, 2, 2), dtypes, strict=True)
    )
    result, _ = AttentionInterface()[TREE_ATTENTION](None, query, key, value, layout, scaling=0.3)
    (result * torch.arange(8)).sum().backward()
    gradients = [each.grad for each in (query, key, value) if each.grad is not None]
    return [result.detach(), *gradients]


def test_bfloat16_gradients_of_a_prompt_are_rounded_once() -> None:
    """They are sums over 64 completions; rotary embeddings leave queries and keys in float32."""
    layout = PackedLayout.of([TREE], CPU)
    assert len(layout.parts) == 65
    *_, exact = attention(layout, *[torch.float64] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        *_, ours = attention(layout, torch.float32, torch.float32, torch.bfloat16)
    # bfloat16 has 8 bits; the sums themselves, of numbers below 10, are in float32.
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-4)
