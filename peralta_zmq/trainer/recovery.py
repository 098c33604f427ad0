"""Recovery of a trainer at its start: restore the newest checkpoint, replay the journal after it.

What becomes of the state of a killed trainer:

- Checkpoint of step C: restored. It holds weights, optimizer, RNG, ledger and curriculum.
- Journal of steps C+1 to N: trained again, bit-identically on CPUs. Rows of metrics.jsonl that
  exist already are not written twice.
- Journal of step N+1, not yet a full batch: its groups become the first of the next batch.
- Groups in the sockets: lost here. The generators send them again, since the trainer never
  announced them as durable.
- Weights folder: if its newest version is not of step N, step N is published again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from peralta_zmq import build, wire
from peralta_zmq.config import Config, write_resolved
from peralta_zmq.errors import JournalError, WireError
from peralta_zmq.learning.admission import ADMITTED, OUTCOMES
from peralta_zmq.observe.run_log import abandoned_weights
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import checkpoint
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.journal import DROPPED, DroppedGroup, JournalRecord, steps_in
from peralta_zmq.trainer.policy import Policy, PolicyPublisher
from peralta_zmq.trainer.session import Session


class Recovery:
    """Brings a newly opened trainer to the newest step that the run folder holds."""

    def __init__(
        self,
        session: Session,
        previous_config: Config,  # settings of the previous session
        policy: Policy,
        collector: BatchCollector,
        checkpoints: checkpoint.CheckpointWriter,
        publishing: PolicyPublisher,
        *,
        train_again: Callable[[Sequence[RolloutGroup], float], None],
    ) -> None:
        self._session, self._config, self._run_log = session, session.config, session.run_log
        self._policy, self._learner = policy, policy.learner
        self._collector, self._checkpoints, self._publishing = collector, checkpoints, publishing
        self._train_again = train_again  # on the groups of a journaled step, with its learning rate
        self._previous_config = previous_config

    def run(self) -> bool:
        """Recover the newest step; return False if a stop was requested during the replay.

        Raises JournalError if checkpoint and journal contradict each other or are of another run.
        """
        self._roll_back()
        self._restore_checkpoint()
        restored = self._learner.step
        if not self._replay_journal():
            return False
        step = self._learner.step
        self._rewind_run_log(step)
        self._publishing.set_lineage(self._run_log.lineage)
        self._publishing.record_unrecorded()
        self._collector.admission.abandoned = abandoned_weights(self._session.folder, step)
        self._return_problems(step)
        self._report(step, restored)
        self._publish(step)
        return True

    # Step 1, only with checkpoint.resume_step: return to an older checkpoint.

    def _roll_back(self) -> None:
        """Move checkpoints and journal files of later steps away, once per requested step."""
        step = self._config.checkpoint.resume_step
        target = self._session.folder / f"rolled_back_to_{step:06d}"
        if step < 0:
            return
        if target.exists():
            self._run_log.note(f"rolled back to step {step} already; to repeat it, move {target}")
            return
        unfinished = target.with_name(
            f".tmp-{target.name}"
        )  # exists already if a roll-back was killed
        (unfinished / "checkpoints").mkdir(parents=True, exist_ok=True)
        (unfinished / "journal").mkdir(exist_ok=True)
        checkpoint.move_after(
            self._session.folder / "checkpoints", step, unfinished / "checkpoints"
        )
        self._collector.journal.move_after(step, unfinished / "journal")
        self._run_log.rewind(step)
        os.rename(unfinished, target)
        self._run_log.note(f"rolled back to step {step}; later steps are moved to {target}")

    # Step 2: the checkpoint.

    def _restore_checkpoint(self) -> None:
        folder = self._session.folder
        saved = checkpoint.restore(folder / "checkpoints", run_id=self._session.run_id)
        if saved is None:
            self._check_journal_start()
            return
        try:
            self._policy.learner.restore(saved.step, saved.tensors)
        except ValueError as error:
            raise JournalError(
                f"checkpoint of step {saved.step} in {folder} does not fit ({error}); "
                "choose another --run.name, or the model and optimizer it was made with"
            ) from None
        base, own_base = saved.progress.get("adapts"), self._policy.manifest_fields.get("adapts")
        if base != own_base:
            raise JournalError(
                f"the checkpoint in {folder} has adapters for {saved.progress.get('adapts_name')} "
                f"({base}), but model.name is another model ({own_base}); choose another --run.name"
            )
        self._collector.restore(saved.progress)
        self._checkpoints.saved_step = saved.step
        self._checkpoints.update_progress()

    def _check_journal_start(self) -> None:
        """Raise JournalError if the journal starts after step 1: a checkpoint is missing then."""
        folder = self._session.folder / "journal"
        next_step = self._run_log.last_step + 1  # if the journal is empty: pruned at a checkpoint
        if (first := min(steps_in(folder), default=next_step)) > 1:
            raise JournalError(
                f"{folder} begins with step {first}, and there is no checkpoint before it; put "
                f"{self._session.folder}/checkpoints back, or delete the run to start over"
            )

    # Step 3: the journal.

    def _replay_journal(self) -> bool:
        """Train the journaled steps again, with the learning rates of the previous session.

        (A change of `train.max_steps` changes the schedule.) Returns False if a stop is requested;
        the next start replays the remaining steps. Raises JournalError if the settings changed and
        no checkpoint can be written.
        """
        schedule = build.learning_rate_schedule(self._previous_config)
        begin = self._learner.step
        end = max(self._collector.journal.steps(), default=begin)
        with self._run_log.progress("replaying", end - begin) as progress:
            while load_journaled_batch(
                self._collector, self._session, self._learner.step + 1, self._policy.vocab_size
            ):
                if self._learner.step >= self._previous_config.train.max_steps:
                    break  # a complete batch after the previous last step: train it as a new step
                if self._session.stop.requested:
                    return False
                groups = self._collector.take_batch()
                self._train_again(groups, schedule(self._learner.step + 1))
                progress.update(self._learner.step - begin)
        if self._previous_config != self._config:
            try:
                self._checkpoints.write()  # the old schedule is never replayed again
            except JournalError as error:
                raise JournalError(
                    f"{error}; make room for it: changed settings take effect only after a "
                    "checkpoint of the steps trained so far"
                ) from None
            write_resolved(self._config, self._session.folder)
        return True

    # Step 4: run log, difficulty pools and weights.

    def _rewind_run_log(self, step: int) -> None:
        """Roll back recorded steps that the journal has lost; they are trained on new groups."""
        if (last := self._run_log.last_step) > step:
            self._run_log.rewind(step)
            self._run_log.note(
                f"the journal has lost groups: steps {step + 1} to {last} are trained again"
            )

    def _return_problems(self, step: int) -> None:
        """Return the configured fractions of the excluded problems to the normal pool."""
        curriculum, seed = self._config.curriculum, self._config.run.seed + step
        easy_fraction, hard_fraction = curriculum.easy_fraction, curriculum.hard_fraction
        returned = self._collector.curriculum.pools.return_to_normal(
            easy_fraction=easy_fraction, hard_fraction=hard_fraction, seed=seed
        )
        if returned:
            self._run_log.event("pool_returned", problems=returned)

    def _report(self, step: int, restored: int) -> None:
        run_log, config = self._run_log, self._config
        is_complete, replayed = step >= config.train.max_steps, step - restored
        if is_complete:
            run_log.note(f"run complete: {step} steps; delete {self._session.folder} to start over")
        elif run_log.resuming:
            run_log.note(f"resumed: step={step} checkpoint={restored} replayed={replayed}")
        if not is_complete and not self._session.stop.requested:
            event = "resume" if run_log.resuming else "start"
            run_log.event(event, step=step, checkpoint=restored, replayed=replayed)

    def _publish(self, step: int) -> None:
        """Publish the weights, or announce the newest version if it has them."""
        newest = self._publishing.store.newest()
        if (
            newest is None
            or (newest.step, newest.lineage) != (step, self._run_log.lineage)
            or newest.weights_id in self._collector.admission.abandoned
        ):
            self._publishing.publish(step)
            self._publishing.wait()
        else:
            self._publishing.announce(newest)


def load_journaled_batch(
    collector: BatchCollector, session: Session, step: int, vocab_size: int
) -> bool:
    """Admit the groups in the journal of `step` again; return True if they are a full batch.

    Raises JournalError if a group is in the checkpoint too, or if the batch is incomplete although
    there are later steps.
    """
    groups: list[RolloutGroup] = []
    for record in collector.journal.read(step):
        entry = _decode(collector, session, step, record, vocab_size)
        if isinstance(entry, DroppedGroup):
            outcome = entry.outcome
            is_new = collector.admission.ledger.settle(
                entry.sender, entry.sequence, outcome, min_sequence=entry.min_sequence
            )
        else:
            groups.append(entry)
            outcome = collector.admission.admit(entry, step=step)
            is_new = outcome in ADMITTED
        if not is_new:
            raise JournalError(
                f"the checkpoint and the journal of step {step} in {session.folder} "
                "disagree: a group is in both; move the newer of the two away"
            )
        collector.curriculum.update(entry, outcome)
    collector.restore_batch(groups)
    if not collector.is_full:
        collector.journal.check_last(step, "is missing or lacks groups")
    return collector.is_full


def _decode(
    collector: BatchCollector, session: Session, step: int, record: JournalRecord, vocab_size: int
) -> RolloutGroup | DroppedGroup:
    """Decode one record. Raises JournalError if it is unreadable or belongs to another run."""
    file = collector.journal.file_of(step)
    try:
        if record.kind == DROPPED:
            dropped = DroppedGroup.decode(record.content)
            if dropped.outcome not in OUTCOMES:
                raise ValueError(f"unknown outcome {dropped.outcome!a:.40}")
            return dropped
        group = wire.decode_group(record.content, vocab_size=vocab_size)
    except (WireError, ValueError, TypeError) as error:
        raise JournalError(
            f"{file} has a whole record that cannot be read ({error}); use the version and the "
            "model that wrote it, or move it and those of later steps away to continue from step "
            f"{step - 1}"
        ) from None
    if group.run_id != session.run_id:
        raise JournalError(
            f"{file} holds a group of run {group.run_id}, not of {session.run_id}; move it and "
            f"those of later steps away to continue from step {step - 1}, or choose another "
            "--run.name"
        )
    return group
