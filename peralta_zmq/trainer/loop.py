"""The trainer's main loop: collect a batch, take a training step, publish weights.

Full micro-batches are computed while the batch is collected (accumulation.py).

A group holds all rollouts of one problem; generators send groups over the network. The trainer
writes every group to a journal, a write-ahead log, before it publishes the step that uses the
group. So after a kill the next start loses no group and trains no group twice (see recovery.py).
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
from peralta_zmq.build import dry_run, memory_errors, open_environments
from peralta_zmq.config import Config
from peralta_zmq.environments.curriculum import MAX_POSITIONS, DifficultyPools
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.errors import ConfigError
from peralta_zmq.learning.distributed import SINGLE, DistributedRanks, Ranks
from peralta_zmq.learning.learner import StepResult
from peralta_zmq.learning.step_metrics import (
    MismatchStatistics,
    by_environment,
    histogram_values,
)
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.trackers import check_trackers
from peralta_zmq.rollout import CUT_OFF, RolloutGroup
from peralta_zmq.trainer import evaluation, policy, session, sockets
from peralta_zmq.trainer.accumulation import GradientAccumulation
from peralta_zmq.trainer.checkpoint import CheckpointWriter
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.early_stop import EarlyStop
from peralta_zmq.trainer.generator_registry import GeneratorRegistry, report_mismatches
from peralta_zmq.trainer.ranks import join, run_follower, shutdown
from peralta_zmq.trainer.recovery import Recovery

# The warning that all groups have equal rewards is due after this number of steps or seconds.
NO_SIGNAL_STEPS, NO_SIGNAL_SECONDS = 20, 20.0


def run(config: Config) -> None:
    """Train to `train.max_steps`; continue an earlier session of the run.

    A session is one start of the trainer. Under torchrun this process is one of several ranks: rank
    0 is the trainer, the other ranks compute their share of each step. Raises ConfigError,
    TaskError, WireError, StoreError or JournalError, before anything is written, if a setting, a
    file, a port or a folder cannot be used. Raises OutOfMemoryError at any time, and TrainingError,
    after the run is saved, if a limit of [early_stop] is exceeded.
    """
    config, ranks = join(config)
    models.keep_memory()  # malloc reuses freed memory, which makes steps faster
    if isinstance(ranks, DistributedRanks) and ranks.rank > 0:
        return run_follower(config, ranks)
    with memory_errors(config, "trainer"), ExitStack() as stack:
        trainer = Trainer(config, stack, ranks)
        trainer.recover()
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
        run_id, self._previous_config = identity.run_id, identity.previous_config
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
        self.policy = policy.open_policy(config, reader.tokenizer, ranks)
        worker_info = self.policy.worker_info
        limits = policy.group_limits(config, self.policy.model)
        authenticator = sockets.open_authenticator(config, stack, stop, is_new=identity.is_new)
        receiver, status_receiver, announcer, address_file = sockets.open_sockets(
            config, stack, run_id, limits, worker_info, train.digest, authenticator
        )
        store = policy.open_store(config)
        identity = replace(identity, tokenizer=self.policy.manifest_fields["tokenizer"])
        run_log, journal = session.open_run_folder(
            config, stack, store, identity, address_file, stop
        )
        if ranks.world_size > 1:
            run_log.note(f"training on {ranks.world_size} ranks")
        self.session = session.Session(config, run_id, run_log, announcer, address_file, stop)
        self.publishing = policy.PolicyPublisher(self.session, store, self.policy, stack)
        self.generators = GeneratorRegistry(status_receiver, run_log, worker_info)
        self.evaluations = evaluation.EvaluationCoordinator(self.session, held_out, self.policy)
        self.collector = BatchCollector(
            self.session, receiver, journal, self.generators, pools, self.evaluations
        )
        self.accumulation = GradientAccumulation(self.policy.learner, self.collector)
        self.checkpoints = CheckpointWriter(self.session, self.policy, self.collector)
        self.mismatch = MismatchStatistics(bound=config.train.max_mismatch_kl)
        self.early_stop = EarlyStop(config.early_stop)
        self.no_signal = NoSignalWarning(run_log, self.policy.tokenizer)
        session.open_dashboard(config, stack, run_log)
        # Until here a signal ended the process at once, because there was no progress to save.
        stop.install()

    @property
    def step(self) -> int:
        """Number of training steps taken in the run."""
        return self.policy.learner.step

    @property
    def unfinished(self) -> bool:
        """True if there are steps to take, no stop is requested and no limit has ended the run."""
        is_complete = self.step >= self.session.config.train.max_steps
        return not (is_complete or self.session.stop.requested or self.early_stop.reason)

    def recover(self) -> None:
        """Continue from the state that earlier sessions saved in the run folder."""
        recovery = Recovery(
            self.session,
            self._previous_config,
            self.policy,
            self.collector,
            self.checkpoints,
            self.publishing,
            train_again=self.train_again,
        )
        config = self.session.config.eval
        if recovery.run() and self.session.run_log.resuming and not config.skip_eval_on_resume:
            self.evaluations.request(self.step)

    def evaluate_base(self) -> None:
        """Evaluate the untrained model, once per run."""
        if self.session.config.eval.eval_base_model and self.step == 0:
            self.evaluations.evaluate(0, meanwhile=self._lease_samples)

    def _lease_samples(self) -> None:
        """Grant sample leases now, so that generators begin before the first batch is collected."""
        if self.collector.lease_samples(self.step + 1):
            self.collector.acknowledgements.publish(self.step, started_step=self.step)

    def advance(self) -> None:
        """Take one training step: collect, learn, publish, record, write a checkpoint.

        Returns without a step if a stop is requested.
        """
        started = time.monotonic()
        self.accumulation.begin_step()
        groups, depth = self.collector.collect(
            self.step + 1, self._between_groups, self.accumulation.compute
        )
        if self.session.stop.requested:
            return
        overlapped = self.accumulation.seconds
        wait_seconds = time.monotonic() - started - self.collector.journal_seconds - overlapped
        failpoint("trainer.collected")  # a test can kill the process at any failpoint
        result = self.learn(groups)
        failpoint("trainer.stepped")
        report_mismatches(self.mismatch, self.session, self.collector.admission, step=self.step)
        publish_seconds = self.publish() if self._is_publish_due else 0.0
        timings = {
            "queue/depth": depth,
            "time/wait_for_batch": wait_seconds,
            "time/overlapped": overlapped,
            "time/forward_backward": result.metrics["time/forward_backward"] + overlapped,
            "time/journal": self.collector.journal_seconds,
            "time/publish": publish_seconds,
        }
        result.metrics.update(timings | self.publishing.metrics())
        self.record(groups, result, step_time=time.monotonic() - started)
        failpoint("trainer.recorded")
        if self.step % self.session.config.eval.interval == 0:
            self.evaluations.request(self.step)
        if self.step % self.session.config.checkpoint.interval == 0:
            self.checkpoints.try_write()
        if self.unfinished:
            self.early_stop.update(self.step, result.metrics)

    def learn(
        self, groups: Sequence[RolloutGroup], *, learning_rate: float | None = None
    ) -> StepResult:
        """Take the next training step on a batch; returns when its groups are in the journal.

        `learning_rate`, if not None, replaces the learning rate of the schedule.
        """
        run_log = self.session.run_log
        result = self.policy.learner.learn(groups, learning_rate=learning_rate)
        failpoint("trainer.learned")
        self.session.check_address()
        self.collector.commit()  # the groups are in the journal before the step is published
        if reason := result.skip_reason:
            run_log.event("skip", step=self.step, reason=reason)
            run_log.note(f"step {self.step} skipped: {reason}")
        if result.excluded:
            run_log.event("exclude", step=self.step, groups=result.excluded)
            run_log.note(_excluded_text(self.step, result.excluded))
        self.checkpoints.update_progress()
        self.mismatch.record(result.mismatch)
        return result

    @property
    def _is_publish_due(self) -> bool:
        """True if the weights of the newest step are due to be published.

        Generators evaluate a step only with its weights or newer ones.
        """
        config, step = self.session.config, self.step
        is_last = step >= config.train.max_steps
        is_interval = step % config.weights.interval == 0 or step % config.eval.interval == 0
        return is_last or is_interval or self.generators.keyframe_due

    def publish(self) -> float:
        """Publish the newest weights in the background; return the seconds of the copy."""
        # One keyframe (all weights instead of a delta) is enough for all generators that need it.
        keyframe = self.generators.take_keyframe_request()
        return self.publishing.publish(self.step, keyframe=keyframe)

    def record(
        self, groups: Sequence[RolloutGroup], result: StepResult, *, step_time: float
    ) -> None:
        """Write the newest step to the run log, unless an earlier session wrote it."""
        by_task = by_environment(groups) if len(self.session.config.environments) > 1 else {}
        row = {
            "step": self.step,
            "time": time.time(),
            **result.metrics,
            **by_task,
            **self.collector.metrics(),
            "generators": len(self.generators.live()),
            **self.generators.metrics(result.metrics),
            "step_time": step_time,
        }
        index = self._index_of_sample(groups)
        sample = _sample(self.step, groups[index], result.advantages[index], self.policy.tokenizer)
        if self.session.run_log.step(row, sample, histogram_values(groups, result.advantages)):
            self.no_signal.update(self.step, groups, result.metrics["frac_reward_zero_std"])

    def _index_of_sample(self, groups: Sequence[RolloutGroup]) -> int:
        """Index of the group that log.samples chooses; depends only on groups, seed and step."""
        config, rewards = self.session.config, [group.mean_reward for group in groups]
        if config.log.samples == "random":
            return random.Random(f"{config.run.seed}/{self.step}").randrange(len(groups))
        return rewards.index(max(rewards) if config.log.samples == "best" else min(rewards))

    def train_again(self, groups: Sequence[RolloutGroup], learning_rate: float) -> None:
        """Repeat a step of an earlier session with the step's groups from the journal."""
        result = self.learn(groups, learning_rate=learning_rate)
        self.record(groups, result, step_time=0.0)

    def finish(self) -> None:
        """Write a checkpoint; if the run is complete, evaluate and close it.

        A run is complete when the version of its last step is published. If the run is not
        complete, or a stop is requested during the evaluation, reports how to resume the run.
        """
        step, run_log = self.step, self.session.run_log
        self.collector.commit()
        if self.publishing.newest_step not in (-1, step):  # -1: the recovery was not completed
            self.publish()
        self.checkpoints.try_write()
        self.publishing.wait()
        is_complete = step >= self.session.config.train.max_steps and self.publishing.wait_out()
        if is_complete:
            self.evaluations.abandon()
            self.collector.acknowledgements.publish(step, started_step=step, done=True)
            # Not after the long evaluation: a kill during it would lose the final statuses.
            self.generators.wait_for_final_statuses(step=step)
        if not (is_complete and self.evaluations.evaluate(step)):
            if reason := self.early_stop.reason:
                run_log.event("early_stop", step=step, reason=reason)
            run_log.end("stop", step=step)
            run_log.note(f"stopped after step {step}, saved; the same command resumes it")
            run_log.write_report()
            return
        self.generators.wait_for_final_statuses(step=step)
        run_log.end("complete", step=step)
        self.session.wait_out(self._close_run)

    def _close_run(self) -> None:
        """Write the summary and the report of a complete run. Raises OSError."""
        config, store = self.session.config, self.publishing.store
        folder = policy.final_weights(config, self.policy, store)
        accounting, num_made = self.collector.accounting(), self.generators.num_made
        self.session.run_log.close_run(folder, accounting, num_made)

    def _between_groups(self, idle: bool) -> None:
        """Publish and report while groups are collected; `idle`: no group arrived."""
        if idle:
            self.session.check_address()
        self.publishing.record_reports()
        self.session.run_log.check_stall()
        # If groups arrive, the next step follows soon and publishes the keyframe.
        if idle and self.generators.keyframe_due:
            self.publish()


class NoSignalWarning:
    """Warns once if all groups of many steps have equal rewards: no learning signal."""

    def __init__(self, run_log: RunLog, tokenizer: models.Tokenizer) -> None:
        self._run_log, self._tokenizer = run_log, tokenizer
        # Time and number of the last step in which a group had different rewards.
        self._signal_time, self._signal_step = time.monotonic(), 0
        self._warned = False

    def update(self, step: int, groups: Sequence[RolloutGroup], frac_without: float) -> None:
        """Add a step; `frac_without` is the fraction of groups without different rewards."""
        if frac_without < 1.0:
            self._signal_time, self._signal_step = time.monotonic(), step
            return
        steps = step - self._signal_step
        is_long = steps > 1 and time.monotonic() - self._signal_time > NO_SIGNAL_SECONDS
        if self._warned or not (steps >= NO_SIGNAL_STEPS or is_long):
            return
        self._warned = True
        firsts = [group.rollouts[0] for group in groups[:3]]
        samples = "; ".join(
            f"{models.text_of(self._tokenizer, r.token_ids[r.loss_mask])!r}"
            f"{CUT_OFF * r.is_cut_off} -> {r.reward:g}"
            for r in firsts
        )
        self._run_log.note(
            f"no learning signal: 100% of groups have equal rewards for {steps} steps; "
            f"check the reward and the task's difficulty. Samples: {samples}"
        )


def _excluded_text(step: int, excluded: Mapping[str, str]) -> str:
    """Text that names groups which a step left out, shortened to 200 characters."""
    groups = textwrap.shorten(", ".join(f"{n} ({why})" for n, why in excluded.items()), 200)
    return (
        f"step {step} left out {len(excluded)} groups: {groups}; "
        "check the generators that sent them"
    )


def _sample(
    step: int, group: RolloutGroup, advantages: Sequence[float], tokenizer: models.Tokenizer
) -> dict[str, object]:
    """Row for the run's file of samples: texts, rewards and advantages of a group."""
    first = group.rollouts[0]
    prompt_ids = first.token_ids[: int(first.loss_mask.argmax())]  # before the first sampled token
    return {
        "step": step,
        "problem": group.problem_id,
        "task": group.task,
        "generator": group.generator_id,
        "policy_step": group.policy_step,
        "rewards": group.rewards,
        **({"turn_rewards": group.turn_rewards} if any(group.turn_rewards) else {}),
        "advantages": list(advantages),
        "prompt": models.text_of(tokenizer, prompt_ids),
        "texts": [models.text_of(tokenizer, r.token_ids) for r in group.rollouts],
        "cut_off": [rollout.is_cut_off for rollout in group.rollouts],
        "num_turns": [rollout.num_turns for rollout in group.rollouts],
    }


def _open_pools(config: Config, train: Environments) -> DifficultyPools:
    """Create the pools, which exclude too easy and too hard training problems.

    Raises ConfigError for too many problems: the trainer's announcement has a bit for each problem,
    and its size is limited.
    """
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
