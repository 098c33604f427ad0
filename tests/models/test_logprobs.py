from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peak_memory import PeakMemory

from peralta_zmq.models.logprobs import logprobs_and_entropies


def test_logprobs_are_computed_in_fp32() -> None:
    logits = torch.tensor([20.0, 0.0], dtype=torch.bfloat16)
    assert logprobs_and_entropies(logits, torch.tensor(1))[0].dtype == torch.float32


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [0.7, torch.tensor([0.5, 1.0, 2.0, 1.5, 0.7])])
def test_logprobs_and_entropies_match_log_softmax_with_gradient(
    temperature: torch.Tensor | float, with_entropy: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 9, generator=random, dtype=torch.float64)
    logits[:, 8] = -math.inf
    logits.requires_grad_()
    ids, weights = torch.randint(8, (5,), generator=random), torch.randn(2, 5, generator=random)
    divisor = temperature if isinstance(temperature, float) else temperature[:, None]
    exact = (logits[:, :8] / divisor).log_softmax(-1)
    expected = exact.gather(-1, ids[:, None])[:, 0], -(exact.exp() * exact).sum(-1)
    options: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
    found: Any = logprobs_and_entropies(logits, ids, chunk_logits=2 * 9, **options)  # three chunks
    assert (found[1] is not None) == with_entropy
    gradients = list[torch.Tensor]()
    for values in (found, expected):
        terms = [values[index] * weights[index] for index in range(1 + with_entropy)]
        gradients += torch.autograd.grad(torch.stack(terms).sum(), logits)
    for ours, other in zip(found[: 1 + with_entropy], expected, strict=False):
        assert torch.allclose(ours, other)
    assert torch.allclose(gradients[0], gradients[1])


def test_entropies_allocate_a_few_rows_and_one_gradient() -> None:
    logits, rows = torch.randn(64, 1024, requires_grad=True), 4 * 2 * 1024
    with PeakMemory() as memory:
        results: Any = logprobs_and_entropies(logits, torch.arange(64), chunk_logits=2 * 1024)
    assert memory.peak < 5 * rows
    with PeakMemory() as memory:
        torch.stack(results).sum().backward()
    assert memory.peak < logits.nbytes + 5 * rows
