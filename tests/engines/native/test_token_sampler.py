"""Sampling frequencies against distributions computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from peralta_zmq.engines.native.kernels.decode_layer import BLOCK_SIZE, library_for
from peralta_zmq.engines.native.token_sampler import MIN_BLOCKS, LogitBlocks, sample_rows
from peralta_zmq.engines.row_engine import SamplingInputs
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


def sample_counts(sampling: Sampling) -> np.ndarray:
    uniform = np.random.default_rng(7).random(DRAWS, dtype=np.float32)
    tokens, _ = sample_rows(LOGITS.expand(DRAWS, -1), SamplingInputs(sampling, uniform))
    return np.bincount(tokens, minlength=8)


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


@pytest.fixture(params=["torch", "C"])
def library(request: Any) -> Any:
    """Computes the blocks: decode_layer.c for fp32, or None."""
    if request.param == "torch":
        return None
    found = library_for(torch.float32, torch.device("cpu"), queries_per_head=1, head_dim=16)
    return found or pytest.skip("decode_layer.c is not compiled here")


def random_logits(num_rows: int = 64) -> torch.Tensor:
    """In a vocabulary that is divided into blocks; some tokens, and whole blocks, have none."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows, 2 * MIN_BLOCKS * BLOCK_SIZE, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -torch.inf
    logits[:, : 3 * BLOCK_SIZE] = -torch.inf
    return logits


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_are_where_the_sum_of_probs_crosses_the_target(
    temperature: float, library: Any
) -> None:
    logits, uniform = random_logits(), torch.rand(64, generator=torch.Generator().manual_seed(1))
    uniform[:2] = torch.tensor([0, 1 - 2**-24])
    inputs = SamplingInputs(Sampling(temperature=temperature), uniform.numpy())
    tokens = torch.from_numpy(sample_rows(logits, inputs, library=library)[0])
    probs = (logits.double() / temperature).softmax(-1)
    selected = probs.gather(1, tokens[:, None])[:, 0]
    after = probs.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    assert (selected > 0).all()
    # Sums of 128 blocks and of 128 probs: 256 roundings of 2^-24, and errors of exp below 1e-6.
    assert (after > uniform - 2e-5).all()
    assert (after - selected <= uniform + 2e-5).all()


def test_a_target_above_all_sums_in_its_block_selects_the_last_possible_token() -> None:
    """The same probs, summed in other orders: here the sum of the block is the larger one."""
    logits = torch.full((400, MIN_BLOCKS * BLOCK_SIZE), -torch.inf)
    probs = torch.rand(400, BLOCK_SIZE - 1, generator=torch.Generator().manual_seed(1))
    logits[:, : BLOCK_SIZE - 1] = probs.log()
    blocks = LogitBlocks(logits, 1.0, None)
    total = blocks.sums[:, 0]
    in_block = (logits[:, :BLOCK_SIZE] - blocks.max).exp().cumsum(-1)[:, -1]
    assert (in_block < total * (1 - 2**-24)).any()
    assert (blocks.sample(torch.full((400,), 1 - 2**-24)) < BLOCK_SIZE - 1).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_blocks_are_as_exact_as_torchs(temperature: float, library: Any) -> None:
    logits, tokens = random_logits(), torch.randint(384, 16000, (64,))
    logits[torch.arange(64), tokens] = 1.5
    ours = LogitBlocks(logits, temperature, library).logprobs(tokens)
    exact, torchs = (
        (logits.to(dtype) / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        for dtype in (torch.float64, torch.float32)
    )
    # 4e-6: the error of exp without fused multiply-add
    assert (ours - exact).abs().max() <= max(4 * (torchs - exact).abs().max(), 4e-6)


def test_non_finite_logits_give_non_finite_logprobs(library: Any) -> None:
    logits = random_logits(3)
    logits[0, 500], logits[1, 600] = torch.nan, torch.inf
    inputs = SamplingInputs(Sampling(), np.full(3, 0.5, np.float32))
    _, logprobs = sample_rows(logits, inputs, library=library)
    assert np.isfinite(logprobs).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_of_blocks_is_torchs(dtype: torch.dtype) -> None:
    logits = random_logits(5).to(dtype)
    logits[1, 30:70] = 9.0  # all of the largest in few blocks, with ties
    values, tokens = LogitBlocks(logits, 1.0, None).topk(40)
    assert torch.equal(values, logits.topk(40).values)
    assert torch.equal(logits.gather(1, tokens), values)
    assert all(len(row.unique()) == 40 for row in tokens)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("name", list(KEPT))
def test_extreme_uniforms_select_allowed_tokens(name: str, uniform: float) -> None:
    options, kept = KEPT[name]
    inputs = SamplingInputs(Sampling(**options), np.array([uniform], np.float32))
    tokens, _ = sample_rows(LOGITS[None], inputs)
    assert tokens[0] in kept
