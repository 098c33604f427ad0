from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sample_data import tiny_model

from peralta_zmq import models


@pytest.fixture
def model() -> Any:
    return tiny_model()


def plain_logprob(model: Any, ids: list[int], t: int, temperature: float = 1.0) -> float:
    """log p(token t | tokens before t), from a forward pass over those tokens alone."""
    logits = model(input_ids=torch.tensor([ids[:t]])).logits[0, -1] / temperature
    return float(logits.log_softmax(-1)[ids[t]])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_token_logprobs_match_separate_forward_passes(model: Any, temperature: float) -> None:
    ids = [5, 9, 33, 2, 17, 60]
    with torch.no_grad():
        ours = models.token_logprobs(
            model, torch.tensor([ids]), torch.ones(1, 6, dtype=torch.int64), temperature=temperature
        )[0]
        plain = [plain_logprob(model, ids, t, temperature) for t in range(1, 6)]
    assert ours[1:].tolist() == pytest.approx(plain, abs=1e-5)


def test_token_logprobs_take_a_temperature_per_token(model: Any) -> None:
    ids, temperatures = [5, 9, 33, 2], [9.0, 0.5, 1.0, 2.0]
    with torch.no_grad():
        ours = models.token_logprobs(
            model, torch.tensor([ids]), torch.ones(1, 4), temperature=torch.tensor([temperatures])
        )[0]
        plain = [plain_logprob(model, ids, t, temperatures[t]) for t in range(1, 4)]
    assert ours.tolist() == pytest.approx([0, *plain], abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scalar_and_tensor_temperature_are_bit_equal(model: Any, temperature: float) -> None:
    ids = torch.tensor([[5, 9, 33, 2]])
    every = torch.full(ids.shape, temperature)
    one, all_alike = (
        models.token_logprobs(model, ids, torch.ones_like(ids), temperature=each)
        for each in (temperature, every)
    )
    assert torch.equal(one, all_alike)


def test_first_token_has_logprob_zero(model: Any) -> None:
    ids = torch.tensor([[5, 9, 33], [7, 8, 2]])
    logprobs = models.token_logprobs(model, ids, torch.ones_like(ids))
    assert logprobs.shape == ids.shape
    assert logprobs[:, 0].tolist() == [0, 0]
    assert (logprobs[:, 1:] < 0).all()


def test_right_padding_does_not_change_logprobs(model: Any) -> None:
    with torch.no_grad():
        short = models.token_logprobs(model, torch.tensor([[5, 9, 33]]), torch.ones(1, 3))
        long = models.token_logprobs(
            model, torch.tensor([[5, 9, 33, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
        )
    assert long[0, :3].tolist() == pytest.approx(short[0].tolist(), abs=1e-6)


def test_selected_logprobs_by_hand() -> None:
    # p = 1/4, 1/4, 1/2 at T 1; at T .5 the squares: 1/6, 1/6, 4/6
    logits = torch.tensor([0.0, 0.0, math.log(2)])
    third = torch.tensor(2)
    assert models.selected_logprobs(logits, third).item() == pytest.approx(math.log(1 / 2))
    cool = models.selected_logprobs(logits, third, temperature=0.5).item()
    assert cool == pytest.approx(math.log(4 / 6))


def test_selected_logprobs_are_computed_in_fp32() -> None:
    logits = torch.tensor([20.0, 0.0], dtype=torch.bfloat16)
    assert models.selected_logprobs(logits, torch.tensor(1)).dtype == torch.float32
