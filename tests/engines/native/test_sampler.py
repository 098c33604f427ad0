"""Sampling frequencies against distributions computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from peralta_zmq.engines.native.sampler import BLOCK_SIZE, _inverse_transform, _topk, sample
from peralta_zmq.rollout import Sampling

PROBABILITIES = np.array([0.02, 0.4, 0.05, 0.2, 0.1, 0.15, 0.05, 0.03])
LOGITS = torch.tensor(np.log(PROBABILITIES), dtype=torch.float32) + 3.0
DRAWS = 20_000
TEMPERATURES = [1.0, 0.7, 1.6]
# By case: the options, and the tokens that remain at temperature 1, computed from PROBABILITIES.
KEPT: dict[str, tuple[dict[str, Any], list[int]]] = {
    "all": ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
    "top_k": ({"top_k": 3}, [1, 3, 5]),
    "top_p": ({"top_p": 0.7}, [1, 3, 5]),  # .4 + .2 = .6: the third crosses .7
    "min_p": ({"min_p": 0.3}, [1, 3, 5]),  # at least .12
    "top_k then top_p": ({"top_k": 3, "top_p": 0.75}, [1, 3]),  # .4/.75 + .2/.75 = .8
    "top_p then min_p": ({"top_p": 0.99, "min_p": 0.45}, [1, 3]),
}
# The tokens that remain at other temperatures: same order, with probabilities p^(1/T) / their sum.
KEPT_AT_TEMPERATURE = {
    ("top_p", 0.7): [1, 3],  # .527 + .196 = .723
    ("top_p", 1.6): [1, 3, 4, 5],  # .285 + .185 + .154 = .624, the fourth crosses .7
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
    kept, probs = KEPT_AT_TEMPERATURE.get((name, temperature), kept), np.zeros(8)
    probs[kept] = PROBABILITIES[kept] ** (1 / temperature)
    counts = sample_counts(Sampling(temperature=temperature, **options))
    assert chi_square(counts, DRAWS * probs / probs.sum()) < 24.3  # 0.1% at 7 degrees


@pytest.mark.parametrize("vocab_size", [100 * BLOCK_SIZE, 100 * BLOCK_SIZE + 1, BLOCK_SIZE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_of_blocks_matches_torchs(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, 30:70] = 9.0  # all of the largest in few blocks, with ties
    values, indices = _topk(logits, 40)
    assert torch.equal(values, logits.topk(40).values)
    assert torch.equal(logits.gather(1, indices), values)
    assert all(len(row.unique()) == 40 for row in indices)


@pytest.mark.parametrize("vocab_size", [40 * BLOCK_SIZE, 40 * BLOCK_SIZE + 1])
def test_inverse_transform_selects_where_the_sum_of_probs_crosses_the_target(
    vocab_size: int,
) -> None:
    random = np.random.default_rng(0)
    probs = random.exponential(size=(64, vocab_size)) * (random.random((64, vocab_size)) < 0.2)
    probs[:, : 3 * BLOCK_SIZE] = 0  # whole blocks are 0
    probs = (probs / probs.sum(1, keepdims=True)).astype(np.float32)
    uniform = random.random(64, dtype=np.float32)
    uniform[:2] = 0, 1 - 2**-24
    tokens = _inverse_transform(torch.from_numpy(probs), torch.from_numpy(uniform)).numpy()
    rows = np.arange(64)
    assert (probs[rows, tokens] > 0).all()
    exact = probs.astype(np.float64).cumsum(1)
    after = exact[rows, tokens]
    target = uniform * exact[:, -1]
    # The sums have at most 168 roundings of 2^-24 each, and so has the target.
    assert (after > target - 2e-5).all()
    assert (after - probs[rows, tokens] <= target + 2e-5).all()


def test_a_target_above_the_sums_within_the_block_selects_its_last_prob_above_0() -> None:
    probs = torch.zeros(1, 2 * BLOCK_SIZE)
    probs[0, : BLOCK_SIZE - 1] = torch.rand(
        BLOCK_SIZE - 1, generator=torch.Generator().manual_seed(1)
    )
    total = probs.view(1, 2, -1).sum(-1).cumsum(-1)[:, -1]
    below_total = torch.nextafter(total, torch.zeros(1)) / total
    assert int(_inverse_transform(probs, below_total)) == BLOCK_SIZE - 2


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-24])
def test_sampling_from_all_tokens_gives_the_logprobs_of_the_softmax(uniform: float) -> None:
    logits = 3 * torch.randn(20, 400 * BLOCK_SIZE, generator=torch.Generator().manual_seed(2))
    numbers = torch.full((20,), uniform)
    tokens, logprobs = sample(logits, Sampling(temperature=0.7), numbers)
    assert torch.equal(tokens, _inverse_transform((logits / 0.7).log_softmax(-1).exp(), numbers))
    exact, torchs = (
        (logits.to(dtype) / 0.7).log_softmax(-1) for dtype in (torch.float64, torch.float32)
    )
    error = (logprobs - exact.gather(1, tokens[:, None])[:, 0]).abs().max()
    assert error <= (torchs - exact).abs().max()


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
