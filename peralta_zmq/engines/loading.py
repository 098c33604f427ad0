"""What engines load from a folder: a torch model (native and hf), base weights of adapters."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from peralta_zmq import models
from peralta_zmq.errors import ConfigError, StoreError
from peralta_zmq.models import lora
from peralta_zmq.registry import EngineSettings, WeightUpdate

logger = logging.getLogger(__name__)


def open_model(
    folder: Path, settings: EngineSettings
) -> tuple[models.Model, models.Tokenizer, AdapterMerger]:
    """The model, its tokenizer and a merger of its adapters; logs device and dtype.

    Raises StoreError if the files in `folder` cannot be loaded, and ConfigError for custom code
    that is not trusted or a device that is not usable.
    """
    device = models.choose_device(settings.device)
    dtype, reason = models.choose_dtype(device, settings.dtype)
    logger.info("device=%s dtype=%s (%s)", device, str(dtype).removeprefix("torch."), reason)
    trust = {"trust_remote_code": settings.trust_remote_code}
    models.check_code(folder, **trust)
    load = functools.partial(models.load_model, folder, device=device, dtype=dtype, **trust)
    with loading_errors(folder):
        model, tokenizer = load(), models.load_tokenizer(folder, **trust)
    return model, tokenizer, AdapterMerger(lambda: models.weights_of(load()))


@contextmanager
def loading_errors(folder: Path) -> Generator[None]:
    """Turn errors about the files in `folder` into StoreError of one line."""
    try:
        yield
    except ConfigError as error:
        raise StoreError(str(error)) from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"model folder {folder} cannot be loaded: {reason}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises StoreError."""
    with loading_errors(folder):
        return json.loads((folder / "config.json").read_bytes())


class AdapterMerger:
    """Merges adapters into the base weights.

    An engine overwrites its own weights with merged ones, and every adapter is merged into the
    unchanged base weights. These are loaded for the first adapter.
    """

    def __init__(self, load_base: Callable[[], Mapping[str, Tensor]]) -> None:
        self._load_base: Callable[[], Mapping[str, Tensor]] = load_base
        self._base: Mapping[str, Tensor] | None = None

    def weights_of(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """All weights of the model after the update; merged ones are computed when read.

        Raises ValueError if the adapter belongs to another model.
        """
        if not update.is_adapter:
            return update.tensors
        if self._base is None:
            self._base = self._load_base()
        return lora.MergedWeights(self._base, update.tensors)
