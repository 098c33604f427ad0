"""Engine wrapper that serves LoRA adapters: merges each into the base weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.engines.requests import CanGenerate
from peralta_zmq.models import lora


class Engine(CanGenerate, Protocol):
    """The wrapped engine; equal to registry.Engine, which this layer must not import."""

    step: int

    def apply(self, weights: Mapping[str, Tensor], *, step: int, folder: Path | None) -> None: ...

    def cancel(self) -> None: ...


class LoraEngine:
    """Applies adapters to an engine that was opened on the base model in `folder`.

    Keeps a copy of the base weights, so that every adapter is merged into the unchanged base.
    """

    def __init__(
        self, engine: Engine, folder: Path, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._engine, self.step = engine, engine.step
        self.generate, self.cancel = engine.generate, engine.cancel
        self._base = models.weights_of(models.load_model(folder, device=device, dtype=dtype))

    def apply(
        self, weights: Mapping[str, Tensor], *, step: int, folder: Path | None = None
    ) -> None:
        """Sample from the base with this adapter from the next token on.

        Raises ValueError, with nothing changed, if the adapter belongs to another model.
        """
        del folder  # holds the adapter, not the merged weights
        self._engine.apply(lora.MergedWeights(self._base, weights), step=step, folder=None)
        self.step = step
