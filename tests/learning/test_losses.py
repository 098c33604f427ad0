from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peralta_zmq import named_losses
from peralta_zmq.config.objective_sections import LossSection
from peralta_zmq.errors import ConfigError
from peralta_zmq.learning.losses import Tokens, kl_estimate, make_loss, preset

# One sequence of four unmasked tokens; expected values computed by hand.
PI = [-0.5, -1.2, -2.0, -0.1]
MU = [-0.6, -1.0, -4.5, -0.1]
PROX = [-0.55, -1.1, -3.9, -0.1]
REF = [-0.7, -1.2, -2.5, -0.3]


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def oracle(advantage: float = 0.75, *, prox: bool = True, pi: list[float] = PI) -> Tokens:
    return Tokens(
        logprobs=float64(pi).requires_grad_(),
        old_logprobs=float64(MU),
        advantages=float64([advantage] * 4),
        mask=float64([1] * 4),
        sequence=torch.zeros(4, dtype=torch.int64),
        num_sequences=1,
        step_tokens=4.0,
        step_sequences=1.0,
        prox_logprobs=float64(PROX) if prox else None,
        ref_logprobs=float64(REF),
        teacher_logprobs=float64([-0.4, -1.5, -1.0, -0.2]),
    )


def gradient(loss: Any, tokens: Tokens) -> list[float]:
    (result,) = torch.autograd.grad(loss(tokens)[0], tokens.logprobs)
    return result.tolist()


@pytest.mark.parametrize(
    ("loss", "advantage", "expected"),
    [
        (preset("reinforce"), 0.75, 0.7125),  # .75 * (.5 + 1.2 + 2 + .1) / 4
        # ratios 1.105171, .818731, 12.182494, 1; with A > 0 the smaller: 1.05, .818731, 1.05, 1
        (preset("dapo", epsilon=0.05), 0.75, -0.734762),
        # with A < 0 the larger, and with delta 3 the third is 3: .75 * (1.105171 + .95 + 3 + 1) / 4
        (preset("dapo", epsilon=0.05, delta=3.0), -0.75, 1.135345),
        (preset("importance"), 0.75, 0.306574),
        (preset("importance_sequence"), 0.75, 3.375),
        (preset("decoupled_ppo"), 0.75, -0.958208),
        # PPO on old, all weights 1: 1.105171, .818731, 1.2, 1 -> -.75 * 4.123902 / 4
        (preset("dapo"), 0.75, -0.773232),
        (preset("grpo_kl"), 0.75, -0.749964),
        (preset("dppo"), 0.75, -2.830874),
        # exp((.1 - .2 + 2.5 + 0) / 4) = 1.822119, clipped at 1.0004
        (preset("gspo"), 0.75, -0.7503),
        (preset("gspo"), -0.75, 1.366589),
        # one rollout: that of dapo; / 8 instead of / 4
        (preset("grpo"), 0.75, -0.773232),
        (make_loss(LossSection(name="dr_grpo"), max_completion_length=8), 0.75, -0.386616),
        # all four tokens have the ratio of the rollout, clipped at 1.2
        (preset("luspo"), 0.75, -3.6),
        # with delta 1.1 the ratios 1.105171 and 12.182494 are 1.1 if A > 0; if A < 0, the larger of
        # that and the clip: 1.105171, .818731, 1.2, 1
        (preset("dapo", delta=1.1), 0.75, -0.753512), (preset("dapo", delta=1.1), -0.75, 0.773232),
        (preset("dapo", delta=3.0), -0.75, 1.110732),  # 3 instead of 1.2
        # weights 1.105171, .818731, 5, 1
        (preset("cispo"), 0.75, 2.181574),
        # 4 sigmoid(r - 1): 2.105077, 1.819225, 3.999944, 2
        (preset("sapo"), 0.75, -1.860796),
        # probabilities change by .057719, -.066685, .124226, 0, so the third is left out; lr^2 6.3
        (preset("ipo"), 0.75, -0.546656),
        # teacher - pi: .1, -.3, 1, -.1
        (preset("ref_kl"), 0.75, -2.985273),
        # r and w to and of prox: 1.051271, .904837, 1.2 (clipped), 1 and the same, 1.822119, 1
        (preset("dapo", importance_sampling_mode="token_truncate",
                importance_sampling_clip_max=1.5), 0.75, -0.885732),
        # w of the rollout is e^.55 = 1.733253
        (preset("dapo", importance_sampling_mode="sequence_truncate",
                importance_sampling_clip_max=1.5), 0.75, -1.168905),
        (preset("dapo", importance_sampling_mode="sequence_mask",
                importance_sampling_clip_max=1.7), 0.75, 0),
        # ref - pi: -.2, 0, -.5, -.2; k3 = .143993 in total, and times r 1.337245
        (preset("dapo", beta=0.1), 0.75, -0.739801),
    ],
)  # fmt: skip
def test_loss_matches_the_oracle(loss: Any, advantage: float, expected: float) -> None:
    assert loss(oracle(advantage))[0].item() == pytest.approx(expected, abs=1e-6)


def test_vespo_weights_the_whole_rollout() -> None:
    # lr .1, -.2, .2, 0: W = e^.1; e^(2 * .1 + 3 (1 - W)) = .890909 and e^(3 * .1 + 2 (1 - W)) =
    # 1.093800; .75 * 6.1 / 4 times that
    near = [-0.5, -1.2, -4.3, -0.1]
    positive, negative = (preset("vespo")(oracle(a, pi=near))[0].item() for a in (0.75, -0.75))
    assert (positive, negative) == pytest.approx((1.018977, -1.251034), abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "threshold", "is_masked"), [(-1, 0.2, True), (-1, 0.3, False), (1, 0.2, False)]
)
def test_off_policy_mask_leaves_out_far_rollouts_with_negative_advantage(
    advantage: float, threshold: float, is_masked: bool
) -> None:
    # mean of mu - pi: (.1 + .2 + .4 + .2) / 4 = .225
    tokens = oracle(advantage, pi=[-0.7, -1.2, -4.9, -0.3])
    value, metrics = preset("dapo", off_policy_mask_threshold=threshold)(tokens)
    assert (value.item() == 0, metrics["masked/off_policy"].item()) == (is_masked, is_masked)


def test_unselected_tokens_count_in_the_divisor_and_in_the_kl() -> None:
    # ratios 1.105171, .818731, 1: -.75 * 2.923902 / 4; k3 times r of all four tokens
    tokens = replace(oracle(), selected=torch.tensor([True, True, False, True]))
    loss = preset("dapo", beta=0.1)
    value, metrics = loss(tokens)
    assert value.item() == pytest.approx(-0.548232 + 0.1 * 1.337245 / 4, abs=1e-6)
    assert metrics["masked/mean"].item() == 0.25
    assert gradient(preset("m2po"), tokens)[2] == 0


def test_mask_of_distillation_leaves_out_tokens_that_became_less_probable() -> None:
    # the second token's probability fell from .367879 to .135335
    _, metrics = preset("ref_kl")(oracle(pi=[-0.5, -2.0, -2.0, -0.1]))
    assert metrics["masked/token_low"].item() == 0.25
    assert "masked/token_high" not in metrics


def test_help_names_every_preset_without_torch() -> None:
    code = (
        "import sys; from peralta_zmq.config import programs; sys.argv = ['x', '--help', 'loss']; "
        "programs.trainer(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(
        f"  {name} " in done.stdout for name in [*named_losses.LOSSES, *named_losses.OBJECTIVES]
    )
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("gap", "expected", "slope"),
    [
        # e^10 - 11 and 9 + e^-10 at the limits of the log ratio; k3' = e^x - 1 within them
        (2.0, 4.389056, 6.389056), (-900.0, 9.000045, 0), (900.0, 22015.465795, 0),
    ],
)  # fmt: skip
def test_kl_estimate_limits_the_log_ratio(gap: float, expected: float, slope: float) -> None:
    log_ratio = float64([gap]).requires_grad_()
    kl = kl_estimate(log_ratio)
    (found,) = torch.autograd.grad(kl.sum(), log_ratio)
    assert (kl.item(), found.item()) == pytest.approx((expected, slope), abs=1e-6)


def test_decoupled_without_prox_is_ppo_on_old_logprobs() -> None:
    # min of r and the clip at 1.2: 1.105171, .818731, 1.2, 1; .75 * 4.123902 / 4
    assert preset("decoupled_ppo")(oracle(prox=False))[0].item() == pytest.approx(
        -0.773232, abs=1e-6
    )


@pytest.mark.parametrize(
    "loss", [preset("reinforce", epsilon_high=0.02), *map(preset, named_losses.LOSSES)],
)  # fmt: skip
def test_loss_is_finite_for_impossible_old_logprobs(loss: Any) -> None:
    tokens = replace(oracle(-0.75, prox=False), old_logprobs=float64([-900.0] * 4))
    assert torch.tensor([loss(tokens)[0].item(), *gradient(loss, tokens)]).isfinite().all()


def test_grpo_clamps_log_ratio_at_ten() -> None:
    tokens = replace(oracle(-0.75), old_logprobs=float64([-900.0] * 4))
    assert preset("dapo")(tokens)[0].item() == pytest.approx(16519.8493, abs=1e-3)  # .75 e^10


# The same formulas as Python loops over sequences and tokens.


Sequence = list[int]  # the unmasked tokens of a rollout


def minimum(a: Tensor, b: Tensor) -> Tensor:
    return a if a <= b else b


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return minimum(torch.maximum(x, float64([low])[0]), float64([high])[0])


def over_tokens(tokens: Tokens, term: Callable[[int], Any]) -> Any:
    kept = [n for n in range(len(tokens.mask)) if tokens.mask[n]]
    return sum(term(n) for n in kept) / tokens.step_tokens


def rollouts(tokens: Tokens) -> Iterator[Sequence]:
    for number in range(tokens.num_sequences):
        members = [
            n for n in range(len(tokens.mask)) if tokens.mask[n] and tokens.sequence[n] == number
        ]
        if members:
            yield members


def plain_reinforce(t: Tokens) -> Any:
    return over_tokens(t, lambda n: -t.advantages[n] * t.logprobs[n])


def plain_clamped_reinforce(t: Tokens) -> Any:
    def term(n: int) -> Tensor:
        ratio = (t.logprobs[n] - t.old_logprobs[n]).exp().detach()
        return -clip(ratio, 0, 1.1) * t.advantages[n] * t.logprobs[n]

    return over_tokens(t, term)


def plain_grpo(t: Tokens, *, c: float | None = None) -> Any:
    def term(n: int) -> Tensor:
        a, r = t.advantages[n], clip(t.logprobs[n] - t.old_logprobs[n], -10, 10).exp()
        loss = -minimum(r * a, clip(r, 0.8, 1.3) * a)
        return minimum(loss, torch.sign(a) * c * a) if c and a < 0 else loss

    return over_tokens(t, term)


def plain_decoupled(t: Tokens, *, cap: float | None = None, c: float | None = None) -> Any:
    def term(n: int) -> Tensor:
        assert t.prox_logprobs is not None
        a, r = t.advantages[n], (t.logprobs[n] - t.prox_logprobs[n]).exp()
        loss = torch.maximum(-a * r, -a * clip(r, 0.8, 1.2))
        if c and a < 0:
            loss = minimum(loss, torch.sign(a) * c * a)
        w = (t.prox_logprobs[n] - t.old_logprobs[n]).exp()
        return loss * (0 if cap and w > cap else w)

    return over_tokens(t, term)


def plain_importance(t: Tokens, *, by_sequence: bool) -> Any:
    total: Any = 0
    for rollout in rollouts(t):
        lrs = [(t.logprobs[n] - t.old_logprobs[n]).detach() for n in rollout]
        geo = (sum(lrs) / len(lrs)).exp()  # type: ignore[union-attr]
        whole = clip(sum(lrs).exp(), 0, 10)  # type: ignore[union-attr]
        ratios = [each.exp() for each in lrs]
        if geo < 0.1 or geo > 10 or max(ratios) > 100:
            continue
        part: Any = 0
        for n, lr, ratio in zip(rollout, lrs, ratios, strict=True):
            assert t.teacher_logprobs is not None
            if 0.4 <= ratio <= 2.2:
                gap = t.teacher_logprobs[n] - t.logprobs[n].detach()
                signal = t.advantages[n] + 0.2 * gap - 0.3 * lr
                part = part - (whole if by_sequence else ratio) * signal * t.logprobs[n]
        total = total + part / (len(rollout) if by_sequence else 1)
    return total / (t.step_sequences if by_sequence else t.step_tokens)


def plain_masked_with_kl(t: Tokens) -> Any:
    """A ratio of at most 1.2 keeps the objective of a token; its KL term, times r, always stays."""

    def term(n: int) -> Tensor:
        assert t.ref_logprobs is not None
        r = (t.logprobs[n] - t.old_logprobs[n]).exp()
        x = t.ref_logprobs[n] - t.logprobs[n]
        objective = -r * t.advantages[n] if r <= 1.2 else 0
        return objective + 0.1 * r * (x.exp() - x - 1)

    return over_tokens(t, term)


def plain_grpo_kl(t: Tokens) -> Any:
    assert t.ref_logprobs is not None
    total: Any = 0
    for rollout in rollouts(t):
        for n in rollout:
            gap = clip(t.ref_logprobs[n] - t.logprobs[n], -10, 10)
            ratio = (t.logprobs[n] - t.logprobs[n].detach()).exp()
            loss = -ratio * t.advantages[n] + 0.1 * (gap.exp() - gap - 1)
            total = total + loss / len(rollout)
    return total / t.step_sequences


def plain_dppo(t: Tokens) -> Any:
    def term(n: int) -> Tensor:
        pi, mu, a = t.logprobs[n], t.old_logprobs[n], t.advantages[n]
        delta = (pi.exp() - mu.exp()).item()
        dropped = (a > 0 and delta > 0.2) or (a <= 0 and delta < -0.2)
        lr = pi - mu
        return 0.01 * lr**2 - (0 if dropped else 1) * a * lr.exp()

    return over_tokens(t, term)


def plain_gspo(t: Tokens) -> Any:
    total: Any = 0
    for rollout in rollouts(t):
        s = (sum(t.logprobs[n] - t.old_logprobs[n] for n in rollout) / len(rollout)).exp()  # type: ignore[union-attr]
        a = t.advantages[rollout[0]]
        total = total - minimum(s * a, clip(s, 0.95, 1.1) * a)
    return total / t.step_sequences


OPTIONS = {"token_mask": (0.4, 2.2), "teacher_tau": 0.2, "kl_tau": 0.3}
PAIRS: list[tuple[Any, Any]] = [
    (preset("reinforce"), plain_reinforce),
    (preset("reinforce", epsilon_high=0.1), plain_clamped_reinforce),
    (preset("dapo", epsilon=0.2, epsilon_high=0.3), plain_grpo),
    (
        preset("dapo", epsilon=0.2, epsilon_high=0.3, delta=1.5),
        functools.partial(plain_grpo, c=1.5),
    ),
    (preset("decoupled_ppo"), plain_decoupled),
    (
        preset("decoupled_ppo", importance_sampling_clip_max=1.4),
        functools.partial(plain_decoupled, cap=1.4),
    ),
    (preset("decoupled_ppo", delta=1.3), functools.partial(plain_decoupled, c=1.3)),
    (preset("importance", **OPTIONS), functools.partial(plain_importance, by_sequence=False)),
    (
        preset("importance_sequence", **OPTIONS),
        functools.partial(plain_importance, by_sequence=True),
    ),
    (preset("m2po", beta=0.1, token_mask=(0.0, 1.2)), plain_masked_with_kl),
    (preset("grpo_kl", beta=0.1), plain_grpo_kl),
    (preset("dppo", kl_tau=0.01), plain_dppo),
    (preset("gspo", epsilon=0.05, epsilon_high=0.1), plain_gspo),
]


def random_tokens(seed: int, *, spread: float = 1.0) -> Tokens:
    """Six rollouts of several lengths, one of them filtered whole and one in part.

    The log ratios of the policies are multiplied by `spread`.
    """
    random = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 8, 3, 6, 4]
    sequence = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    total = len(sequence)

    def drawn(scale: float) -> Tensor:
        return scale * torch.randn(total, generator=random, dtype=torch.float64)

    pi = -2 * torch.rand(total, generator=random, dtype=torch.float64) - 0.01
    mask = (sequence != 3).double()
    mask[1] = 0
    return Tokens(
        logprobs=pi.requires_grad_(),
        old_logprobs=pi.detach() + spread * (drawn(0.5) + 0.3 * sequence - 0.8),
        advantages=torch.randn(6, generator=random, dtype=torch.float64)[sequence],
        mask=mask,
        sequence=sequence,
        num_sequences=6,
        step_tokens=100.0,
        step_sequences=17.0,
        prox_logprobs=pi.detach() + drawn(0.3),
        ref_logprobs=pi.detach() + drawn(0.5),
        teacher_logprobs=pi.detach() + drawn(0.5),
    )


def names(value: Any) -> str:
    return getattr(value, "func", value).__name__


@pytest.mark.parametrize(("loss", "plain"), PAIRS, ids=names)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_match_plain_formula(loss: Any, plain: Any, seed: int) -> None:
    # far enough apart for the masks of rollouts
    tokens = random_tokens(seed, spread=4.0 if "importance" in names(plain) else 1.0)
    ours, expected = loss(tokens)[0], plain(tokens)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
    (our_gradient,) = torch.autograd.grad(ours, tokens.logprobs)
    (plain_gradient,) = torch.autograd.grad(expected, tokens.logprobs)
    assert our_gradient.abs().sum() > 0
    assert torch.allclose(our_gradient, plain_gradient, rtol=1e-12, atol=1e-15)


WITH_EVERY_PART = preset(
    "dapo", importance_sampling_mode="sequence_truncate", off_policy_mask_threshold=0.1,
    beta=0.1,
)  # fmt: skip
LOSSES = [*(loss for loss, _ in PAIRS), *map(preset, named_losses.LOSSES), WITH_EVERY_PART]


@pytest.mark.parametrize("loss", LOSSES, ids=names)
def test_losses_of_micro_batches_sum_to_the_step(loss: Any) -> None:
    whole = random_tokens(0)
    value, metrics = loss(whole)
    parts = [loss(part_of(whole, chosen)) for chosen in ([4, 0], [1, 3], [2, 5])]
    assert sum(part_loss.item() for part_loss, _ in parts) == pytest.approx(value.item(), rel=1e-12)
    for name, total in metrics.items():
        added = sum(part[name].item() for _, part in parts)
        assert added == pytest.approx(total.item(), rel=1e-12, abs=1e-15)


def part_of(tokens: Tokens, chosen: list[int]) -> Tokens:
    """The rollouts `chosen` in this order, as a micro-batch of their own."""
    index = torch.cat([torch.nonzero(tokens.sequence == each)[:, 0] for each in chosen])
    fields = ("logprobs", "old_logprobs", "advantages", "mask", "prox_logprobs", "ref_logprobs",
              "teacher_logprobs")  # fmt: skip
    picked: dict[str, Any] = {name: getattr(tokens, name)[index] for name in fields}
    sequence = torch.tensor([chosen.index(int(each)) for each in tokens.sequence[index]])
    return replace(tokens, **picked, sequence=sequence, num_sequences=len(chosen))


@pytest.mark.parametrize("loss", LOSSES, ids=names)
def test_loss_ignores_masked_tokens(loss: Any) -> None:
    tokens = random_tokens(0)
    masked = tokens.mask == 0
    other = replace(
        tokens,
        old_logprobs=torch.where(masked, -30.0, tokens.old_logprobs),
        advantages=torch.where(masked & (tokens.sequence == 3), 9.0, tokens.advantages),
    )
    assert loss(other)[0].item() == pytest.approx(loss(tokens)[0].item(), rel=1e-12)
    (moved,) = torch.autograd.grad(loss(other)[0], tokens.logprobs)
    assert moved[masked].tolist() == [0] * int(masked.sum())


# Metrics


def rounded_metrics(loss: Any, tokens: Tokens) -> dict[str, float]:
    return {name: round(float(value), 6) for name, value in loss(tokens)[1].items()}


def test_importance_reports_masked_tokens_by_reason() -> None:
    # of ratios 1.105171, .818731, 12.182494, 1 one is above 8
    expected = {"masked/mean": 0.25, "masked/token_low": 0, "masked/token_high": 0.25,
                "masked/geo": 0, "masked/sequence": 0}  # fmt: skip
    assert rounded_metrics(preset("importance"), oracle()) == expected


def test_importance_reports_masked_rollouts() -> None:
    # the geometric mean of the ratios is e^2.975, above 10, and the largest e^12, above 100
    far = replace(oracle(), old_logprobs=float64([-0.6, -1.0, -14.0, -0.1]))
    masked = rounded_metrics(preset("importance"), far)
    assert (masked["masked/geo"], masked["masked/sequence"], masked["masked/mean"]) == (1, 1, 1)


def test_grpo_reports_clipping_by_side() -> None:
    # with A > 0 tokens 0 and 2 are above 1.05; with A < 0 token 1 is below .95
    assert rounded_metrics(preset("dapo", epsilon=0.05), oracle(0.75)) == {
        "clip_ratio/low_mean": 0, "clip_ratio/high_mean": 0.5,
    }  # fmt: skip
    assert rounded_metrics(preset("dapo", epsilon=0.05), oracle(-0.75)) == {
        "clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0,
    }  # fmt: skip


def test_decoupled_reports_weights_above_cap() -> None:
    # weights 1.051, .905, 1.822, 1
    capped = rounded_metrics(preset("decoupled_ppo", importance_sampling_clip_max=1.5), oracle())
    assert capped["masked/importance_sampling"] == 0.25


@pytest.mark.parametrize(
    ("loss", "missing", "message"),
    [
        (preset("grpo_kl"), "ref_logprobs", "loss.beta above 0 needs the logprobs of a reference"),
        (preset("importance", teacher_tau=0.5), "teacher_logprobs", "loss.teacher_tau above 0"),
    ],
)
def test_missing_reference_error_names_the_option(loss: Any, missing: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss(replace(oracle(), **{missing: None}))
