"""Names and meanings of all metrics in metrics.jsonl; docs/metrics.md contains `markdown()`.

NAME stands for a reward, an environment, a generator, a filter or a pool. Names are TRL's where
TRL has one. A custom loss may add others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "The step": {
        "step": "optimizer steps taken",
        "time": "end of the step, unix seconds",
        "step_time": "seconds of the whole step, waiting included; 0 for a replayed one",
        "time/wait_for_batch": "seconds of waiting for the batch, journal writes excluded",
        "time/journal": "seconds of writing received groups to the disk of run.dir",
        "time/forward_backward": "seconds of computing the step",
        "time/publish": "seconds for which publishing blocked the step",
        "num_rollouts": "rollouts in the batch",
        "num_tokens": "tokens in the batch, prompts and completions",
        "num_truncated": "rollouts truncated to train.max_tokens_per_microbatch",
        "num_dropped": "rollouts left out because they exceed train.max_tokens_per_microbatch",
    },
    "Rewards": {
        "reward": "mean reward of all rollouts in the batch",
        "reward_std": "mean over the groups of the standard deviation of the reward",
        "frac_reward_zero_std": "share of groups with equal rewards, which give no learning signal",
        "rewards/NAME/mean": "mean of one reward component, or of one environment's rewards if "
        "there are several",
        "completions/mean_length": "mean number of generated tokens",
        "completions/clipped_ratio": "share of completions cut off at max_completion_length",
        "filter/NAME": "share of rollouts that a filter flagged",
        "filter/taken_out": "share of rollouts that enforced filters excluded from the loss",
        "curriculum/NAME": "problems in the normal, easy and hard pool",
    },
    "Learning": {
        "loss": "value of the loss; near 0 without a meaning for some losses",
        "grad_norm": "norm of the gradient before clipping to train.max_grad_norm",
        "learning_rate": "learning rate of this step",
        "entropy": "mean entropy of the policy in nats per token: exact with loss.entropy_coef, "
        "else estimated from the sampled tokens",
        "kl": "mean KL estimate (k3) to the reference model",
        "mismatch_kl": "mean KL estimate (k3) of the policy to the weights that sampled",
        "ess": "effective share of the tokens after weighting by the importance ratio",
        "clip_ratio/low_mean": "share of tokens whose gradient the lower bound clips",
        "clip_ratio/high_mean": "share of tokens whose gradient the upper bound clips",
        "masked/mean": "share of tokens excluded from the loss",
        "masked/token_low": "share of tokens excluded because of a small ratio",
        "masked/token_high": "share of tokens excluded because of a large ratio",
        "masked/geo": "share of rollouts excluded because of the geometric mean of their ratios",
        "masked/sequence": "share of rollouts excluded because of one extreme ratio",
        "masked/behav_imp_weight": "share of tokens over loss.behav_imp_weight_cap",
        "skipped": "1 if the gradient was not finite, so that the step changed nothing",
        "skipped_steps": "steps skipped so far because the gradient was not finite",
    },
    "Off-policy": {
        "staleness/mean": "mean age of the groups, in steps between their weights and this step's",
        "staleness/max": "age of the oldest group",
        "dropped/stale": "groups dropped so far for being older than train.max_off_policy_steps",
        "dropped/abandoned": "groups dropped so far because a roll-back undid their weights",
        "dropped/mismatched": "groups dropped so far because their generator's logprobs differ "
        "from the trainer's",
        "dropped/lost": "groups lost so far between generator and trainer",
        "dropped/filtered": "groups dropped so far by online difficulty filtering",
        "dropped/duplicate": "groups received twice so far and counted once",
        "dropped/invalid": "messages rejected so far",
        "queue/depth": "groups already waiting when the step began to collect its batch",
    },
    "Weights": {
        "weights/version": "newest published version",
        "weights/bytes": "its size on disk",
        "weights/stall_seconds": "seconds for which its snapshot blocked training",
        "weights/encode_seconds": "seconds of encoding it, in the background",
        "weights/write_seconds": "seconds of writing it, in the background",
    },
    "Generators": {
        "generators": "generators that reported within the last 30 s",
        "gen/NAME/groups": "groups of this generator in the batch",
        "gen/NAME/step": "step of the newest weights it is known to sample from",
        "gen/NAME/tokens_per_s": "generated tokens per second",
        "gen/NAME/blocked_frac": "share of its time in which it may not sample, because it is far "
        "enough ahead or its send queue is full",
        "gen/NAME/queue_frac": "share of its time in which its send queue is full",
        "gen/NAME/reload_s": "seconds of its newest weight update",
        "gen/NAME/mismatch_kl": "KL estimate (k3) of its logprobs to the trainer's",
        "gen/NAME/unjudged": "groups given up so far because their reward failed",
    },
}
_PATTERNS = [
    (re.compile(re.escape(name).replace("NAME", "(.+)"), re.DOTALL), name, meaning)
    for names in SECTIONS.values()
    for name, meaning in names.items()
]


def meaning_of(key: str) -> tuple[str, str] | None:
    """The documented name of a metric and its meaning; None for one that a custom loss added."""
    exact = (entry[1:] for entry in _PATTERNS if entry[1] == key)
    matching = (entry[1:] for entry in _PATTERNS if entry[0].fullmatch(key))
    return next(exact, None) or next(matching, None)


def markdown() -> str:
    """All names and meanings in Markdown, one table for each section."""
    lines: list[str] = []
    for section, names in SECTIONS.items():
        lines += [f"## {section}", "", "| name | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {meaning} |" for name, meaning in names.items()]
        lines.append("")
    return "\n".join(lines)
