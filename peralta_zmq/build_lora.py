"""From the settings to adapters: into the policy, beside what is published, over a base.

Knows the config and the leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peralta_zmq import atomic_files, models
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError, JournalError
from peralta_zmq.models import lora
from peralta_zmq.weights import tensors as sets
from peralta_zmq.weights.version import WEIGHTS, Version

logger = logging.getLogger(__name__)


def load_policy(config: Config, folder: Path) -> models.Model:
    """The model to be trained, fp32, with adapters when [lora] asks for them."""
    device = models.choose_device(config.model.device)
    model = models.load_model(folder, device=device, dtype=torch.float32)
    chosen = config.lora
    if chosen.rank is not None:
        lora.add_adapters(
            model, rank=chosen.rank, alpha=chosen.alpha, dropout=chosen.dropout,
            target_modules=chosen.target_modules, seed=config.run.seed,
        )  # fmt: skip
        if chosen.dropout:
            torch.manual_seed(config.run.seed)  # from here on a checkpoint keeps the dice
        trained = lora.trained_parameters(model).values()
        logger.info("lora rank=%d trained=%d", chosen.rank, sum(each.numel() for each in trained))
    return model


@dataclass(frozen=True, slots=True)
class CompanionFiles:
    """What goes with every published set of weights."""

    companions: dict[str, bytes]  # files
    about: dict[str, str]  # what the manifest says of it


def companion_files_of(config: Config, folder: Path, model: models.Model) -> CompanionFiles:
    """A whole model has its config and tokenizer with it; an adapter names the base it is for."""
    if not lora.has_adapters(model):
        return CompanionFiles(models.companion_files(folder), {})
    name = config.model.name
    described = lora.config_file(model, base=str(folder) if name == "embedded" else name)
    about = {"adapts": lora.digest_of(folder), "adapts_name": name}
    return CompanionFiles({lora.CONFIG_FILE: described}, about)


def check_base(beside: CompanionFiles, progress: Mapping[str, Any], *, where: Path) -> None:
    """Raise JournalError for the progress of a run whose adapters are for another base."""
    if progress.get("adapts") != beside.about.get("adapts"):
        raise JournalError(
            f"the checkpoint in {where} has adapters for {progress.get('adapts_name')} "
            f"({progress.get('adapts')}), and model.name is another model "
            f"({beside.about.get('adapts')}); choose another --run.name"
        )


def base_of(config: Config, version: Version) -> Path:
    """The folder of the model that a published adapter is for. Raises ConfigError for another."""
    folder = models.model_folder(config.model.name)
    if lora.digest_of(folder) != version.says("adapts"):
        raise ConfigError(
            f"version {version.number} is an adapter for {version.says('adapts_name')} "
            f"({version.says('adapts')}), and model.name {config.model.name} is another model; "
            "give the one that the trainer has, with the same files"
        )
    return folder


def export(config: Config, folder: Path, model_folder: Path, model: models.Model) -> Path:
    """Write the adapter for peft and the whole model for transformers; returns the latter's folder.

    In `folder`, over what an earlier end of the run left. Raises OSError.
    """
    dtype = models.DTYPES[config.weights.dtype]
    adapter = sets.copy_set(lora.published_weights(model), dtype)
    beside = companion_files_of(config, model_folder, model)
    _write_weights(folder / "adapter", lora.WEIGHTS_FILE, adapter, beside)
    return write_merged(
        folder / "merged", lora.base_weights(model), adapter,
        companions=models.companion_files(model_folder), dtype=dtype,
    )  # fmt: skip


def write_merged(
    target: Path,
    base: Mapping[str, torch.Tensor],
    adapter: Mapping[str, torch.Tensor],
    *,
    companions: dict[str, bytes],
    dtype: torch.dtype,
) -> Path:
    """A folder for `from_pretrained` with the adapter merged in. Raises OSError."""
    whole = sets.copy_set(lora.merged(base, adapter), dtype)
    _write_weights(target, WEIGHTS, whole, CompanionFiles(companions, {}))
    return target


def _write_weights(
    target: Path,
    name: str,
    weights: Mapping[str, torch.Tensor],
    beside: CompanionFiles,
) -> None:
    atomic_files.remove_folder(target)
    atomic_files.write_folder(
        target, {name: sets.file_of(weights, {}), **beside.companions}, beside.about
    )
