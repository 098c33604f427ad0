"""Reference models that score the policy's tokens for a loss: a policy copy or a teacher."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from peralta_zmq.learning.optimizer_step import Score

PREFIX = "reference/"  # of tensor names in a checkpoint


class ReferenceModel(Protocol):
    """A model that computes logprobs of the policy's tokens and is not trained."""

    @contextmanager
    def scoring(self) -> Generator[Score]:
        """Yield the function that scores. The policy must not be used inside the context."""
        ...


class TeacherModel:
    """A model with weights of its own."""

    def __init__(self, score: Score) -> None:
        self._score = score

    @contextmanager
    def scoring(self) -> Generator[Score]:
        """Yield the function that scores."""
        yield self._score


class PolicyCopy:
    """A copy of the trained parameters, swapped into the policy while it scores.

    With LoRA it copies only the adapters; before the first step they are zero, so the copy scores
    as the base model. With `sync_steps` every sync_steps-th step sets the copy to
    mixup_alpha policy + (1 - mixup_alpha) copy (TR-DPO, arXiv 2404.09656, as in TRL), and the copy
    is saved in checkpoints.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        score: Score,
        *,
        sync_steps: int | None = None,
        mixup_alpha: float = 1.0,
    ) -> None:
        self._parameters, self._score = parameters, score
        self._sync_steps, self._mixup_alpha = sync_steps, mixup_alpha
        self._copy = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @contextmanager
    def scoring(self) -> Generator[Score]:
        """Yield the function that scores; on exit the policy has its weights back, bit for bit."""
        self._swap()
        try:
            yield self._score
        finally:
            self._swap()

    @torch.no_grad()
    def sync(self, step: int) -> None:
        """Move the copy towards the policy if `step` is a multiple of sync_steps."""
        if self._sync_steps and step % self._sync_steps == 0:
            for name, parameter in self._parameters.items():
                self._copy[name].lerp_(parameter, self._mixup_alpha)

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint; none for a copy that is never synced."""
        return {PREFIX + name: t for name, t in self._copy.items()} if self._sync_steps else {}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a `state`; `tensors` may have other names, too."""
        for path in self.state():
            self._copy[path.removeprefix(PREFIX)].copy_(tensors[path])

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            policy = parameter.detach().clone()
            parameter.copy_(self._copy[name])
            self._copy[name].copy_(policy)
