"""What every number of metrics.jsonl means, by its name; docs/metrics.md is made from it.

Knows names only. NAME stands for a reward, an environment, a generator, a filter or a pool. TRL's
names are used where TRL has one; a loss of the user's own may add others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "The step": {
        "step": "optimizer steps taken",
        "time": "when the step ended, unix seconds",
        "step_time": "seconds of the whole step, waiting included; 0 for a replayed one",
        "time/wait_for_batch": "seconds until enough groups were there, without the journal's",
        "time/journal": "seconds until what came was safe on the disk of run.dir",
        "time/forward_backward": "seconds of computing the step",
        "time/publish": "seconds for which publishing held the step up",
        "num_rollouts": "rollouts that the step took",
        "num_tokens": "tokens of the step, prompts and completions",
        "num_truncated": "rollouts cut to train.max_tokens_per_microbatch",
        "num_dropped": "rollouts longer than train.max_tokens_per_microbatch and left out",
    },
    "Rewards": {
        "reward": "mean reward of all rollouts that the step took",
        "reward_std": "mean of the groups' standard deviations of the reward",
        "frac_reward_zero_std": "share of groups with equal rewards, which teach nothing",
        "rewards/NAME/mean": "mean of a part of the reward, or of an environment's rewards when "
        "there are several",
        "completions/mean_length": "mean number of generated tokens",
        "completions/clipped_ratio": "share of completions that max_completion_length cut off",
        "filter/NAME": "share of rollouts that a filter caught",
        "filter/taken_out": "share of rollouts that enforced filters left out of the loss",
        "curriculum/NAME": "problems in the normal, easy and hard pool",
    },
    "Learning": {
        "loss": "what the step made smaller; near 0 without meaning anything for some losses",
        "grad_norm": "length of the gradient before it is clipped to train.max_grad_norm",
        "learning_rate": "of this step",
        "entropy": "mean entropy of the policy in nats per token: exact with loss.entropy_coef, "
        "else estimated from the sampled tokens",
        "kl": "mean distance (k3) to the reference",
        "mismatch_kl": "mean distance (k3) of the policy to the weights that sampled",
        "ess": "effective share of the tokens after weighting by the importance ratio",
        "clip_ratio/low_mean": "share of tokens whose gradient the lower bound clips away",
        "clip_ratio/high_mean": "share of tokens whose gradient the upper bound clips away",
        "masked/mean": "share of tokens that the loss leaves out",
        "masked/token_low": "share of tokens left out for a small ratio",
        "masked/token_high": "share of tokens left out for a large ratio",
        "masked/geo": "share of rollouts left out for the geometric mean of their ratios",
        "masked/sequence": "share of rollouts left out for one extreme ratio",
        "masked/behav_imp_weight": "share of tokens over loss.behav_imp_weight_cap",
        "skipped": "1 when the step had no finite gradient and changed nothing",
        "skipped_steps": "steps skipped so far for want of a finite gradient",
    },
    "Off-policy": {
        "staleness/mean": "mean age of the groups, in steps between their weights and this step's",
        "staleness/max": "age of the oldest group",
        "dropped/stale": "groups dropped so far for being older than train.max_off_policy_steps",
        "dropped/abandoned": "groups dropped so far because a roll-back undid their weights",
        "dropped/mismatched": "groups dropped so far as their generator computes other logprobs",
        "dropped/lost": "groups given up so far on their way here",
        "dropped/filtered": "groups dropped so far by online difficulty filtering",
        "dropped/duplicate": "groups that came twice so far and counted once",
        "dropped/invalid": "messages refused so far",
        "queue/depth": "groups that were waiting already when the step began to collect",
    },
    "Weights": {
        "weights/version": "newest published version",
        "weights/bytes": "its size on disk",
        "weights/stall_seconds": "seconds for which its snapshot held training up",
        "weights/encode_seconds": "seconds of encoding it, beside the training",
        "weights/write_seconds": "seconds of writing it, beside the training",
    },
    "Generators": {
        "generators": "generators heard within 30 s",
        "gen/NAME/groups": "groups of it that the step took",
        "gen/NAME/step": "step of the newest weights it is known to sample from",
        "gen/NAME/tokens_per_s": "tokens it generates in a second",
        "gen/NAME/blocked_frac": "share of its time in which it may not sample, as it is far "
        "enough ahead or its queue is full",
        "gen/NAME/queue_frac": "share of its time in which its queue is full",
        "gen/NAME/reload_s": "seconds of its newest change of weights",
        "gen/NAME/mismatch_kl": "k3 estimate of the KL of its logprobs to the trainer's",
        "gen/NAME/unjudged": "groups it gave up so far because their reward failed",
    },
}
_PATTERNS = [
    (re.compile(re.escape(name).replace("NAME", "(.+)"), re.DOTALL), name, meaning)
    for names in SECTIONS.values()
    for name, meaning in names.items()
]


def meaning_of(key: str) -> tuple[str, str] | None:
    """The documented name of a metric and what it means; None for one of the user's own loss."""
    exact = (each for each in _PATTERNS if each[1] == key)
    like = (each for each in _PATTERNS if each[0].fullmatch(key))
    found = next(exact, None) or next(like, None)
    return found[1:] if found else None


def table() -> str:
    """All names and meanings in Markdown, a table for each section."""
    lines: list[str] = []
    for section, names in SECTIONS.items():
        lines += [f"## {section}", "", "| name | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in names.items()]
        lines.append("")
    return "\n".join(lines)
