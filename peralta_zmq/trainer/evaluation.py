"""Evaluation of the weights on the held-out problems.

The trainer announces the step to evaluate, and the generators send their answers as groups of
rollouts, which are not trained on. Steps in between are evaluated by the generators alone, while
the training continues. No step is trained while step 0 (the base model) and the last step are
evaluated: then the trainer samples too, with its own engine, HEAD_START_SECONDS later if there are
generators, and from the last problem on, while the generators begin with the first ones. So these
evaluations end without a generator as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

from peralta_zmq import models
from peralta_zmq.config import Config
from peralta_zmq.environments.curriculum import MAX_POSITIONS
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.held_out import Evaluation, summarize
from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Answer, Problem, RolloutGroup
from peralta_zmq.trainer.answers import Answering
from peralta_zmq.trainer.policy import Policy
from peralta_zmq.trainer.session import Session

HEAD_START_SECONDS = 10.0  # of the generators before the trainer samples answers, too
WAIT_SECONDS = 0.02  # between two checks for answers meanwhile


class EvaluationCoordinator:
    """Runs one evaluation at a time, and evaluates each step at most once."""

    def __init__(self, session: Session, held_out: Environments, policy: Policy) -> None:
        self._session, self.held_out, self._policy = session, held_out, policy
        self._current: Evaluation | None = None  # the evaluation in progress
        self._samples_too = False  # whether the trainer samples answers for it

    def evaluate(
        self,
        step: int,
        *,
        meanwhile: Callable[[], None] = lambda: None,
        has_generators: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Evaluate the trainer's weights of `step`, unless the run log has the result.

        Calls `meanwhile` between two decode steps (tokens), and while rewards are computed, to
        receive the answers of generators. `has_generators` tells whether there are any now. Returns
        False, and records nothing, if a stop is requested before the evaluation ends. Raises
        TaskError if the rewards of all problems failed.
        """
        run_log, stop = self._session.run_log, self._session.stop
        if self._is_recorded(step):
            return True
        self.abandon()
        current = self._begin(step)
        run_log.event("evaluate", step=step)
        self._samples_too = True
        answering = Answering(
            self._session.config, self._policy.open_engine(), self._policy.tokenizer, self.held_out
        )
        with (
            closing(answering),
            run_log.progress(f"evaluating step {step}", len(self.held_out.problems)) as progress,
        ):
            head_start_end = time.monotonic() + HEAD_START_SECONDS
            waiting = list(self.held_out.problems)  # the last one is the first to be answered
            while (waiting or answering.is_busy) and not (stop.requested or current.complete):
                meanwhile()
                progress.update(current.num_answered)
                may_start = time.monotonic() >= head_start_end or not has_generators()
                while may_start and waiting and answering.has_room:
                    problem = waiting.pop()
                    if not current.is_answered(problem.id):
                        answering.start(problem)
                if not answering.is_busy:
                    time.sleep(WAIT_SECONDS)
                for problem, answers in answering.advance():
                    self._add(current, problem, answers)
            if not current.num_answered:
                answering.check()
        self._samples_too, self._current = False, None
        self._announce()
        if stop.requested:
            return False
        self._record(current)
        run_log.event("evaluated", step=step)
        return True

    def _add(self, current: Evaluation, problem: Problem, answers: Sequence[Answer]) -> None:
        """Add the trainer's answers, unless a generator was faster."""
        if current.expects(problem.id, len(answers)):
            texts = [(answer.answer, answer.reward, answer.cut_off) for answer in answers]
            current.add(problem.id, texts, policy_step=current.step)
            self._announce()

    def request(self, step: int) -> None:
        """Request an evaluation of the weights of `step` from the generators.

        Does nothing for step 0 and the last step, which `evaluate` evaluates. Ends an earlier
        evaluation that is still incomplete.
        """
        if 0 < step < self._session.config.train.max_steps and not self._is_recorded(step):
            self.abandon()
            self._begin(step)

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
            models.text_of(
                tokenizer, r.token_ids[int(r.loss_mask.argmax()) :], skip_special_tokens=True
            )
            for r in group.rollouts
        ]
        cut_off = [rollout.is_cut_off for rollout in group.rollouts]
        answers = list(zip(texts, group.rewards, cut_off, strict=True))
        current.add(group.problem_id, answers, policy_step=group.policy_step)
        if current.complete and not self._samples_too:
            self._current = None
            self._record(current)
        self._announce()

    def abandon(self) -> None:
        """End the generators' evaluation if it is incomplete, and report it."""
        if (current := self._current) is not None:
            self._current = None
            self._announce()
            self._session.run_log.note(
                f"evaluation of step {current.step} incomplete: {len(current.answers())} of "
                f"{len(self.held_out.problems)} examples were answered in time"
            )

    def _begin(self, step: int) -> Evaluation:
        """Begin the evaluation of `step` and announce it."""
        config = self._session.config
        sizes = {env.label: config.rollouts_per_example_of(env) for env in config.eval_environments}
        problems = self.held_out.problems
        self._current = current = Evaluation(step, problems, rollouts_per_example=sizes)
        self._announce()
        return current

    def _is_recorded(self, step: int) -> bool:
        return self._session.wait_out(lambda: self._session.run_log.has_evaluation(step))

    def _announce(self) -> None:
        """Announce the step to evaluate (-1 = none) and a bit field of answered problems."""
        current = self._current
        step, answered = (current.step, current.answered) if current else (-1, b"")
        self._session.announcer.publish(evaluation_step=step, answered=answered)

    def _record(self, evaluation: Evaluation) -> None:
        """Record an evaluation that has ended."""
        results = evaluation.answers()
        accuracy, stderr, figures = summarize(results)
        self._session.run_log.evaluation(
            evaluation.step,
            results,
            accuracy=accuracy,
            stderr=stderr,
            figures=figures,
            policy_steps=(min(evaluation.policy_steps), max(evaluation.policy_steps)),
        )


def check_size(config: Config, held_out: Environments) -> None:
    """Raise ConfigError for more held-out problems than generators can evaluate.

    The trainer's announcement has one bit per problem, and a limited size.
    """
    num_problems = len(held_out.problems)
    if num_problems > MAX_POSITIONS:
        raise ConfigError(
            f"eval.num_examples {config.eval.num_examples} means {num_problems} held-out problems; "
            f"generators can evaluate at most {MAX_POSITIONS}; lower it"
        )
