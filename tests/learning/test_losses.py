from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peralta_zmq.learning.losses import grpo, reinforce

# The oracle of algorithms.md: one sequence of four tokens, all masked in.
PI = [-0.5, -1.2, -2.0, -0.1]
MU = [-0.6, -1.0, -4.5, -0.1]
MASK = torch.ones(1, 4)


def tensors(advantage: float, pi: list[float] | None = None) -> tuple[Tensor, ...]:
    logprobs = torch.tensor([pi or PI], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([MU], dtype=torch.float64)
    return logprobs, old, torch.full((1, 4), advantage, dtype=torch.float64), MASK


def gradient(loss: Tensor, logprobs: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss.mean(), logprobs)
    return found[0].tolist()


def test_reinforce_matches_the_oracle() -> None:
    # .75 * (.5 + 1.2 + 2 + .1) / 4
    assert reinforce(*tensors(0.75)).mean().item() == pytest.approx(0.7125, abs=1e-9)


def test_reinforce_with_negative_advantage_matches_the_oracle() -> None:
    assert reinforce(*tensors(-0.75)).mean().item() == pytest.approx(-0.7125, abs=1e-9)


def test_reinforce_pushes_every_token_by_its_share_of_the_advantage() -> None:
    inputs = tensors(0.75)
    assert gradient(reinforce(*inputs), inputs[0]) == pytest.approx([-0.1875] * 4)


def test_reinforce_does_not_depend_on_the_sampler() -> None:
    pi, old, advantages, mask = tensors(0.75)
    assert torch.equal(reinforce(pi, old, advantages, mask), reinforce(pi, pi, advantages, mask))


def test_grpo_matches_the_oracle() -> None:
    # ratios 1.105171, .818731, 12.182494, 1; min with the clip: 1.05, .818731, 1.05, 1
    # -.75 * 3.918731 / 4
    assert grpo(*tensors(0.75), epsilon=0.05).mean().item() == pytest.approx(-0.734762, abs=1e-6)


def test_grpo_with_negative_advantage_matches_the_oracle() -> None:
    # max instead: 1.105171, .95, 12.182494, 1; .75 * 15.237665 / 4
    assert grpo(*tensors(-0.75), epsilon=0.05).mean().item() == pytest.approx(2.857062, abs=1e-6)


def test_grpo_gives_no_gradient_where_it_is_clipped() -> None:
    # tokens 0 and 2 are above 1.05; the others get -.75 r / 4
    inputs = tensors(0.75)
    found = gradient(grpo(*inputs, epsilon=0.05), inputs[0])
    assert found == pytest.approx([0, -0.153512, 0, -0.1875], abs=1e-6)


def test_grpo_with_negative_advantage_clips_at_the_low_side_only() -> None:
    # token 1 is below .95; the others get .75 r / 4
    inputs = tensors(-0.75)
    found = gradient(grpo(*inputs, epsilon=0.05), inputs[0])
    assert found == pytest.approx([0.207220, 0, 2.284218, 0.1875], abs=1e-6)


def test_grpo_with_a_higher_upper_bound_lets_more_through() -> None:
    # 1.105171, .818731, 1.2, 1 -> -.75 * 4.123902 / 4
    loss = grpo(*tensors(0.75), epsilon=0.05, epsilon_high=0.2).mean().item()
    assert loss == pytest.approx(-0.773232, abs=1e-6)


def test_grpo_at_equal_weights_is_minus_the_advantage() -> None:
    loss = grpo(*tensors(0.75, pi=MU), epsilon=0.05)
    assert loss.tolist() == [[-0.75] * 4]


def test_grpo_at_equal_weights_has_the_gradient_of_reinforce() -> None:
    inputs = tensors(0.75, pi=MU)
    found = gradient(grpo(*inputs, epsilon=0.05), inputs[0])
    assert found == pytest.approx(gradient(reinforce(*inputs), inputs[0]))


def test_grpo_stays_finite_for_a_token_the_sampler_thought_impossible() -> None:
    old = torch.full((1, 4), -900.0, dtype=torch.float64)
    pi, _, advantages, mask = tensors(-0.75)
    # the log ratio is held at 10: .75 * e^10
    assert grpo(pi, old, advantages, mask).mean().item() == pytest.approx(16519.8493, abs=1e-3)


@pytest.mark.parametrize("advantage", [0.75, -0.75])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_grpo_is_that_of_the_formula_written_plainly(
    advantage: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    pi = (-2 * torch.rand(3, 5, generator=random, dtype=torch.float64)).requires_grad_()
    mu = -2 * torch.rand(3, 5, generator=random, dtype=torch.float64)
    a = torch.full((3, 5), advantage, dtype=torch.float64)
    total = 0
    for p, m in zip(pi.flatten(), mu.flatten(), strict=True):
        r = torch.exp(p - m)
        total = total - min(r * advantage, min(max(r, 0.8), 1.2) * advantage)
    (plain,) = torch.autograd.grad(torch.as_tensor(total), pi)
    (ours,) = torch.autograd.grad(grpo(pi, mu, a, torch.ones(3, 5)).sum(), pi)
    assert torch.allclose(ours, plain, rtol=1e-12)


def test_options_of_other_losses_do_not_disturb_reinforce() -> None:
    assert reinforce(*tensors(0.75), epsilon=0.05).mean().item() == pytest.approx(0.7125)
