"""Roll-backs at the start of a trainer, each done only once: later starts continue the run.

`checkpoint.resume_step` returns to an earlier checkpoint. `checkpoint.skip_progress` makes the
newest state the checkpoint of step 0, so that steps, schedules and curves begin again with trained
weights and their optimizer. Both move the superseded checkpoints and journal files to a folder in
the run folder; that folder also marks the roll-back as done.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from peralta_zmq import atomic_files
from peralta_zmq.errors import JournalError
from peralta_zmq.trainer.checkpoint import CHECKPOINTS, Checkpoint, write_checkpoint
from peralta_zmq.trainer.journal import JOURNAL, files_in
from peralta_zmq.trainer.session import Session

SKIPPED = "skipped_progress"  # folder with the files of the steps before checkpoint.skip_progress
# Folder with the new checkpoint of step 0 until the files of all earlier steps are moved away.
NEW = ".tmp-step_zero"


def roll_back(session: Session) -> None:
    """Roll back to checkpoint.resume_step, unless an earlier start has done it.

    Moves the checkpoints and journal files of later steps to `rolled_back_to_N`.
    """
    step, run_log = session.config.checkpoint.resume_step, session.run_log
    folder, target = session.folder, session.folder / f"rolled_back_to_{step:06d}"
    wait_out = session.wait_out
    if step < 0:  # no roll-back is configured
        return
    if wait_out(target.exists):
        run_log.note(f"rolled back to step {step} already; to repeat it, move {target}")
        return
    checkpoints = wait_out(lambda: atomic_files.steps_in(folder / CHECKPOINTS))
    if step not in checkpoints:
        steps = ", ".join(map(str, checkpoints)) or "none"
        raise JournalError(
            f"no checkpoint of step {step} in {folder / 'checkpoints'}; there are: {steps}"
        )
    unfinished = target.with_name(f".tmp-{target.name}")  # exists after a killed roll-back
    wait_out(lambda: _move_later(folder, step, unfinished))
    wait_out(lambda: run_log.rewind(step))
    wait_out(lambda: os.rename(unfinished, target))
    run_log.note(f"rolled back to step {step}; later steps are moved to {target}")


def skips_progress(session: Session, *, step: int) -> bool:
    """True if `step` becomes step 0: checkpoint.skip_progress is set, and no start has done it.

    A run that begins with the setting has no progress to skip, at this and all later starts.
    """
    target = session.folder / SKIPPED
    if not session.config.checkpoint.skip_progress:
        return False
    if session.wait_out(target.exists):
        session.run_log.note(f"progress skipped already; to repeat it, move {target}")
        return False
    if step == 0:
        session.wait_out(lambda: target.mkdir(exist_ok=True))
    return step > 0


def skip_progress(session: Session, state: Checkpoint) -> None:
    """Replace all checkpoints and the journal by `state`, a checkpoint of step 0.

    A kill before `state` is on disk changes nothing. After a later kill, `finish_skip` of the next
    start completes the change.
    """
    folder = session.folder / NEW
    session.wait_out(lambda: write_checkpoint(folder, state, run_id=session.run_id))
    finish_skip(session)
    session.run_log.note(f"progress skipped; earlier steps are moved to {session.folder / SKIPPED}")


def finish_skip(session: Session) -> None:
    """Install the checkpoint that `skip_progress` has written, if there is one."""
    folder, wait_out = session.folder, session.wait_out
    new = folder / NEW / "step_000000"

    def install() -> None:
        os.rename(new, folder / CHECKPOINTS / new.name)
        atomic_files.sync_folder(folder / CHECKPOINTS)

    if not wait_out(new.exists):
        return
    wait_out(lambda: _move_later(folder, -1, folder / SKIPPED))
    wait_out(lambda: session.run_log.rewind(-1))  # undoes step 0 too: it had other weights
    wait_out(install)
    with suppress(OSError):
        new.parent.rmdir()


def _move_later(folder: Path, step: int, target: Path) -> None:
    """Move checkpoints and journal files of later steps to `target`, newest first."""
    for name, paths_in in ((CHECKPOINTS, atomic_files.steps_in), (JOURNAL, files_in)):
        (target / name).mkdir(parents=True, exist_ok=True)
        for later, path in reversed(paths_in(folder / name).items()):
            if later > step:
                os.rename(path, target / name / path.name)
                atomic_files.sync_folder(folder / name)
