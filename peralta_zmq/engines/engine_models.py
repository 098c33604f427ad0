"""What engines load from a folder: a torch model (native and hf), base weights of adapters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peralta_zmq import models
from peralta_zmq.errors import ConfigError, StoreError
from peralta_zmq.models import lora
from peralta_zmq.models.base_formats import PACKED_FORMATS
from peralta_zmq.models.frozen_base import BaseWeights, load_base_weights
from peralta_zmq.models.rounding import grid_noise, off_grid
from peralta_zmq.registry import EngineSettings, WeightUpdate


def chosen_device(settings: EngineSettings) -> tuple[torch.device, torch.dtype]:
    device = models.choose_device(settings.device)
    dtype, _ = models.choose_dtype(device, settings.dtype)
    return device, dtype


class ModelFiles(NamedTuple):
    tokenizer: models.Tokenizer
    end_ids: list[int]
    weights: Mapping[str, Tensor]


def open_files(folder: Path, settings: EngineSettings) -> ModelFiles:
    """Raises StoreError for files that cannot be loaded, and ConfigError for untrusted code."""
    trust = {"trust_remote_code": settings.trust_remote_code}
    models.check_code(folder, **trust)
    with loading_errors(folder):
        tokenizer = models.load_tokenizer(folder, **trust)
        end_ids = models.folder_end_ids(folder, tokenizer)
        return ModelFiles(tokenizer, end_ids, models.folder_weights(folder))


def open_model(
    folder: Path, settings: EngineSettings
) -> tuple[models.Model, models.Tokenizer, AdapterMerger]:
    """The model, its tokenizer and a merger of its adapters; raises as `open_files`."""
    device, dtype = chosen_device(settings)
    models.limit_memory(device, settings.gpu_memory_utilization)
    trust = {"trust_remote_code": settings.trust_remote_code}
    models.check_code(folder, **trust)
    with loading_errors(folder):
        model = models.load_model(folder, device=device, dtype=dtype, **trust)
        tokenizer = models.load_tokenizer(folder, **trust)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # transformers maps the file
    assert model.generation_config is not None
    model.generation_config.eos_token_id = models.folder_end_ids(folder, tokenizer)
    names = frozenset(models.weights_of(model))

    def load_base(base_dtype: str) -> BaseWeights:
        base = load_base_weights(folder, base_dtype, device=device, dtype=dtype, **trust)
        # Files may have a tensor that the model shares with another one.
        return base._replace(tensors={name: base.tensors[name] for name in names})

    return model, tokenizer, AdapterMerger(load_base, dtype)


def merger_of_files(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool) -> AdapterMerger:
    def load_base(base_dtype: str) -> BaseWeights:
        if base_dtype in PACKED_FORMATS:
            cpu = torch.device("cpu")
            return load_base_weights(
                folder, base_dtype, device=cpu, trust_remote_code=trust_remote_code
            )
        weights = models.folder_weights(folder)
        if base_dtype == "float32":
            return BaseWeights(weights, None)
        return BaseWeights(models.converted_weights(weights, torch.bfloat16), None)

    return AdapterMerger(load_base, dtype)


@contextmanager
def loading_errors(folder: Path) -> Generator[None]:
    try:
        with models.model_loading_errors(f"model folder {folder} cannot be loaded"):
            yield
    except ConfigError as error:
        raise StoreError(str(error)) from None


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder, or of its text part. Raises StoreError."""
    with loading_errors(folder):
        return models.published_config(folder)


class AdapterMerger:
    """Merges adapters into the base weights, which `load_base(base_dtype)` loads for the first one.

    An engine overwrites its own weights with merged ones. It rounds them to its `dtype`, so they
    start off its grid (models/rounding.py): otherwise most of a small adapter is lost.
    """

    def __init__(self, load_base: Callable[[str], BaseWeights], dtype: torch.dtype) -> None:
        self._load_base: Callable[[str], BaseWeights] = load_base
        self._dtype = dtype
        self._base: BaseWeights | None = None
        self._base_dtype = ""  # the format of `_base`
        self._noise: dict[str, Tensor] = {}  # rounding noise by base weight with an adapter

    def weights_of(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """All weights of the model after the update; merged ones are computed when read.

        Raises ValueError if the adapter belongs to another model, or to other base values.
        """
        if not update.is_adapter:
            return update.tensors
        if self._base is None:
            self._base = self._load_base(update.base_dtype)
            self._base_dtype = update.base_dtype
        if update.base_dtype != self._base_dtype:
            raise ValueError(
                f"its base model is stored as {update.base_dtype}, and the one in use as "
                f"{self._base_dtype}; restart the generator"
            )
        if update.base_digest != self._base.digest:
            raise ValueError(
                f"its base model packed as {update.base_dtype} has the digest "
                f"{update.base_digest}, but here {self._base.digest}; install the trainer's "
                "version of peralta_zmq"
            )
        return lora.merged_weights(self._base.tensors, update.tensors, base_in_fp32=self._off_grid)

    def _off_grid(self, name: str, weight: Tensor) -> Tensor:
        if name not in self._noise:
            self._noise[name] = grid_noise(weight, self._dtype, seed=name)
        return off_grid(weight, self._noise[name])
