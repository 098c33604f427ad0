from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from peralta_zmq.learning.packing import TreeBuilder
from peralta_zmq.models.tree_attention import TREE_ATTENTION, PackedLayout
from peralta_zmq.rollout import PrefixTree, TreeSpan

CPU = torch.device("cpu")
# A completion that branches from another one, one without a prompt, and a single span.
TREES = [
    PrefixTree((TreeSpan(-1, 3), TreeSpan(2, 5), TreeSpan(4, 2), TreeSpan(9, 3), TreeSpan(2, 1))),
    PrefixTree((TreeSpan(-1, 1), TreeSpan(-1, 2), TreeSpan(0, 2))),
    PrefixTree((TreeSpan(-1, 4),)),
]


def group(num_prompt: int, num_completions: int, length: int) -> PrefixTree:
    """The tree of a group whose completions differ from their first token on."""
    builder, prompt = TreeBuilder(), list(range(num_prompt))
    for number in range(num_completions):
        completion = range(num_prompt + number * length, num_prompt + (number + 1) * length)
        assert builder.add([*prompt, *completion], max_tokens=1 << 20)
    return PrefixTree(tuple(builder.spans))


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


def whole_and_by_span(trees: list[PrefixTree]) -> tuple[PackedLayout, PackedLayout]:
    whole = PackedLayout.of(trees, CPU, is_by_span=lambda *_: False)
    by_span = PackedLayout.of(trees, CPU, is_by_span=lambda *_: True)
    assert len(whole.parts) == len(trees)
    assert len(by_span.parts) == sum(len(tree.spans) for tree in trees)
    return whole, by_span


def test_attention_by_span_is_that_of_whole_trees() -> None:
    whole, by_span = whole_and_by_span(TREES)
    dtypes = [torch.float64] * 3
    # Sums of some tens of numbers below 100, in float64.
    for ours, expected in zip(attention(by_span, *dtypes), attention(whole, *dtypes), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_bfloat16_gradients_of_a_prompt_are_rounded_once() -> None:
    """They are sums over 64 completions; rotary embeddings leave queries and keys in float32."""
    whole, by_span = whole_and_by_span([group(4, num_completions=64, length=3)])
    *_, exact = attention(whole, *[torch.float64] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        *_, ours = attention(by_span, torch.float32, torch.float32, torch.bfloat16)
    # bfloat16 has 8 bits; the sums themselves, of numbers below 10, are in float32.
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    ("num_prompt", "num_completions", "length", "num_parts"),
    [(20, 8, 25, 1), (110, 8, 512, 8), (464, 8, 48, 1), (160, 4, 96, 4), (120, 8, 100, 8)],
)
def test_spans_of_large_groups_are_computed_one_by_one(
    num_prompt: int, num_completions: int, length: int, num_parts: int
) -> None:
    """Small trees, and those of short completions after a long prompt, are one part."""
    tree = group(num_prompt, num_completions, length)
    assert len(PackedLayout.of([tree], CPU).parts) == num_parts
