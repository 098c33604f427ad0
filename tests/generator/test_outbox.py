"""Outbox: retention and resending of groups that are not yet durable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peralta_zmq.generator import trainer_connection
from peralta_zmq.generator.trainer_connection import Outbox
from peralta_zmq.wire import Announcement

SENDER = "ann/00"
UNLISTED = Announcement("run", incarnation=b"1")  # acknowledges nothing


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(trainer_connection.time, "monotonic", lambda: now[0])
    return now


def outbox_with(num_groups: int, *, limit: int = 64) -> Outbox:
    """Each frame is the text of its sequence."""
    outbox = Outbox(SENDER, limit=limit)
    for sequence in range(num_groups):
        outbox.add(b"%d" % sequence)
    return outbox


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
        "run",
        incarnation=incarnation,
        waiting=waiting,
        received={SENDER: received},
        durable={SENDER: durable},
        highest_received={SENDER: highest_received},
    )


def test_outbox_forgets_durable_frames_only() -> None:
    outbox = outbox_with(4)
    assert outbox.frames_to_resend(acknowledging(0, received=2)) == []
    assert (outbox.num_undelivered, len(outbox), outbox.min_sequence) == (1, 3, 1)
    outbox.frames_to_resend(acknowledging(3))
    assert (outbox.num_undelivered, len(outbox), outbox.min_sequence) == (0, 0, 4)


def test_outbox_keeps_received_when_the_trainer_omits_the_sender() -> None:
    outbox = outbox_with(3)
    assert outbox.frames_to_resend(UNLISTED) == []
    assert outbox.num_undelivered == 3
    outbox.frames_to_resend(acknowledging(0, received=2))
    outbox.frames_to_resend(UNLISTED)
    assert (outbox.num_undelivered, len(outbox)) == (0, 2)


def test_num_pending_keeps_the_last_known_number_of_consumed_groups() -> None:
    outbox = outbox_with(10)
    for announcement, num_pending in (
        (UNLISTED, 10), (replace(UNLISTED, consumed={SENDER: 6}), 3), (UNLISTED, 3),
    ):  # fmt: skip
        outbox.frames_to_resend(announcement)
        assert outbox.num_pending == num_pending


def test_outbox_does_not_resend_received_frames_for_a_later_gap() -> None:
    outbox = outbox_with(5)
    assert outbox.frames_to_resend(acknowledging(0, 4, received=1)) == [b"2", b"3"]
    assert outbox.num_resent == 2


def test_outbox_resends_groups_that_a_restarted_trainer_lost() -> None:
    outbox = outbox_with(4)
    outbox.frames_to_resend(acknowledging(0, received=3))
    assert outbox.frames_to_resend(acknowledging(1, incarnation=b"2")) == [b"2", b"3"]
    assert outbox.num_undelivered == 2
    assert outbox.frames_to_resend(acknowledging(1, incarnation=b"2")) == []


def test_outbox_fills_a_gap_in_order_once_per_resend_interval(clock: list[float]) -> None:
    outbox = outbox_with(5)
    assert outbox.frames_to_resend(acknowledging(0)) == []  # the others may be in transit
    assert outbox.frames_to_resend(acknowledging(0, 3)) == [b"1", b"2"]
    assert outbox.frames_to_resend(acknowledging(0, 3)) == []
    clock[0] += trainer_connection.RESEND_SECONDS
    assert outbox.frames_to_resend(acknowledging(0, 3)) == [b"1", b"2"]


def test_outbox_resends_the_last_frames_to_a_trainer_that_keeps_waiting(
    clock: list[float],
) -> None:
    outbox, resent = outbox_with(3), []
    for _ in range(40):
        clock[0] += 1.0
        resent.append(outbox.frames_to_resend(acknowledging(0, waiting=True)))
    seconds = [second for second, batch in enumerate(resent) if batch]
    assert resent[seconds[0]] == [b"1", b"2"]
    assert seconds[0] <= 10 and seconds[1] - seconds[0] > trainer_connection.IDLE_SECONDS


@pytest.mark.parametrize("case", ["not waiting", "no announcement", "receiving", "sending"])
def test_outbox_does_not_resend_frames_that_may_still_arrive(clock: list[float], case: str) -> None:
    outbox, old = outbox_with(100, limit=200), acknowledging(0, waiting=True)
    for number in range(1, 40):
        clock[0] += 1.0
        received = number if case == "receiving" else 0
        new = acknowledging(0, received=received, waiting=case != "not waiting")
        if case == "sending":
            outbox.add(b"more")
        assert outbox.frames_to_resend(old if case == "no announcement" else new) == []


def test_full_outbox_drops_its_oldest_frame_and_counts_it() -> None:
    outbox = outbox_with(3, limit=2)
    assert (len(outbox), outbox.min_sequence, outbox.num_lost) == (2, 1, 1)
