"""Files of a run with LoRA adapters: companion files of a version, and exports at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peralta_zmq import atomic_files, models
from peralta_zmq.config import Config
from peralta_zmq.errors import JournalError
from peralta_zmq.models import lora
from peralta_zmq.weights import tensors as sets
from peralta_zmq.weights.version import WEIGHTS


@dataclass(frozen=True, slots=True)
class CompanionFiles:
    """Published with every version of the weights."""

    companions: dict[str, bytes]  # content by file name
    about: dict[str, str]  # additional fields of the manifest


def companion_files(config: Config, folder: Path, model: models.Model) -> CompanionFiles:
    """Config and tokenizer of a whole model; for an adapter its config and its base's digest."""
    if not lora.has_adapters(model):
        return CompanionFiles(models.companion_files(folder), {})
    name = config.model.name
    content = lora.config_file(model, base=str(folder) if name == "embedded" else name)
    about = {"adapts": lora.weights_digest(folder), "adapts_name": name}
    return CompanionFiles({lora.CONFIG_FILE: content}, about)


def check_base(files: CompanionFiles, progress: Mapping[str, Any], *, where: Path) -> None:
    """Raise JournalError if a checkpoint's adapters belong to another base model."""
    if progress.get("adapts") != files.about.get("adapts"):
        raise JournalError(
            f"the checkpoint in {where} has adapters for {progress.get('adapts_name')} "
            f"({progress.get('adapts')}), but model.name is another model "
            f"({files.about.get('adapts')}); choose another --run.name"
        )


def export_adapter(config: Config, folder: Path, model_folder: Path, model: models.Model) -> Path:
    """Write `adapter` for peft and `merged` for transformers; returns the folder of the latter.

    Replaces the files of an earlier export. Raises OSError.
    """
    dtype = models.DTYPES[config.weights.dtype]
    adapter = sets.copy_set(lora.published_weights(model), dtype)
    files = companion_files(config, model_folder, model)
    _write_weights(folder / "adapter", lora.WEIGHTS_FILE, adapter, files)
    return write_merged(
        folder / "merged",
        lora.base_weights(model),
        adapter,
        companions=models.companion_files(model_folder),
        dtype=dtype,
    )


def write_merged(
    target: Path,
    base: Mapping[str, torch.Tensor],
    adapter: Mapping[str, torch.Tensor],
    *,
    companions: dict[str, bytes],
    dtype: torch.dtype,
) -> Path:
    """Write a folder for `from_pretrained` with the adapter merged in. Raises OSError."""
    merged = sets.copy_set(lora.MergedWeights(base, adapter), dtype)
    _write_weights(target, WEIGHTS, merged, CompanionFiles(companions, {}))
    return target


def _write_weights(
    target: Path, name: str, weights: Mapping[str, torch.Tensor], files: CompanionFiles
) -> None:
    atomic_files.remove_folder(target)
    atomic_files.write_folder(
        target, {name: sets.file_of(weights, {}), **files.companions}, files.about
    )
