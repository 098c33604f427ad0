"""Answers to held-out problems by an engine of this process, with their rewards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from peralta_zmq import build, models
from peralta_zmq.config import Config
from peralta_zmq.engines import Group, Sampler
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.errors import TaskError
from peralta_zmq.registry import Engine
from peralta_zmq.rollout import Answer, Problem, Score

WAIT_SECONDS = 0.2  # for a reward, while no completion is sampled
logger = logging.getLogger(__name__)


class Answering:
    """Samples completions of held-out problems and computes their rewards. Use with `closing`.

    A problem whose reward function fails is skipped and logged.
    """

    def __init__(
        self, config: Config, engine: Engine, tokenizer: models.Tokenizer, held_out: Environments
    ) -> None:
        self._held_out = held_out
        self._sampler = Sampler(engine, tokenizer, max_turns=config.task.max_turns)
        self._sampling_of = build.eval_group_sampling(config, seed=config.run.seed)
        self._sampled: list[Group] = []
        self._scored: list[tuple[Group, Future[list[Score]]]] = []  # whose rewards are computed
        self._num_answered = 0
        self._failure: TaskError | None = None  # of a reward

    @property
    def has_room(self) -> bool:
        """Whether another problem can be started now."""
        return self._sampler.has_room

    @property
    def is_busy(self) -> bool:
        """Whether a problem was started and has no answers yet."""
        return bool(self._sampled or self._scored)

    def start(self, problem: Problem) -> None:
        """Start to sample the answers to a problem."""
        group = self._sampler.start(problem, *self._sampling_of(problem), replies=self._held_out)
        self._sampled.append(group)

    def advance(self) -> list[tuple[Problem, list[Answer]]]:
        """Take a decode step; returns the answers whose rewards are there.

        Waits up to WAIT_SECONDS if only rewards are missing.
        """
        for group in self._sampler.advance():
            self._sampled.remove(group)
            scores = self._held_out.score(group.problem, group.completions)
            self._scored.append((group, scores))
        if self._scored and not self._sampled:
            wait([scores for _, scores in self._scored], WAIT_SECONDS, FIRST_COMPLETED)
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
        """Stop sampling."""
        self._sampler.drop(self._sampled)


def _answers(group: Group, scores: Sequence[Score]) -> list[Answer]:
    return [
        Answer(
            group.problem.question,
            completion.transcript,
            score.reward,
            cut_off=completion.finish_reason == "length",
        )
        for completion, score in zip(group.completions, scores, strict=True)
    ]
