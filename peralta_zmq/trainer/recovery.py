"""Recovery: every start of the trainer continues from the state in the run folder.

A checkpoint is the saved state after a step. The journal is the write-ahead log of received groups
(all rollouts of one problem), with one file per step. The lineage counts roll-backs to an earlier
step. A roll-back abandons the weights of the undone steps: the trainer drops groups that were
sampled from them.

A start brings the trainer to step N, the newest step that the run folder holds:

1. If checkpoint.resume_step is set, roll back to that checkpoint by moving later files away
   (roll_back.py). Later starts with the same setting do not repeat this.
2. Restore the newest checkpoint, of step C: weights, optimizer, RNG, counts of groups, curriculum.
3. Train the steps C+1 to N again from the journal, bit-identically on CPUs. Steps that are already
   in metrics.jsonl are not written again. Groups above the limits of the settings are refused, and
   a step whose groups are all refused is skipped. The journaled groups of step N+1, not a full
   batch yet, become the first groups of the next batch.
4. If checkpoint.skip_buffer is set, drop these groups, and return all problems to the problems in
   use. If checkpoint.skip_progress is set, and no earlier start has done it, step N becomes step 0.
5. Correct the run log: remove steps whose groups the journal has lost, which counts as a
   roll-back; add weight versions that were published just before a kill.
6. Return some problems, which were excluded as too easy or too hard, to the problems in use.
7. Publish the weights of step N, unless the weights folder has them; announce them.

A killed trainer loses the groups that are not in the journal on disk yet. Their generators
send them again, because the trainer has not acknowledged them as durable (in the journal on disk).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peralta_zmq import atomic_files, build, wire
from peralta_zmq.config import Config, write_resolved
from peralta_zmq.errors import JournalError, WireError
from peralta_zmq.learning.admission import OUTCOMES
from peralta_zmq.observe.run_log import abandoned_weights
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import checkpoint, roll_back
from peralta_zmq.trainer.accumulation import repeat_micro_batches
from peralta_zmq.trainer.checkpoint import CHECKPOINTS
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.journal import (
    ACCUMULATED,
    DROPPED,
    GROUP,
    JOURNAL,
    LEASED,
    DroppedGroup,
    JournalRecord,
    decode_number,
    decode_record,
    files_in,
)
from peralta_zmq.trainer.policy import Policy, PolicyPublisher, group_limits
from peralta_zmq.trainer.ranks import PolicyLearner
from peralta_zmq.trainer.session import Session

ALL_REFUSED = "all groups are refused"  # reason for skipping a journaled step


@dataclass(frozen=True, slots=True)
class Recovery:
    """Brings a newly opened trainer to the newest step that the run folder holds.

    Waits while the files of the run folder cannot be read or written.
    """

    session: Session
    previous_config: Config  # settings of the previous session
    policy: Policy
    collector: BatchCollector
    checkpoints: checkpoint.CheckpointWriter
    publishing: PolicyPublisher
    train_again: Callable[[Sequence[RolloutGroup], float], None]  # arguments: groups, learning rate

    def run(self) -> bool:
        """Recover the newest step; return False if a stop request ended the replay.

        Raises JournalError if checkpoint and journal contradict each other, are damaged, or belong
        to another run.
        """
        roll_back.finish_skip(self.session)
        roll_back.roll_back(self.session)
        self._restore_checkpoint()
        restored_step = self.policy.learner.step
        if not self._replay_journal():
            return False
        if self.session.config.checkpoint.skip_buffer:
            self._skip_buffer()
        if roll_back.skips_progress(self.session, step=self.policy.learner.step):
            self._skip_progress()
            restored_step = 0
        step = self.policy.learner.step
        wait_out, folder = self.session.wait_out, self.session.folder
        wait_out(lambda: self._undo_lost_steps(step))
        self.publishing.record_unrecorded()
        self.collector.admission.abandoned = wait_out(lambda: abandoned_weights(folder, step))
        self._return_problems(step)
        self._report(step, restored_step)
        self._publish(step)
        return True

    # 2. Restore the newest checkpoint.

    def _restore_checkpoint(self) -> None:
        """Restore learner and collector from the newest checkpoint, if there is one."""
        folder = self.session.folder
        saved = self.session.wait_out(self._newest_checkpoint)
        if saved is None:
            self.session.wait_out(self._check_journal_start)
            return
        remedy = "choose another --run.name, or the model and optimizer it was made with"
        checkpoint.restore(self.policy.learner, saved, run_folder=folder, remedy=remedy)
        saved_base = saved.progress.get("adapts")  # LoRA: digest of the base model
        base = self.policy.manifest_fields.get("adapts")
        if saved_base != base:
            raise JournalError(
                f"the checkpoint in {folder} has adapters for {saved.progress.get('adapts_name')} "
                f"({saved_base}), but model.name is another model ({base}); "
                "choose another --run.name"
            )
        stored = [_storage_of(fields) for fields in (saved.progress, self.policy.manifest_fields)]
        if saved_base is not None and stored[0] != stored[1]:
            raise JournalError(
                f"the checkpoint in {folder} has adapters for a base model stored as {stored[0]}, "
                f"but here it is stored as {stored[1]}; set lora.base_dtype to the same format, "
                "and install the version of peralta_zmq that made the run"
            )
        self.collector.restore(saved.progress)
        self.checkpoints.saved_step = saved.step
        self.checkpoints.update_progress()

    def _newest_checkpoint(self) -> checkpoint.Checkpoint | None:
        """Read the newest valid checkpoint; removes half-written checkpoints."""
        folder = self.session.folder / CHECKPOINTS
        atomic_files.sweep(folder)
        return checkpoint.newest(folder, run_id=self.session.run_id)

    def _check_journal_start(self) -> None:
        """Raise JournalError if the journal starts after step 1.

        Without a checkpoint, nothing else can restore the steps before the journal.
        """
        folder = self.session.folder / JOURNAL
        # The journal may be empty: in a new run, or because a checkpoint of the last recorded step
        # made all its files superfluous. It then begins with the next step.
        next_step = self.session.run_log.last_step + 1
        if (first := min(files_in(folder), default=next_step)) > 1:
            raise JournalError(
                f"{folder} begins with step {first}, and there is no checkpoint before it; put "
                f"{self.session.folder}/checkpoints back, or delete the run to start over"
            )

    # 3. Train the journaled steps again.

    def _replay_journal(self) -> bool:
        """Train the journaled steps again, at the previous session's learning rates.

        A change of `train.max_steps` thus changes the learning rates of new steps only. Returns
        False if a stop is requested; the next start replays the remaining steps.
        """
        learner, run_log = self.policy.learner, self.session.run_log
        learning_rate = build.learning_rate_schedule(self.previous_config)
        begin = learner.step
        end = max(self.session.wait_out(self.collector.journal.steps), default=begin)
        with run_log.progress("replaying", end - begin) as progress:
            # The groups were received under the limits of the previous settings.
            limits = group_limits(self.previous_config, self.policy.model)
            while load_journaled_batch(self.collector, learner.step + 1, limits):
                if learner.step >= self.previous_config.train.max_steps:
                    break  # the previous session did not train this full batch: it is a new step
                if self.session.stop.requested:
                    return False
                sizes = self.collector.accumulated_sizes
                if groups := self.collector.take_batch():
                    repeat_micro_batches(learner, groups, sizes)
                    self.train_again(groups, learning_rate(learner.step + 1))
                else:
                    self._skip_step()
                progress.update(learner.step - begin)
        if self.previous_config != self.session.config:
            self.session.wait_out(self._adopt_settings)
        return True

    def _skip_step(self) -> None:
        """Skip a journaled step whose groups are all refused, and report it."""
        skip_step(self.policy.learner)
        self.checkpoints.update_progress()
        step, run_log = self.policy.learner.step, self.session.run_log
        run_log.event("skip", step=step, reason=ALL_REFUSED)
        run_log.note(f"step {step} skipped: {ALL_REFUSED}")

    def _adopt_settings(self) -> None:
        """Write a checkpoint, then the changed settings.

        After this checkpoint no restart needs the previous learning rates.
        """
        self.checkpoints.write()
        write_resolved(self.session.config, self.session.folder)

    # 4. Skip the buffer, and the progress.

    def _skip_buffer(self) -> None:
        """Drop the groups received for the next step; return all problems to the problems in use.

        Generators do not send the groups again. Their outcome becomes "abandoned".
        """
        step, run_log = self.policy.learner.step + 1, self.session.run_log
        groups, collector = self.collector.batch, self.collector
        collector.curriculum.pools.return_to_normal(easy_fraction=1.0, hard_fraction=1.0, seed=0)
        if groups:
            run_log.event("skip_buffer", step=step, groups=len(groups))
            self.session.wait_out(lambda: self._drop_in_journal(step))
            collector.abandon_batch()
            run_log.note(f"dropped {len(groups)} buffered groups of step {step}")

    def _drop_in_journal(self, step: int) -> None:
        """Replace the journaled groups of a step by records of dropped groups."""
        limits = group_limits(self.previous_config, self.policy.model)
        records: list[JournalRecord] = []
        for record in self.collector.journal.read(step):
            if record.kind == ACCUMULATED:
                continue
            if record.kind != LEASED:
                group = _decode(self.collector, step, record, limits)
                if isinstance(group, RolloutGroup):
                    record = JournalRecord(DROPPED, DroppedGroup.of(group, "abandoned").encode())
            records.append(record)
        self.collector.journal.replace(step, records)

    def _skip_progress(self) -> None:
        """Make the newest step the checkpoint of step 0, and restore it.

        The groups received for the next step are dropped: all weights of earlier steps are
        abandoned. The counts of groups continue, because generators continue their sequences.
        """
        self.collector.abandon_batch()
        self.checkpoints.update_progress()
        roll_back.skip_progress(self.session, self.checkpoints.state(step=0))
        self._restore_checkpoint()

    # 5. Correct the run log.

    def _undo_lost_steps(self, step: int) -> None:
        """Undo recorded steps that the journal has lost; they are trained on new groups."""
        run_log = self.session.run_log
        if (last := run_log.last_step) > step:
            run_log.rewind(step)
            run_log.note(
                f"the journal has lost groups: steps {step + 1} to {last} are trained again"
            )

    # 6. Return excluded problems, and report.

    def _return_problems(self, step: int) -> None:
        """Return the configured fractions of the excluded problems to the problems in use."""
        config = self.session.config
        num_returned = self.collector.curriculum.pools.return_to_normal(
            easy_fraction=config.curriculum.easy_fraction,
            hard_fraction=config.curriculum.hard_fraction,
            seed=config.run.seed + step,
        )
        if num_returned:
            self.session.run_log.event("pool_returned", problems=num_returned)

    def _report(self, step: int, restored_step: int) -> None:
        """Report on the terminal and in events.jsonl where the run continues."""
        run_log, num_replayed = self.session.run_log, step - restored_step
        if step >= self.session.config.train.max_steps and run_log.was_complete:
            run_log.note(f"run complete: {step} steps; delete {self.session.folder} to start over")
            return
        if run_log.resuming:
            run_log.note(f"resumed: step={step} checkpoint={restored_step} replayed={num_replayed}")
        if not self.session.stop.requested:
            event = "resume" if run_log.resuming else "start"
            run_log.event(
                event,
                step=step,
                checkpoint=restored_step,
                replayed=num_replayed,
                ranks=self.policy.num_ranks,
            )

    # 7. Publish the weights.

    def _publish(self, step: int) -> None:
        """Publish the weights of `step`, or announce them if the store has them."""
        newest = self.publishing.store.newest()
        if (
            newest is None
            or (newest.step, newest.lineage) != (step, self.session.run_log.lineage)
            or newest.weights_id in self.collector.admission.abandoned
        ):
            self.publishing.publish(step)
            self.publishing.wait()
        else:
            self.publishing.newest_step = step
            self.publishing.announce(newest)


def load_journaled_batch(collector: BatchCollector, step: int, limits: wire.GroupLimits) -> bool:
    """Load the batch of `step` from the journal; return True if the step can be taken.

    Refuses groups that exceed the limits. The step can be taken, i.e. trained or skipped,

    - if the batch is full, or
    - if groups were refused and it is not the last step of the journal.

    Otherwise the last step of the journal is the beginning of the next batch, and an earlier step
    is damaged: raises JournalError, as for a group that the checkpoint has counted, too. Waits
    while the journal cannot be read.
    """
    journal, wait_out = collector.journal, collector.session.wait_out
    groups, accumulated_sizes = list[RolloutGroup](), list[int]()
    num_refused = 0
    for record in wait_out(lambda: journal.read(step)):
        if record.kind == LEASED:
            leases = collector.curriculum.leases
            leases.next_index = max(leases.next_index, decode_number(record.content))
            continue
        if record.kind == ACCUMULATED:
            accumulated_sizes.append(decode_number(record.content))
            continue
        group = _decode(collector, step, record, limits)
        if isinstance(group, RolloutGroup):
            groups.append(group)
            outcome = "trained" if group.has_signal else "no_signal"
        else:
            outcome = group.outcome
            num_refused += record.kind == GROUP  # exceeds the limits; decoded as a DroppedGroup
        # `settle` returns False for a group that the checkpoint has counted.
        if not collector.admission.ledger.settle(
            group.sender, group.sequence, outcome, min_sequence=group.min_sequence
        ):
            raise JournalError(
                f"the checkpoint and the journal of step {step} in {collector.session.folder} "
                "disagree: a group is in both; move the newer of the two away"
            )
        collector.curriculum.update(group, outcome)
    collector.restore_batch(groups, accumulated_sizes)
    if collector.is_full:
        return True
    if num_refused and step < max(wait_out(journal.steps)):
        return True
    # The batch has too few groups: raises JournalError unless this is the last step.
    wait_out(lambda: journal.check_last(step, "is missing or lacks groups"))
    return False


def skip_step(learner: PolicyLearner) -> None:
    """Count a step as taken without an update."""
    # On the CPU, as in a checkpoint: `restore` sends the tensors to the other ranks from there.
    tensors = {name: tensor.cpu() for name, tensor in learner.state().items()}
    learner.restore(learner.step + 1, tensors)


def _decode(
    collector: BatchCollector, step: int, record: JournalRecord, limits: wire.GroupLimits
) -> RolloutGroup | DroppedGroup:
    """Decode a record. Raises JournalError if it is unreadable or of another run."""
    file, run_id = collector.journal.file_of(step), collector.session.run_id
    try:
        group = decode_record(record, limits)
        if isinstance(group, DroppedGroup) and group.outcome not in OUTCOMES:
            raise ValueError(f"unknown outcome {group.outcome!a:.40}")
    except (WireError, ValueError, TypeError) as error:
        raise JournalError(
            f"{file} has a complete record that cannot be read ({error}); use the version and the "
            "model that wrote it, or move it and those of later steps away to continue from step "
            f"{step - 1}"
        ) from None
    if isinstance(group, RolloutGroup) and group.run_id != run_id:
        raise JournalError(
            f"{file} holds a group of run {group.run_id}, not of {run_id}; move it and "
            f"those of later steps away to continue from step {step - 1}, or choose another "
            "--run.name"
        )
    return group


def _storage_of(fields: Mapping[str, Any]) -> str:
    """Format of the base model of adapters, and digest if packed, from its manifest fields."""
    digest = fields.get("adapts_packed")
    return str(fields.get("adapts_dtype", "float32")) + (f" ({digest})" if digest else "")
