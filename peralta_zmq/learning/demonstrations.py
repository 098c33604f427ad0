"""Supervised fine-tuning (SFT): a loss of demonstrations, added to each update.

A demonstration is a prompt with a reference completion. Their order depends only on seed and step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.learning.distributed import SINGLE, Ranks
from peralta_zmq.learning.packing import MicroBatch, Packing, make_micro_batches, pack_groups
from peralta_zmq.learning.reference_models import ComputeLogprobs
from peralta_zmq.rollout import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Demonstrations with the settings of their training; `packing` has the temperature 1."""

    rollouts: Sequence[Rollout]  # the loss mask is True on the completion
    weight: float  # of the mean negative logprob of their tokens
    batch_size: int  # demonstrations per training step
    seed: int
    compute_logprobs: ComputeLogprobs  # the policy's forward pass
    packing: Packing

    def of_step(self, step: int) -> list[Rollout]:
        """The demonstrations of a step, counted from 1; each epoch has another order."""
        count = len(self.rollouts)
        indices = range((step - 1) * self.batch_size, step * self.batch_size)
        orders = {
            epoch: np.random.default_rng([self.seed, epoch]).permutation(count)
            for epoch in {index // count for index in indices}
        }
        return [self.rollouts[orders[index // count][index % count]] for index in indices]

    def term(
        self, step: int, *, device: torch.device | str = "cpu", ranks: Ranks = SINGLE
    ) -> Callable[[], dict[str, float]]:
        """The function that adds the gradient of a step's SFT term, see `add_gradient`."""
        groups = [_group(number, each) for number, each in enumerate(self.of_step(step))]
        samples, _ = pack_groups(groups, [[0.0]] * len(groups), self.packing)
        batches = make_micro_batches(samples, self.packing, device=device, ranks=ranks)
        count = sum(float(batch.mask.sum()) for batch in batches)
        num_tokens = torch.tensor(count, dtype=torch.float64)  # also on a rank without a batch
        ranks.all_reduce(num_tokens)
        return partial(
            add_gradient, batches, self.weight, self.compute_logprobs, max(1.0, float(num_tokens))
        )

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: the sha256 of all tokens and loss masks, uint8 [32]."""
        sha256 = hashlib.sha256()
        for rollout in self.rollouts:
            sha256.update(rollout.token_ids.tobytes() + rollout.loss_mask.tobytes())
        return {"demonstrations": torch.tensor(list(sha256.digest()), dtype=torch.uint8)}

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError if `tensors` have the `state` of other demonstrations."""
        for name, digest in self.state().items():
            if name in tensors and not torch.equal(tensors[name], digest):
                raise ValueError("loss.sft_file had other demonstrations; put that file back")


def add_gradient(
    batches: Sequence[MicroBatch],
    weight: float,
    compute_logprobs: ComputeLogprobs,
    num_tokens: float,
) -> dict[str, float]:
    """Add the gradient of `weight` times mean(-logprob); returns this rank's part of sft_loss."""
    total = 0.0
    for batch in batches:
        logprobs = compute_logprobs(
            batch.token_ids, batch.trees, batch.scored, temperature=batch.temperatures
        )
        loss = -(logprobs * batch.mask).sum() / num_tokens
        (weight * loss).backward()
        total += float(loss.detach())
    return {"sft_loss": total}


def demonstration(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> Rollout:
    """A rollout of these tokens, with a loss mask and without logprobs."""
    token_ids = np.array([*prompt_ids, *completion_ids], np.int32)
    mask = np.arange(len(token_ids)) >= len(prompt_ids)
    return Rollout(
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=np.zeros(len(token_ids), np.float32),
        policy_steps=np.where(mask, 0, -1).astype(np.int32),
        reward=0.0,
        finish_reason="stop",
    )


def _group(number: int, rollout: Rollout) -> RolloutGroup:
    return RolloutGroup(
        run_id="", generator_id="sft", incarnation=bytes(8), group_number=number, problem_id="",
        task="", policy_step=0, weights_id="", rollouts=(rollout,),
    )  # fmt: skip
