"""One optimizer step from a batch: learn, record metrics and a sample, write checkpoints.

Used by the loop for new steps and by the recovery for journaled ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from peralta_zmq import atomic_files, models
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import JournalError
from peralta_zmq.learning.step_metrics import by_environment, mismatch_metrics
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import checkpoint
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.generator_registry import GeneratorRegistry, LogprobMismatchMonitor
from peralta_zmq.trainer.policy import Policy
from peralta_zmq.trainer.session import Session

# Limits, whichever comes first, of the warning that no group has two different rewards.
NO_SIGNAL_STEPS, NO_SIGNAL_SECONDS = 20, 20.0


class StepTrainer:
    """Trains and records batches.

    `progress` is the part of the next checkpoint that is not tensors, as of the newest step: groups
    received since then belong to the next step.
    """

    def __init__(
        self,
        session: Session,
        policy: Policy,
        collector: BatchCollector,
        generators: GeneratorRegistry,
    ) -> None:
        self.progress = {**collector.state(), **policy.manifest_fields}
        self.saved_step = -1
        self._session, self._policy = session, policy
        self._collector, self._generators = collector, generators
        self.mismatch = LogprobMismatchMonitor(session.config, session.run_log, collector.admission)
        self._recorder = StepRecorder(session.run_log, policy.tokenizer)

    def learn(
        self, groups: Sequence[RolloutGroup], *, learning_rate: float | None = None
    ) -> dict[str, float]:
        """Take the next optimizer step and make its groups durable; returns the step's metrics."""
        learner, run_log = self._policy.learner, self._session.run_log
        metrics = self._policy.leader.learn(groups, learning_rate=learning_rate)
        failpoint("trainer.learned")
        self._collector.commit()  # before the step is announced or published
        if reason := learner.skip_reason:
            run_log.event("skip", step=learner.step, reason=reason)
            run_log.note(f"step {learner.step} skipped: {reason}")
        self.progress = {**self._collector.state(), **self._policy.manifest_fields}
        self.mismatch.update(learner.mismatch)
        return metrics | mismatch_metrics(learner.mismatch)

    def record(
        self, groups: Sequence[RolloutGroup], metrics: Mapping[str, float], *, step_time: float
    ) -> None:
        """Write the newest step to the run log, unless an earlier session has written it."""
        by_task = by_environment(groups) if len(self._session.config.environments) > 1 else {}
        row = {
            **metrics,
            **by_task,
            **self._collector.metrics(),
            "generators": len(self._generators.live()),
            **self._generators.metrics(metrics),
            "step_time": step_time,
        }
        learner = self._policy.learner
        self._recorder.record(learner.step, groups, row, advantages=learner.advantages)

    def save(self) -> None:
        """Write a checkpoint of the newest step; a failed write only makes a replay longer."""
        try:
            self.write_checkpoint()
        except JournalError as error:
            run_log = self._session.run_log
            run_log.event("checkpoint_failed", step=self._policy.learner.step, reason=str(error))
            run_log.note(f"{error}; the journal still holds everything")

    def write_checkpoint(self) -> None:
        """Write a checkpoint of the newest step unless there is one; prune the journal.

        Raises JournalError if it cannot be written.
        """
        step, rules = self._policy.learner.step, self._session.config.checkpoint
        if step == self.saved_step:
            return
        folder = self._session.folder / "checkpoints"
        checkpoint.save(
            folder,
            checkpoint.Checkpoint(step, self._policy.leader.state(), self.progress),
            run_id=self._session.run_id,
            keep_last=rules.keep_last,
            keep_interval=rules.keep_interval,
        )
        self.saved_step = step
        if not rules.keep_journal:
            self._collector.journal.prune(min(atomic_files.steps_in(folder)) + 1)


class StepRecorder:
    """Writes metrics and one sample group per step; warns once if no group has a signal."""

    def __init__(self, run_log: RunLog, tokenizer: models.Tokenizer) -> None:
        self._run_log, self._tokenizer = run_log, tokenizer
        self._signal_time, self._signal_step = time.monotonic(), 0  # of the last step with a signal
        self._warned = False

    def record(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        row: Mapping[str, float],
        *,
        advantages: Sequence[Sequence[float]],
    ) -> None:
        """Write the step unless it is recorded; `advantages` has one sequence per group."""
        full = {"step": step, "time": time.time(), **row}
        if self._run_log.step(full, self._sample(step, groups[0], advantages[0])):
            self._warn_without_signal(step, groups, row["frac_reward_zero_std"])

    def _sample(
        self, step: int, group: RolloutGroup, advantages: Sequence[float]
    ) -> dict[str, object]:
        first = group.rollouts[0]
        prompt_ids = first.token_ids[: int(first.loss_mask.argmax())]
        return {
            "step": step,
            "problem": group.problem_id,
            "task": group.task,
            "generator": group.generator_id,
            "policy_step": group.policy_step,
            "rewards": group.rewards,
            "advantages": list(advantages),
            "prompt": models.text_of(self._tokenizer, prompt_ids),
            "texts": [models.text_of(self._tokenizer, r.token_ids) for r in group.rollouts],
        }

    def _warn_without_signal(
        self, step: int, groups: Sequence[RolloutGroup], frac_without: float
    ) -> None:
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
            f"{models.text_of(self._tokenizer, r.token_ids[r.loss_mask])!r} -> {r.reward:g}"
            for r in firsts
        )
        self._run_log.note(
            f"no learning signal: 100% of groups have equal rewards for {steps} steps; "
            f"check the reward and the task's difficulty. Samples: {samples}"
        )
