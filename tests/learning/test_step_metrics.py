from __future__ import annotations

from dataclasses import replace

import pytest
from sample_data import group_of, rollout_with

from peralta_zmq.learning.step_metrics import (
    MAX_NAMES,
    Mismatch,
    MismatchStatistics,
    by_environment,
    describe_groups,
    mismatch_metrics,
    special_token_ratio,
)
from peralta_zmq.observe.metrics import generator_numbers

GROUPS = [
    group_of([1, 0, 0, 1], lengths=[4, 4, 4, 8], policy_step=6),
    group_of([1, 1, 1, 1], lengths=[2, 2, 2, 6], policy_step=4),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", 0.75),
        ("frac_reward_zero_std", 0.5),
        ("reward_std", 0.25),  # .5 and 0
        ("completions/mean_length", 4),  # (20 + 12) / 8
        ("num_groups", 2),
        ("num_rollouts", 8),
        ("num_tokens", 32 + 8 * 3),  # with the prompts
        ("staleness/mean", 2),  # 8 - 1 - 6 and 8 - 1 - 4
        ("staleness/max", 3),
    ],
)
def test_metric_of_two_groups_by_hand(name: str, value: float) -> None:
    assert describe_groups(GROUPS, step=8)[name] == value


def test_clipped_ratio_is_the_share_of_finish_reason_length() -> None:
    rollouts = (*[rollout_with(1.0)] * 3, rollout_with(0.0, finish_reason="length"))
    group = replace(GROUPS[0], rollouts=rollouts)
    assert describe_groups([group], step=8)["completions/clipped_ratio"] == 0.25


def test_reward_parts_have_separate_means() -> None:
    rollouts = (rollout_with(1.5, rewards={"right": 1.0, "short": 0.5}),
                rollout_with(0.0, rewards={"right": 0.0, "short": 0.0}))  # fmt: skip
    row = describe_groups([replace(GROUPS[0], rollouts=rollouts)], step=8)
    assert (row["rewards/right/mean"], row["rewards/short/mean"]) == (0.5, 0.25)


def test_names_of_rewards_are_bounded() -> None:
    rewards = {f"part{number}": 1.0 for number in range(MAX_NAMES + 1)}
    group = replace(GROUPS[0], rollouts=(rollout_with(1.0, rewards=rewards),))
    row = describe_groups([group], step=8)
    assert [name for name in row if name.startswith("rewards/")] == [
        f"rewards/part{number}/mean" for number in range(MAX_NAMES)
    ]


def test_environments_have_separate_mean_rewards() -> None:
    groups = [*GROUPS, group_of([0.5, 0.25], task="sudoku"), group_of([0.25] * 4, task="sudoku")]
    assert by_environment(groups) == {
        "rewards/calculator/mean": 0.75, "rewards/sudoku/mean": pytest.approx(1.75 / 6),
    }  # fmt: skip


def test_generators_are_counted_with_their_newest_weights() -> None:
    groups = [*GROUPS, replace(GROUPS[0], generator_id="bob", policy_step=7)]
    row = describe_groups(groups, step=8)
    assert (row["gen/ann/groups"], row["gen/ann/step"]) == (2, 6)
    assert (row["gen/bob/groups"], row["gen/bob/step"]) == (1, 7)


# Logprob mismatch

FAR, NEAR = Mismatch(3.0, 10.0), Mismatch(0.1, 10.0)  # .3 and .01 per token


def test_sender_is_flagged_after_min_steps() -> None:
    statistics = MismatchStatistics(bound=0.1, min_steps=2)
    for step in range(2):
        assert statistics.flag_senders() == {}, step
        statistics.record({"ann/0": FAR, "bob/0": NEAR})
    assert statistics.flag_senders() == {"ann/0": pytest.approx(0.3)}


def test_initial_mismatch_is_that_of_the_first_step() -> None:
    statistics = MismatchStatistics(bound=0.1)
    statistics.record({"ann/0": Mismatch(0.01, 10.0)})
    for _ in range(3 * statistics.window):
        statistics.record({"ann/0": FAR})
    assert statistics.initial("ann/0") == pytest.approx(0.001)


def test_special_token_ratio_counts_sampled_tokens_of_rollouts() -> None:
    groups = [group_of([1, 0], lengths=[3, 4]), group_of([1, 0], lengths=[2, 6])]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert special_token_ratio(groups, set()) == 0.0
    prompt_ids = {int(token) for r in rollouts for token in r.token_ids[~r.loss_mask]}
    sampled = [{int(token) for token in r.token_ids[r.loss_mask]} for r in rollouts]
    assert special_token_ratio(groups, prompt_ids - set().union(*sampled)) == 0.0
    last = int(rollouts[-1].token_ids[-1])
    expected = sum(last in tokens for tokens in sampled) / 4
    assert special_token_ratio(groups, {last}) == expected > 0.0


def test_sender_is_flagged_once_per_incarnation() -> None:
    statistics = MismatchStatistics(bound=0.1)
    for _ in range(5):
        statistics.record({"ann/0": FAR})
    assert list(statistics.flag_senders()) == ["ann/0"]
    statistics.record({"ann/0": FAR, "ann/1": NEAR})
    statistics.record({"ann/1": NEAR})
    assert statistics.flag_senders() == {}


def test_mismatch_mean_covers_the_window() -> None:
    statistics = MismatchStatistics(bound=0.1)
    statistics.record({"ann/0": Mismatch(100.0, 10.0)})
    for _ in range(statistics.window):
        statistics.record({"ann/0": NEAR})
    assert statistics.mean("ann/0") == pytest.approx(0.01)


def test_least_recent_senders_are_forgotten() -> None:
    statistics = MismatchStatistics(bound=0.1, max_senders=2)
    for sender in ("ann/0", "bob/0", "ann/0", "cid/0"):
        statistics.record({sender: FAR})
    assert (statistics.mean("bob/0"), statistics.mean("ann/0")) == (0, pytest.approx(0.3))


def test_mismatch_metrics_are_the_means_of_generators() -> None:
    # two starts of ann in one step: 3.1 over 20 tokens
    row = mismatch_metrics({"ann/00ff": FAR, "ann/ff00": NEAR, "bob/00ff": NEAR})
    assert row == {
        "gen/ann/mismatch_kl": pytest.approx(0.155), "gen/bob/mismatch_kl": pytest.approx(0.01),
    }  # fmt: skip


def test_names_of_generators_are_bounded() -> None:
    names = [f"gen{number}" for number in range(MAX_NAMES + 1)]
    groups = [replace(GROUPS[0], generator_id=name) for name in [*names, *names]]
    row = describe_groups(groups, step=8)
    assert row["num_groups"] == 2 * len(names)
    row |= mismatch_metrics({f"{name}/00ff": NEAR for name in names})
    for metric, value in (("groups", 2), ("step", 6), ("mismatch_kl", NEAR.mean)):
        expected = dict.fromkeys(names[:MAX_NAMES], value)
        assert generator_numbers(row, metric) == expected
