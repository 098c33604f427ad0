from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_data import group_of

from peralta_zmq import wire
from peralta_zmq.learning import admission as admission_module
from peralta_zmq.learning.admission import Admission, Ledger
from peralta_zmq.rollout import RolloutGroup


@pytest.mark.parametrize(
    ("max_steps", "group", "step", "outcome"),
    [
        *((8, group_of([1, 0]), step, "trained") for step in (1, 8, 9)),  # staleness 0, 7 and 8
        (8, group_of([1, 0]), 10, "stale"),
        (0, group_of([1, 0], policy_step=4), 5, "trained"),  # the newest weights
        (0, group_of([1, 0], policy_step=3), 5, "stale"),
        (8, group_of([1, 0], policy_step=5), 5, "abandoned"),
        (8, group_of([1, 0], policy_step=9), 5, "abandoned"),
        (8, group_of([1, 0], weights_id="abandoned"), 5, "abandoned"),
        (8, group_of([1, 1]), 1, "no_signal"),
        (8, replace(group_of([1, 0]), rollouts=()), 1, "invalid"),
    ],
)
def test_admission_settles_group_with_its_outcome(
    max_steps: int, group: RolloutGroup, step: int, outcome: str
) -> None:
    admission = Admission(max_steps, abandoned={"abandoned"})
    assert admission.admit(group, step=step) == outcome
    assert admission.ledger.settled(group.sender) == 0
    assert admission.ledger.outcomes == {outcome: 1}


def test_admission_after_the_last_step_accepts_only_evaluations() -> None:
    admission = Admission(8, is_over=True)
    assert admission.admit(group_of([1, 0], group_number=0), step=5) == "abandoned"
    evaluated = group_of([1, 0], group_number=1, policy_step=4, evaluation_step=4)
    assert admission.admit(evaluated, step=5) == "evaluated"


@pytest.mark.parametrize(("step", "outcome"), [(1, "trained"), (10, "stale")])
def test_admission_drops_and_counts_duplicate(step: int, outcome: str) -> None:
    admission, group = Admission(8), group_of([1, 0], group_number=3)
    assert [admission.admit(group, step=step) for _ in range(2)] == [outcome, "duplicate"]
    assert (admission.duplicates, admission.ledger.outcomes) == (1, {outcome: 1})


@pytest.mark.parametrize(
    "field", [{"group_number": 2}, {"incarnation": b"second!!"}, {"generator_id": "bob"}], ids=repr
)
def test_admission_accepts_lower_group_number_that_is_new(field: dict[str, Any]) -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0], group_number=3), step=1)
    assert admission.admit(group_of([1, 0], **field), step=1) == "trained"


def test_ledger_restored_from_json_detects_duplicates() -> None:
    before = Admission(8)
    before.admit(group_of([1, 0], group_number=3), step=1)
    saved = json.loads(json.dumps(before.ledger.saved()))
    after = Admission(8, ledger=Ledger(saved))
    assert after.admit(group_of([1, 0], group_number=3), step=1) == "duplicate"
    assert after.admit(group_of([1, 0], group_number=0), step=1) == "trained"


def test_ledger_gap_holds_settled_until_filled() -> None:
    ledger = Ledger()
    marks = []
    for group_number in (0, 2, 3, 1):
        ledger.settle("a", group_number, "trained")
        marks.append((ledger.settled("a"), ledger.highest("a")))
    assert marks == [(0, 0), (0, 2), (0, 3), (3, 3)]


def test_ledger_memory_is_bounded_for_jumping_group_numbers() -> None:
    ledger = Ledger()
    for group_number in range(0, 40_000, 2):
        assert ledger.settle("a", group_number, "trained")
    assert len(json.dumps(ledger.saved())) < 10_000
    assert not ledger.settle("a", 39_998, "trained")


def test_admission_rejects_group_with_one_abandoned_token() -> None:
    first, second = group_of([1, 0], policy_step=4).rollouts
    second.policy_steps[-1] = 5
    group = replace(group_of([1, 0], policy_step=4), rollouts=(first, second))
    received = wire.decode_group(wire.encode_group(group), wire.GroupLimits(64))
    for copy in (group, received):
        assert Admission(8).admit(copy, step=5) == "abandoned"
        assert Admission(8).admit(copy, step=6) == "trained"


def test_group_number_far_above_all_others_is_not_plausible() -> None:
    ledger, limit = Ledger(), admission_module.MAX_JUMP
    assert ledger.is_plausible("a", limit - 1) and not ledger.is_plausible("a", limit)
    ledger.settle("a", 5, "trained")
    assert ledger.is_plausible("a", limit + 5) and not ledger.is_plausible("a", limit + 6)


def test_ledger_counts_groups_missing_below_min_group_number_as_lost() -> None:
    ledger = Ledger()
    for group_number, min_group_number in ((0, 0), (3, 0), (6, 5)):  # 1, 2 and 4 never came
        ledger.settle("a", group_number, "trained", min_group_number=min_group_number)
    assert ledger.outcomes == {"trained": 3, "lost": 3}
    assert (ledger.settled("a"), ledger.highest("a")) == (4, 6)
    assert not ledger.settle("a", 2, "trained")


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30), st.integers(0, 30)), max_size=60)
)
def test_ledger_outcomes_sum_to_settled_groups(messages: list[tuple[str, int, int]]) -> None:
    ledger = Ledger()
    for sender, group_number, below in messages:
        ledger.settle(sender, group_number, "trained", min_group_number=min(below, group_number))
        ledger = Ledger(json.loads(json.dumps(ledger.saved())))
        assert ledger.total == sum(ledger.outcomes.values())


def test_ledger_copy_is_independent() -> None:
    ledger = Ledger()
    for sender, group_number in (("a", 0), ("a", 2), ("b", 3)):
        ledger.settle(sender, group_number, "trained")
    copied, saved = ledger.copy(), ledger.saved()
    for sender, group_number in (("a", 1), ("b", 5), ("c", 0)):
        ledger.settle(sender, group_number, "stale")
    assert copied.saved() == saved != ledger.saved()


def least_seconds(call: Callable[[], object]) -> float:
    """CPU time of a call, the least of five."""
    seconds: list[float] = []
    for _ in range(5):
        started = time.thread_time()
        call()
        seconds.append(time.thread_time() - started)
    return min(seconds)


def test_ledger_time_per_group_does_not_grow_with_gaps() -> None:
    def settle_100(ledger: Ledger) -> None:
        for _ in range(100):  # group_number 0 stays missing
            ledger.settle("a", max(2, ledger.highest("a") + 1), "stale")

    few, many = (
        Ledger({
            "senders": {f"b/{number}": (-1, [1]) for number in range(num)},
            "outcomes": {"stale": num},
            "forgotten": 0,
        })
        for num in (1, 60_000)
    )  # fmt: skip
    expected = least_seconds(lambda: settle_100(few))
    assert least_seconds(lambda: settle_100(many)) < 10 * expected + 1e-3


def test_ledger_counts_groups_of_forgotten_senders() -> None:
    ledger = Ledger(max_senders=2)
    for sender in ("a", "b", "a", "c"):
        ledger.settle(sender, ledger.highest(sender) + 1, "trained")
    assert list(ledger.settled_by_sender) == ["a", "c"]
    assert ledger.total == 4 == ledger.outcomes["trained"]


@pytest.mark.parametrize("width", [1, 5])
def test_ledger_closes_gaps_of_least_recent_sender_at_limit(width: int) -> None:
    ledger = Ledger(max_above=20)
    for incarnation in range(12):
        assert ledger.settle("honest", 1 + incarnation, "trained")  # 0 is sent again in the end
        for number in range(1, width + 1):
            assert ledger.settle(f"hostile/{incarnation}", 2 * number, "stale")
    above = [len(above) for _, above in ledger.saved()["senders"].values()]
    assert sum(above) <= 20
    assert ledger.settle("honest", 0, "trained")
    again = Ledger(json.loads(json.dumps(ledger.saved())))
    assert again.total == ledger.total == sum(ledger.outcomes.values())


@pytest.mark.parametrize(
    ("rewards", "decision"),
    [
        ([0, 0, 0], "filtered"),
        ([1, 1, 1], "filtered"),
        ([0.5, 0.5], "no_signal"),
        ([2, 0], "filtered"),  # its mean is 1
        ([0, 1], "trained"),
    ],
)
def test_difficulty_filtering_drops_mean_reward_zero_and_one(
    rewards: list[float], decision: str
) -> None:
    assert (
        Admission(8, online_difficulty_filtering=True).admit(group_of(rewards), step=1) == decision
    )
    assert Admission(8).admit(group_of(rewards), step=1) != "filtered"


def test_admission_never_trains_evaluation_group() -> None:
    admission = Admission(0)
    group = group_of([1, 0], evaluation_step=3)
    assert [admission.admit(group, step=step) for step in (90, 91)] == ["evaluated", "duplicate"]
    assert admission.ledger.outcomes == {"evaluated": 1}
    abandoned = Admission(0, abandoned={group_of([1, 0]).weights_id})
    assert abandoned.admit(group, step=90) == "abandoned"
