"""Outbox: retention and resending of groups that are not yet durable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peralta_zmq.generator import trainer_link
from peralta_zmq.generator.trainer_link import Outbox
from peralta_zmq.wire import Announcement, SenderProgress

SENDER = "ann/00"
UNLISTED = Announcement("run", incarnation=b"1")  # acknowledges nothing


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(trainer_link.time, "monotonic", lambda: now[0])
    return now


def outbox_with(num_groups: int, *, limit: int = 64) -> Outbox:
    """Each frame is the text of its number, and has been sent."""
    outbox = Outbox(SENDER, limit=limit)
    for number in range(num_groups):
        outbox.add(b"%d" % number)
    sent(outbox)
    return outbox


def sent(outbox: Outbox) -> list[bytes]:
    """Send the queued frames."""
    frames = []
    while (frame := outbox.next_frame()) is not None:
        frames.append(frame)
        outbox.mark_sent()
    return frames


def acknowledging(
    durable: int,
    newest: int | None = None,
    *,
    settled: int | None = None,
    incarnation: bytes = b"1",
    waiting: bool = False,
    started_step: int = 0,
) -> Announcement:
    """Arguments are the numbers of groups; by default, every settled group is durable."""
    settled = durable if settled is None else settled
    newest = settled if newest is None else newest
    return Announcement(
        "run",
        incarnation=incarnation,
        waiting=waiting,
        started_step=started_step,
        senders={
            SENDER: SenderProgress(settled=settled + 1, settled_end=newest + 1, durable=durable + 1)
        },
    )


def resent(outbox: Outbox, announcement: Announcement) -> list[bytes]:
    """The frames to send again after an announcement."""
    outbox.acknowledge(announcement)
    outbox.queue_lost()
    return sent(outbox)


def test_outbox_forgets_durable_frames_only() -> None:
    outbox = outbox_with(4)
    assert resent(outbox, acknowledging(0, settled=2)) == []
    assert (outbox.num_unreceived, len(outbox), outbox.min_group_number) == (1, 3, 1)
    resent(outbox, acknowledging(3))
    assert (outbox.num_unreceived, len(outbox), outbox.min_group_number) == (0, 0, 4)


def test_outbox_keeps_received_when_the_trainer_omits_the_sender() -> None:
    outbox = outbox_with(3)
    assert resent(outbox, UNLISTED) == []
    assert outbox.num_unreceived == 3
    resent(outbox, acknowledging(0, settled=2))
    resent(outbox, UNLISTED)
    assert (outbox.num_unreceived, len(outbox)) == (0, 2)


def test_num_pending_keeps_the_last_known_number_of_consumed_groups() -> None:
    outbox = outbox_with(10)
    listed = replace(UNLISTED, senders={SENDER: SenderProgress(consumed=7)})
    for announcement, num_pending in ((UNLISTED, 10), (listed, 3), (UNLISTED, 3)):
        resent(outbox, announcement)
        assert outbox.num_pending == num_pending


def test_outbox_does_not_resend_received_frames_for_a_later_gap() -> None:
    outbox = outbox_with(5)
    assert resent(outbox, acknowledging(0, 4, settled=1)) == [b"2", b"3"]


def test_outbox_resends_groups_that_a_restarted_trainer_lost() -> None:
    outbox = outbox_with(4)
    resent(outbox, acknowledging(0, settled=3))
    assert resent(outbox, acknowledging(1, incarnation=b"2")) == [b"2", b"3"]
    assert outbox.num_unreceived == 2
    assert resent(outbox, acknowledging(1, incarnation=b"2")) == []


def test_outbox_fills_a_gap_in_order_once_per_resend_interval(clock: list[float]) -> None:
    outbox = outbox_with(5)
    assert resent(outbox, acknowledging(0)) == []  # the others may be in transit
    assert resent(outbox, acknowledging(0, 3)) == [b"1", b"2"]
    assert resent(outbox, acknowledging(0, 3)) == []
    clock[0] += 2.0
    assert resent(outbox, acknowledging(0, 3)) == [b"1", b"2"]


def test_outbox_resends_the_last_frames_to_a_trainer_that_keeps_waiting(
    clock: list[float],
) -> None:
    outbox, batches = outbox_with(3), []
    for _ in range(40):
        clock[0] += 1.0
        batches.append(resent(outbox, acknowledging(0, waiting=True)))
    seconds = [second for second, batch in enumerate(batches) if batch]
    assert batches[seconds[0]] == [b"1", b"2"]
    assert seconds[0] <= 10 and seconds[1] - seconds[0] > 5.0


@pytest.mark.parametrize(
    ("case", "seconds"),
    [("waiting", 10), ("fast steps", 10), ("long step", 0), ("silence", 0), ("receiving", 0),
     ("nothing sent", 0), ("large frame", 10 - 8)],
)  # fmt: skip
def test_undelivered_time_counts_only_while_the_trainer_takes_groups(
    clock: list[float], case: str, seconds: float
) -> None:
    outbox, resends = outbox_with(0 if case in ("nothing sent", "large frame") else 20), 0
    if case == "large frame":
        outbox.add(bytes(10**6))  # 8 s over a link of 1 Mbit/s
        sent(outbox)
    first = acknowledging(-1)
    outbox.acknowledge(first)
    for number in range(1, 11):
        clock[0] += 1.0
        new = acknowledging(
            -1,
            settled=number if case == "receiving" else -1,
            waiting=case not in ("fast steps", "long step"),
            started_step=number if case == "fast steps" else 0,
        )
        resends += bool(resent(outbox, first if case == "silence" else new))
    assert outbox.unreceived_seconds == pytest.approx(seconds, abs=0.01)
    assert (resends > 0) == (seconds > 5.0)


def test_full_outbox_drops_its_oldest_frame_and_counts_it() -> None:
    outbox = outbox_with(3, limit=2)
    assert (len(outbox), outbox.min_group_number, outbox.num_lost) == (2, 1, 1)


def test_frames_too_large_for_a_restarted_trainer_are_dropped_and_counted() -> None:
    outbox = outbox_with(3)
    outbox.add(b"large")  # made with former settings
    outbox.add(b"4")
    sent(outbox)
    restarted = replace(acknowledging(2, 4, incarnation=b"2"), max_group_bytes=4)
    assert resent(outbox, acknowledging(0, 4)) == [b"1", b"2", b"large"]
    assert resent(outbox, restarted) == [b"4"]
    assert (len(outbox), outbox.min_group_number, outbox.num_lost) == (1, 4, 1)
    assert outbox.max_group_bytes == 4
