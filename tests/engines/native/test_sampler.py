"""Sampling frequencies against distributions computed by hand, and packed linear layers."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from peralta_zmq.engines.native.kernels.gemm import can_pack
from peralta_zmq.engines.native.linears import FusedLinear, PackedLinear
from peralta_zmq.engines.native.sampler import sample
from peralta_zmq.rollout import Sampling

PROBABILITIES = np.array([0.02, 0.4, 0.05, 0.2, 0.1, 0.15, 0.05, 0.03])
LOGITS = torch.tensor(np.log(PROBABILITIES), dtype=torch.float32) + 3.0
DRAWS = 20_000
TEMPERATURES = [1.0, 0.7, 1.6]
# the tokens that stay at temperature 1, worked out by hand from PROBABILITIES
KEPT: dict[str, tuple[dict[str, Any], list[int]]] = {
    "all": ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
    "top_k": ({"top_k": 3}, [1, 3, 5]),
    "top_p": ({"top_p": 0.7}, [1, 3, 5]),  # .4 + .2 = .6, so the third crosses .7
    "min_p": ({"min_p": 0.3}, [1, 3, 5]),  # at least .12
    "top_k then top_p": ({"top_k": 3, "top_p": 0.75}, [1, 3]),  # .4/.75 + .2/.75 = .8
    "top_p then min_p": ({"top_p": 0.99, "min_p": 0.45}, [1, 3]),
}


# those that stay at another, where the order is the same but no share is: p^(1/T) over their sum
AT = {
    ("top_p", 0.7): [1, 3],  # .527 + .196 = .723
    ("top_p", 1.6): [1, 3, 4, 5],  # .285 + .185 + .154 = .624, so the fourth crosses .7
    ("min_p", 0.7): [1, 3],  # (.2 / .4)^(1 / .7) = .371, (.15 / .4)^(1 / .7) = .246
    ("min_p", 1.6): [1, 3, 4, 5],  # (.1 / .4)^(1 / 1.6) = .42, (.05 / .4)^(1 / 1.6) = .273
    ("top_p then min_p", 0.7): [1],  # .371
    ("top_p then min_p", 1.6): [1, 3, 5],  # (.15 / .4)^(1 / 1.6) = .542
}


def sample_counts(sampling: Sampling, **options: Any) -> np.ndarray:
    uniform = np.random.default_rng(7).random(DRAWS, dtype=np.float32)
    tokens, _ = sample(LOGITS.expand(DRAWS, -1), sampling, torch.from_numpy(uniform), **options)
    return np.bincount(tokens.numpy(), minlength=8)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    possible = expected > 0
    assert counts[~possible].sum() == 0
    return float((((counts - expected) ** 2)[possible] / expected[possible]).sum())


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", list(KEPT))
def test_sample_frequencies_follow_the_truncated_distribution(
    name: str, temperature: float
) -> None:
    options, kept = KEPT[name]
    kept, probs = AT.get((name, temperature), kept), np.zeros(8)
    probs[kept] = PROBABILITIES[kept] ** (1 / temperature)
    counts = sample_counts(Sampling(temperature=temperature, **options))
    assert chi_square(counts, DRAWS * probs / probs.sum()) < 24.3  # 0.1% at 7 degrees


def test_packed_bias_is_a_copy() -> None:
    """The source may be a mapped file, which changes before the next version is applied."""
    if not can_pack(torch.float32):
        pytest.skip("this build cannot pack")
    linear = torch.nn.Linear(48, 16)
    fused, inputs = FusedLinear([linear], ["weight"], ["bias"]), torch.randn(3, 48)
    weights = {"weight": linear.weight.detach() * 2, "bias": linear.bias.detach() * 2}
    fused.load(weights)
    with torch.inference_mode():
        before = fused.output(0, inputs)
        weights["bias"].zero_()
        assert torch.equal(fused.output(0, inputs), before)


def test_fused_linear_keeps_no_rows_after_the_last_output() -> None:
    if not can_pack(torch.float32):
        pytest.skip("this build cannot pack")
    fused = FusedLinear([torch.nn.Linear(48, 16) for _ in range(3)], ["q", "k", "v"])
    inputs = torch.randn(3, 48)
    parts = [fused.output(number, inputs) for number in range(3)]
    assert torch.equal(fused.output(1, inputs), parts[1])  # in another order it is done once more
    assert torch.equal(fused.output(2, inputs), parts[2])
    memory = [weakref.ref(each) for each in (inputs, parts[0])]
    del inputs, parts
    assert [each() for each in memory] == [None, None]


def test_banned_tokens_are_never_sampled() -> None:
    banned = torch.zeros(DRAWS, 8, dtype=torch.bool)
    banned[:, 1] = True
    probs = np.where(np.arange(8) == 1, 0, PROBABILITIES)
    counts = sample_counts(Sampling(min_tokens=1), banned=banned)
    assert chi_square(counts, DRAWS * probs / probs.sum()) < 24.3


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("name", list(KEPT))
def test_extreme_uniforms_select_allowed_tokens(name: str, uniform: float) -> None:
    options, kept = KEPT[name]
    tokens, _ = sample(LOGITS[None], Sampling(**options), torch.tensor([uniform]))
    assert int(tokens) in kept


def test_temperature_0_selects_the_most_probable_token() -> None:
    tokens, logprobs = sample(LOGITS[None], Sampling(temperature=0.0), torch.zeros(1))
    assert int(tokens) == 1
    assert float(logprobs) == pytest.approx(np.log(0.4), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_packed_linears_match_plain_ones(dtype: torch.dtype, rows: int) -> None:
    if not can_pack(dtype):
        pytest.skip("this build cannot pack")
    torch.manual_seed(0)
    linears = [torch.nn.Linear(48, size).to(dtype) for size in (64, 16)]
    fused = FusedLinear(linears, ["wide", "narrow"], ["wide_bias", "narrow_bias"])
    packed = [PackedLinear(fused, number) for number in (0, 1)]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02

    def compare() -> None:
        inputs = torch.randn(rows, 3, 48).to(dtype)
        for ours, reference in zip(packed, linears, strict=True):
            assert torch.allclose(ours(inputs), reference(inputs), atol=tolerance, rtol=tolerance)

    with torch.inference_mode():
        compare()
        compare()  # other rows, the same layers
        fused.load(
            {
                name + suffix: tensor * 2
                for name, linear in zip(("wide", "narrow"), linears, strict=True)
                for suffix, tensor in (("", linear.weight), ("_bias", linear.bias))
            }
        )
        for each in linears:
            each.weight.mul_(2)
            each.bias.mul_(2)
        compare()
