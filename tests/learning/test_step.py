from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import group_of, tiny_model
from torch import Tensor

from peralta_zmq import policy
from peralta_zmq.learning.advantages import group_mean
from peralta_zmq.learning.batch import Batch, make_batches
from peralta_zmq.learning.losses import grpo, reinforce
from peralta_zmq.learning.step import take_step

GROUPS = [
    group_of([1, 0, 0, 1], lengths=[4, 1, 7, 2], seed=1),
    group_of([0, 0.5, 1], lengths=[3, 9, 5], seed=2, num_prompt=6),
]
LOSSES = [reinforce, functools.partial(grpo, epsilon=0.2)]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield tiny_model().double()


def double(batch: Batch) -> Batch:
    return replace(
        batch,
        loss_mask=batch.loss_mask.double(),
        old_logprobs=batch.old_logprobs.double(),
        advantages=batch.advantages.double(),
    )


def batches_of(max_tokens: int = 1000) -> list[Batch]:
    return [double(each) for each in make_batches(GROUPS, group_mean, max_tokens=max_tokens)]


def logits_in_double(
    model: Any, token_ids: Tensor, attention_mask: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """policy.token_logprobs, which works in fp32, with the logits kept in float64."""
    logits = model(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits
    logprobs = (
        (logits / temperature)[:, :-1].log_softmax(-1).gather(-1, token_ids[:, 1:, None])[..., 0]
    )
    return torch.nn.functional.pad(logprobs, (1, 0))


class Keep(torch.optim.SGD):
    """An optimizer that keeps the gradient it was given and changes nothing."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [each.grad.clone() for each in self.param_groups[0]["params"]]


def gradient(
    model: Any, batches: list[Batch], loss: Callable[..., Tensor], *, exact: bool = True
) -> tuple[Tensor, dict[str, float]]:
    """The whole gradient of a step, flat, and the step's metrics."""
    score = logits_in_double if exact else policy.token_logprobs
    optimizer = Keep(model.parameters(), lr=1.0)
    metrics = take_step(
        optimizer, batches,
        score=functools.partial(score, model), loss=loss, max_grad_norm=math.inf,
    )  # fmt: skip
    return torch.cat([each.flatten() for each in optimizer.seen]), metrics


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    return bool((ours - theirs).norm() <= tolerance * theirs.norm())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("max_tokens", [1, 20, 45])
def test_no_split_into_micro_batches_changes_the_gradient(
    model: Any, loss: Callable[..., Tensor], max_tokens: int
) -> None:
    whole, _ = gradient(model, batches_of(), loss)
    split = batches_of(max_tokens)
    assert len(split) > 1
    assert close(gradient(model, split, loss)[0], whole, 1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_split_changes_the_gradient_through_the_policys_own_logprobs(
    model: Any, loss: Callable[..., Tensor]
) -> None:
    # fp32 inside token_logprobs bounds the agreement
    whole, _ = gradient(model, batches_of(), loss, exact=False)
    assert close(gradient(model, batches_of(20), loss, exact=False)[0], whole, 1e-5)


def test_order_of_micro_batches_does_not_change_the_gradient(model: Any) -> None:
    split = batches_of(20)
    forward, _ = gradient(model, split, reinforce)
    assert close(gradient(model, split[::-1], reinforce)[0], forward, 1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_split_does_not_change_the_reported_numbers(
    model: Any, loss: Callable[..., Tensor]
) -> None:
    _, whole = gradient(model, batches_of(), loss)
    _, split = gradient(model, batches_of(20), loss)
    assert split == pytest.approx(whole, rel=1e-6)


def padded(batch: Batch, columns: int, token: int) -> Batch:
    """The batch with masked columns on the right whose contents must not matter."""
    pad = functools.partial(torch.nn.functional.pad, pad=(0, columns))
    return Batch(
        token_ids=pad(batch.token_ids, value=token),
        attention_mask=pad(batch.attention_mask, value=0),
        loss_mask=pad(batch.loss_mask, value=0.0),
        old_logprobs=pad(batch.old_logprobs, value=-7.0),
        advantages=pad(batch.advantages, value=3.0),
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_never_changes_loss_or_gradient(model: Any, loss: Callable[..., Tensor]) -> None:
    (batch,) = batches_of()
    plain, before = gradient(model, [batch], loss)
    wide, after = gradient(model, [padded(batch, 11, token=5)], loss)
    assert close(wide, plain, 1e-9)
    assert after == pytest.approx(before, rel=1e-9)


def test_loss_is_the_mean_over_the_generated_tokens_of_the_step(model: Any) -> None:
    total, count = 0.0, 0
    for group in GROUPS:
        for rollout, a in zip(group.rollouts, group_mean(group.rewards, []), strict=True):
            ids = torch.from_numpy(rollout.token_ids).long()
            table = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            for t in range(len(ids)):
                if rollout.loss_mask[t]:
                    total -= a * table[t - 1, ids[t]].item()
                    count += 1
    assert count == 31
    _, metrics = gradient(model, batches_of(20), reinforce)
    assert metrics["loss"] == pytest.approx(total / 31, rel=1e-6)


def test_mismatch_is_zero_when_the_sampler_had_the_same_weights(model: Any) -> None:
    (batch,) = batches_of()
    with torch.no_grad():
        same = logits_in_double(model, batch.token_ids, batch.attention_mask)
    _, metrics = gradient(model, [replace(batch, old_logprobs=same)], reinforce)
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-12)


def by_hand(old: float) -> tuple[torch.nn.Parameter, Batch]:
    """One generated token whose logprob is the only parameter, -1."""
    parameter = torch.nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))
    row = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    batch = Batch(row.long(), row.long(), row, row * old, torch.tensor([[0.5, 0.5]]).double())
    return parameter, batch


def test_mismatch_of_one_token_is_the_k3_estimate() -> None:
    # log ratio -1 - (-1.5) = .5; e^.5 - .5 - 1 = .148721
    parameter, batch = by_hand(old=-1.5)
    metrics = take_step(
        torch.optim.SGD([parameter], lr=0.1), [batch],
        score=lambda ids, mask, temperature: parameter.expand(1, 2),
        loss=reinforce, max_grad_norm=10.0,
    )  # fmt: skip
    assert metrics["mismatch_kl"] == pytest.approx(0.148721, abs=1e-6)


@pytest.mark.parametrize(("limit", "after"), [(10.0, -0.95), (0.25, -0.975)])
def test_step_follows_the_gradient_up_to_its_limit(limit: float, after: float) -> None:
    # d(-.5 p)/dp = -.5, so p moves up by .1 * min(.5, limit)
    parameter, batch = by_hand(old=-1.0)
    metrics = take_step(
        torch.optim.SGD([parameter], lr=0.1), [batch],
        score=lambda ids, mask, temperature: parameter.expand(1, 2),
        loss=reinforce, max_grad_norm=limit,
    )  # fmt: skip
    assert parameter.item() == pytest.approx(after, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(0.5)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_gradient_that_is_not_finite_skips_the_step(poison: float) -> None:
    parameter, batch = by_hand(old=-1.0)
    metrics = take_step(
        torch.optim.AdamW([parameter], lr=0.1), [batch],
        score=lambda ids, mask, temperature: parameter.expand(1, 2) * poison,
        loss=reinforce, max_grad_norm=1.0,
    )  # fmt: skip
    assert (parameter.item(), metrics["skipped"]) == (-1.0, 1.0)


def test_skipped_gradient_does_not_leak_into_the_next_step() -> None:
    parameter, batch = by_hand(old=-1.0)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for factor in (math.nan, 1.0):
        metrics = take_step(
            optimizer, [batch],
            score=lambda ids, mask, temperature, factor=factor: (
                parameter.expand(1, 2) * factor
            ),
            loss=reinforce, max_grad_norm=10.0,
        )  # fmt: skip
    assert (metrics["skipped"], parameter.item()) == (0.0, pytest.approx(-0.95))


def test_step_without_batches_changes_nothing() -> None:
    parameter, _ = by_hand(old=-1.0)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1)
    metrics = take_step(
        optimizer, [], score=lambda ids, mask, temperature: ids, loss=reinforce, max_grad_norm=1.0
    )
    assert (parameter.item(), metrics["loss"], metrics["skipped"]) == (-1.0, 0.0, 0.0)


def test_tokens_are_scored_at_the_temperatures_of_their_batch() -> None:
    parameter, batch = by_hand(old=-1.0)
    seen: list[object] = []

    def score(ids: Tensor, mask: Tensor, *, temperature: Tensor | float) -> Tensor:
        seen.append(temperature)
        return parameter.expand(1, 2)

    for each in (0.7, torch.tensor([[1.0, 0.5]])):
        take_step(
            torch.optim.SGD([parameter], lr=0.1), [replace(batch, temperatures=each)],
            score=score, loss=reinforce, max_grad_norm=1.0,
        )  # fmt: skip
        assert seen[-1] is each
