"""The trainer's main loop: collect a batch, take a training step, publish weights.

Every group is in the journal before the step that uses it is published: see recovery.py.
"""

from __future__ import annotations

import random
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from peralta_zmq import models
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.build import dry_run, fitted_settings, memory_errors, open_environments
from peralta_zmq.config import Config, keep_fork, with_fitted_of_run
from peralta_zmq.environments.curriculum import MAX_POSITIONS, DifficultyPools
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.errors import ConfigError
from peralta_zmq.learning.distributed import SINGLE, DistributedRanks, Ranks
from peralta_zmq.learning.learner import StepResult
from peralta_zmq.learning.optimizer import UpdateSettings
from peralta_zmq.learning.step_metrics import (
    MismatchStatistics,
    by_environment,
    special_token_ratio,
)
from peralta_zmq.observe.trackers import check_trackers
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import evaluation, fork, session, trained_model
from peralta_zmq.trainer.checkpoint import CheckpointWriter
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.early_stop import EarlyStop
from peralta_zmq.trainer.generator_registry import GeneratorRegistry, report_mismatches
from peralta_zmq.trainer.own_generator import OwnGenerator
from peralta_zmq.trainer.ranks import is_leader, join, run_follower, shutdown
from peralta_zmq.trainer.recovery import Recovery
from peralta_zmq.trainer.start_report import start_lines


def run(config: Config) -> None:
    """Train to `train.max_steps`; continue an earlier session of the run.

    Under torchrun this process is one of several ranks: rank 0 is the trainer. Raises ConfigError,
    TaskError or StoreError before anything is written, JournalError while it resumes, WireError or
    OutOfMemoryError at any time, and, after it saved the run, TrainingError for [early_stop].
    """
    fitted = fitted_settings.FittedConfig(config, {})
    if is_leader():  # the other ranks get its settings
        known = session.wait_out(
            lambda: with_fitted_of_run(config), folder=config.run_folder, stop=session.StopSignal()
        )
        fitted = fitted_settings.fit_settings(known)
    config, ranks = join(fitted.config)
    models.keep_memory()  # malloc reuses freed memory, which makes steps faster
    if isinstance(ranks, DistributedRanks) and ranks.rank > 0:
        return run_follower(config, ranks)
    with memory_errors(config, "trainer"), ExitStack() as stack:
        trainer = Trainer(config, stack, ranks)
        trainer.recover()
        trainer.describe(fitted.reasons)
        trainer.evaluate_base()
        while trainer.unfinished:
            trainer.advance()
        trainer.finish()
        shutdown(ranks)
        trainer.early_stop.raise_if_reached()


class Trainer:
    """One session of a run: from the start of the trainer to its end."""

    def __init__(self, config: Config, stack: ExitStack, ranks: Ranks = SINGLE) -> None:
        """Open all resources; `stack` closes them. Locks the run folder before any write."""
        stop = session.StopSignal()
        identity = session.identify_run(config, stack, stop)
        run_id = identity.run_id
        self._previous_config = identity.previous_config
        config = keep_fork(config, self._previous_config)
        check_trackers(config.run.report_to)
        train = open_environments(config, "train")
        held_out = open_environments(config, "eval", limit=config.eval.num_examples)
        stack.enter_context(closing(held_out))
        evaluation.check_size(config, held_out)
        reader = dry_run.PromptReader.of(config)
        train = dry_run.usable_environments(config, train, "train", reader)
        held_out = dry_run.usable_environments(config, held_out, "eval", reader)
        dry_run.log([dry_run.check_end_tokens(reader.tokenizer)])
        pools = _open_pools(config, train)
        self.policy = trained_model.open_trained_model(config, reader.tokenizer, ranks)
        end_ids = models.folder_end_ids(self.policy.base_folder, reader.tokenizer)
        self._special_ids = models.special_ids(reader.tokenizer) - {*end_ids}
        self._forked = fork.fork_if_new(config, self.policy, stop)
        limits = trained_model.group_limits(config, self.policy.model)
        authenticator = session.open_authenticator(config, stack, stop, is_new=identity.is_new)
        receiver, status_receiver, announcer, address_file = session.open_sockets(
            config, stack, run_id, limits, train.digest, authenticator
        )
        store = trained_model.open_store(config)
        identity = replace(identity, tokenizer=self.policy.manifest_fields["tokenizer"])
        run_log, journal = session.open_run_folder(
            config, stack, store, identity, address_file, stop
        )
        if ranks.world_size > 1:
            run_log.note(f"training on {ranks.world_size} ranks")
        self._data = train, held_out
        self.session = session.Session(config, run_id, run_log, announcer, address_file, stop)
        self.publishing = trained_model.PolicyPublisher(self.session, store, self.policy, stack)
        self.generators = GeneratorRegistry(status_receiver, run_log, self.policy.worker_info)
        self.evaluations = evaluation.EvaluationCoordinator(
            self.session, held_out, self.policy, self.generators
        )
        self.collector = BatchCollector(
            self.session, receiver, journal, self.generators, pools, self.evaluations
        )
        self.checkpoints = CheckpointWriter(self.session, self.policy, self.collector)
        self.mismatch = MismatchStatistics()
        self.early_stop = EarlyStop(config.early_stop)
        session.open_dashboard(config, stack, run_log)
        self._own_generator = OwnGenerator(config, config.run_folder)
        stack.enter_context(closing(self._own_generator))
        # Until here a signal ended the process at once, because there was no progress to save.
        stop.install()

    @property
    def step(self) -> int:
        return self.policy.learner.step

    @property
    def unfinished(self) -> bool:
        """True if there are steps to take, no stop is requested and no limit has ended the run."""
        is_complete = self.step >= self.session.config.train.max_steps
        return not (is_complete or self.session.stop.requested or self.early_stop.reason)

    def recover(self) -> None:
        recovery = Recovery(
            self.session,
            self._previous_config,
            self.policy,
            self.collector,
            self.checkpoints,
            self.publishing,
            forked=self._forked,
        )
        recovery.restore_checkpoint()
        for groups, update in recovery.journaled_steps():
            self.policy.learner.add(groups)
            result = self.finish_step(repeated=update)
            self.record(result, step_time=0.0)
        recovery.finish()

    def describe(self, reasons: Mapping[str, str]) -> None:
        """Print what a new run will do; `reasons` as in `start_lines`."""
        stop = self.session.stop
        if self.step == 0 and not stop.requested:
            config = self.session.config
            for line in start_lines(config, reasons, self.policy, *self._data, stop):
                self.session.run_log.note(line)

    def evaluate_base(self) -> None:
        """Evaluate the untrained model, once per run."""
        if self.session.config.eval.eval_base_model and self.step == 0:
            self._evaluate()

    def _evaluate(self) -> bool:
        """Evaluate the newest weights together with the generators; False after a stop request."""
        for _ in self.evaluations.evaluate(self.step):
            self.collector.receive_answers(self.step + 1)
        return not self.session.stop.requested or self.evaluations.is_recorded(self.step)

    def advance(self) -> None:
        """Take one training step; returns without one if a stop is requested."""
        config = self.session.config
        collector = self.collector
        learner = self.policy.learner
        started = time.monotonic()
        update = replace(learner.next_update, arithmetic=self.policy.arithmetic)
        for groups in collector.groups(self.step + 1, update):
            learner.add(groups)
            while learner.compute():  # a micro-batch that they fill
                collector.serve(self.step + 1)
            self._maintain(is_idle=not groups)
            if not groups:
                self._own_generator.poll(time.monotonic() - started - learner.seconds)
        if collector.started_step <= self.step:  # a stop is requested
            return
        wait_seconds = time.monotonic() - started - collector.journal_seconds - learner.seconds
        failpoint("trainer.collected")  # a test can kill the process at any failpoint
        result = self.finish_step()
        failpoint("trainer.stepped")
        report_mismatches(self.mismatch, self.session, step=self.step)
        publish_seconds = self.publish() if self._is_publish_due else 0.0
        timings = {
            "queue/depth": collector.queue_depth,
            "time/wait_for_batch": wait_seconds,
            "time/journal": collector.journal_seconds,
            "time/publish": publish_seconds,
        }
        result.metrics.update(timings | self.publishing.metrics())
        step_seconds = time.monotonic() - started
        self.record(result, step_time=step_seconds)
        failpoint("trainer.recorded")
        self._own_generator.record(waited=wait_seconds, seconds=step_seconds)
        if self.step % config.eval.interval == 0:
            self.evaluations.request(self.step)
        if self.step % config.checkpoint.interval == 0:
            self.checkpoints.try_write()
        if self.unfinished:
            self.early_stop.update(self.step, result.metrics)

    def _maintain(self, *, is_idle: bool) -> None:
        if is_idle:
            self.session.check_address()
        self.publishing.record_reports()
        self.session.run_log.check_stall()
        # If groups arrive, the next step follows soon and publishes the keyframe.
        if is_idle and self.generators.keyframe_due:
            self.publish()

    def finish_step(self, *, repeated: UpdateSettings | None = None) -> StepResult:
        """Take the next step on the learner's groups; `repeated` as in `Learner.finish_step`."""
        run_log = self.session.run_log
        result = self.policy.learner.finish_step(repeated=repeated)
        failpoint("trainer.learned")
        self.session.check_address()
        self.collector.commit()  # the groups are in the journal before the step is published
        if reason := result.skip_reason:
            run_log.event("skip", step=self.step, reason=reason)
            run_log.note(f"step {self.step} skipped: {reason}")
        if result.excluded:
            run_log.event("exclude", step=self.step, groups=result.excluded)
            names = ", ".join(f"{name} ({why})" for name, why in result.excluded.items())
            run_log.note(
                f"step {self.step} left out {len(result.excluded)} groups: "
                f"{textwrap.shorten(names, 200)}; check the generators that sent them"
            )
        self.checkpoints.update_progress()
        self.mismatch.record(result.mismatch)
        return result

    @property
    def _is_publish_due(self) -> bool:
        config = self.session.config
        is_last = self.step >= config.train.max_steps
        # Generators evaluate a step only with its weights or newer.
        intervals = (config.weights.interval, config.eval.interval)
        is_interval = any(self.step % interval == 0 for interval in intervals)
        return is_last or is_interval or self.generators.keyframe_due

    def publish(self) -> float:
        """Publish the newest weights in the background; return the seconds of the copy."""
        # One keyframe (all weights instead of a delta) is enough for all generators that need it.
        keyframe = self.generators.take_keyframe_request()
        return self.publishing.publish(self.step, keyframe=keyframe)

    def record(self, result: StepResult, *, step_time: float) -> None:
        """Write the newest step to the run log, unless an earlier session wrote it."""
        groups = result.groups
        by_task = by_environment(groups) if len(self.session.config.environments) > 1 else {}
        row = {
            "step": self.step,
            "time": time.time(),
            **result.metrics,
            **by_task,
            **self.collector.metrics(),
            "generators": len(self.generators.live),
            **self.generators.metrics(result.metrics),
            "step_time": step_time,
        }
        row["completions/special_token_ratio"] = special_token_ratio(groups, self._special_ids)
        samples: list[dict[str, object]] = []
        if self.step > self.session.run_log.last_step:  # not written by an earlier session
            samples = self._samples(groups, result.advantages)
        # The group for the trackers depends only on settings, groups and step.
        seed = self.session.config.run.seed
        tracked = random.Random(f"{seed}/{self.step}").randrange(len(groups))
        self.session.run_log.step(row, samples, tracked=tracked)

    def _samples(
        self, groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]]
    ) -> list[dict[str, object]]:
        tokenizer = self.policy.tokenizer
        batch = [
            _sample(self.step, group, "trained" if group.has_signal else "no_signal", tokenizer)
            | {"advantages": list(values)}
            for group, values in zip(groups, advantages, strict=True)
        ]
        dropped = [_sample(self.step, *entry, tokenizer) for entry in self.collector.dropped]
        return batch + dropped

    def finish(self) -> None:
        """Write a checkpoint; evaluate and close the run if its last version is published."""
        step = self.step
        run_log = self.session.run_log
        self.collector.commit()
        if self.publishing.newest_step not in (-1, step):  # -1: the recovery was not completed
            self.publish()
        self.checkpoints.try_write()
        self.publishing.wait()
        is_complete = step >= self.session.config.train.max_steps and self.publishing.wait_out()
        if is_complete:
            self.collector.admission.is_over = True
            is_complete = self._evaluate()
            self.collector.commit()
        if not is_complete:
            if reason := self.early_stop.reason:
                run_log.event("early_stop", step=step, reason=reason)
            run_log.end("stop", step=step)
            run_log.note(f"stopped after step {step}, saved; the same command resumes it")
            run_log.write_report()
            return
        self.collector.acknowledgements.publish(step, started_step=step, done=True)
        self.generators.wait_for_final_statuses(step=step)
        run_log.end("complete", step=step)
        self.session.wait_out(self._close_run)

    def _close_run(self) -> None:
        folder = trained_model.final_weights(
            self.session.config, self.policy, self.publishing.store
        )
        accounting = self.collector.accounting()
        self.session.run_log.close_run(folder, accounting, self.generators.num_made)


def _sample(
    step: int, group: RolloutGroup, outcome: str, tokenizer: models.Tokenizer
) -> dict[str, object]:
    first = group.rollouts[0]
    prompt_ids = first.token_ids[: int(first.loss_mask.argmax())]  # before the first sampled token
    return {
        "step": step,
        "problem": group.problem_id,
        "task": group.task,
        "generator": group.generator_id,
        "policy_step": group.policy_step,
        "outcome": outcome,
        "rewards": group.rewards,
        "advantages": [],
        **({"turn_rewards": group.turn_rewards} if any(group.turn_rewards) else {}),
        "prompt": models.text_of(tokenizer, prompt_ids),
        "texts": [models.text_of(tokenizer, rollout.token_ids) for rollout in group.rollouts],
        "cut_off": [rollout.is_cut_off for rollout in group.rollouts],
        "num_turns": [rollout.num_turns for rollout in group.rollouts],
    }


def _open_pools(config: Config, train: Environments) -> DifficultyPools:
    """Raises ConfigError for more problems than bits in an announcement."""
    curriculum = config.curriculum
    pools = DifficultyPools(
        [problem.id for problem in train.problems],
        easy_threshold=curriculum.easy_threshold,
        hard_threshold=curriculum.hard_threshold,
    )
    if pools.active and len(train.problems) > MAX_POSITIONS:
        raise ConfigError(
            f"curriculum.easy_threshold and hard_threshold work with at most {MAX_POSITIONS} "
            f"problems, and there are {len(train.problems)}; leave them out"
        )
    return pools
