"""Trust by hand: who is too far off, after how many steps, and how often it is said."""

from __future__ import annotations

import pytest

from peralta_zmq.learning import logprob_mismatch as trust_module
from peralta_zmq.learning.logprob_mismatch import (
    FEWEST,
    WINDOW,
    Mismatch,
    MismatchStatistics,
    figures,
)

FAR, NEAR = Mismatch(3.0, 10.0), Mismatch(0.1, 10.0)  # .3 and .01 per token


def test_mean_is_per_token_and_not_per_step() -> None:
    trust = MismatchStatistics(bound=0.1)
    trust.note({"ann/0": Mismatch(1.0, 1.0)})
    trust.note({"ann/0": Mismatch(0.0, 9.0)})
    assert trust.mean("ann/0") == pytest.approx(0.1)
    assert trust.newly_suspect() == []  # at the bound, not above


def test_one_step_is_no_proof_and_two_are() -> None:
    trust = MismatchStatistics(bound=0.1)
    for step in range(FEWEST):
        assert trust.newly_suspect() == [], step
        trust.note({"ann/0": FAR, "bob/0": NEAR})
    assert trust.newly_suspect() == ["ann/0"]
    assert trust.suspects == {"ann/0": pytest.approx(0.3)}


def test_suspect_is_told_of_once_and_a_new_start_is_judged_anew() -> None:
    trust = MismatchStatistics(bound=0.1)
    for _ in range(5):
        trust.note({"ann/0": FAR})
    assert trust.newly_suspect() == ["ann/0"]
    trust.note({"ann/0": FAR, "ann/1": NEAR})
    trust.note({"ann/1": NEAR})
    assert trust.newly_suspect() == []


def test_only_the_last_steps_count() -> None:
    trust = MismatchStatistics(bound=0.1)
    trust.note({"ann/0": Mismatch(100.0, 10.0)})
    for _ in range(WINDOW):
        trust.note({"ann/0": NEAR})
    assert trust.mean("ann/0") == pytest.approx(0.01)


def test_senders_unseen_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust_module, "MAX_SENDERS", 2)
    trust = MismatchStatistics(bound=0.1)
    for sender in ("ann/0", "bob/0", "ann/0", "cid/0"):
        trust.note({sender: FAR})
    assert (trust.mean("bob/0"), trust.mean("ann/0")) == (0, pytest.approx(0.3))


def test_figures_are_named_after_the_generator() -> None:
    assert figures({"ann/00ff": FAR}) == {"gen/ann/mismatch_kl": pytest.approx(0.3)}
