"""Any engine over a base model that is served with adapters. Knows weights; samples nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from torch import Tensor

from peralta_zmq import models
from peralta_zmq.models import lora
from peralta_zmq.rollout import Completion, Request, Sampling


class Engine(Protocol):
    """What is over the base (registry.Engine)."""

    step: int

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]: ...

    def apply(self, weights: Mapping[str, Tensor], step: int) -> None: ...

    def cancel(self) -> None: ...


class AdaptedEngine:
    """Takes adapters and gives the engine whole weights: those of the base with them merged in.

    The base's own are kept, so that no version leaves a trace in the next.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        model: models.Model,
        adapter: Mapping[str, Tensor],
        step: int,
    ) -> None:
        """`make` gives an engine over `model`, which may take its weights apart.

        Raises ValueError for an adapter of another model.
        """
        self._base = lora.kept_apart(model, adapter)
        self._engine = make()
        self.apply(adapter, step)

    def apply(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Sample from the base with this adapter from now on. Raises ValueError, with nothing
        changed, if it is of another model."""
        self._engine.apply(lora.merged(self._base, weights), step)
        self.step = step

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """As the engine does."""
        return self._engine.generate(requests, sampling, between_steps)

    def cancel(self) -> None:
        """Give up what is under way."""
        self._engine.cancel()
