"""Recovery: every start of the trainer continues from the state in the run folder.

A start brings the trainer to step N, the newest step that the run folder holds:

1. Restore the newest checkpoint, of step C. The first start of a fork (fork.py) writes step 0.
2. Train the steps C+1 to N again from the journal, bit-identically on CPUs: with the UpdateSettings
   of the journal, and the operators and threads that computed the step (models/step_arithmetic.py).
   A step whose groups are all refused is skipped. The groups of step N+1, not a full batch yet,
   begin the next batch. Then record changed settings.
3. Correct the run log: remove steps whose groups the journal has lost, which is a roll-back; add
   weight versions that were published just before a kill.
4. Publish the weights of step N, unless the weights folder has them; announce them.

Groups that a kill has lost are sent again: the trainer has not acknowledged them as durable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peralta_zmq import atomic_files, build, models, wire
from peralta_zmq.config import Config, changed_settings, write_resolved
from peralta_zmq.errors import ConfigError, JournalError
from peralta_zmq.learning.optimizer import UpdateSettings
from peralta_zmq.observe.run_log import abandoned_weights
from peralta_zmq.observe.run_state import REPLAY
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import checkpoint
from peralta_zmq.trainer import journal as journals
from peralta_zmq.trainer.checkpoint import CHECKPOINTS
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.journal import JOURNAL
from peralta_zmq.trainer.ranks import PolicyLearner
from peralta_zmq.trainer.session import Session
from peralta_zmq.trainer.trained_model import (
    PolicyPublisher,
    TrainedModel,
    base_of,
    group_limits,
    trained_text,
)

ALL_REFUSED = "all groups are refused"  # reason for skipping a journaled step


@dataclass(slots=True)
class Recovery:
    """Brings a new trainer to the newest step; waits while files cannot be read or written."""

    session: Session
    previous_config: Config  # settings of the previous session
    policy: TrainedModel
    collector: BatchCollector
    checkpoints: checkpoint.CheckpointWriter
    publishing: PolicyPublisher
    forked: str = ""  # the weights of another run to which this start has set the learner
    is_exact: bool = True  # repeated steps have the same bits as before
    is_replayed: bool = False  # all journaled steps are trained again
    restored_step: int = 0  # step of the checkpoint

    # 1. Restore the newest checkpoint.

    def restore_checkpoint(self) -> None:
        folder = self.session.folder
        remedy = "choose another --run.name, or the model and optimizer it was made with"

        def restore_newest() -> checkpoint.Checkpoint | None:
            checkpoints = folder / CHECKPOINTS
            atomic_files.sweep(checkpoints)  # removes half-written ones
            run_id = self.session.run_id
            saved = checkpoint.newest(checkpoints, run_id=run_id, way_back=self._way_back)
            if saved is not None:
                checkpoint.restore(self.policy.learner, saved, run_folder=folder, remedy=remedy)
            return saved

        saved = self.session.wait_out(restore_newest)
        if saved is None:
            self.session.wait_out(self._check_journal_start)
            if self.forked:
                self.session.run_log.event("fork", source=self.forked)
                self.session.wait_out(self.checkpoints.write)
                self.session.run_log.note(f"forked: step 0 has the {self.forked}")
            return
        own = self.policy.manifest_fields
        if base_of(saved.progress) != base_of(own):
            raise JournalError(
                f"the checkpoint in {folder} has {trained_text(saved.progress)}, but with these "
                f"settings the run trains {trained_text(own)}; choose another --run.name, or the "
                "model, lora.base_dtype and version of peralta_zmq that made the run"
            )
        self.collector.restore(saved.progress)
        self.restored_step = saved.step
        self.checkpoints.saved_step = saved.step
        self.checkpoints.update_progress()

    def _way_back(self) -> str:
        """The remedy if no checkpoint verifies."""
        run = self.session.config.run
        steps = [*journals.files_in(self.session.folder / JOURNAL)]
        if steps and run.fork is None and steps == [*range(1, len(steps) + 1)]:
            return "move the folder away: the next start trains all steps from the journal again"
        fork = f"--run.name NEW --run.fork {run.name} --run.from-step STEP"
        return f"put a copy back, or continue from published weights: {fork}"

    def _check_journal_start(self) -> None:
        """Raise JournalError if the journal starts after step 1, or is that of a fork."""
        folder = self.session.folder / JOURNAL
        # An empty journal, of a new run or after a checkpoint, begins with the next step.
        next_step = self.session.run_log.last_step + 1
        files = journals.files_in(folder)
        first = min(files, default=next_step)
        if first > 1 or (files and self.session.config.run.fork is not None):
            raise JournalError(
                f"{folder} begins with step {first}, and there is no checkpoint before it; put "
                f"{self.session.folder}/checkpoints back, or delete the run to start over"
            )

    # 2. Train the journaled steps again.

    def journaled_steps(self) -> Iterator[tuple[list[RolloutGroup], UpdateSettings]]:
        """Yield each step's groups and numbers; the caller takes it before it asks for the next."""
        learner = self.policy.learner
        run_log = self.session.run_log
        config = self.session.config
        max_steps = min(self.previous_config.train.max_steps, config.train.max_steps)
        begin = learner.step
        end = max(self.session.wait_out(self.collector.journal.steps), default=begin)
        with run_log.progress("replaying", end - begin) as progress:
            # The groups were received under the limits of the previous settings.
            limits = group_limits(self.previous_config, self.policy.model)
            while (
                loaded := load_journaled_batch(self.collector, learner.step + 1, limits)
            ).is_complete:
                begun = loaded.begun
                if begun is None and learner.step >= max_steps:
                    break  # no session has begun to train this full batch: it is a new step
                if learner.step == begin:
                    run_log.event(REPLAY, checkpoint=begin, steps=end - begin)
                    run_log.note(f"replaying the journal from step {begin + 1} on")
                if self.session.stop.requested:
                    return
                if groups := self.collector.take_batch():
                    self._use_arithmetic(begun)
                    numbers = build.update_settings(self.previous_config, learner.step + 1)
                    yield groups, begun or numbers
                else:
                    skip_step(learner)
                    self.checkpoints.update_progress()
                    run_log.event("skip", step=learner.step, reason=ALL_REFUSED)
                    run_log.note(f"step {learner.step} skipped: {ALL_REFUSED}")
                progress.update(learner.step - begin)
        models.use_arithmetic(self.policy.arithmetic, self.policy.arithmetic)
        if self.previous_config != config:
            self._adopt_settings()
        self.is_replayed = True

    def _use_arithmetic(self, begun: UpdateSettings | None) -> None:
        """Compute the next step as it was computed before. Raises JournalError if it cannot be."""
        recorded = {} if begun is None else begun.arithmetic
        try:
            is_exact = models.use_arithmetic(recorded, self.policy.arithmetic)
        except ConfigError as error:
            folder = self.session.folder
            raise JournalError(
                f"step {self.policy.learner.step + 1} of {folder} cannot be repeated with the same "
                f"bits: {error}; restart it with the machine and software that computed it, or "
                f"continue from its weights: --run.fork {folder.name} --run.name NEW"
            ) from None
        self.is_exact = self.is_exact and is_exact

    def _adopt_settings(self) -> None:
        """Write a checkpoint: no restart then needs the previous limits. Record the settings."""
        session = self.session
        previous = self.previous_config
        session.wait_out(self.checkpoints.write)
        if changes := changed_settings(previous, session.config):
            session.run_log.record_settings(
                list(changes.values()),
                first_step=self.policy.learner.step + 1,
                previous=previous.model_dump(mode="json"),
            )
        session.wait_out(lambda: write_resolved(session.config, session.folder))

    # 3. and 4.

    def finish(self) -> None:
        """Correct the run log and publish, unless a stop has ended the replay."""
        if not self.is_replayed:
            return
        step = self.policy.learner.step
        wait_out = self.session.wait_out
        folder = self.session.folder
        run_log = self.session.run_log
        if (last := run_log.last_step) > step:
            wait_out(lambda: run_log.rewind(step))
            run_log.note(
                f"the journal has lost groups: steps {step + 1} to {last} are trained again"
            )
        self.publishing.record_unrecorded()
        self.collector.admission.abandoned = wait_out(lambda: abandoned_weights(folder, step))
        self._report(step)
        self._publish(step)

    def _report(self, step: int) -> None:
        run_log = self.session.run_log
        restored_step = self.restored_step
        num_replayed = step - restored_step
        max_steps = self.session.config.train.max_steps
        if step >= max_steps and run_log.was_complete:
            run_log.note(f"run complete: {step} steps; delete {self.session.folder} to start over")
            return
        if run_log.resuming:
            run_log.note(f"resumed: step={step} checkpoint={restored_step} replayed={num_replayed}")
        if step > max_steps:
            run_log.note(
                f"run complete: step {step} is trained already, and train.max_steps is {max_steps}"
            )
        if not self.session.stop.requested:
            event = "resume" if run_log.resuming else "start"
            run_log.event(
                event,
                step=step,
                checkpoint=restored_step,
                replayed=num_replayed,
                ranks=self.policy.num_ranks,
                arithmetic=dict(self.policy.arithmetic),
            )

    def _publish(self, step: int) -> None:
        """Announce the stored weights of `step`; publish them if there are none with these bits."""
        newest = self.publishing.store.newest()
        is_last = step >= self.session.config.train.max_steps
        if (
            newest is None
            or (newest.step, newest.lineage) != (step, self.session.run_log.lineage)
            or newest.weights_id in self.collector.admission.abandoned
            or (is_last and newest.kind == "delta")
            or not self.is_exact
        ):
            self.publishing.publish(step)
            self.publishing.wait()
        else:
            self.publishing.newest_step = step
            self.publishing.announce(newest)


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """Properties of the collector's batch, which was read from the journal."""

    is_complete: bool  # the step can be trained or skipped
    begun: UpdateSettings | None  # the last BEGUN record


def load_journaled_batch(
    collector: BatchCollector, step: int, limits: wire.GroupLimits
) -> LoadedBatch:
    """Load the batch of `step` from the journal into the collector.

    An incomplete last step is the beginning of the next batch. An earlier one is damaged: raises
    JournalError, as for a group that the checkpoint has counted, too.
    """
    journal = collector.journal
    wait_out = collector.session.wait_out
    records = wait_out(lambda: journal.read(step))
    run_id = collector.session.run_id
    file = journal.file_of(step)
    decoded = journals.decode_step(records, limits, file=file, step=step, run_id=run_id)
    for group in decoded.entries:
        if isinstance(group, int):
            ranges = collector.curriculum.ranges
            ranges.next_index = max(ranges.next_index, group)
            continue
        if isinstance(group, RolloutGroup):
            outcome = "trained" if group.has_signal else "no_signal"
        else:
            outcome = group.outcome
        # `settle` returns False for a group that the checkpoint has counted.
        if not collector.admission.ledger.settle(
            group.sender, group.group_number, outcome, min_group_number=group.min_group_number
        ):
            raise JournalError(
                f"the checkpoint and the journal of step {step} in {collector.session.folder} "
                "disagree: a group is in both; move the newer of the two away"
            )
        collector.curriculum.update(group, outcome)
    collector.restore_batch(decoded.groups)
    batch_size = collector.session.config.train.batch_size
    is_newest = step >= max(wait_out(journal.steps), default=step)
    if decoded.is_complete(batch_size, is_newest=is_newest):
        return LoadedBatch(True, decoded.begun)
    # The batch has too few groups: raises JournalError unless this is the last step.
    wait_out(lambda: journal.check_last(step, "is missing or lacks groups"))
    return LoadedBatch(False, decoded.begun)


def skip_step(learner: PolicyLearner) -> None:
    """Count a step as taken without an update."""
    # On the CPU, as in a checkpoint: `restore` sends the tensors to the other ranks from there.
    tensors = {name: tensor.cpu() for name, tensor in learner.state().items()}
    learner.restore(learner.step + 1, tensors)
