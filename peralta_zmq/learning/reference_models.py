"""Frozen models that score the policy's tokens: its own earlier weights, or another model.

Knows parameters by name and functions that score; knows nothing of losses or files.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from peralta_zmq.learning.optimizer_step import Score

PLACE = "reference/"  # before the names of tensors in a checkpoint


class Frozen(Protocol):
    """What is asked for logprobs beside the policy."""

    @contextmanager
    def at_work(self) -> Generator[Score]:
        """How it scores; the policy is not itself meanwhile."""
        ...


class TeacherModel:
    """A model of its own, such as a teacher from a folder."""

    def __init__(self, score: Score) -> None:
        self._score = score

    @contextmanager
    def at_work(self) -> Generator[Score]:
        """How it scores."""
        yield self._score


class Reference:
    """The policy as it was, by a copy of the parameters that are trained.

    The copy changes places with them while it scores, so that adapters cost a copy of themselves
    only: before the first step they are the base with the adapters off. With `sync_steps` it
    follows the policy every so many steps: mixup_alpha policy + (1 - mixup_alpha) copy (TR-DPO,
    arXiv 2404.09656, as in TRL), and is a part of checkpoints.
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
        self._copy = {name: each.detach().clone() for name, each in parameters.items()}

    @contextmanager
    def at_work(self) -> Generator[Score]:
        """How it scores; the policy has its weights back on leaving, bit for bit."""
        self._change_places()
        try:
            yield self._score
        finally:
            self._change_places()

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Come nearer to the policy of `step`, when it is time."""
        if self._sync_steps and step % self._sync_steps == 0:
            for name, each in self._parameters.items():
                self._copy[name].lerp_(each, self._mixup_alpha)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs: nothing of a copy that never changes."""
        return {PLACE + name: each for name, each in self._copy.items()} if self._sync_steps else {}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave; `tensors` may hold more."""
        for path in self.state():
            self._copy[path.removeprefix(PLACE)].copy_(tensors[path])

    @torch.no_grad()
    def _change_places(self) -> None:
        for name, each in self._parameters.items():
            aside = each.detach().clone()
            each.copy_(self._copy[name])
            self._copy[name].copy_(aside)
