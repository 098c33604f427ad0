"""Groups between engine and wire: their completions have ended, and are being scored."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from peralta_zmq.generator.trainer_connection import TrainerConnection
from peralta_zmq.generator.weight_sync import ServedWeights
from peralta_zmq.rollout import Completion, Problem, Rollout, RolloutGroup, Score, rollout_of


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """The completions of a problem, with their future scores."""

    problem: Problem
    completions: Sequence[Completion]
    scores: Future[list[Score]]
    evaluation_step: int  # RolloutGroup.evaluation_step

    def rollouts(self) -> tuple[Rollout, ...]:
        """The scored completions. Raises RewardError or TaskError.

        Rollouts without rewards of turns get zeros, if others of the group have some.
        """
        pairs = zip(self.completions, self.scores.result(), strict=True)
        rollouts = tuple(rollout_of(completion, *score) for completion, score in pairs)
        if not any(rollout.turn_rewards for rollout in rollouts):
            return rollouts
        return tuple(
            replace(each, turn_rewards=each.turn_rewards or (0.0,) * each.num_turns)
            for each in rollouts
        )


class ScoringQueue:
    """Groups in the order in which their completions ended."""

    def __init__(self) -> None:
        self._groups: deque[SampledGroup] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: SampledGroup) -> None:
        """Add a group at the end."""
        self._groups.append(group)

    def next_scored(self) -> SampledGroup | None:
        """Remove and return the oldest group; None if it has no rewards yet.

        Drops groups whose rewards were cancelled, because their environment was closed.
        """
        while self._groups and self._groups[0].scores.done():
            group = self._groups.popleft()
            if not group.scores.cancelled():
                return group
        return None

    def discard(self) -> None:
        """Drop all groups."""
        while self._groups:
            self._groups.popleft().scores.cancel()


def make_group(
    group: SampledGroup,
    rollouts: tuple[Rollout, ...],
    weights: ServedWeights,
    connection: TrainerConnection,
) -> RolloutGroup:
    """The next group. Its policy step is the oldest among those of its generated tokens."""
    policy_step = min(int(rollout.policy_steps[rollout.loss_mask].min()) for rollout in rollouts)
    return RolloutGroup(
        run_id=weights.version.run_id,
        generator_id=connection.name,
        incarnation=connection.incarnation,
        sequence=connection.outbox.next_sequence,
        problem_id=group.problem.id,
        task=group.problem.task,
        policy_step=policy_step,
        weights_id=weights.weights_id_of(policy_step),
        rollouts=rollouts,
        min_sequence=connection.outbox.min_sequence,
        sample_index=group.problem.sample_index,
        evaluation_step=group.evaluation_step,
    )
