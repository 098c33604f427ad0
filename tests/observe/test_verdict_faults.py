"""Faults of the learning, in rows that real runs wrote: SmolLM2-135M-Instruct, one generator.

Each fault is named from the third step on, of five.
"""

from __future__ import annotations

import pytest

from peralta_zmq.observe.metrics import Row
from peralta_zmq.observe.verdict import Verdict, verdict

START: Row = {"event": "start", "time": 1000.0, "step": 0}
JOIN: Row = {"event": "join", "time": 1001.0, "generator": "a", "incarnation": "1"}
COLUMNS = (
    *("reward", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio"),
    *("completions/special_token_ratio", "gen/a/mismatch_kl", "entropy", "grad_norm"),
)


def rows_of(table: list[tuple[float | None, ...]], **fields: object) -> list[Row]:
    """Rows with these values of COLUMNS (None: not in the row), steps of 20 s."""
    rows: list[Row] = []
    for step, values in enumerate(table, start=1):
        measured = dict(zip(COLUMNS, values, strict=True))
        row: Row = {
            "step": step, "time": 1000.0 + 20 * step, "step_time": 20.0, "num_groups": 8,
            "learning_rate": 2e-4 * (1 - step / 5), "completions/mean_turns": 1.0,
            "time/wait_for_batch": 0.02, "weights/moved": 0.99, "gen/a/tokens_per_s": 100.0,
            "gen/a/blocked_frac": 0.92, "gen/a/step": step - 1,
        }  # fmt: skip
        rows.append(row | {k: v for k, v in measured.items() if v is not None} | fields)
    return rows


HIGH_RATE = [  # configs/extract.toml with a learning rate of 2e-4
    (0.25, 0.0, 31.6, 0.219, 0.0, 0.00131, 0.540, 0.415),
    (0.184, 0.0, 33.3, 0.234, 0.0, 0.83874, 0.366, 0.688),
    (0.215, 0.125, 33.4, 0.172, 0.0, 0.34763, 0.344, 1.246),
    (0.238, 0.0, 31.8, 0.234, 0.0, 0.4543, 0.260, 1.239),
    (0.18, 0.0, 34.2, 0.219, 0.0, 0.53562, 0.342, 2.647),
]
GOOD_RATE = [  # the same with 2e-6
    (0.293, 0.0, 31.8, 0.172, 0.0, 0.00073, 0.432, 0.347),
    (0.215, 0.0, 33.9, 0.281, 0.0, 0.00190, 0.494, 0.288),
    (0.258, 0.0, 31.8, 0.203, 0.0, 0.00151, 0.567, 0.351),
    (0.3125, 0.0, 32.6, 0.203, 0.0, 0.00182, 0.518, 0.403),
    (0.352, 0.0, 28.8, 0.078, 0.0, 0.00085, 0.348, 0.341),
]
SHORT_LIMIT = [  # word problems with at most 48 tokens
    (0.0, 1.0, 44.9, 0.8125, 0.0, None, None, 0.0),
    (0.0625, 0.75, 44.6, 0.75, 0.0, 0.00213, 1.559, 1.881),
    (0.125, 0.5, 44.6, 0.8125, 0.0, 0.00151, 1.439, 1.317),
    (0.3125, 0.25, 41.8, 0.5625, 0.0, 0.00129, 1.496, 1.360),
    (0.125, 0.5, 42.3, 0.6875, 0.0, 0.00145, 1.028, 1.509),
]
NO_END = [  # the same with 160 tokens, and files of the model that name another end token
    (0.0, 1.0, 160.0, 1.0, 0.5, None, None, 0.0),
    (0.0, 1.0, 160.0, 1.0, 0.375, None, None, 0.0),
    (0.0, 1.0, 160.0, 1.0, 0.25, None, None, 0.0),
    (0.0, 1.0, 160.0, 1.0, 0.375, None, None, 0.0),
    (0.0625, 0.75, 160.0, 1.0, 0.5625, 0.00177, 2.019, 1.065),
]
NO_REWARD = [  # the same with the right end token, and a reward function that returns 0
    (0.0, 1.0, 114.7, 0.3125, 0.0, None, None, 0.0),
    (0.0, 1.0, 85.9, 0.1875, 0.0, None, None, 0.0),
    (0.0, 1.0, 109.9, 0.3125, 0.0, None, None, 0.0),
    (0.0, 1.0, 87.6, 0.1875, 0.0, None, None, 0.0),
    (0.0, 1.0, 100.8, 0.5, 0.0, None, None, 0.0),
]
ALL_REWARD = [(1.0, *values[1:]) for values in NO_REWARD]
FAULTS = {
    "learning rate": (
        HIGH_RATE,
        "the learning rate is too high: mismatch_kl from 0.0013 to 0.84, ",
    ),
    "truncation": (SHORT_LIMIT, "% of completions are cut off at their limit, after 4"),
    "end token": (NO_END, "the end token never comes: 100% of completions are cut off at their "),
    "no reward": (NO_REWARD, "the reward is never given: every completion of the last "),
    "all reward": (ALL_REWARD, "the reward is always given: every completion of the last "),
}


@pytest.mark.parametrize("num_steps", [3, 4, 5])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_real_run_is_named_within_five_steps(fault: str, num_steps: int) -> None:
    table, sentence = FAULTS[fault]
    rows = rows_of(table)[:num_steps]
    for events in ([], [START, JOIN]):
        found = verdict(rows, events)
        assert sentence in found.sentence
        assert found.level == ("warn" if fault == "truncation" else "bad")
    complete = [START, JOIN, {"event": "complete", "time": 2000.0}]
    finished = verdict(rows, complete)
    assert finished.sentence == verdict(rows, [START, JOIN]).sentence
    assert bool(finished.advice) == (finished.level == "bad")


def test_sentences_of_the_faults_name_numbers_and_settings() -> None:
    assert verdict(rows_of(HIGH_RATE)) == Verdict(
        "the learning rate is too high: mismatch_kl from 0.0013 to 0.84, grad_norm from 0.41 to "
        "2.6, with the same engine and dtype",
        "lower train.learning_rate (up to 0.0002) to a tenth, in a new run, which may "
        "continue (run.fork, run.from_step) from a step that is kept before these steps",
        "bad",
    )
    assert verdict(rows_of(SHORT_LIMIT)).text == (
        "72% of completions are cut off at their limit, after 44 tokens on average; raise "
        "sampling.max_completion_length, or ask for shorter answers in data.system_prompt"
    )
    assert verdict(rows_of(NO_END)).text == (
        "the end token never comes: 100% of completions are cut off at their limit, after 160 "
        "tokens on average, and 41% go on after a special token that should have ended them; set "
        "eos_token_id in generation_config.json of the model to the token that ends its answers"
    )
    assert verdict(rows_of(NO_REWARD)).text == (
        "the reward is never given: every completion of the last 5 steps got 0.00; check the "
        "reward function (bin/doctor calls it on one completion) on a right answer; if it is "
        "correct, use easier problems"
    )


def test_one_generator_is_not_called_too_many() -> None:
    assert verdict(rows_of(GOOD_RATE)) == Verdict(
        "the trainer is the bottleneck: a is blocked 92% of its time until the trainer catches up",
        "use a faster device for the trainer",
    )


# The learning rate.


def test_large_mismatch_of_the_first_step_is_no_fault_of_the_learning_rate() -> None:
    """A generator with another dtype differs from its first step on."""
    rows = rows_of(HIGH_RATE, **{"gen/a/mismatch_kl": 0.4})
    assert "learning rate" not in verdict(rows).sentence


def test_mismatch_after_a_restart_of_the_generator_is_no_fault_of_the_learning_rate() -> None:
    rejoined = {**JOIN, "incarnation": "2", "time": 1021.0}  # with another dtype
    assert "learning rate" not in verdict(rows_of(HIGH_RATE), [START, JOIN, rejoined]).sentence


@pytest.mark.parametrize("fields", [
    {"entropy": 0.5, "grad_norm": 0.5, "reward": 0.3},  # nothing else diverges
    {"weights/moved": 0.2},  # updates are lost in rounding
])  # fmt: skip
def test_mismatch_alone_is_no_fault_of_the_learning_rate(fields: dict[str, float]) -> None:
    assert "learning rate" not in verdict(rows_of(HIGH_RATE, **fields)).sentence


def test_one_step_with_a_moderate_mismatch_is_no_fault() -> None:
    """mismatch_kl of a good run at 2e-5, near the limit."""
    values = (0.0015, 0.093, 0.015, 0.012, 0.112)
    table = [
        (*good[:5], value, good[6], 0.4 * step)
        for step, (good, value) in enumerate(zip(GOOD_RATE, values, strict=True), start=1)
    ]
    assert "learning rate" not in verdict(rows_of(table)).sentence


def test_fall_of_the_reward_or_growth_of_the_entropy_shows_a_divergence() -> None:
    for column, values in ((0, (0.8, 0.7, 0.04, 0.03, 0.1)), (6, (0.4, 0.5, 1.2, 2.0, 2.2))):
        table = [
            (*row[:column], value, *row[column + 1 : 7], 0.4)[:8]
            for row, value in zip(HIGH_RATE, values, strict=True)
        ]
        assert "the learning rate is too high" in verdict(rows_of(table)).sentence


def test_collapsed_policy_is_not_called_a_fault_of_the_reward() -> None:
    """Long after the divergence, no row has a mismatch."""
    mismatch: Row = {"event": "mismatch", "time": 1041.0, "generator": "a", "step": 2,
                     "mismatch_kl": 0.84, "initial_kl": 0.0013}  # fmt: skip
    rows = rows_of(NO_REWARD * 8)
    assert verdict(rows, [START, JOIN, mismatch]).sentence == (
        "the learning rate was too high: mismatch_kl rose from 0.0013 to 0.84 until step 2, and "
        "all groups have equal rewards now"
    )
    wrong_dtype = {**mismatch, "initial_kl": 0.8}
    earlier_session = [START, JOIN, mismatch, {"event": "resume", "time": 1050.0, "step": 2}]
    for events in ([START, JOIN, wrong_dtype], earlier_session):
        assert "the reward is never given" in verdict(rows, events).sentence


# Truncation and the end token.


def test_completions_that_all_reach_the_limit_name_both_causes() -> None:
    found = verdict(rows_of(NO_END, **{"completions/special_token_ratio": 0.0}))
    assert found.sentence == (
        "no completion ends: all are cut off at their limit, after 160 tokens on average"
    )
    assert found.advice.startswith("raise sampling.max_completion_length; if longer ones do not")


def test_truncation_of_episodes_names_their_turns() -> None:
    found = verdict(rows_of(SHORT_LIMIT, **{"completions/mean_turns": 2.5}))
    assert "raise sampling.max_completion_length or task.max_turns, or" in found.advice


@pytest.mark.parametrize(("clipped", "level", "sentence"), [
    (0.49, "warn", "the trainer is the bottleneck"),
    (0.5, "warn", "50% of completions are cut off"),
    (0.95, "warn", "95% of completions are cut off"),
])  # fmt: skip
def test_truncation_is_named_from_one_half_on(clipped: float, level: str, sentence: str) -> None:
    found = verdict(rows_of(GOOD_RATE, **{"completions/clipped_ratio": clipped}))
    assert found.level == level and found.sentence.startswith(sentence)


def test_truncation_explains_rewards_of_0_unless_some_completions_end() -> None:
    for clipped, sentence in ((0.95, "95% of completions"), (0.8, "the reward is never given")):
        found = verdict(rows_of(NO_REWARD, **{"completions/clipped_ratio": clipped}))
        assert found.level == "bad" and found.sentence.startswith(sentence)


def test_solved_task_may_be_cut_off() -> None:
    cut_off = {"completions/clipped_ratio": 1.0, "frac_reward_zero_std": 0.9}
    assert "solved" in verdict(rows_of(ALL_REWARD, **cut_off)).sentence


# The reward.


def test_reward_that_became_the_highest_is_a_solved_task() -> None:
    rows = rows_of([(0.4, 0.2, *ALL_REWARD[0][2:]), *ALL_REWARD])
    assert verdict(rows, [START, JOIN]).sentence.startswith("the task is solved")


def test_equal_rewards_that_a_loss_trains_on_are_no_fault() -> None:
    """As with a reward function that returns 0, and train.keep_zero_std."""
    assert "reward is never" not in verdict(rows_of(NO_REWARD, num_loss_tokens=900)).sentence


def test_lowest_reward_may_be_negative() -> None:
    found = verdict(rows_of(NO_REWARD, reward=-1.0))
    assert "the reward is never given" in found.sentence and "got -1.00" in found.sentence
