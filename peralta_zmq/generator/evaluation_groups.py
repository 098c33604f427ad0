"""Evaluation groups: the generators answer held-out problems with the weights of a step or later.

The trainer announces the step to evaluate, and which problems are answered. A generator begins with
its own share of the problems. Its training groups wait, and so do newer weights.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from concurrent.futures import Future

from peralta_zmq import build
from peralta_zmq.build import dry_run
from peralta_zmq.config import Config
from peralta_zmq.engines import RequestGroup, Sampler
from peralta_zmq.environments.curriculum import is_in_bitmap
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.held_out import examples_for
from peralta_zmq.errors import TaskError
from peralta_zmq.generator.scoring import SampledGroup, ScoringQueue
from peralta_zmq.generator.trainer_link import TrainerLink
from peralta_zmq.generator.training_groups import TrainingGroups, own_share, sampling_seed
from peralta_zmq.generator.weight_sync import ServedWeights
from peralta_zmq.rollout import Score

logger = logging.getLogger(__name__)


class EvaluationGroups:
    """Starts the groups of announced evaluations."""

    def __init__(
        self,
        config: Config,
        reader: dry_run.PromptReader,
        training: TrainingGroups,
        weights: ServedWeights,
        link: TrainerLink,
        rewards: ScoringQueue,
    ) -> None:
        self._config = config
        self._reader = reader
        self._training = training
        self._weights = weights
        self._link = link
        self._rewards = rewards
        self._step: int | None = None  # newest evaluation that this generator took part in
        # Of the running evaluation:
        self._held_out: Environments | None = None
        self._positions: Iterator[int] = iter(())  # positions of problems that were not started
        self._groups: list[RequestGroup] = []  # in flight
        self._scores: list[Future[list[Score]]] = []  # scores of the groups that have ended

    @property
    def _due_step(self) -> int | None:
        announcement = self._link.announcement
        step = None if announcement is None else announcement.evaluation_step
        if step is None or step > self._weights.version.step:
            return None
        return step if self._step is None or self._step < step else None

    @property
    def is_running(self) -> bool:
        return self._held_out is not None

    def repeat(self) -> None:
        """Take part in the announced evaluation again."""
        self._step = None

    def submit_due(self, sampler: Sampler) -> None:
        """Begin a due evaluation when no training group is in the engine; start its groups."""
        if self._held_out is None:
            step = self._due_step
            self._training.is_paused = step is not None
            if step is None:
                return
            if self._config.eval.cancel_inflight_rollouts_on_eval:
                sampler.interrupt(self._training.groups)
            if any(not group.is_interrupted for group in self._training.groups):
                return
            self._held_out = self._open_problems(step)
        if self._held_out is not None:
            self._start_groups(sampler, self._held_out)

    def take(self, ended: Collection[RequestGroup]) -> list[SampledGroup]:
        """Remove the evaluation's groups among those that have ended; begin to score them."""
        sampled: list[SampledGroup] = []
        for group in ended:
            if self._held_out is not None and group in self._groups:
                self._groups.remove(group)
                scores = self._held_out.score(group.problem, group.completions)
                self._scores.append(scores)
                sampled.append(SampledGroup(group.problem, group.completions, scores, self._step))
        return sampled

    def drop(self, sampler: Sampler) -> int:
        """End the evaluation, and drop its groups in flight; returns their number."""
        groups = self._groups
        sampler.drop(groups)
        self.close()
        return len(groups)

    def close(self) -> None:
        if self._held_out is not None:
            self._held_out.close()
        self._held_out = None
        self._groups = []
        self._scores = []

    def _open_problems(self, step: int) -> Environments | None:
        """The held-out problems; None, with a warning, if they cannot be used."""
        config = self._config
        link = self._link
        self._step = step
        try:
            held_out = build.open_environments(config, "eval", limit=config.eval.num_examples)
        except TaskError as error:
            logger.warning("evaluation of step %d skipped: %s", step, error)
            return None
        held_out, findings = dry_run.check_prompts(config, held_out, "eval", self._reader)
        if fatal := next((finding for finding in findings if finding.is_fatal), None):
            logger.warning("evaluation of step %d skipped: %s", step, fatal.text)
            held_out.close()
            return None
        seed = sampling_seed(config.run.seed, link.outbox.sender, f"evaluation {step}")
        self._sampling_of = build.eval_group_sampling(config, seed=seed)
        index, count = own_share(link.announcement, link.outbox.sender)

        def is_answered(position: int) -> bool:
            announcement = link.announcement
            return announcement is not None and is_in_bitmap(announcement.answered, position)

        self._positions = examples_for(
            len(held_out.problems), index=index, count=count, answered=is_answered
        )
        return held_out

    def _start_groups(self, sampler: Sampler, held_out: Environments) -> None:
        """Start as many groups as may be started; end the evaluation after the last one."""
        announcement = self._link.announcement
        may_end = announcement is None or announcement.evaluation_step != self._step
        while not may_end and self._has_room(sampler, held_out):
            position = next(self._positions, None)
            if position is None:
                may_end = True
            else:
                problem = held_out.problems[position]
                self._groups.append(
                    sampler.start(problem, *self._sampling_of(problem), replies=held_out)
                )
        if may_end and not self._groups and all(each.done() for each in self._scores):
            self.close()

    def _has_room(self, sampler: Sampler, held_out: Environments) -> bool:
        num_unsent = len(self._groups) + len(self._rewards)
        return sampler.has_room and self._link.outbox.has_room(num_unsent) and held_out.has_room
