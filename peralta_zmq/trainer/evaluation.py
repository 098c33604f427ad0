"""Evaluation of the weights on the held-out problems.

The trainer itself evaluates step 0 (the base model) and the last step with its own engine, while it
does not train. The generators evaluate steps in between while the training continues: the trainer
announces the step to evaluate, and the generators send their answers as groups of rollouts, which
are not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Runs one evaluation at a time, and evaluates each step at most once."""

    def __init__(self, session: Session, held_out: Environments, policy: Policy) -> None:
        self._session, self._held_out, self._policy = session, held_out, policy
        self._current: Evaluation | None = None  # the evaluation in progress on the generators

    def evaluate(self, step: int, *, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Evaluate the trainer's weights of `step`, unless the run log has the result.

        Calls `meanwhile` between two decode steps (tokens), and while rewards are computed. Returns
        False, and records nothing, if a stop is requested before the evaluation ends.
        """
        config, run_log = self._session.config, self._session.run_log
        if self._is_recorded(step):
            return True
        problems = self._held_out.problems

        def is_cancelled() -> bool:
            meanwhile()
            return self._session.stop.requested

        run_log.event("evaluate", step=step)
        with run_log.progress(f"evaluating step {step}", len(problems)) as progress:
            answers = evaluate(
                self._policy.engine,
                self._policy.tokenizer,
                problems,
                self._held_out.score,
                sampling=build.make_eval_sampling(config, seed=config.run.seed),
                num_generations=config.eval.rollouts_per_example,
                overrides=build.eval_sampling_overrides(config, seed=config.run.seed),
                replies=self._held_out,
                max_turns=config.task.max_turns,
                report_progress=progress.update,
                is_cancelled=is_cancelled,
            )
        if self._session.stop.requested:
            return False
        self._record(step, answers, [step])
        run_log.event("evaluated", step=step)
        return True

    def request(self, step: int) -> None:
        """Request an evaluation of the weights of `step` from the generators.

        Does nothing for step 0 and the last step, which the trainer itself evaluates. Ends an
        earlier evaluation that is still incomplete.
        """
        config = self._session.config
        if 0 < step < config.train.max_steps and not self._is_recorded(step):
            self.abandon()
            sizes = {
                env.label: config.rollouts_per_example_of(env) for env in config.eval_environments
            }
            self._current = Evaluation(step, self._held_out.problems, rollouts_per_example=sizes)
            self._announce()

    def receive(self, group: RolloutGroup) -> None:
        """Add a generator's answers to one held-out problem.

        Records the evaluation when it is complete. Ignores answers to another evaluation, and
        answers that were received before.
        """
        current, tokenizer = self._current, self._policy.tokenizer
        if current is None or group.evaluation_step != current.step:
            return
        if not current.expects(group.problem_id, len(group.rollouts)):
            return
        texts = [  # from the first generated token on
            models.text_of(tokenizer, r.token_ids[int(r.loss_mask.argmax()) :])
            for r in group.rollouts
        ]
        cut_off = [rollout.is_cut_off for rollout in group.rollouts]
        answers = list(zip(texts, group.rewards, cut_off, strict=True))
        current.add(group.problem_id, answers, policy_step=group.policy_step)
        if current.complete:
            self._current = None
            self._record(current.step, current.answers(), current.policy_steps)
        self._announce()

    def abandon(self) -> None:
        """End the generators' evaluation if it is incomplete, and report it."""
        if (current := self._current) is not None:
            self._current = None
            self._announce()
            self._session.run_log.note(
                f"evaluation of step {current.step} incomplete: {len(current.answers())} of "
                f"{len(self._held_out.problems)} examples were answered in time"
            )

    def _is_recorded(self, step: int) -> bool:
        return self._session.wait_out(lambda: self._session.run_log.has_evaluation(step))

    def _announce(self) -> None:
        """Announce the step to evaluate (-1 = none) and a bit field of answered problems."""
        current = self._current
        step, answered = (current.step, current.answered) if current else (-1, b"")
        self._session.announcer.publish(evaluation_step=step, answered=answered)

    def _record(
        self, step: int, results: Sequence[tuple[Problem, list[Answer]]], policy_steps: list[int]
    ) -> None:
        """Record a complete evaluation; `policy_steps` are the steps of the weights used."""
        rewards: dict[str, list[list[float]]] = {}
        for problem, answers in results:
            rewards.setdefault(problem.task, []).append([answer.reward for answer in answers])
        self._session.run_log.evaluation(
            step,
            [answers[0] for _, answers in results],
            accuracy=fmean(fmean(each.reward for each in answers) for _, answers in results),
            figures=eval_metrics(rewards),
            policy_steps=(min(policy_steps), max(policy_steps)),
        )


def check_size(config: Config, held_out: Environments) -> None:
    """Raise ConfigError for more held-out problems than generators can evaluate.

    The trainer's announcement has one bit per problem, and a limited size.
    """
    num_problems = len(held_out.problems)
    if num_problems > MAX_POSITIONS and config.eval.interval < config.train.max_steps:
        raise ConfigError(
            f"eval.num_examples {config.eval.num_examples} means {num_problems} held-out problems; "
            f"generators can evaluate at most {MAX_POSITIONS}; lower it"
        )
