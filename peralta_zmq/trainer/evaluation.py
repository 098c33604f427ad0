"""Evaluation of the weights on the held-out problems.

The trainer announces the step to evaluate, and the generators send answers as groups of rollouts.
Training continues meanwhile, except while step 0 and the last step are evaluated: then the trainer
samples too, beginning with the last problem.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, closing

from peralta_zmq import build, models, serving
from peralta_zmq.config import Config
from peralta_zmq.engines import RequestGroup, Sampler
from peralta_zmq.environments.curriculum import MAX_POSITIONS
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.held_out import Evaluation, summarize
from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.registry import Engine
from peralta_zmq.rollout import Answer, Problem, RolloutGroup, Score
from peralta_zmq.trainer.generator_registry import GeneratorRegistry
from peralta_zmq.trainer.session import Session
from peralta_zmq.trainer.trained_model import TrainedModel

logger = logging.getLogger(__name__)


class Answering:
    """Samples and scores held-out problems; logs a failed reward. Use with `closing`."""

    def __init__(
        self, config: Config, engine: Engine, tokenizer: models.Tokenizer, held_out: Environments
    ) -> None:
        self._held_out = held_out
        self._stack = ExitStack()
        chats = serving.open_server(
            config, tokenizer, self._stack, max_model_len=engine.max_model_len
        )
        self._sampler = Sampler(
            engine, tokenizer, max_turns=config.task.max_turns, sessions=chats.sessions
        )
        self._sampling_of = build.eval_group_sampling(config, seed=config.run.seed)
        self._sampled: list[RequestGroup] = []
        # Groups whose rewards are being computed.
        self._scored: list[tuple[RequestGroup, Future[list[Score]]]] = []
        self._num_answered = 0
        self._failure: TaskError | None = None  # the last failure of a reward

    @property
    def has_room(self) -> bool:
        return self._sampler.has_room

    @property
    def is_busy(self) -> bool:
        return bool(self._sampled or self._scored)

    def start(self, problem: Problem) -> None:
        group = self._sampler.start(problem, *self._sampling_of(problem), replies=self._held_out)
        self._sampled.append(group)

    def advance(self) -> list[tuple[Problem, list[Answer]]]:
        """Take a decode step, or wait for a reward; returns the answers that have rewards."""
        for group in self._sampler.advance():
            self._sampled.remove(group)
            scores = self._held_out.score(group.problem, group.completions)
            self._scored.append((group, scores))
        if self._scored and not self._sampled:
            wait([scores for _, scores in self._scored], 0.2, FIRST_COMPLETED)
        ready = [each for each in self._scored if each[1].done()]
        self._scored = [each for each in self._scored if not each[1].done()]
        answered: list[tuple[Problem, list[Answer]]] = []
        for group, scores in ready:
            try:
                answered.append((group.problem, _answers(group, scores.result())))
            except TaskError as error:
                self._failure = error
                logger.warning("not evaluated: problem=%s reason=%s", group.problem.id, error)
        self._num_answered += len(answered)
        return answered

    def check(self) -> None:
        """Raise TaskError if the rewards of all problems failed."""
        if self._failure is not None and not self._num_answered:
            raise self._failure

    def close(self) -> None:
        self._sampler.drop(self._sampled)
        self._stack.close()


def _answers(group: RequestGroup, scores: Sequence[Score]) -> list[Answer]:
    return [
        Answer(
            group.problem.question,
            completion.transcript,
            score.reward,
            cut_off=completion.finish_reason == "length",
        )
        for completion, score in zip(group.completions, scores, strict=True)
    ]


class EvaluationCoordinator:
    """Runs one evaluation at a time, and evaluates each step at most once."""

    def __init__(
        self,
        session: Session,
        held_out: Environments,
        policy: TrainedModel,
        generators: GeneratorRegistry,
    ) -> None:
        self.held_out = held_out
        self.head_start_seconds = 10.0  # live generators may first answer alone
        self._session = session
        self._policy = policy
        self._generators = generators
        self._current: Evaluation | None = None  # the evaluation in progress
        self._samples_too = False  # whether the trainer samples answers for it

    def evaluate(self, step: int) -> Iterator[None]:
        """Evaluate the trainer's weights of `step`, unless the run log has the result.

        Yields after each decode step, so that the caller can receive the answers of generators.
        Records nothing if a stop is requested. Raises TaskError if all rewards failed.
        """
        run_log = self._session.run_log
        stop = self._session.stop
        if self.is_recorded(step):
            return
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
            head_start_end = time.monotonic() + self.head_start_seconds
            waiting = list(self.held_out.problems)  # the last one is the first to be answered
            while (waiting or answering.is_busy) and not (stop.requested or current.complete):
                yield
                progress.update(current.num_answered)
                may_start = time.monotonic() >= head_start_end or not self._generators.live
                while may_start and waiting and answering.has_room:
                    problem = waiting.pop()
                    if not current.is_answered(problem.id):
                        answering.start(problem)
                if not answering.is_busy:
                    time.sleep(0.02)
                for problem, answers in answering.advance():
                    self._add(current, problem, answers)
            if not current.num_answered:
                answering.check()
        self._samples_too = False
        self._current = None
        self._announce()
        if not stop.requested:
            self._record(current)
            run_log.event("evaluated", step=step)

    def _add(self, current: Evaluation, problem: Problem, answers: Sequence[Answer]) -> None:
        """Add the trainer's answers, unless a generator was faster."""
        if current.expects(problem.id, len(answers)):
            texts = [(answer.answer, answer.reward, answer.cut_off) for answer in answers]
            current.add(problem.id, texts, policy_step=current.step)
            self._announce()

    def request(self, step: int) -> None:
        """Request an evaluation from generators; not of the steps that `evaluate` evaluates."""
        if 0 < step < self._session.config.train.max_steps and not self.is_recorded(step):
            self.abandon()
            self._begin(step)

    def receive(self, group: RolloutGroup) -> None:
        """Add a generator's answers; record the evaluation when it is complete."""
        current = self._current
        tokenizer = self._policy.tokenizer
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
        """End and report an incomplete evaluation by the generators."""
        if (current := self._current) is not None:
            self._current = None
            self._announce()
            self._session.run_log.note(
                f"evaluation of step {current.step} incomplete: {len(current.answers())} of "
                f"{len(self.held_out.problems)} examples were answered in time"
            )

    def is_recorded(self, step: int) -> bool:
        return self._session.wait_out(lambda: self._session.run_log.has_evaluation(step))

    def _begin(self, step: int) -> Evaluation:
        config = self._session.config
        sizes = {env.label: config.rollouts_per_example_of(env) for env in config.eval_environments}
        problems = self.held_out.problems
        self._current = current = Evaluation(step, problems, rollouts_per_example=sizes)
        self._announce()
        return current

    def _announce(self) -> None:
        current = self._current
        step = current.step if current else None
        answered = current.answered if current else b""
        self._session.announcer.publish(evaluation_step=step, answered=answered)

    def _record(self, evaluation: Evaluation) -> None:
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
    """Raise ConfigError for more held-out problems than the bits of an announcement."""
    num_problems = len(held_out.problems)
    if num_problems > MAX_POSITIONS:
        raise ConfigError(
            f"eval.num_examples {config.eval.num_examples} means {num_problems} held-out problems; "
            f"generators can evaluate at most {MAX_POSITIONS}; lower it"
        )
