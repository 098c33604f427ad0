"""Accuracy on the held-out problems: by the trainer at both ends, by the generators between.

Knows answers and the run's books; knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from peralta_zmq import build, models
from peralta_zmq.config import Config
from peralta_zmq.engines.evaluation import evaluate
from peralta_zmq.environments.curriculum import MAX_POSITIONS
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.held_out import Evaluation, eval_metrics
from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.registry import Engine
from peralta_zmq.rollout import Answer, Problem, RolloutGroup
from peralta_zmq.trainer.status import StatusPublisher
from peralta_zmq.trainer.stop_signal import StopSignal


class EvaluationCoordinator:
    """At most one is under way; each step is evaluated once."""

    def __init__(
        self,
        config: Config,
        held_out: Environments,
        engine: Engine,
        tokenizer: models.Tokenizer,
        books: RunLog,
        speaker: StatusPublisher,
        stop: StopSignal,
    ) -> None:
        self._config, self._held_out = config, held_out
        self._engine, self._tokenizer = engine, tokenizer
        self._books, self._speaker, self._stop = books, speaker, stop
        self._under_way: Evaluation | None = None

    def evaluate(self, step: int) -> bool:
        """Let the trainer's own model answer, unless this step is evaluated already.

        False when we are asked to stop before it has answered all: nothing is recorded then.
        """
        config = self._config
        if not self._books.has_evaluation(step):
            problems = self._held_out.problems
            self._books.event("evaluate", step=step)
            with self._books.progress(f"evaluating step {step}", len(problems)) as progress:
                answers = evaluate(
                    self._engine, self._tokenizer, problems, self._held_out.reward,
                    sampling=build.make_eval_sampling(config, seed=config.run.seed),
                    num_generations=config.eval.rollouts_per_example, reach=progress.update,
                    between_steps=self._look_for_stop,
                )  # fmt: skip
            if self._stop.asked:
                return False
            self._record(step, answers, [step])
            self._books.event("evaluated", step=step)
        return True

    def begin(self, step: int) -> None:
        """Let the generators answer with the weights of `step` while training goes on.

        The untrained and the final model are the trainer's own to evaluate.
        """
        if 0 < step < self._config.train.max_steps and not self._books.has_evaluation(step):
            self.leave()
            self._under_way = Evaluation(
                step, self._held_out.problems,
                rollouts_per_example=self._config.eval.rollouts_per_example,
            )  # fmt: skip
            self._say()

    def take(self, group: RolloutGroup) -> None:
        """What a generator says to one held-out problem; the last one ends the evaluation."""
        under_way = self._under_way
        if under_way is None or group.evaluation_step != under_way.step:
            return
        if not under_way.expects(group.problem_id, len(group.rollouts)):
            return
        answers = [
            (models.text_of(self._tokenizer, each.token_ids[each.loss_mask]), each.reward)
            for each in group.rollouts
        ]
        under_way.add(group.problem_id, answers, policy_step=group.policy_step)
        if under_way.complete:
            self._under_way = None
            self._record(under_way.step, under_way.answers(), under_way.policy_steps)
        self._say()

    def leave(self) -> None:
        """Give up an evaluation that is not complete, and say so."""
        if (left := self._under_way) is not None:
            self._under_way = None
            self._say()
            self._books.note(
                f"evaluation of step {left.step} given up: {left.num_answered} of "
                f"{len(self._held_out.problems)} examples were answered in time"
            )

    def _look_for_stop(self) -> None:
        if self._stop.asked:
            self._engine.cancel()

    def _say(self) -> None:
        now = self._under_way
        self._speaker.say(
            evaluation_step=now.step if now else -1, answered=now.answered if now else b""
        )

    def _record(
        self, step: int, answers: Sequence[tuple[Problem, list[Answer]]], policy_steps: list[int]
    ) -> None:
        rewards: dict[str, list[list[float]]] = {}
        for problem, said in answers:
            rewards.setdefault(problem.task, []).append([each.reward for each in said])
        self._books.evaluation(
            step, [said[0] for _, said in answers],
            accuracy=fmean(each.reward for _, said in answers for each in said),
            figures=eval_metrics(rewards), policy_steps=(min(policy_steps), max(policy_steps)),
        )  # fmt: skip


def check_size(config: Config, held_out: Environments) -> None:
    """Raises ConfigError for more examples than the generators can be told of."""
    many = len(held_out.problems)
    if many > MAX_POSITIONS and config.eval.interval < config.train.max_steps:
        raise ConfigError(
            f"eval.num_examples {config.eval.num_examples} means {many} held-out problems; "
            f"generators take {MAX_POSITIONS} at most"
        )
