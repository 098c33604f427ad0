"""Logprobs under models that are not trained: earlier policies, and teachers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from peralta_zmq.learning.packing import MicroBatch

# The forward pass of a model over a row of M tokens, in which several rollouts follow each other:
# compute(token_ids [M], trees, scored [N], temperature=number or tensor [N]) returns the logprobs
# [N] of the tokens at the indices `scored`. `trees` describe the prefixes that rollouts share.
# ComputeLogprobsAndEntropy also returns the entropies [N] of the predicted distributions, in nats.
# models/scorer.py:Scorer implements both types.
ComputeLogprobs: TypeAlias = Callable[..., Tensor]
ComputeLogprobsAndEntropy: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
# Returns the logprobs [N] of the generated tokens of each batch.
ReferenceModel: TypeAlias = Callable[[Sequence[MicroBatch]], list[Tensor]]


@torch.no_grad()
def reference_logprobs(
    compute_logprobs: ComputeLogprobs, batches: Sequence[MicroBatch]
) -> list[Tensor]:
    """Logprobs [N] of the generated tokens of each batch, without gradient."""
    return [
        compute_logprobs(batch.token_ids, batch.trees, batch.scored, temperature=batch.temperatures)
        for batch in batches
    ]


def with_logprobs(
    name: str, batches: Sequence[MicroBatch], model: ReferenceModel
) -> list[MicroBatch]:
    """Set the field `name` of each batch to the model's logprobs of its tokens."""
    logprobs = zip(batches, model(batches), strict=True)
    return [replace(batch, **{name: values}) for batch, values in logprobs]


class PolicyCopy:
    """A ReferenceModel that swaps a copy of parameters into the policy for each use.

    With LoRA only the adapters are copied; new ones add nothing to the base model. If `sync_steps`
    is set, `sync` copies the policy every sync_steps steps, and checkpoints contain the copy.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        compute_logprobs: ComputeLogprobs,
        *,
        sync_steps: int | None = None,
    ) -> None:
        self._parameters = parameters
        self._compute_logprobs = compute_logprobs
        self._sync_steps = sync_steps
        self._copy = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def __call__(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Logprobs [N] of each batch; restores the policy's weights bit for bit."""
        self._swap()
        try:
            return reference_logprobs(self._compute_logprobs, batches)
        finally:
            self._swap()

    @torch.no_grad()
    def sync(self, step: int) -> None:
        if self._sync_steps and step % self._sync_steps == 0:
            for name, parameter in self._parameters.items():
                self._copy[name].copy_(parameter)

    def state(self) -> Mapping[str, Tensor]:
        """The copy for a checkpoint, by parameter name; empty without sync_steps."""
        return self._copy if self._sync_steps else {}

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            previous = parameter.detach().clone()
            parameter.copy_(self._copy[name])
            self._copy[name].copy_(previous)
