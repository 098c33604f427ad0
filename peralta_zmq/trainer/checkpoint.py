"""Checkpoints of the trainer: tensors as safetensors, progress as JSON, no pickle."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import JournalError
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.policy import Policy
from peralta_zmq.trainer.session import Session

TENSORS, PROGRESS = "state.safetensors", "progress.json"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a trainer after a step; a restored run equals an uninterrupted one."""

    step: int
    tensors: dict[str, torch.Tensor]  # fp32 masters, optimizer state, RNG
    progress: dict[str, Any]  # JSON: ledger, curriculum, base of the adapters


class CheckpointWriter:
    """Writes the checkpoints of a session, and prunes the journal before the oldest one kept."""

    def __init__(self, session: Session, policy: Policy, collector: BatchCollector) -> None:
        self.saved_step = -1  # of the newest checkpoint; -1: none
        self._session, self._policy, self._collector = session, policy, collector
        self.update_progress()

    def update_progress(self) -> None:
        """Take the JSON part of the next checkpoint; call it right after each step.

        Groups that are received later belong to the next step.
        """
        self._progress = {**self._collector.state(), **self._policy.manifest_fields}

    def save(self) -> None:
        """Write a checkpoint of the newest step; a failed write only makes a replay longer."""
        try:
            self.write()
        except JournalError as error:
            run_log = self._session.run_log
            run_log.event("checkpoint_failed", step=self._policy.learner.step, reason=str(error))
            run_log.note(f"{error}; the journal still holds everything")

    def write(self) -> None:
        """Write a checkpoint of the newest step unless there is one; prune the journal.

        Raises JournalError if it cannot be written.
        """
        step, rules = self._policy.learner.step, self._session.config.checkpoint
        if step == self.saved_step:
            return
        folder = self._session.folder / "checkpoints"
        save(
            folder,
            Checkpoint(step, self._policy.learner.state(), self._progress),
            run_id=self._session.run_id,
            keep_last=rules.keep_last,
            keep_interval=rules.keep_interval,
        )
        self.saved_step = step
        if not rules.keep_journal:
            self._collector.journal.prune(min(atomic_files.steps_in(folder)) + 1)


def save(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    run_id: str,
    keep_last: int | None,
    keep_interval: int | None = None,
) -> None:
    """Write `folder/step_N` atomically, then prune older checkpoints.

    Keeps the newest `keep_last` and every `keep_interval`-th step; keeps all if both are None.
    Raises JournalError if it cannot be written; the older checkpoints stay.
    """
    final = folder / f"step_{checkpoint.step:06d}"
    files = {
        TENSORS: safetensors.torch.save(checkpoint.tensors),
        PROGRESS: json.dumps(checkpoint.progress).encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        failpoint("checkpoint.write")
        atomic_files.remove_folder(final)  # a checkpoint that did not verify at the restart
        atomic_files.write_folder(final, files, {"run_id": run_id, "step": checkpoint.step})
    except OSError as error:
        raise JournalError(f"cannot write checkpoint {final}: {error.strerror}") from None
    failpoint("checkpoint.written")
    for old in _prunable(atomic_files.steps_in(folder), keep_last, keep_interval):
        atomic_files.remove_folder(old)
    failpoint("checkpoint.pruned")


def _prunable(
    checkpoints: Mapping[int, Path], keep_last: int | None, keep_interval: int | None
) -> list[Path]:
    if keep_last is None and keep_interval is None:
        return []
    older = list(checkpoints)[: -(keep_last or 1)]
    return [checkpoints[step] for step in older if not keep_interval or step % keep_interval]


def restore(folder: Path, *, run_id: str) -> Checkpoint | None:
    """Remove half-written folders, then return the newest checkpoint that verifies, if any.

    Raises JournalError if it belongs to another run, or if there are some but none verifies.
    """
    atomic_files.sweep(folder)
    return newest(folder, run_id=run_id)


def newest(folder: Path, *, run_id: str, until: int | None = None) -> Checkpoint | None:
    """The newest checkpoint up to step `until` that verifies; changes nothing.

    Raises JournalError as `restore` does.
    """
    checkpoints = atomic_files.steps_in(folder)
    paths = [path for step, path in checkpoints.items() if until is None or step <= until]
    for path in reversed(paths):
        with contextlib.suppress(OSError, atomic_files.CorruptError, KeyError, ValueError):
            manifest = atomic_files.read_manifest(path)
            if manifest.about["run_id"] != run_id:
                raise JournalError(
                    f"checkpoint {path} belongs to run {manifest.about['run_id']}, not to "
                    f"{run_id}; move it away, or choose another --run.name"
                )
            return _read(path, manifest)
        logger.warning("checkpoint skipped: folder=%s does not verify", path)
    if paths:
        raise JournalError(
            f"no checkpoint in {folder} verifies; put a copy back, or delete the run to start over"
        )
    return None


def move_after(folder: Path, step: int, target: Path) -> None:
    """Move the checkpoints of later steps to another folder, the newest first.

    Raises JournalError, with nothing moved, if `step` itself has none.
    """
    checkpoints = atomic_files.steps_in(folder)
    if step not in checkpoints:
        steps = ", ".join(map(str, checkpoints)) or "none"
        raise JournalError(f"no checkpoint of step {step} in {folder}; there are: {steps}")
    for later in reversed(checkpoints):
        if later > step:
            os.rename(checkpoints[later], target / checkpoints[later].name)
    atomic_files.sync_folder(folder)


def _read(path: Path, manifest: atomic_files.Manifest) -> Checkpoint:
    def content(name: str) -> bytes:
        return b"".join(atomic_files.read_verified(path, name, manifest))

    progress = cast("dict[str, Any]", json.loads(content(PROGRESS)))
    tensors = safetensors.torch.load(content(TENSORS))
    return Checkpoint(int(manifest.about["step"]), tensors, progress)
