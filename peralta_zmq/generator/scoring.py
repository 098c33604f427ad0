"""Groups between engine and wire: their completions have ended, and are being scored."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from peralta_zmq.errors import RewardError, RewardUnavailableError
from peralta_zmq.generator.trainer_link import TrainerLink
from peralta_zmq.generator.weight_sync import ServedWeights
from peralta_zmq.rollout import Completion, Problem, Rollout, RolloutGroup, Score, rollout_of

MAX_REWARD_FAILURES = 16  # consecutive groups that cannot be scored before the generator stops
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """The completions of a problem, with their future scores."""

    problem: Problem
    completions: Sequence[Completion]
    scores: Future[list[Score]]
    evaluation_step: int | None  # RolloutGroup.evaluation_step

    def rollouts(self) -> tuple[Rollout, ...]:
        """The scored completions. Raises RewardError or TaskError."""
        pairs = zip(self.completions, self.scores.result(), strict=True)
        rollouts = tuple(rollout_of(completion, *score) for completion, score in pairs)
        if not any(rollout.turn_rewards for rollout in rollouts):
            return rollouts
        return tuple(  # zeros where others of the group have rewards of turns
            replace(each, turn_rewards=each.turn_rewards or (0.0,) * each.num_turns)
            for each in rollouts
        )


class ScoringQueue:
    """Groups in the order in which their completions ended."""

    def __init__(self, weights: ServedWeights, link: TrainerLink) -> None:
        self._weights = weights
        self._link = link
        self._groups: deque[SampledGroup] = deque()
        self._num_failures = 0  # consecutive groups that could not be scored

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Iterable[SampledGroup]) -> None:
        self._groups.extend(groups)

    def finished(self) -> Iterator[RolloutGroup]:
        """Remove and yield the oldest groups, up to the first one without rewards yet.

        A group is dropped if its reward failed or was cancelled. Raises RewardError after
        MAX_REWARD_FAILURES consecutive failures, not counting unavailable rewards.
        """
        while self._groups and self._groups[0].scores.done():
            group = self._groups.popleft()
            if group.scores.cancelled():
                continue
            try:
                rollouts = group.rollouts()
            except RewardError as error:
                self._num_failures += not isinstance(error, RewardUnavailableError)
                if self._num_failures == MAX_REWARD_FAILURES:
                    raise
                self._link.num_unscored += 1
                logger.warning("dropped an unscored group: %s", error)
                continue
            self._num_failures = 0
            yield self._make_group(group, rollouts)

    def discard(self) -> None:
        while self._groups:
            self._groups.popleft().scores.cancel()

    def _make_group(self, group: SampledGroup, rollouts: tuple[Rollout, ...]) -> RolloutGroup:
        link = self._link
        weights = self._weights
        policy_step = min(
            int(rollout.policy_steps[rollout.loss_mask].min()) for rollout in rollouts
        )
        return RolloutGroup(
            run_id=weights.version.run_id,
            generator_id=link.name,
            incarnation=link.incarnation,
            group_number=link.outbox.next_group_number,
            problem_id=group.problem.id,
            task=group.problem.task,
            policy_step=policy_step,
            weights_id=weights.weights_id_of(policy_step),
            rollouts=rollouts,
            min_group_number=link.outbox.min_group_number,
            sample_index=group.problem.sample_index,
            evaluation_step=group.evaluation_step,
        )
