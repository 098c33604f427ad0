"""Outbox: retention and resending of groups that are not yet durable."""

from __future__ import annotations

import pytest

from peralta_zmq.wire import Announcement, Outbox, outbox

SENDER = "ann/00"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(outbox.time, "monotonic", lambda: now[0])
    return now


def outbox_with(*sequences: int, limit: int = 64) -> Outbox:
    frames = Outbox(SENDER, limit=limit)
    for sequence in sequences:
        frames.add(sequence, b"%d" % sequence)
    return frames


def acknowledging(
    durable: int,
    highest_received: int | None = None,
    *,
    received: int | None = None,
    incarnation: bytes = b"1",
    waiting: bool = False,
) -> Announcement:
    """By default every received group is durable and no group is missing."""
    received = durable if received is None else received
    highest_received = received if highest_received is None else highest_received
    return Announcement(
        "run", incarnation=incarnation, waiting=waiting, received={SENDER: received},
        durable={SENDER: durable}, highest_received={SENDER: highest_received},
    )  # fmt: skip


def test_outbox_forgets_durable_frames() -> None:
    frames = outbox_with(0, 1, 2, 3)
    assert frames.frames_to_resend(acknowledging(1)) == []
    assert (len(frames), frames.min_sequence) == (2, 2)


def test_outbox_keeps_frames_that_are_received_but_not_durable() -> None:
    frames = outbox_with(0, 1, 2, 3)
    frames.frames_to_resend(acknowledging(0, received=2))
    assert (frames.in_flight, len(frames), frames.min_sequence) == (1, 3, 1)


def test_outbox_counts_unacknowledged_frames_as_in_flight() -> None:
    frames = outbox_with(0, 1, 2)
    frames.frames_to_resend(Announcement("run", incarnation=b"1"))
    assert frames.in_flight == 3


def test_outbox_keeps_received_when_the_trainer_omits_the_sender() -> None:
    frames = outbox_with(0, 1, 2)
    frames.frames_to_resend(acknowledging(0, received=2))
    frames.frames_to_resend(Announcement("run", incarnation=b"1"))
    assert (frames.in_flight, len(frames)) == (0, 2)


def test_outbox_does_not_resend_received_frames_for_a_later_gap() -> None:
    frames = outbox_with(0, 1, 2, 3, 4)
    assert frames.frames_to_resend(acknowledging(0, 4, received=1)) == [b"2", b"3"]
    assert frames.resent == 2


def test_outbox_resends_groups_that_a_restarted_trainer_lost() -> None:
    frames = outbox_with(0, 1, 2, 3)
    frames.frames_to_resend(acknowledging(0, received=3))
    assert frames.frames_to_resend(acknowledging(1, incarnation=b"2")) == [b"2", b"3"]
    assert frames.in_flight == 2
    assert frames.frames_to_resend(acknowledging(1, incarnation=b"2")) == []


def test_outbox_does_not_resend_frames_in_flight() -> None:
    frames = outbox_with(0, 1, 2, 3)
    assert frames.frames_to_resend(acknowledging(0)) == []
    assert frames.frames_to_resend(None) == []


def test_outbox_fills_a_gap_in_order() -> None:
    assert outbox_with(0, 1, 2, 3, 4).frames_to_resend(acknowledging(0, 3)) == [b"1", b"2"]


def test_outbox_fills_a_gap_once_per_resend_interval(clock: list[float]) -> None:
    frames = outbox_with(0, 1, 2)
    frames.frames_to_resend(acknowledging(0, 2))
    assert frames.frames_to_resend(acknowledging(0, 2)) == []
    clock[0] += outbox.RESEND_SECONDS
    assert frames.frames_to_resend(acknowledging(0, 2)) == [b"1"]


def test_outbox_resends_the_last_frames_to_a_trainer_that_keeps_waiting(
    clock: list[float],
) -> None:
    frames, resent = outbox_with(0, 1, 2), []
    for _ in range(40):
        clock[0] += 1.0
        resent.append(frames.frames_to_resend(acknowledging(0, waiting=True)))
    seconds = [second for second, batch in enumerate(resent) if batch]
    assert resent[seconds[0]] == [b"1", b"2"]
    assert seconds[0] <= 10 and seconds[1] - seconds[0] > outbox.IDLE_SECONDS


@pytest.mark.parametrize("case", ["not waiting", "no announcement", "receiving", "sending"])
def test_outbox_does_not_resend_frames_that_may_still_arrive(clock: list[float], case: str) -> None:
    frames, old = outbox_with(*range(100), limit=200), acknowledging(0, waiting=True)
    for number in range(1, 40):
        clock[0] += 1.0
        received = number if case == "receiving" else 0
        new = acknowledging(0, received=received, waiting=case != "not waiting")
        if case == "sending":
            frames.add(99 + number, b"more")
        assert frames.frames_to_resend(old if case == "no announcement" else new) == []


def test_outbox_resends_nothing_at_the_first_announcement() -> None:
    assert outbox_with(0, 1).frames_to_resend(Announcement("run", incarnation=b"1")) == []


def test_full_outbox_drops_its_oldest_frame_and_counts_it() -> None:
    frames = outbox_with(0, 1, 2, limit=2)
    assert (len(frames), frames.min_sequence, frames.lost) == (2, 1, 1)


def test_min_sequence_of_an_empty_outbox_is_the_next_sequence() -> None:
    frames = outbox_with(0, 1)
    frames.frames_to_resend(acknowledging(1))
    assert frames.min_sequence == 2
