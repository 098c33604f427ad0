from __future__ import annotations

import math

import pytest
import torch
from peak_memory import PeakMemory

from peralta_zmq.models import selected_logprobs
from peralta_zmq.models.logprobs import logprobs_and_entropies


@pytest.mark.parametrize("temperature", [0.7, torch.tensor([[0.5, 1.0, 2.0], [1.5, 0.7, 1.0]])])
def test_selected_logprobs_match_log_softmax_with_gradient(
    temperature: torch.Tensor | float,
) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 8, generator=random, dtype=torch.float64).requires_grad_()
    ids, weights = torch.randint(8, (2, 3), generator=random), torch.randn(2, 3, generator=random)
    divisor = temperature if isinstance(temperature, float) else temperature[..., None]
    expected = (logits / divisor).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    found = selected_logprobs(  # in three chunks
        logits, ids, temperature=temperature, chunk_logits=2 * 8
    )
    assert torch.allclose(found, expected)
    gradients = [torch.autograd.grad((each * weights).sum(), logits) for each in (found, expected)]
    assert torch.allclose(gradients[0][0], gradients[1][0])


def test_selected_logprobs_are_computed_in_fp32() -> None:
    logits = torch.tensor([20.0, 0.0], dtype=torch.bfloat16)
    assert selected_logprobs(logits, torch.tensor(1)).dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.7, torch.tensor([0.5, 1.0, 2.0, 1.5, 0.7])])
def test_entropies_match_log_softmax_with_gradient(
    temperature: torch.Tensor | float,
) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 9, generator=random, dtype=torch.float64)
    logits[:, 8] = -math.inf
    logits.requires_grad_()
    ids, weights = torch.randint(8, (5,), generator=random), torch.randn(2, 5, generator=random)
    divisor = temperature if isinstance(temperature, float) else temperature[:, None]
    exact = (logits[:, :8] / divisor).log_softmax(-1)
    expected = exact.gather(-1, ids[:, None])[:, 0], -(exact.exp() * exact).sum(-1)
    found = logprobs_and_entropies(  # in three chunks
        logits, ids, temperature=temperature, chunk_logits=2 * 9
    )
    sums = list[torch.Tensor]()
    for ours, other in zip(found, expected, strict=True):
        assert torch.allclose(ours, other)
    for one, entropy in (found, expected):
        (gradient,) = torch.autograd.grad((torch.stack([one, entropy]) * weights).sum(), logits)
        sums.append(gradient)
    assert torch.allclose(sums[0], sums[1])


def test_entropies_allocate_a_few_rows_and_one_gradient() -> None:
    logits, rows = torch.randn(64, 1024, requires_grad=True), 4 * 2 * 1024
    with PeakMemory() as memory:
        logprobs, entropies = logprobs_and_entropies(
            logits, torch.arange(64), chunk_logits=2 * 1024
        )
    assert memory.peak < 5 * rows
    with PeakMemory() as memory:
        (logprobs + entropies).sum().backward()
    assert memory.peak < logits.nbytes + 5 * rows
