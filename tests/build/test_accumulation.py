"""Which settings need all groups of a step before its first micro-batch is computed."""

from __future__ import annotations

import logging

import pytest
from sample_data import tiny_model
from user_modules import UserModules

from peralta_zmq import build
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
WHOLE = {
    "--train.num-minibatches=2": "train.num_minibatches 2",
    "--train.num-iterations=3": "train.num_iterations 3",
    "--advantage.name=group_zscore --advantage.scale-rewards=batch": (
        "advantage.scale_rewards batch"
    ),
    "--advantage.name=leave_one_out --advantage.scale-rewards=batch": (
        "advantage.scale_rewards batch"
    ),
    "--advantage.name=token_whitening": "an advantage function with step_rewards",
    "--advantage.name=mine.by_step": "an advantage function with step_rewards",
    "--advantage.name=mine.scaled": "an advantage function with step_rewards",
    "--advantage.name=mine.whole": "an advantage function with step_rewards",
    "--loss.name=mine.loss": "loss 'mine.loss' is not one of this package",
    "--loss.top-entropy-quantile=0.2": "loss.top_entropy_quantile",
    "--loss.name=m2po": "loss 'm2po'",
    "--loss.name=grpo --loss.entropy-coef=0.01": (
        "loss.entropy_coef without loss.aggregation token"
    ),
}


@pytest.fixture(autouse=True)
def mine(user_modules: UserModules) -> None:
    user_modules.write("mine", MINE)


@pytest.mark.parametrize("settings", EARLY)
def test_loss_with_one_divisor_and_one_update_is_computed_early(settings: str) -> None:
    config = load_config("bin/trainer", settings.split())
    assert early_divisor(config) == (EARLY[settings], "")


@pytest.mark.parametrize("settings", WHOLE)
def test_setting_that_compares_groups_or_repeats_a_step_needs_the_whole_step(
    settings: str,
) -> None:
    config = load_config("bin/trainer", settings.split())
    assert early_divisor(config) == (None, WHOLE[settings])


def test_several_ranks_need_the_whole_step() -> None:
    config = load_config("bin/trainer", [])
    assert early_divisor(config, num_ranks=2) == (None, "2 ranks")


def test_learner_logs_when_a_step_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="peralta_zmq")
    for settings in ([], ["--train.num-minibatches=2"]):
        build.make_learner(load_config("bin/trainer", settings), tiny_model())
    lines = [record.getMessage() for record in caplog.records if "a step" in record.getMessage()]
    assert lines == [
        "full micro-batches of a step are computed while its other groups arrive",
        "a step is computed when all its groups are there (train.num_minibatches 2)",
    ]
