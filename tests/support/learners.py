"""Tiny learners: the groups of a step, the tokens that a loss gets, a reference model."""

from __future__ import annotations

from typing import Any

import torch
from sample_data import group_of, siblings, tiny_learner
from torch import Tensor

from peralta_zmq.learning.demonstrations import Demonstrations, demonstration
from peralta_zmq.learning.losses import Tokens, preset
from peralta_zmq.learning.packing import Packing
from peralta_zmq.learning.reference_models import PolicyCopy
from peralta_zmq.models.scorer import Scorer
from peralta_zmq.rollout import RolloutGroup

FOUR = [siblings([1, 0], seed=seed) for seed in range(4)]


def groups_of(step: int) -> list[RolloutGroup]:
    return [group_of([1, 0, 0, 1], seed=step, lengths=[4, 2, 6, 3])]


def weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def identical(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


def tokens_of_step(learner_of: Any, **options: Any) -> list[Tokens]:
    """Tokens that the loss gets in one step on four groups."""
    seen = list[Tokens]()

    def loss(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(tokens)
        return preset("reinforce")(tokens)

    learner_of(loss=loss, **options).learn(FOUR)
    return seen


def learner_with_reference(model: Any, **options: Any) -> Any:
    reference = PolicyCopy(dict(model.named_parameters()), Scorer(model), **options)
    return tiny_learner(model, reference=reference, loss=preset("grpo_kl", beta=0.5))


def demonstrations_of(model: Any, *, max_tokens: int = 1000, **options: Any) -> Demonstrations:
    """Five demonstrations of different lengths, three of them per step."""
    texts = [([5, 6], [7, 8, 2]), ([9], [10, 2]), ([11, 12, 13], [14]), ([15], [16, 17, 18, 2]),
             ([5, 6], [19, 2])]  # fmt: skip
    defaults = {"weight": 0.3, "batch_size": 3, "seed": 4, "compute_logprobs": Scorer(model)}
    return Demonstrations(
        rollouts=[demonstration(prompt, completion) for prompt, completion in texts],
        packing=Packing(max_tokens=max_tokens), **{**defaults, **options},
    )  # fmt: skip
