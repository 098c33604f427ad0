"""Which settings need all groups of a step before its first micro-batch is computed."""

from __future__ import annotations

import pytest
from user_modules import UserModules

from peralta_zmq.build.components import early_divisor
from peralta_zmq.config import load_config

MINE = """
def loss(tokens): return -(tokens.advantages * tokens.logprobs).sum() / tokens.step_tokens, {}
def centered(rewards, lengths): return [reward - 0.5 for reward in rewards]
def by_step(rewards, lengths, *, step_rewards=()): return [r - max(step_rewards) for r in rewards]
def scaled(rewards, lengths, *, scale_rewards="group", step_rewards=()): return [*rewards]
def whole(rewards, lengths, *, step_lengths=()): return [*rewards]
"""
# Settings that let micro-batches be computed early -> the total that the loss divides by.
EARLY = {
    "": "tokens",
    "--loss.name=dapo": "tokens",
    "--loss.name=grpo": "rollouts",
    "--loss.name=dr_grpo": "rollouts",
    "--loss.name=luspo": "rollouts",
    "--loss.name=gspo --loss.aggregation=token": "tokens",
    "--loss.name=dapo --loss.entropy-coef=0.01": "tokens",
    "--loss.name=grpo_kl --loss.beta=0.1 --train.ref-sync-steps=4": "rollouts",
    "--loss.name=importance": "tokens",
    "--advantage.name=group_zscore": "tokens",
    "--advantage.name=mine.centered": "tokens",
    "--advantage.multi-objective-aggregation=normalize_then_sum": "tokens",
    "--train.keep-zero-std": "tokens",
    "--filter.remove=repetition": "tokens",
    "--train.optim=adamw_bf16": "tokens",
}
WHOLE = [
    "--train.num-minibatches=2",
    "--train.num-iterations=3",
    "--advantage.name=group_zscore --advantage.scale-rewards=batch",
    "--advantage.name=leave_one_out --advantage.scale-rewards=batch",
    "--advantage.name=token_whitening",
    "--advantage.name=mine.by_step",
    "--advantage.name=mine.scaled",
    "--advantage.name=mine.whole",
    "--loss.name=mine.loss",
    "--loss.top-entropy-quantile=0.2",
    "--loss.name=m2po",
    "--loss.name=grpo --loss.entropy-coef=0.01",
]


@pytest.mark.parametrize("settings", [*EARLY, *WHOLE])
def test_loss_that_compares_no_groups_and_one_update_are_computed_early(
    settings: str, user_modules: UserModules
) -> None:
    user_modules.write("mine", MINE)
    config = load_config("bin/trainer", settings.split())
    assert early_divisor(config) == EARLY.get(settings)


def test_several_ranks_need_the_whole_step() -> None:
    assert early_divisor(load_config("bin/trainer", []), num_ranks=2) is None
