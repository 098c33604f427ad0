"""The trainer's loop: groups in, optimizer steps, weights out.

Knows the config and every leaf; knows nothing of the generator's loop. Killed at any moment it
goes on from the newest checkpoint and the journal, with nothing trained twice.

Its rooms: intake (groups), roster and doubts (generators), broadcast (weights), evaluations,
recording, page.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from peralta_zmq import build, models, registry, wire
from peralta_zmq.build import open_environments
from peralta_zmq.config import RESOLVED, Config, earlier_config, write_resolved
from peralta_zmq.environments.curriculum import MAX_POSITIONS, DifficultyPools
from peralta_zmq.environments.dataset import Environments, check_tokens
from peralta_zmq.errors import ConfigError, JournalError, StoreError
from peralta_zmq.failpoints import failpoint
from peralta_zmq.learning.distributed import SINGLE, SingleRank
from peralta_zmq.learning.step_metrics import by_environment, mismatch_metrics
from peralta_zmq.models import lora
from peralta_zmq.models.scoring import training_dtype
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.trackers import check_trackers, open_trackers
from peralta_zmq.rollout import Problem, RolloutGroup
from peralta_zmq.trainer import (
    adapter_files,
    checkpoint,
    dashboard,
    evaluation,
    publishing,
    run_folder,
)
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.generator_registry import GeneratorRegistry
from peralta_zmq.trainer.journal import Journal, steps_in
from peralta_zmq.trainer.mismatch_monitor import LogprobMismatchMonitor
from peralta_zmq.trainer.ranks import TrainerRanks, dismiss, enlist, follow, led
from peralta_zmq.trainer.status import StatusPublisher
from peralta_zmq.trainer.step_recorder import StepRecorder
from peralta_zmq.trainer.stop_signal import StopSignal
from peralta_zmq.weights.store import WeightStore


def run(config: Config) -> None:
    """Train to `train.max_steps`, from wherever an earlier start was ended.

    Started by torchrun, this is one rank of several; rank 0 is the trainer, the others help it.
    Raises ConfigError, TaskError, WireError, StoreError or JournalError before anything is
    written when a setting, a file, the port or a folder is at fault.
    """
    config, ranks = enlist(config)
    models.keep_memory()
    if not isinstance(ranks, SingleRank) and ranks.rank > 0:
        return follow(config, ranks)
    with ExitStack() as stack:
        trainer = Trainer(config, stack, ranks)
        trainer.recover()
        trainer.evaluate_base()
        while trainer.unfinished:
            trainer.advance()
        trainer.finish()
        dismiss(ranks)


class Trainer:
    """One session of a run: what it holds open, and what it does with it."""

    def __init__(self, config: Config, stack: ExitStack, ranks: TrainerRanks = SINGLE) -> None:
        self._config, self._folder = config, config.run_folder
        self._earlier = earlier_config(config, config.run_folder)  # of the session before
        self._stop = StopSignal()
        check_trackers(config.run.report_to)
        # Everything that can be refused is tried before anything is written.
        train = open_environments(config, "train")
        held_out = open_environments(config, "eval", limit=config.eval.num_examples)
        stack.enter_context(closing(held_out))
        evaluation.check_size(config, held_out)
        pools = _pools_of(config, train)
        self._open_model([*train.problems, *held_out.problems], ranks)
        self._run_id = build.run_id_of(self._folder, config.run.name)
        receiver, counters = self._open_sockets(stack, train_set=train.digest)
        store = publishing.open_store(config)
        self._books, journal = self._open_folder(stack, store)
        self._broadcast = publishing.WeightPublishing(
            config, store, stack,
            beside=self._beside, books=self._books,
            speaker=self._speaker, stop=self._stop,
        )  # fmt: skip
        self._roster = GeneratorRegistry(counters, self._books, self._hello)
        self._evaluations = evaluation.EvaluationCoordinator(
            config, held_out, self._engine, self._tokenizer,
            self._books, self._speaker, self._stop,
        )  # fmt: skip
        self._intake = BatchCollector(
            config, receiver=receiver, run_id=self._run_id, vocab_size=self._vocab_size,
            journal=journal, roster=self._roster, pools=pools, evaluations=self._evaluations,
            books=self._books, speaker=self._speaker, stop=self._stop,
        )  # fmt: skip
        self._doubts = LogprobMismatchMonitor(config, self._books, self._intake.admission)
        self._recorder = StepRecorder(self._books, self._tokenizer)
        dashboard.show(config, stack, self._books)
        self._progress: dict[str, Any] = {"ledger": None, "duplicates": 0, **self._beside.about}
        self._saved_step = -1
        self._stop.listen()

    @property
    def unfinished(self) -> bool:
        """Whether there is a step to take and nobody asked us to stop."""
        return self._learner.step < self._config.train.max_steps and not self._stop.asked

    def recover(self) -> None:
        """Restore the newest checkpoint, replay the journal after it, publish what is missing."""
        self._roll_back()
        saved = checkpoint.restore(self._folder / "checkpoints", run_id=self._run_id)
        if saved is not None:
            self._restore(saved)
        else:
            self._check_begin()
        start = self._learner.step
        if not self._replay():
            return  # what follows is of the newest step
        step = self._learner.step
        self._go_back(step)
        self._broadcast.begin_line()
        self._broadcast.record_what_is_out()
        self._intake.admission.abandoned = self._books.abandoned_weights(step)
        if step >= self._config.train.max_steps:
            self._books.note(f"run complete: {step} steps; delete {self._folder} to start anew")
        elif self._books.resuming:
            self._books.note(f"resumed: step={step} checkpoint={start} replayed={step - start}")
        self._return_some_problems()
        if self.unfinished:
            event = "resume" if self._books.resuming else "start"
            self._books.event(event, step=step, checkpoint=start, replayed=step - start)
        newest, left_behind = self._broadcast.store.newest(), self._intake.admission.abandoned
        if (
            newest is None
            or (newest.step, newest.lineage) != (step, self._books.lineage)
            or newest.weights_id in left_behind
        ):
            self._publish()
            self._broadcast.wait(publishing.LAST_VERSION_SECONDS)
        else:
            self._broadcast.tell(newest)
        if self._books.resuming and not self._config.eval.skip_eval_on_resume:
            self._evaluations.begin(step)

    def evaluate_base(self) -> None:
        """Greedy accuracy of the untrained model, once per run."""
        if self._config.eval.eval_base_model and self._learner.step == 0:
            self._evaluations.evaluate(0)

    def advance(self) -> None:
        """One optimizer step: collect, learn, publish, record, save."""
        started = time.monotonic()
        groups, depth = self._intake.collect(self._learner.step + 1, self._meanwhile)
        if self._stop.asked:
            return
        collected, journaled = time.monotonic(), self._intake.journaling
        failpoint("trainer.collected")
        row = self._learn(groups)
        failpoint("trainer.stepped")
        self._doubts.judge(step=self._learner.step)
        publish_seconds = self._publish()
        row |= {
            "queue/depth": depth,
            "time/wait_for_batch": collected - started - journaled,
            "time/journal": self._intake.journaling,
            "time/publish": publish_seconds,
            **self._broadcast.figures(),
        }
        self._record(groups, row, step_time=time.monotonic() - started)
        failpoint("trainer.recorded")
        step = self._learner.step
        if step % self._config.eval.interval == 0:
            self._evaluations.begin(step)
        if step % self._config.checkpoint.interval == 0:
            self._save()

    def finish(self) -> None:
        """Save; then close the run, or say how to resume it."""
        step = self._learner.step
        self._intake.commit()
        self._save()
        complete = step >= self._config.train.max_steps
        last = complete and not self._stop.asked
        self._broadcast.wait(publishing.LAST_VERSION_SECONDS if last else publishing.STOP_SECONDS)
        if complete:
            self._evaluations.leave()
            self._intake.announce(step, started_step=step, done=True)
            self._roster.hear_last(step=step)  # what is heard outlives us, whatever comes
        if not (complete and self._evaluations.evaluate(step)):
            self._books.end("stop", step=step)
            self._books.note(f"stopped after step {step}, saved; the same command resumes it")
            self._books.write_report()
            return
        self._roster.hear_last(step=step)
        self._books.end("complete", step=step)
        self._books.close_run(
            self._loadable(), self._intake.accounting(), self._roster.last_reports()
        )

    def _loadable(self) -> Path:
        """A folder that transformers loads the last weights from."""
        if lora.has_adapters(self._model):
            return adapter_files.export_adapter(
                self._config, self._folder, self._model_folder, self._model
            )
        newest = self._broadcast.store.newest()
        return newest.folder if newest else self._broadcast.store.folder

    # Opening.

    def _open_model(self, problems: Sequence[Problem], ranks: TrainerRanks) -> None:
        config = self._config
        self._model_folder = models.model_folder(config.model.name)
        self._tokenizer = models.load_tokenizer(self._model_folder)
        self._model = build.load_policy(config, self._model_folder)
        self._beside = adapter_files.companion_files(config, self._model_folder, self._model)
        self._vocab_size = int(self._model.config.vocab_size)
        check_tokens(problems, len(self._tokenizer))
        dtype, _ = training_dtype(self._model, config.train.dtype)
        self._hello = models.facts_of(self._model.device, dtype)
        self._learner = led(build.make_learner(config, self._model, ranks), ranks, self._model)
        self._engine = registry.resolve("engine", config.engine.name)(
            self._model, self._tokenizer, live=True,
            slots=config.engine.slots, max_model_len=config.engine.max_model_len,
        )  # fmt: skip

    def _open_sockets(
        self, stack: ExitStack, *, train_set: bytes
    ) -> tuple[wire.RolloutReceiver, wire.GeneratorStatusReceiver]:
        wires = self._config.wire
        address, keys = f"tcp://{wires.bind}:{wires.port}", self._config.keys_folder
        gate = stack.enter_context(closing(wire.CurveAuthenticator(keys))) if keys else None
        receiver = wire.RolloutReceiver(
            address,
            run_id=self._run_id,
            vocab_size=self._vocab_size,
            hwm=wires.hwm,
            authenticator=gate,
        )
        stack.enter_context(closing(receiver))
        announcer = wire.AnnouncementPublisher(wire.next_port(address), authenticator=gate)
        stack.enter_context(closing(announcer))
        counters = wire.GeneratorStatusReceiver(
            wire.next_port(address, 2), run_id=self._run_id, authenticator=gate
        )
        stack.enter_context(closing(counters))
        greeting = wire.ProbeReply(
            self._config.run.name, run_id=self._run_id, worker_info=self._hello
        )
        show = publishing.open_probe(self._config, stack)
        greeter = wire.ProbeServer(
            wire.next_port(address, 3), greeting, create_file=show, authenticator=gate
        )
        stack.enter_context(closing(greeter))
        first = wire.Announcement(
            self._run_id, incarnation=os.urandom(8), train_set_digest=train_set
        )
        self._speaker = StatusPublisher(announcer, first)
        return receiver, counters

    def _open_folder(self, stack: ExitStack, store: WeightStore) -> tuple[RunLog, Journal]:
        """Claim the run's folder and its weights; ours are the first words written to either."""
        config, folder = self._config, self._folder
        is_new = not (folder / build.IDENTITY).exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(closing(run_folder.lock(folder)))
            if is_new:
                # Our identity first: a weights folder that we claim must never be a stranger's.
                build.write_identity(folder, run_id=self._run_id, weights=None)
            if not (folder / RESOLVED).exists():  # a start may be killed between the two
                write_resolved(config, folder)
            publishing.claim(store, config, run_id=self._run_id, stop=self._stop)
        except StoreError:
            if is_new:
                run_folder.remove_new(folder)
            raise
        except OSError as error:
            raise ConfigError(
                f"run folder {folder} cannot be written ({error.strerror}); "
                "choose another with --run.dir"
            ) from None
        journal = stack.enter_context(closing(Journal(folder / "journal")))
        trackers = open_trackers(
            config.run.report_to, folder=folder, run_id=self._run_id,
            settings=config.model_dump(mode="json"),
        )  # fmt: skip
        name, max_steps = config.run.name, config.train.max_steps
        books = RunLog(folder, run=name, max_steps=max_steps, trackers=trackers)
        return stack.enter_context(books), journal

    # One step.

    def _meanwhile(self, idle: bool) -> None:
        """Between two groups."""
        self._broadcast.take_reports()
        self._books.check_stall()
        if idle and self._roster.wants_keyframe:  # perhaps nobody can work without it
            self._publish()

    def _learn(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        row = self._learner.learn(groups)
        failpoint("trainer.learned")
        self._intake.commit()  # nothing is told or published of groups that are not on disk
        if problem := self._learner.skip_reason:
            self._books.event("skip", step=self._learner.step, reason=problem)
            self._books.note(f"step {self._learner.step} skipped: {problem}")
        self._progress = {**self._intake.saved(), **self._beside.about}
        self._doubts.note(self._learner.mismatch)
        return row | mismatch_metrics(self._learner.mismatch)

    def _publish(self) -> float:
        """Hand this step's weights over to be published; returns the seconds it took.

        The last version of a run is whole, so that transformers loads it as it is; so is one that
        a generator asked for.
        """
        step = self._learner.step
        whole = self._roster.wants_keyframe or step >= self._config.train.max_steps
        self._roster.wants_keyframe = False
        return self._broadcast.publish(step, lora.published_weights(self._model), whole=whole)

    def _record(
        self, groups: Sequence[RolloutGroup], row: dict[str, float], *, step_time: float
    ) -> None:
        several = len(self._config.environments) > 1
        full = {
            **row,
            **(by_environment(groups) if several else {}),
            **self._intake.figures(),
            "generators": len(self._roster.live()),
            **self._roster.fares(row),
            "step_time": step_time,
        }
        self._recorder.record(self._learner.step, groups, full, advantages=self._learner.advantages)

    def _save(self) -> None:
        """Write a checkpoint of the newest step; a disk that refuses costs only a longer replay."""
        try:
            self._write_checkpoint()
        except JournalError as error:
            self._books.event("checkpoint_failed", step=self._learner.step, reason=str(error))
            self._books.note(f"{error}; the journal still holds everything")

    def _write_checkpoint(self) -> None:
        """Unless there is one of the newest step. Raises JournalError when the disk refuses."""
        step, rules = self._learner.step, self._config.checkpoint
        if step == self._saved_step:
            return
        folder = self._folder / "checkpoints"
        snapshot = checkpoint.Checkpoint(step, self._learner.state(), self._progress)
        checkpoint.save(
            folder, snapshot, run_id=self._run_id,
            keep_last=rules.keep_last, keep_interval=rules.keep_interval,
        )  # fmt: skip
        self._saved_step = step
        if not rules.keep_journal:
            self._intake.journal.prune(checkpoint.oldest_step(folder) + 1)

    # Going on after an earlier session.

    def _roll_back(self) -> None:
        """Set aside, once, what came after the step that was asked for."""
        step = self._config.checkpoint.resume_step
        aside = self._folder / f"rolled_back_to_{step:06d}"
        if step < 0:
            return
        if aside.exists():
            self._books.note(f"rolled back to step {step} already; to do it again, move {aside}")
            return
        begun = aside.with_name(f".tmp-{aside.name}")
        (begun / "checkpoints").mkdir(parents=True, exist_ok=True)
        (begun / "journal").mkdir(exist_ok=True)
        checkpoint.move_after(self._folder / "checkpoints", step, begun / "checkpoints")
        self._intake.journal.move_after(step, begun / "journal")
        self._books.rewind(step)
        os.rename(begun, aside)
        self._books.note(f"rolled back to step {step}; what came after it is in {aside}")

    def _go_back(self, step: int) -> None:
        """What is written of steps that the journal has lost is not of the line that goes on."""
        if (last := self._books.last_step) > step:
            self._books.rewind(step)
            self._books.note(f"the journal has lost groups: steps {step + 1} to {last} begin anew")

    def _check_begin(self) -> None:
        """Raise JournalError when there is no checkpoint, and the journal needs one."""
        after = self._books.last_step + 1  # of an empty one, pruned after a checkpoint
        if (first := min(steps_in(self._folder / "journal"), default=after)) > 1:
            raise JournalError(
                f"{self._folder}/journal begins with step {first}, and nothing is left of what "
                f"came before; put {self._folder}/checkpoints back, or delete the run to start anew"
            )

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        try:
            self._learner.restore(saved.step, saved.tensors)
        except ValueError as error:
            raise JournalError(
                f"checkpoint of step {saved.step} in {self._folder} does not fit ({error}); "
                "choose another --run.name, or the model and optimizer it was made with"
            ) from None
        adapter_files.check_base(self._beside, saved.progress, where=self._folder)
        self._progress = saved.progress
        self._intake.restore(saved.progress)
        self._saved_step = saved.step

    def _replay(self) -> bool:
        """Train again what the journal holds after the checkpoint; keep an unfinished rest.

        False when it was stopped before its end: the next start replays what is left, under the
        settings that it was trained with. Raises JournalError when these change and the disk
        refuses a checkpoint.
        """
        earlier = self._earlier.train.max_steps  # the schedule under which it was trained
        self._learner.learning_rate = build.learning_rate_schedule(self._earlier)
        begin = self._learner.step
        end = max(steps_in(self._folder / "journal"), default=begin)
        with self._books.progress("replaying", end - begin) as progress:
            while self._intake.replay(self._learner.step + 1):
                if self._learner.step >= earlier:
                    break
                if self._stop.asked:
                    return False
                groups = self._intake.take()
                self._record(groups, self._learn(groups), step_time=0.0)
                progress.update(self._learner.step - begin)
        self._learner.learning_rate = build.learning_rate_schedule(self._config)
        if self._earlier != self._config:
            try:
                self._write_checkpoint()  # nothing is replayed any more under the old schedule
            except JournalError as error:
                raise JournalError(
                    f"{error}; make room for it: a run goes on with other settings only once what "
                    "it has trained is saved"
                ) from None
            write_resolved(self._config, self._folder)
        return True

    def _return_some_problems(self) -> None:
        """At a start, shares of the easy and hard problems are drawn again."""
        chosen = self._config.curriculum
        returned = self._intake.pools.return_some(
            easy_fraction=chosen.easy_fraction, hard_fraction=chosen.hard_fraction,
            seed=self._config.run.seed + self._learner.step,
        )  # fmt: skip
        if returned:
            self._books.event("pool_returned", problems=returned)


def _pools_of(config: Config, train: Environments) -> DifficultyPools:
    """Raises ConfigError when there are more problems than an announcement can name."""
    chosen = config.curriculum
    pools = DifficultyPools(
        [each.id for each in train.problems],
        easy_threshold=chosen.easy_threshold, hard_threshold=chosen.hard_threshold,
    )  # fmt: skip
    if pools.active and len(train.problems) > MAX_POSITIONS:
        raise ConfigError(
            f"curriculum.easy_threshold and hard_threshold work with {MAX_POSITIONS} problems at "
            f"most, and there are {len(train.problems)}; leave them out"
        )
    return pools
