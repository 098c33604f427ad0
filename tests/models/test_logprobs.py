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


def test_selected_logprobs_with_scalar_and_tensor_temperature_are_bit_equal() -> None:
    logits, ids = torch.randn(3, 8), torch.tensor([5, 0, 3])
    scalar = selected_logprobs(logits, ids, temperature=0.7)
    assert torch.equal(selected_logprobs(logits, ids, temperature=torch.full((3,), 0.7)), scalar)


def test_selected_logprobs_by_hand() -> None:
    # p = 1/4, 1/4, 1/2 at T 1; at T .5 the squares: 1/6, 1/6, 4/6
    logits = torch.tensor([0.0, 0.0, math.log(2)])
    third = torch.tensor(2)
    assert selected_logprobs(logits, third).item() == pytest.approx(math.log(1 / 2))
    cool = selected_logprobs(logits, third, temperature=0.5).item()
    assert cool == pytest.approx(math.log(4 / 6))


def test_selected_logprobs_are_computed_in_fp32() -> None:
    logits = torch.tensor([20.0, 0.0], dtype=torch.bfloat16)
    assert selected_logprobs(logits, torch.tensor(1)).dtype == torch.float32


def test_entropies_by_hand() -> None:
    # four equal ones: ln 4; .5, .25, .25: 1.5 ln 2; at temperature 2 ln p is halved
    logits = torch.tensor([[0.0, 0, 0, 0], [0.0, 0, 0, -math.inf]]).double()
    logits[1, :3] = torch.tensor([0.5, 0.25, 0.25]).log()
    ids = torch.tensor([1, 1])
    logprobs, entropies = logprobs_and_entropies(logits, ids)
    assert logprobs.exp().tolist() == pytest.approx([0.25, 0.25])
    assert entropies.tolist() == pytest.approx([1.3862944, 1.0397208])
    _, doubled = logprobs_and_entropies(2 * logits, ids, temperature=torch.tensor([2.0, 2.0]))
    assert doubled.tolist() == pytest.approx(entropies.tolist())


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
