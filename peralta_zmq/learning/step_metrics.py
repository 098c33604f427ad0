"""Metrics of a training step: rollout groups, entropy and logprob mismatch.

The logprob mismatch is the k3 estimate of the KL divergence (`losses.kl_estimate`) between the
logprobs that the generators reported and the trainer's, as a mean over all tokens and over those of
each sender. docs/metrics.md lists the metrics; one that TRL also has keeps TRL's name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, pstdev

import numpy as np
import torch
from torch import Tensor

from peralta_zmq.learning import losses
from peralta_zmq.learning.admission import staleness
from peralta_zmq.learning.distributed import Ranks
from peralta_zmq.rollout import RolloutGroup

MAX_NAMES = 64  # names in each metric of a step; senders of groups choose them


def describe_groups(groups: Sequence[RolloutGroup], *, step: int) -> dict[str, float]:
    """Metrics of all groups in the batch of a step, with or without equal rewards."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ages = [staleness(group, step=step) for group in groups]
    lengths = [rollout.num_generated for rollout in rollouts]
    return {
        "reward": fmean(rollout.reward for rollout in rollouts),
        "reward_std": fmean(pstdev(group.rewards) for group in groups),
        "frac_reward_zero_std": fmean(not group.has_signal for group in groups),
        "completions/mean_length": fmean(lengths),
        "completions/mean_turns": fmean(rollout.num_turns for rollout in rollouts),
        "completions/clipped_ratio": fmean(r.is_cut_off for r in rollouts),
        "num_groups": len(groups),
        "num_rollouts": len(rollouts),
        "num_tokens": sum(len(rollout.token_ids) for rollout in rollouts),
        "staleness/mean": fmean(ages),
        "staleness/max": max(ages),
        **_mean_rewards(term for rollout in rollouts for term in rollout.rewards.items()),
        **_mean_rewards(("turn_rewards", sum(r.turn_rewards)) for r in rollouts if r.turn_rewards),
        **_by_generator(groups),
    }


def special_token_ratio(groups: Sequence[RolloutGroup], special_ids: Collection[int]) -> float:
    """Share of rollouts with a sampled token of `special_ids`."""
    return fmean(
        bool(np.isin(rollout.token_ids[rollout.loss_mask], [*special_ids]).any())
        for group in groups
        for rollout in group.rollouts
    )


def mean_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over the updates of a step; a missing metric counts as 0."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row.get(name, 0.0) for row in rows) for name in names}


def by_environment(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Mean reward of the rollouts of each environment, as rewards/NAME/mean."""
    return _mean_rewards((group.task, reward) for group in groups for reward in group.rewards)


def _mean_rewards(rewards: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean of the rewards of each of the first MAX_NAMES names, as rewards/NAME/mean."""
    by_name: dict[str, list[float]] = {}
    for name, reward in rewards:
        if name in by_name or len(by_name) < MAX_NAMES:
            by_name.setdefault(name, []).append(reward)
    return {f"rewards/{name}/mean": fmean(values) for name, values in by_name.items()}


def _by_generator(groups: Sequence[RolloutGroup]) -> dict[str, int]:
    """Per generator, at most MAX_NAMES: number of its groups, and their newest policy step."""
    steps: dict[str, list[int]] = {}
    for group in groups:
        name = group.generator_id
        if name in steps or len(steps) < MAX_NAMES:
            steps.setdefault(name, []).append(max(0, group.policy_step))
    return {f"gen/{name}/groups": len(values) for name, values in steps.items()} | {
        f"gen/{name}/step": max(values) for name, values in steps.items()
    }


@dataclass(frozen=True, slots=True)
class Mismatch:
    """k3 estimate of KL(generator, trainer), summed over `num_tokens` tokens."""

    kl: float
    num_tokens: float

    @property
    def mean(self) -> float:
        """Mean per token."""
        return self.kl / max(1.0, self.num_tokens)


class MismatchStatistics:
    """Mean mismatch of each sender; a sender above `bound` is flagged once, after `min_steps`.

    The mean is that of the last `window` steps with groups of the sender. Wrong kernels or weights
    make it large from the first step on; updates that change the policy too much make it grow.
    """

    def __init__(
        self, *, bound: float = 0.1, window: int = 4, min_steps: int = 2, max_senders: int = 4096
    ) -> None:
        self.bound = bound
        self.window = window
        self._min_steps = min_steps
        self._max_senders = max_senders  # the least recently active is dropped first
        self._flagged: set[str] = set()
        self._steps: dict[str, deque[Mismatch]] = {}
        self._initial: dict[str, float] = {}  # sender -> mean of its first step

    def record(self, by_sender: Mapping[str, Mismatch]) -> None:
        for sender, mismatch in by_sender.items():
            steps = self._steps.pop(sender, deque[Mismatch](maxlen=self.window))
            steps.append(mismatch)
            self._steps[sender] = steps  # re-inserted as the most recently active
            self._initial.setdefault(sender, mismatch.mean)
        while len(self._steps) > self._max_senders:
            oldest = next(iter(self._steps))
            del self._steps[oldest], self._initial[oldest]

    def initial(self, sender: str) -> float:
        """Mean mismatch per token in the first step of a sender that `flag_senders` returned."""
        return self._initial[sender]

    def mean(self, sender: str) -> float:
        """Mean mismatch per token; 0 without steps."""
        steps = self._steps.get(sender, ())
        return Mismatch(sum(m.kl for m in steps), sum(m.num_tokens for m in steps)).mean

    def flag_senders(self) -> dict[str, float]:
        """Flag senders with a mean above the bound; returns the newly flagged ones' means."""
        new = {
            sender: mean
            for sender, steps in self._steps.items()
            if sender not in self._flagged
            and len(steps) >= self._min_steps
            and (mean := self.mean(sender)) > self.bound
        }
        self._flagged |= new.keys()
        return new


def mismatch_by(names: Sequence[str], parts: Sequence[Mismatch]) -> dict[str, Mismatch]:
    """Sum the mismatches of each name: parts[i] belongs to names[i]."""
    totals: dict[str, Mismatch] = {}
    for name, part in zip(names, parts, strict=True):
        total = totals.get(name, Mismatch(0.0, 0.0))
        totals[name] = Mismatch(total.kl + part.kl, total.num_tokens + part.num_tokens)
    return totals


@dataclass(slots=True)
class UpdateSums:
    """Sums over micro-batches, then over ranks; ess = ratio^2 / (tokens * ratio_square)."""

    metrics: dict[str, float] = field(default_factory=lambda: {"loss": 0.0, "mismatch_kl": 0.0})
    """Means, of which every micro-batch adds its part."""
    ratio: float = 0.0  # probability of a token by the policy, divided by the generator's
    ratio_square: float = 0.0
    num_not_finite: float = 0.0  # logprobs of the policy
    num_usable: float = 0.0  # micro-batches with a usable group
    mismatch: dict[str, Mismatch] = field(default_factory=dict[str, Mismatch])  # by sender
    excluded: dict[str, str] = field(default_factory=dict[str, str])  # group -> the reason

    def add(self, other: UpdateSums) -> None:
        """Add the sums of a further micro-batch or rank."""
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.ratio += other.ratio
        self.ratio_square += other.ratio_square
        self.num_not_finite += other.num_not_finite
        self.num_usable += other.num_usable
        self.mismatch = mismatch_by(
            [*self.mismatch, *other.mismatch], [*self.mismatch.values(), *other.mismatch.values()]
        )
        self.excluded |= other.excluded

    def over_ranks(self, ranks: Ranks) -> UpdateSums:
        """The sums over all ranks."""
        total = UpdateSums()
        for each in ranks.gather(asdict(self)):
            parts = each["mismatch"].items()
            each["mismatch"] = {sender: Mismatch(**part) for sender, part in parts}
            total.add(UpdateSums(**each))
        return total


@torch.no_grad()
def mismatch_sums(tokens: losses.Tokens, groups: Sequence[str]) -> UpdateSums:
    """A micro-batch's part of the sums; `groups` has the name of each rollout's group."""
    log_ratio = tokens.logprobs - tokens.old_logprobs
    ratio = losses.ratio_of(log_ratio, limit=losses.STRICT_LOG_RATIO)
    kl = losses.kl_estimate(log_ratio)
    by_rollout = (losses.sequence_sum(tokens, each).tolist() for each in (kl, torch.ones_like(kl)))
    rollouts = [Mismatch(*sums) for sums in zip(*by_rollout, strict=True)]
    senders = mismatch_by([name.rpartition("/")[0] for name in groups], rollouts)
    return UpdateSums(
        metrics={"mismatch_kl": float(losses.token_mean(tokens, kl))},
        ratio=float((tokens.mask * ratio).sum()),
        ratio_square=float((tokens.mask * ratio.square()).sum()),
        num_not_finite=float((~tokens.logprobs.isfinite()).sum()),
        mismatch={name: each for name, each in senders.items() if each.num_tokens},
    )


@torch.no_grad()
def estimate_entropy(tokens: losses.Tokens) -> Tensor:
    """A micro-batch's term of the policy's mean entropy per token, in nats.

    mean(-ratio * logprob), where the ratio is the policy's probability divided by the generator's;
    unbiased if sampling truncates nothing (no top-k, top-p or min-p).
    """
    ratio = losses.ratio_of(tokens.logprobs - tokens.old_logprobs, limit=losses.STRICT_LOG_RATIO)
    return losses.token_mean(tokens, -ratio * tokens.logprobs)


def mismatch_metrics(by_sender: Mapping[str, Mismatch]) -> dict[str, float]:
    """Mean mismatch of at most MAX_NAMES generators in a step, as gen/NAME/mismatch_kl."""
    names = [sender.rpartition("/")[0] for sender in by_sender]
    generators = [*mismatch_by(names, [*by_sender.values()]).items()][:MAX_NAMES]
    return {f"gen/{name}/mismatch_kl": total.mean for name, total in generators}
