from __future__ import annotations

import json

import pytest
from fakes import group_of

from peralta_zmq.learning.admission import Admission, Ledger, staleness


def test_group_sampled_from_the_newest_weights_is_not_stale() -> None:
    assert staleness(group_of([1, 0], policy_step=6), step=7) == 0


def test_staleness_counts_the_steps_taken_since() -> None:
    assert staleness(group_of([1, 0], policy_step=2), step=7) == 4


def test_group_from_weights_of_the_future_is_not_stale() -> None:
    assert staleness(group_of([1, 0], policy_step=9), step=7) == 0


@pytest.mark.parametrize(("step", "admitted"), [(1, True), (8, True), (9, True), (10, False)])
def test_group_is_admitted_up_to_the_bound_and_not_beyond(step: int, admitted: bool) -> None:
    # policy step 0: staleness 0, 7, 8 and 9
    assert Admission(8).admit(group_of([1, 0]), step=step) is admitted


def test_bound_of_zero_admits_the_newest_weights_only() -> None:
    admission = Admission(0)
    fresh, old = group_of([1, 0], policy_step=4), group_of([1, 0], policy_step=3, sequence=1)
    assert (admission.admit(fresh, step=5), admission.admit(old, step=5)) == (True, False)


def test_stale_group_is_counted() -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0]), step=10)
    assert admission.dropped == {"stale": 1}


def test_group_that_comes_twice_is_dropped_and_counted() -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0], sequence=3), step=1)
    assert not admission.admit(group_of([1, 0], sequence=3), step=1)
    assert admission.dropped == {"duplicate": 1}


def test_group_that_was_overtaken_is_still_admitted() -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0], sequence=3), step=1)
    assert admission.admit(group_of([1, 0], sequence=2), step=1)


def test_stale_group_that_comes_again_is_a_duplicate() -> None:
    admission = Admission(8)
    for _ in range(2):
        admission.admit(group_of([1, 0]), step=10)
    assert admission.dropped == {"stale": 1, "duplicate": 1}


def test_restarted_generator_may_count_from_zero_again() -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0], sequence=9), step=1)
    assert admission.admit(group_of([1, 0], sequence=0, boot=b"second!!"), step=1)


def test_generators_count_apart() -> None:
    admission = Admission(8)
    admission.admit(group_of([1, 0], sequence=9), step=1)
    assert admission.admit(group_of([1, 0], sequence=0, generator_id="bob"), step=1)


def test_ledger_of_an_earlier_start_is_honoured() -> None:
    before = Admission(8)
    before.admit(group_of([1, 0], sequence=3), step=1)
    saved = json.loads(json.dumps(before.ledger.saved()))
    after = Admission(8, ledger=Ledger(saved))
    assert not after.admit(group_of([1, 0], sequence=3), step=1)
    assert after.admit(group_of([1, 0], sequence=0), step=1)


def test_floor_of_a_group_settles_what_its_sender_has_given_up() -> None:
    ledger = Ledger()
    ledger.settle("a", 5, floor=5)
    assert (ledger.settled("a"), ledger.seen("a")) == (5, 5)
    assert not ledger.settle("a", 3)


def test_a_gap_holds_the_watermark_until_it_is_filled() -> None:
    ledger = Ledger()
    marks = []
    for sequence in (0, 2, 3, 1):
        ledger.settle("a", sequence)
        marks.append((ledger.settled("a"), ledger.seen("a")))
    assert marks == [(0, 0), (0, 2), (0, 3), (3, 3)]


def test_a_sender_never_heard_has_settled_nothing() -> None:
    assert (Ledger().settled("a"), Ledger().seen("a")) == (-1, -1)


def test_jumping_sequences_do_not_fill_memory() -> None:
    ledger = Ledger()
    for sequence in range(0, 40_000, 2):
        assert ledger.settle("a", sequence)
    assert len(json.dumps(ledger.saved())) < 10_000
    assert not ledger.settle("a", 39_998)
