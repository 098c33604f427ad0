"""Advantages of rollouts from their rewards, and filters that remove rollouts.

A function of the table in `registry.py`; its keywords are options.

    def advantage(rewards, lengths, *, option=...) -> list[float]

turns the rewards of the K rollouts of a group into K advantages; `lengths` are the numbers of
generated tokens. The keywords `step_rewards` and `step_lengths` get those of all groups of the
step. If the task gives rewards of turns, the function gets the returns of the same turn of several
rollouts instead (`turn_advantages`).

    def filter(rollout, *, option=...) -> bool

returns True for a rollout to detect. A rollout that a filter removes from the loss still counts in
the metrics and in the advantages of the group. The keywords `vocab_size` and
`max_completion_length` get their values from the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from statistics import fmean
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Rollout, RolloutGroup, equal_within_rounding, returns_of
from peralta_zmq.signatures import Signature

AdvantageFunction = Callable[[Sequence[float], Sequence[int]], list[float]]
# Advantage of all generated tokens of a rollout, or of those of each of its turns.
Advantage: TypeAlias = "float | tuple[float, ...]"
ScaleRewards: TypeAlias = Literal["group", "batch", "none"]
# Weight of each term of the reward, by label of the environment and name of the term; others: 1.
TermWeights: TypeAlias = Mapping[str, Mapping[str, float]]


# Advantages


def advantages_of(
    groups: Sequence[RolloutGroup],
    advantage: AdvantageFunction,
    *,
    term_weights: TermWeights | None = None,
    keep_zero_std: bool = False,
) -> list[list[Advantage]]:
    """Compute the advantages of each group's rollouts from their rewards.

    With `term_weights`, from `normalized_rewards`. The list of a group whose rewards are equal is
    empty, unless `keep_zero_std` is set. Raises ConfigError as `check_turn_rewards`.
    """
    if any(any(group.turn_rewards) for group in groups):
        check_turn_rewards(advantage, normalizes=term_weights is not None)
    rewards = [
        [*group.rewards]
        if term_weights is None
        else normalized_rewards(group, term_weights.get(group.task, {}))
        for group in groups
    ]
    lengths = [[rollout.num_generated for rollout in group.rollouts] for group in groups]
    has_signal = [keep_zero_std or not equal_within_rounding(values) for values in rewards]
    step = {
        "step_rewards": [*chain(*rewards)],
        # 0 in groups without signal, which are not trained: a mean over tokens leaves them out.
        "step_lengths": [
            length * is_trained
            for group_lengths, is_trained in zip(lengths, has_signal, strict=True)
            for length in group_lengths
        ],
    }
    names = Signature(advantage).names
    used = {name: values for name, values in step.items() if name in names}
    by_group = partial(cast(Any, advantage), **used)
    advantages: list[list[Advantage]] = []
    for group, group_rewards, group_lengths, is_trained in zip(
        groups, rewards, lengths, has_signal, strict=True
    ):
        if any(group.turn_rewards):
            advantages.append([*turn_advantages(group, advantage, keep_zero_std=keep_zero_std)])
        elif is_trained:
            advantages.append(by_group(group_rewards, group_lengths))
        else:
            advantages.append([])
    return advantages


def normalized_rewards(group: RolloutGroup, weights: Mapping[str, float]) -> list[float]:
    """R = sum(w z) over the terms, z = `group_zscore` of a term or 0 (GDPO, arXiv 2601.05242)."""
    terms = [rollout.rewards or {"reward": rollout.reward} for rollout in group.rollouts]
    sums = [0.0] * len(terms)
    for name in dict.fromkeys(chain(*terms)):
        indices = [index for index, values in enumerate(terms) if name in values]
        scores = group_zscore([terms[at][name] for at in indices], [])
        for index, score in zip(indices, scores, strict=True):
            sums[index] += weights.get(name, 1.0) * score
    return sums


def turn_advantages(
    group: RolloutGroup, advantage: AdvantageFunction, *, keep_zero_std: bool = False
) -> list[tuple[float, ...]]:
    """The advantages of the turns of each rollout, from the rewards of turns.

    `advantage` compares the returns (`returns_of`) of the first turns of all rollouts, then of the
    second turns of all rollouts that have two, and so on, with the lengths of these turns. A turn
    with equal returns, or of one rollout only, has the advantage 0. If all turns have, the list is
    empty, unless `keep_zero_std` is set. Sources: GTPO (arXiv 2511.14846), with discount 1, and
    MT-GRPO (arXiv 2505.11821).
    """
    if not (group.has_signal or keep_zero_std):
        return []
    lengths = [np.bincount(r.turn_indices[r.loss_mask]).tolist() for r in group.rollouts]
    returns = [*map(returns_of, group.rewards, group.turn_rewards)]
    advantages: list[list[float]] = [[] for _ in returns]
    for turn in range(max(map(len, returns))):
        members = [index for index, values in enumerate(returns) if len(values) > turn]
        compared = [returns[index][turn] for index in members]
        values = [0.0] * len(members)
        if not equal_within_rounding(compared):
            values = advantage(compared, [lengths[index][turn] for index in members])
        for index, value in zip(members, values, strict=True):
            advantages[index].append(value)
    return [*map(tuple, advantages)]


def check_turn_rewards(advantage: AdvantageFunction, *, normalizes: bool) -> None:
    """Raise ConfigError for settings that compare different turns, groups or terms."""
    step_wide = step_wide_setting(advantage)
    normalized = "advantage.multi_objective_aggregation normalize_then_sum" if normalizes else ""
    if setting := step_wide or normalized:
        raise ConfigError(
            f"{setting} cannot be combined with the rewards of turns that a task gives, which "
            "are compared between equal turns of a group; change it, or let the task give none"
        )


def step_wide_setting(advantage: AdvantageFunction) -> str:
    """The setting by which advantages depend on the other groups of the step; empty if none."""
    signature = Signature(advantage)
    if getattr(advantage, "func", advantage) in (group_zscore, leave_one_out):
        is_batch = signature.defaults["scale_rewards"] == "batch"
        return "advantage.scale_rewards batch" if is_batch else ""
    is_step_wide = bool({"step_rewards", "step_lengths"} & {*signature.names})
    return "an advantage function with step_rewards" if is_step_wide else ""


def token_advantages(rollout: Rollout, advantage: Advantage) -> NDArray[np.float64]:
    """The advantage of each generated token; other tokens have any value. [T]"""
    if isinstance(advantage, tuple):
        return np.array(advantage)[rollout.turn_indices]
    return np.full(len(rollout.token_ids), advantage)


def mean_advantages(group: RolloutGroup, advantages: Sequence[Advantage]) -> list[float]:
    """The mean over the generated tokens of each rollout; `advantages` may be empty."""
    return [
        float(token_advantages(rollout, value)[rollout.loss_mask].mean())
        if isinstance(value, tuple)
        else value
        for rollout, value in zip(group.rollouts, advantages, strict=False)
    ]


def group_mean(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - mean(R): REINFORCE with the mean reward of the group as baseline."""
    return _deviations(rewards, fmean(rewards))


def group_zscore(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    scale_rewards: ScaleRewards = "group",
    step_rewards: Sequence[float] = (),
) -> list[float]:
    """(R - mean) / (std + 1e-4), as TRL's GRPO, with the sample standard deviation.

    With `scale_rewards` "batch", std is that of the rewards of all groups of the step; with "none"
    the divisor is 1 (Dr. GRPO).
    """
    deviations = _deviations(rewards, fmean(rewards))
    return _scaled(deviations, _scale(scale_rewards, rewards, step_rewards))


def leave_one_out(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    scale_rewards: ScaleRewards = "none",
    step_rewards: Sequence[float] = (),
) -> list[float]:
    """R - mean of the other K - 1 rewards (RLOO), scaled as `group_zscore`; 0 for one rollout."""
    share_of_others = 1 - 1 / len(rewards)  # R - mean = share_of_others * (R - mean of the others)
    deviations = _scaled(_deviations(rewards, fmean(rewards)), share_of_others)
    return _scaled(deviations, _scale(scale_rewards, rewards, step_rewards))


def max_rl(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """(R - mean) / mean, or 0 unless the mean is above 0 (MaxRL, arXiv 2602.02710)."""
    mean = fmean(rewards)
    return _scaled(_deviations(rewards, mean), mean) if mean > 0 else [0.0] * len(rewards)


def length_weighted(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R - sum(R * length) / sum(length) (Surogate's length_weighted_mean)."""
    return _deviations(rewards, _token_mean(rewards, lengths))


def token_whitening(
    rewards: Sequence[float],
    lengths: Sequence[int],
    *,
    step_rewards: Sequence[float] = (),
    step_lengths: Sequence[int] = (),
) -> list[float]:
    """(R - mean) / (std + 1e-5) over the trained tokens of the step (AReaL)."""
    if equal_within_rounding(step_rewards):
        return [0.0] * len(rewards)
    mean = _token_mean(step_rewards, step_lengths)
    squares = [(reward - mean) ** 2 for reward in step_rewards]
    std = math.sqrt(_token_mean(squares, step_lengths))
    return [(reward - mean) / (std + 1e-5) for reward in rewards]


def _deviations(rewards: Sequence[float], baseline: float) -> list[float]:
    """R - baseline; exactly 0 if all rewards are equal, so that no rounding error is scaled up."""
    if equal_within_rounding(rewards):
        return [0.0] * len(rewards)
    return [reward - baseline for reward in rewards]


def _scale(
    scale_rewards: ScaleRewards, rewards: Sequence[float], step_rewards: Sequence[float]
) -> float:
    """Sample standard deviation + 1e-4 of the rewards that are selected; 1 for "none"."""
    if scale_rewards == "none":
        return 1.0
    scaled = step_rewards if scale_rewards == "batch" else rewards
    squares = [each**2 for each in _deviations(scaled, fmean(scaled))]
    return math.sqrt(math.fsum(squares) / max(1, len(scaled) - 1)) + 1e-4


def _scaled(deviations: Sequence[float], divisor: float) -> list[float]:
    """Each deviation divided by `divisor`, which is 0 only if the deviations are 0."""
    return [each / (divisor or 1.0) for each in deviations]


def _token_mean(values: Sequence[float], lengths: Sequence[int]) -> float:
    weighted = (value * length for value, length in zip(values, lengths, strict=True))
    return math.fsum(weighted) / sum(lengths)


# Filters


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter function with its options bound."""

    name: str  # in metrics
    detects: Callable[[Rollout], bool]
    enforce: bool = False  # also remove detected rollouts from the loss


def apply_filters(
    groups: Sequence[RolloutGroup], filters: Sequence[Filter]
) -> tuple[list[list[bool]], dict[str, int]]:
    """Per group, a flag per rollout, False if a filter removes it; and numbers of rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    included = [True] * len(rollouts)
    counts = dict[str, int]()
    for rule in filters:
        detected = [rule.detects(rollout) for rollout in rollouts]
        counts[f"filter/{rule.name}"] = sum(detected)
        if rule.enforce:
            included = [flag and not hit for flag, hit in zip(included, detected, strict=True)]
    if filters:
        counts["filter/taken_out"] = included.count(False)
    flags = iter(included)
    return [list(islice(flags, len(group.rollouts))) for group in groups], counts


def gibberish(
    rollout: Rollout,
    *,
    vocab_size: int,
    token_id_threshold: int = 100_000,
    logprob_offset: float = 2.0,
) -> bool:
    """Detect a token with a large id and logprob < -ln(vocab_size) - logprob_offset (Surogate)."""
    is_unlikely = rollout.logprobs < -math.log(vocab_size) - logprob_offset
    has_large_id = rollout.token_ids > token_id_threshold
    return bool((rollout.loss_mask & has_large_id & is_unlikely).any())


def repetition(
    rollout: Rollout,
    *,
    max_completion_length: int,
    window: int = 3000,
    prob_threshold: float = 0.99,
) -> bool:
    """Detect `window` consecutive tokens with probabilities above prob_threshold (Surogate)."""
    window = max(1, min(window, max_completion_length // 2))  # shorter for short completions
    is_certain = rollout.logprobs[rollout.loss_mask] > math.log(prob_threshold)
    # Runs of certain tokens lie between the uncertain tokens.
    boundaries = np.concatenate([[-1], np.flatnonzero(~is_certain), [len(is_certain)]])
    return bool((np.diff(boundaries) - 1).max() >= window)


def overlong(rollout: Rollout) -> bool:
    """Detect a completion that was cut off at the maximum length."""
    return rollout.is_cut_off
