"""Checkpoints: the state of the trainer after a step, as safetensors and JSON."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import JournalError, OutageError, failure_text
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.ranks import PolicyLearner
from peralta_zmq.trainer.session import Session
from peralta_zmq.trainer.trained_model import TrainedModel
from peralta_zmq.weights import tensor_set

CHECKPOINTS = "checkpoints"  # folder in the run folder
TENSORS = "state.safetensors"
PROGRESS = "progress.json"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a trainer after a step: all that is needed to continue."""

    step: int
    tensors: Mapping[str, torch.Tensor]  # fp32 weights, optimizer state, RNG
    progress: dict[str, Any]  # JSON: counts of groups, curriculum, base model of LoRA adapters


class CheckpointWriter:
    """Writes checkpoints; deletes journal files that no kept checkpoint needs."""

    def __init__(self, session: Session, policy: TrainedModel, collector: BatchCollector) -> None:
        self.saved_step = -1  # step of the newest checkpoint; -1: none
        self._session = session
        self._policy = policy
        self._collector = collector
        self.update_progress()

    def update_progress(self) -> None:
        """Copy the progress for the next checkpoint, right after each step."""
        self._ledger = self._collector.admission.ledger.copy()
        self._progress = {**self._collector.state(), **self._policy.manifest_fields}

    def try_write(self) -> None:
        """Write a checkpoint of the newest step; a failure is reported."""
        try:
            self.write()
        except OutageError as error:
            run_log = self._session.run_log
            run_log.event("checkpoint_failed", step=self._policy.learner.step, reason=str(error))
            run_log.note(f"{error}; the journal still holds everything")

    def write(self) -> None:
        """Write the newest step's checkpoint, prune older ones. Raises OutageError, WireError."""
        learner = self._policy.learner
        settings = self._session.config.checkpoint
        if learner.step == self.saved_step:
            return
        self._session.address_file.check()
        folder = self._session.folder / CHECKPOINTS
        try:
            write_checkpoint(folder, self.state(step=learner.step), run_id=self._session.run_id)
            self.saved_step = learner.step
            # The checkpoint of step 0, of a fork, precedes the whole journal.
            oldest = 1 if settings.keep_journal else 0
            prune(folder, settings.keep_last, oldest=oldest)
            failpoint("checkpoint.pruned")  # a test can kill the process here
            if not settings.keep_journal:
                self._collector.journal.prune(min(atomic_files.steps_in(folder)) + 1)
        except OSError as error:
            raise OutageError(
                f"cannot write checkpoint {learner.step} in {folder}: {failure_text(error, folder)}"
            ) from error

    def state(self, *, step: int) -> Checkpoint:
        """The newest weights and optimizer, with the last copied progress, as those of `step`."""
        progress = {"ledger": self._ledger.saved(), **self._progress}
        return Checkpoint(step, self._policy.learner.state(), progress)


def write_checkpoint(folder: Path, checkpoint: Checkpoint, *, run_id: str) -> None:
    """Write the checkpoint to `folder/step_N` atomically. Raises OSError."""
    final = folder / f"step_{checkpoint.step:06d}"
    files = {
        TENSORS: tensor_set.file_of(checkpoint.tensors, {}),
        PROGRESS: json.dumps(checkpoint.progress).encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    failpoint("checkpoint.write")
    # `final` exists if it was corrupt at the restart, so that its step was trained again.
    atomic_files.remove_folder(final)
    atomic_files.write_folder(final, files, {"run_id": run_id, "step": checkpoint.step})
    failpoint("checkpoint.written")


def prune(folder: Path, keep_last: int | None, *, oldest: int = 0) -> None:
    """Remove checkpoints of step `oldest` or later, but for the newest `keep_last`; None = all."""
    steps = atomic_files.steps_in(folder)
    for step, path in [*steps.items()][:-keep_last] if keep_last else ():
        if step >= oldest:
            atomic_files.remove_folder(path)


def newest(
    folder: Path,
    *,
    run_id: str,
    until: int | None = None,
    way_back: Callable[[], str] = lambda: "put a copy back",
) -> Checkpoint | None:
    """Read the newest valid checkpoint up to step `until`; None if there is none.

    Raises JournalError if it belongs to another run. If none of several is valid, raises
    OutageError if one could not be read, else JournalError with `way_back`.
    """
    checkpoints = atomic_files.steps_in(folder)
    paths = [path for step, path in checkpoints.items() if until is None or step <= until]
    unreadable: OSError | None = None
    for path in reversed(paths):
        try:
            manifest = atomic_files.read_manifest(path)
            if manifest.about["run_id"] != run_id:
                raise JournalError(
                    f"checkpoint {path} belongs to run {manifest.about['run_id']}, not to "
                    f"{run_id}; move it away, or choose another --run.name"
                )
            return _read(path, manifest)
        except (FileNotFoundError, *atomic_files.MALFORMED):
            pass
        except OSError as error:
            unreadable = error
        logger.warning("checkpoint skipped: folder=%s does not verify", path)
    if unreadable:
        reason = failure_text(unreadable, folder)
        if unreadable.errno == errno.EMFILE:
            raise OutageError(f"{folder} cannot be read: {reason}")
        raise OutageError(f"{folder} cannot be read ({reason}); mount it") from unreadable
    if paths:
        raise JournalError(f"no checkpoint in {folder} verifies; {way_back()}")
    return None


def _read(path: Path, manifest: atomic_files.Manifest) -> Checkpoint:
    """Read and verify a checkpoint. Raises OSError, or an exception of MALFORMED."""
    text = b"".join(atomic_files.read_verified(path, PROGRESS, manifest))
    progress = atomic_files.parse_object(text)
    for _ in atomic_files.read_verified(path, TENSORS, manifest):
        pass
    tensors = tensor_set.FileTensors(path / TENSORS, dtypes=tensor_set.ALL_DTYPES)
    return Checkpoint(int(manifest.about["step"]), tensors, progress)


def restore(
    learner: PolicyLearner, checkpoint: Checkpoint, *, run_folder: Path, remedy: str
) -> None:
    """Restore weights, optimizer and RNG; JournalError that ends in `remedy` if they do not fit."""
    try:
        learner.restore(checkpoint.step, checkpoint.tensors)
    except ValueError as error:
        raise JournalError(
            f"checkpoint of step {checkpoint.step} in {run_folder} does not fit ({error}); {remedy}"
        ) from None
