"""Snapshots of the trainer: tensors and progress, safetensors and JSON, no pickle.

Knows tensors by name and folders; knows nothing of models or of how tensors came about.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch

from peralta_zmq import durable
from peralta_zmq.errors import JournalError

TENSORS, PROGRESS = "state.safetensors", "progress.json"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything a trainer needs to go on as if it had never stopped."""

    step: int
    tensors: dict[str, torch.Tensor]  # fp32 masters, optimizer state, RNG
    progress: dict[str, Any]  # ledger and the like, as JSON


def save(folder: Path, checkpoint: Checkpoint, *, run_id: str, keep_last: int) -> None:
    """Write `folder/step_N` whole, then remove all but the newest `keep_last`.

    Raises JournalError when the disk refuses; the older checkpoints stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step_{checkpoint.step:06d}"
    files = {
        TENSORS: safetensors.torch.save(checkpoint.tensors),
        PROGRESS: json.dumps(checkpoint.progress).encode(),
    }
    try:
        durable.remove_folder(final)  # one that did not verify when we resumed
        durable.write_folder(final, files, {"run_id": run_id, "step": checkpoint.step})
    except OSError as error:
        raise JournalError(f"cannot write checkpoint {final}: {error.strerror}") from None
    for old in list(durable.steps_in(folder).values())[:-keep_last]:
        durable.remove_folder(old)


def restore(folder: Path, *, run_id: str) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None when none was ever written.

    Raises JournalError when it is of another run, or when there are some but none verifies.
    """
    durable.sweep(folder)
    found = durable.steps_in(folder)
    for path in reversed(found.values()):
        with contextlib.suppress(OSError, durable.CorruptError, KeyError, ValueError):
            manifest = durable.read_manifest(path)
            if manifest.about["run_id"] != run_id:
                raise JournalError(
                    f"checkpoint {path} belongs to run {manifest.about['run_id']}, not to "
                    f"{run_id}; move it away, or choose another --run.name"
                )
            return _read(path, manifest)
        logger.warning("checkpoint skipped: folder=%s does not verify", path)
    if found:
        raise JournalError(
            f"no checkpoint in {folder} verifies; put a copy back, or delete the run to start anew"
        )
    return None


def oldest_step(folder: Path) -> int:
    """The step of the oldest kept checkpoint, 0 when there is none."""
    return min(durable.steps_in(folder), default=0)


def _read(path: Path, manifest: durable.Manifest) -> Checkpoint:
    def whole(name: str) -> bytes:
        return _joined(durable.read_verified(path, name, manifest))

    tensors = safetensors.torch.load(whole(TENSORS))
    return Checkpoint(
        step=int(manifest.about["step"]),
        tensors=tensors,
        progress=cast("dict[str, Any]", json.loads(whole(PROGRESS))),
    )


def _joined(chunks: Iterable[bytes]) -> bytes:
    return b"".join(chunks)
