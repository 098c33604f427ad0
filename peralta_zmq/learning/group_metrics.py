"""What a step's groups look like: the metrics that need no model. Pure functions of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev

from peralta_zmq.learning.admission import staleness
from peralta_zmq.rollout import RolloutGroup


def describe(groups: Sequence[RolloutGroup], *, step: int) -> dict[str, float]:
    """Reward, length and staleness of everything admitted to a step, signal or not.

    Names are TRL's where TRL has one. `reward_std` is the mean of the groups' own deviations.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ages = [staleness(group, step=step) for group in groups]
    lengths = [rollout.num_generated for rollout in rollouts]
    return {
        "reward": fmean(rollout.reward for rollout in rollouts),
        "reward_std": fmean(pstdev(group.rewards) for group in groups),
        "frac_reward_zero_std": fmean(not group.has_signal for group in groups),
        "completions/mean_length": fmean(lengths),
        "completions/clipped_ratio": fmean(r.finish_reason == "length" for r in rollouts),
        "num_rollouts": len(rollouts),
        "num_tokens": sum(len(rollout.token_ids) for rollout in rollouts),
        "staleness/mean": fmean(ages),
        "staleness/max": max(ages),
        **_reward_parts(groups),
        **_by_generator(groups),
    }


def by_environment(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """The mean reward of each environment's rollouts, as rewards/NAME/mean."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        rewards.setdefault(group.task, []).extend(group.rewards)
    return {f"rewards/{name}/mean": fmean(values) for name, values in rewards.items()}


def _reward_parts(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for group in groups:
        for rollout in group.rollouts:
            for name, value in rollout.rewards.items():
                parts.setdefault(name, []).append(value)
    return {f"rewards/{name}/mean": fmean(values) for name, values in parts.items()}


def _by_generator(groups: Sequence[RolloutGroup]) -> dict[str, int]:
    made = Counter(group.generator_id for group in groups)
    newest: dict[str, int] = {}
    for group in groups:
        name = group.generator_id
        newest[name] = max(group.policy_step, newest.get(name, 0))
    return {f"gen/{name}/groups": count for name, count in made.items()} | {
        f"gen/{name}/step": step for name, step in newest.items()
    }
