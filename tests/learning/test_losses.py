from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peralta_zmq.learning.losses import grpo, reinforce
from peralta_zmq.learning.tokens import Tokens

# The oracle of algorithms.md: one sequence of four tokens, all masked in.
PI = [-0.5, -1.2, -2.0, -0.1]
MU = [-0.6, -1.0, -4.5, -0.1]


def tokens_of(advantage: float, pi: list[float] | None = None, **fields: Any) -> Tokens:
    logprobs = torch.tensor(pi or PI, dtype=torch.float64, requires_grad=True)
    given: dict[str, Any] = {
        "logprobs": logprobs,
        "old_logprobs": torch.tensor(MU, dtype=torch.float64),
        "advantages": torch.full((4,), advantage, dtype=torch.float64),
        "mask": torch.ones(4),
        "sequence": torch.zeros(4, dtype=torch.int64),
        "num_sequences": 1,
        "step_tokens": 4.0,
        "step_sequences": 1.0,
    }
    return Tokens(**{**given, **fields})


def value(given: tuple[Tensor, dict[str, Tensor]]) -> float:
    return given[0].item()


def gradient(given: tuple[Tensor, dict[str, Tensor]], tokens: Tokens) -> list[float]:
    (found,) = torch.autograd.grad(given[0], tokens.logprobs)
    return found.tolist()


def test_reinforce_matches_the_oracle() -> None:
    # .75 * (.5 + 1.2 + 2 + .1) / 4
    assert value(reinforce(tokens_of(0.75))) == pytest.approx(0.7125, abs=1e-9)


def test_reinforce_with_negative_advantage_matches_the_oracle() -> None:
    assert value(reinforce(tokens_of(-0.75))) == pytest.approx(-0.7125, abs=1e-9)


def test_reinforce_pushes_every_token_by_its_share_of_the_advantage() -> None:
    tokens = tokens_of(0.75)
    assert gradient(reinforce(tokens), tokens) == pytest.approx([-0.1875] * 4)


def test_reinforce_does_not_depend_on_the_sampler() -> None:
    tokens = tokens_of(0.75)
    other = replace(tokens, old_logprobs=tokens.logprobs.detach())
    assert value(reinforce(tokens)) == value(reinforce(other))


def test_grpo_matches_the_oracle() -> None:
    # ratios 1.105171, .818731, 12.182494, 1; min with the clip: 1.05, .818731, 1.05, 1
    # -.75 * 3.918731 / 4
    assert value(grpo(tokens_of(0.75), epsilon=0.05)) == pytest.approx(-0.734762, abs=1e-6)


def test_grpo_with_negative_advantage_matches_the_oracle() -> None:
    # max instead: 1.105171, .95, 12.182494, 1; .75 * 15.237665 / 4
    assert value(grpo(tokens_of(-0.75), epsilon=0.05)) == pytest.approx(2.857062, abs=1e-6)


def test_grpo_gives_no_gradient_where_it_is_clipped() -> None:
    # tokens 0 and 2 are above 1.05; the others get -.75 r / 4
    tokens = tokens_of(0.75)
    found = gradient(grpo(tokens, epsilon=0.05), tokens)
    assert found == pytest.approx([0, -0.153512, 0, -0.1875], abs=1e-6)


def test_grpo_with_negative_advantage_clips_at_the_low_side_only() -> None:
    # token 1 is below .95; the others get .75 r / 4
    tokens = tokens_of(-0.75)
    found = gradient(grpo(tokens, epsilon=0.05), tokens)
    assert found == pytest.approx([0.207220, 0, 2.284218, 0.1875], abs=1e-6)


def test_grpo_with_a_higher_upper_bound_lets_more_through() -> None:
    # 1.105171, .818731, 1.2, 1 -> -.75 * 4.123902 / 4
    loss = value(grpo(tokens_of(0.75), epsilon=0.05, epsilon_high=0.2))
    assert loss == pytest.approx(-0.773232, abs=1e-6)


def test_grpo_at_equal_weights_is_minus_the_advantage() -> None:
    assert value(grpo(tokens_of(0.75, pi=MU), epsilon=0.05)) == pytest.approx(-0.75)


def test_grpo_at_equal_weights_has_the_gradient_of_reinforce() -> None:
    tokens = tokens_of(0.75, pi=MU)
    found = gradient(grpo(tokens, epsilon=0.05), tokens)
    assert found == pytest.approx(gradient(reinforce(tokens), tokens))


def test_grpo_stays_finite_for_a_token_the_sampler_thought_impossible() -> None:
    impossible = torch.full((4,), -900.0, dtype=torch.float64)
    # the log ratio is held at 10: .75 * e^10
    tokens = tokens_of(-0.75, old_logprobs=impossible)
    assert value(grpo(tokens)) == pytest.approx(16519.8493, abs=1e-3)


@pytest.mark.parametrize("loss", [reinforce, grpo])
def test_tokens_that_are_masked_out_count_in_no_way(loss: Any) -> None:
    tokens = tokens_of(0.75, mask=torch.tensor([1.0, 0, 0, 1]), step_tokens=2.0)
    found = gradient(loss(tokens), tokens)
    assert found[1:3] == [0, 0]
    # halved for half of the tokens: the mean of what is left
    left = [each for each, keep in zip(found, [1, 0, 0, 1], strict=True) if keep]
    whole = tokens_of(0.75)
    doubled = [2 * each for each in gradient(loss(whole), whole)]
    assert left == pytest.approx([doubled[0], doubled[3]])


@pytest.mark.parametrize("advantage", [0.75, -0.75])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_grpo_is_that_of_the_formula_written_plainly(
    advantage: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    pi = (-2 * torch.rand(15, generator=random, dtype=torch.float64)).requires_grad_()
    mu = -2 * torch.rand(15, generator=random, dtype=torch.float64)
    total = 0
    for p, m in zip(pi, mu, strict=True):
        r = torch.exp(p - m)
        total = total - min(r * advantage, min(max(r, 0.8), 1.2) * advantage) / 20
    (plain,) = torch.autograd.grad(torch.as_tensor(total), pi)
    tokens = tokens_of(
        0, logprobs=pi, old_logprobs=mu, mask=torch.ones(15), step_tokens=20.0,
        advantages=torch.full((15,), advantage, dtype=torch.float64),
    )  # fmt: skip
    (ours,) = torch.autograd.grad(grpo(tokens)[0], pi)
    assert torch.allclose(ours, plain, rtol=1e-12)


def test_options_of_other_losses_do_not_disturb_reinforce() -> None:
    assert value(reinforce(tokens_of(0.75), epsilon=0.05)) == pytest.approx(0.7125)
