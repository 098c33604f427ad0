"""Evaluation on the held-out problems.

The trainer evaluates the first and the last step itself; generators evaluate the steps between
while the training continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from peralta_zmq import build, models
from peralta_zmq.config import Config
from peralta_zmq.engines import evaluate
from peralta_zmq.environments.curriculum import MAX_POSITIONS
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.held_out import Evaluation, eval_metrics
from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Answer, Problem, RolloutGroup
from peralta_zmq.trainer.policy import Policy
from peralta_zmq.trainer.session import Session


class EvaluationCoordinator:
    """Runs at most one evaluation at a time, and one evaluation per step."""

    def __init__(self, session: Session, held_out: Environments, policy: Policy) -> None:
        self._session, self._held_out, self._policy = session, held_out, policy
        self._current: Evaluation | None = None  # evaluation in progress by the generators

    def evaluate(self, step: int) -> bool:
        """Evaluate the trainer's own model, unless this step is evaluated already.

        Returns False, with nothing recorded, if a stop is requested before the last answer.
        """
        config, run_log = self._session.config, self._session.run_log
        if not run_log.has_evaluation(step):
            problems = self._held_out.problems
            run_log.event("evaluate", step=step)
            with run_log.progress(f"evaluating step {step}", len(problems)) as progress:
                answers = evaluate(
                    self._policy.engine, self._policy.tokenizer, problems, self._held_out.reward,
                    sampling=build.make_eval_sampling(config, seed=config.run.seed),
                    num_generations=config.eval.rollouts_per_example,
                    report_progress=progress.update,
                    between_steps=self._cancel_on_stop,
                )  # fmt: skip
            if self._session.stop.requested:
                return False
            self._record(step, answers, [step])
            run_log.event("evaluated", step=step)
        return True

    def request(self, step: int) -> None:
        """Ask the generators to evaluate the weights of `step` while training continues.

        The trainer itself evaluates step 0 and the last step.
        """
        config = self._session.config
        if 0 < step < config.train.max_steps and not self._session.run_log.has_evaluation(step):
            self.abandon()
            self._current = Evaluation(
                step, self._held_out.problems,
                rollouts_per_example=config.eval.rollouts_per_example,
            )  # fmt: skip
            self._announce()

    def receive(self, group: RolloutGroup) -> None:
        """Add a generator's answers to one held-out problem; record a complete evaluation."""
        current = self._current
        if current is None or group.evaluation_step != current.step:
            return
        if not current.expects(group.problem_id, len(group.rollouts)):
            return
        answers = [
            (
                models.text_of(self._policy.tokenizer, rollout.token_ids[rollout.loss_mask]),
                rollout.reward,
            )
            for rollout in group.rollouts
        ]
        current.add(group.problem_id, answers, policy_step=group.policy_step)
        if current.complete:
            self._current = None
            self._record(current.step, current.answers(), current.policy_steps)
        self._announce()

    def abandon(self) -> None:
        """Drop an incomplete evaluation and report it."""
        if (current := self._current) is not None:
            self._current = None
            self._announce()
            self._session.run_log.note(
                f"evaluation of step {current.step} incomplete: {current.num_answered} of "
                f"{len(self._held_out.problems)} examples were answered in time"
            )

    def _cancel_on_stop(self) -> None:
        if self._session.stop.requested:
            self._policy.engine.cancel()

    def _announce(self) -> None:
        step = self._current.step if self._current else -1
        answered = self._current.answered if self._current else b""
        self._session.status.publish(evaluation_step=step, answered=answered)

    def _record(
        self, step: int, answers: Sequence[tuple[Problem, list[Answer]]], policy_steps: list[int]
    ) -> None:
        rewards: dict[str, list[list[float]]] = {}
        for problem, of_problem in answers:
            rewards.setdefault(problem.task, []).append([answer.reward for answer in of_problem])
        self._session.run_log.evaluation(
            step, [of_problem[0] for _, of_problem in answers],
            accuracy=fmean(answer.reward for _, of_problem in answers for answer in of_problem),
            figures=eval_metrics(rewards), policy_steps=(min(policy_steps), max(policy_steps)),
        )  # fmt: skip


def check_size(config: Config, held_out: Environments) -> None:
    """Raise ConfigError if an announcement has fewer bits than there are examples."""
    num_problems = len(held_out.problems)
    if num_problems > MAX_POSITIONS and config.eval.interval < config.train.max_steps:
        raise ConfigError(
            f"eval.num_examples {config.eval.num_examples} means {num_problems} held-out problems; "
            f"generators can evaluate at most {MAX_POSITIONS}; lower it"
        )
