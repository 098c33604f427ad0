from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from learners import FOUR
from sample_data import tiny_learner, tiny_model

from peralta_zmq.learning.losses import Tokens, preset
from peralta_zmq.learning.selection import TokenSelection, entropy_bound, second_moment_bound
from peralta_zmq.models.scorer import Scorer


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("quantile", "bound"), [(1.0, 0.1), (0.5, 0.25), (0.25, 0.325), (0.001, 0.3997)]
)
def test_entropy_bound_interpolates_between_entropies(quantile: float, bound: float) -> None:
    # of 4 sorted values, the quantile 1 - q is at the index 3 (1 - q)
    assert entropy_bound(float64([0.4, 0.1, 0.2, 0.3]), quantile) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("log_ratios", "threshold", "bound"),
    [
        # squares .01, .04, .25, 1; means of the first .01, .025, .1, .325
        ([-0.2, 0.1, -1.0, 0.5], 0.04, 0.25),
        ([-0.2, 0.1, -1.0, 0.5], 0.11, 1.0),
        ([-0.2, 0.1, -1.0, 0.5], 0.4, math.inf),
        ([-0.2, 0.1, -1.0, 0.5], 0.005, 0.01),  # leaves out all
        # means .01, .025, .03: one of the equal squares would fit
        ([0.2, 0.1, -0.2], 0.026, 0.04),
        ([math.inf, 0.1, 0.2], 0.04, math.inf),
        ([], 0.04, math.inf),
    ],
)
def test_second_moment_bound_leaves_out_the_fewest_tokens(
    log_ratios: list[float], threshold: float, bound: float
) -> None:
    assert second_moment_bound(float64(log_ratios).square(), threshold) == pytest.approx(bound)


@torch.no_grad()
def by_rollout(model: Any) -> tuple[dict[float, float], dict[float, float]]:
    """Entropy and squared log ratio of each token of FOUR, by its sampling logprob."""
    entropies, squares = dict[float, float](), dict[float, float]()
    for rollout in (rollout for group in FOUR for rollout in group.rollouts):
        ids = torch.from_numpy(rollout.token_ids).long()
        table = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for t in rollout.loss_mask.nonzero()[0].tolist():
            logprob = float(rollout.logprobs[t])
            entropies[logprob] = -float((table[t - 1].exp() * table[t - 1]).sum())
            squares[logprob] = (table[t - 1, ids[t]].item() - logprob) ** 2
    return entropies, squares


@pytest.mark.parametrize(
    "options", [{}, {"max_tokens": 9}, {"num_minibatches": 2, "num_iterations": 2}]
)
def test_selection_is_that_of_the_whole_step_for_any_split(options: dict[str, Any]) -> None:
    model, selected = tiny_model(), dict[float, bool]()
    entropies, squares = by_rollout(model)
    # The first tokens of siblings have equal entropies, so the bound is in the widest gap.
    order = sorted(entropies.values())
    index = max(range(8, 24), key=lambda at: order[at + 1] - order[at])
    bound = (order[index] + order[index + 1]) / 2
    highest = [each for each, entropy in entropies.items() if entropy > bound]
    smallest = sorted(squares, key=squares.__getitem__)[:25]
    ascending = sorted(squares.values())
    threshold = (sum(ascending[:25]) / 25 + sum(ascending[:26]) / 26) / 2  # 26 would be too many

    def loss(tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert tokens.selected is not None
        selected.update(zip(tokens.old_logprobs.tolist(), tokens.selected.tolist(), strict=True))
        return preset("dapo")(tokens)

    selection = TokenSelection(
        compute=Scorer(model).with_entropy,
        top_entropy_quantile=1 - (index + 0.5) / 31,
        m2_threshold=threshold,
    )
    metrics = tiny_learner(model, loss=loss, selection=selection, **options).learn(FOUR).metrics
    assert len(selected) == 32
    assert {each for each, flag in selected.items() if flag} == {*highest} & {*smallest}
    assert metrics["masked/entropy"] == (index + 1) / 32 and metrics["masked/m2"] == 7 / 32
