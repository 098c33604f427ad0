"""Nothing lost on the way: what is kept, what is sent again, and when."""

from __future__ import annotations

import pytest

from peralta_zmq.wire import Announcement, Outbox, outbox

ME = "me/00"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(outbox.time, "monotonic", lambda: now[0])
    return now


def holding(*sequences: int, limit: int = 64) -> Outbox:
    kept = Outbox(ME, limit=limit)
    for sequence in sequences:
        kept.add(sequence, b"%d" % sequence)
    return kept


def said(
    durable: int,
    highest_received: int | None = None,
    *,
    received: int | None = None,
    incarnation: bytes = b"1",
    waiting: bool = False,
) -> Announcement:
    """All that came is durable, unless `received` says that more came, and nothing is missing."""
    received = durable if received is None else received
    highest_received = received if highest_received is None else highest_received
    return Announcement(
        "run",
        incarnation=incarnation,
        waiting=waiting,
        received={ME: received},
        durable={ME: durable},
        highest_received={ME: highest_received},
    )


def test_what_is_settled_is_forgotten() -> None:
    kept = holding(0, 1, 2, 3)
    assert kept.frames_to_resend(said(1)) == []
    assert (len(kept), kept.min_sequence) == (2, 2)


def test_what_has_come_frees_the_window_and_is_kept() -> None:
    kept = holding(0, 1, 2, 3)
    kept.frames_to_resend(said(0, received=2))
    assert (kept.in_flight, len(kept), kept.min_sequence) == (1, 3, 1)


def test_what_was_never_heard_of_fills_the_window() -> None:
    kept = holding(0, 1, 2)
    kept.frames_to_resend(Announcement("run", incarnation=b"1"))
    assert kept.in_flight == 3


def test_window_stays_free_when_a_trainer_forgets_whom_it_has_not_heard_lately() -> None:
    kept = holding(0, 1, 2)
    kept.frames_to_resend(said(0, received=2))
    kept.frames_to_resend(Announcement("run", incarnation=b"1"))
    assert (kept.in_flight, len(kept)) == (0, 2)


def test_what_came_but_is_not_durable_is_not_sent_again_for_a_gap_behind_it() -> None:
    kept = holding(0, 1, 2, 3, 4)
    assert kept.frames_to_resend(said(0, received=1, highest_received=4)) == [b"2", b"3"]
    assert kept.resent == 2


def test_what_came_but_was_not_durable_is_sent_again_to_a_restarted_trainer() -> None:
    kept = holding(0, 1, 2, 3)
    kept.frames_to_resend(said(0, received=3))
    assert kept.frames_to_resend(said(1, incarnation=b"2")) == [b"2", b"3"]
    assert kept.in_flight == 2


def test_what_is_merely_under_way_is_not_sent_again() -> None:
    kept = holding(0, 1, 2, 3)
    assert kept.frames_to_resend(said(0)) == []
    assert kept.frames_to_resend(None) == []


def test_a_gap_is_filled_in_order() -> None:
    kept = holding(0, 1, 2, 3, 4)
    assert kept.frames_to_resend(said(0, highest_received=3)) == [b"1", b"2"]


def test_a_gap_is_filled_once_until_an_announcement_can_tell_of_it(clock: list[float]) -> None:
    kept = holding(0, 1, 2)
    kept.frames_to_resend(said(0, highest_received=2))
    assert kept.frames_to_resend(said(0, highest_received=2)) == []
    clock[0] += outbox.RESEND_SECONDS
    assert kept.frames_to_resend(said(0, highest_received=2)) == [b"1"]


def test_the_last_ones_are_sent_again_when_a_trainer_goes_on_waiting(clock: list[float]) -> None:
    kept, sent = holding(0, 1, 2), []
    for _ in range(40):
        clock[0] += 1.0
        sent.append(kept.frames_to_resend(said(0, waiting=True)))
    again = [at for at, frames in enumerate(sent) if frames]
    assert sent[again[0]] == [b"1", b"2"]
    assert again[0] <= 10 and again[1] - again[0] > outbox.IDLE_SECONDS


@pytest.mark.parametrize("reason", ["not waiting", "not heard", "it comes", "more is sent"])
def test_what_may_still_come_is_not_sent_again(clock: list[float], reason: str) -> None:
    kept, old = holding(*range(100), limit=200), said(0, waiting=True)
    for number in range(1, 40):
        clock[0] += 1.0
        heard = said(
            0, received=number if reason == "it comes" else 0, waiting=reason != "not waiting"
        )
        if reason == "more is sent":
            kept.add(99 + number, b"more")
        assert kept.frames_to_resend(old if reason == "not heard" else heard) == []


def test_a_restarted_trainer_gets_all_that_is_not_settled_at_once() -> None:
    kept = holding(0, 1, 2, 3)
    kept.frames_to_resend(said(1, incarnation=b"1"))
    assert kept.frames_to_resend(said(0, incarnation=b"2")) == [b"2", b"3"]
    assert kept.frames_to_resend(said(0, incarnation=b"2")) == []


def test_the_first_trainer_heard_is_not_a_restarted_one() -> None:
    assert holding(0, 1).frames_to_resend(Announcement("run", incarnation=b"1")) == []


def test_a_full_outbox_gives_up_its_oldest_and_counts_it() -> None:
    kept = holding(0, 1, 2, limit=2)
    assert (len(kept), kept.min_sequence, kept.lost) == (2, 1, 1)


def test_the_floor_of_an_empty_outbox_is_the_next_sequence() -> None:
    kept = holding(0, 1)
    kept.frames_to_resend(said(1))
    assert kept.min_sequence == 2
