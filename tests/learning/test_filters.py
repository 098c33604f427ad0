from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from sample_data import group_of, rollout_with

from peralta_zmq.learning.advantages import Filter, apply_filters, gibberish, overlong, repetition
from peralta_zmq.rollout import Rollout


def rollout_of(
    logprobs: list[float], token_ids: list[int] | None = None, *, finish_reason: str = "stop"
) -> Rollout:
    """A prompt of two tokens, which are rare and certain, and these generated ones."""
    total = len(logprobs) + 2
    return Rollout(
        token_ids=np.array([9999, 9999, *(token_ids or [5] * len(logprobs))], np.int32),
        loss_mask=np.arange(total) >= 2,
        logprobs=np.array([0, 0, *logprobs], np.float32),
        policy_steps=np.array([-1, -1, *([0] * len(logprobs))], np.int32),
        reward=1.0,
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )


# -ln(1000) - 2 = -8.907755


@pytest.mark.parametrize(
    ("token_id", "logprob", "detected"),
    [(600, -8.95, True), (600, -8.85, False), (500, -8.95, False), (501, -8.95, True)],
)
def test_gibberish_detects_rare_improbable_token(
    token_id: int, logprob: float, detected: bool
) -> None:
    rollout = rollout_of([-0.1, logprob, -0.1], [5, token_id, 700])
    assert gibberish(rollout, vocab_size=1000, token_id_threshold=500) is detected


def test_gibberish_threshold_follows_logprob_offset() -> None:
    rollout = rollout_of([-8.0], [600])
    found = [
        gibberish(rollout, vocab_size=1000, token_id_threshold=500, logprob_offset=offset)
        for offset in (1.0, 1.2)  # -7.907755, -8.107755
    ]
    assert found == [True, False]


def test_gibberish_ignores_vocabulary_below_threshold() -> None:
    rollout = rollout_of([-50.0], [999])
    assert not gibberish(rollout, vocab_size=1000, token_id_threshold=1000)
    assert not gibberish(rollout, vocab_size=1000)
    assert gibberish(rollout, vocab_size=1001, token_id_threshold=998)


SURE, UNSURE = math.log(0.995), math.log(0.985)


@pytest.mark.parametrize(
    ("logprobs", "detected"),
    [
        ([SURE] * 4, True),
        ([SURE] * 3, False),  # the certain prompt does not count
        ([SURE] * 3 + [UNSURE] + [SURE] * 3, False),
        ([UNSURE] + [SURE] * 4 + [UNSURE], True),
        ([UNSURE] * 9, False),
    ],
)
def test_repetition_detects_window_of_certain_tokens(logprobs: list[float], detected: bool) -> None:
    assert repetition(rollout_of(logprobs), max_completion_length=100, window=4) is detected


@pytest.mark.parametrize(("length", "detected"), [(16, True), (17, True), (18, False)])
def test_repetition_window_is_at_most_half_of_max_length(length: int, detected: bool) -> None:
    # halves of 16, 17 and 18: 8, 8 and 9
    assert repetition(rollout_of([SURE] * 8), max_completion_length=length) is detected


def test_repetition_follows_prob_threshold() -> None:
    rollout = rollout_of([UNSURE] * 4)
    assert repetition(rollout, max_completion_length=8, prob_threshold=0.98)


def test_overlong_detects_finish_reason_length() -> None:
    assert overlong(rollout_of([-1.0], finish_reason="length"))
    assert not overlong(rollout_of([-1.0]))


def long_rollout() -> Rollout:
    return rollout_with(0.0, finish_reason="length")


PLAIN = group_of([1, 0])
GROUP = dataclasses.replace(PLAIN, rollouts=(*PLAIN.rollouts, long_rollout(), long_rollout()))


def test_enforced_filter_removes_detected_rollouts() -> None:
    stays, metrics = apply_filters([PLAIN, GROUP], [Filter("overlong", overlong, enforce=True)])
    assert stays == [[True, True], [True, True, False, False]]
    assert metrics == {"filter/overlong": 1 / 3, "filter/taken_out": 1 / 3}


def test_filter_without_enforce_only_counts() -> None:
    stays, metrics = apply_filters([GROUP], [Filter("overlong", overlong)])
    assert stays == [[True] * 4]
    assert metrics == {"filter/overlong": 0.5, "filter/taken_out": 0}


def test_rollout_detected_twice_is_counted_once() -> None:
    both = [Filter("overlong", overlong, enforce=True), Filter("all", lambda _: True, enforce=True)]
    stays, metrics = apply_filters([GROUP], both)
    assert stays == [[False] * 4]
    assert metrics == {"filter/overlong": 0.5, "filter/all": 1, "filter/taken_out": 1}


def test_no_filters_keep_all_and_report_nothing() -> None:
    assert apply_filters([PLAIN], []) == ([[True, True]], {})
