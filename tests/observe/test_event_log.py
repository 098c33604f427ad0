"""Bounds on the lines of events.jsonl that messages from other machines cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from peralta_zmq.observe import event_log
from peralta_zmq.observe.event_log import LIMITS, EventLog
from peralta_zmq.observe.metrics import EVENTS, JsonLines, Row, read_rows


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stop the clock of the limits; the fixture advances it by seconds."""
    now = [1000.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(event_log.time, "monotonic", lambda: now[0])
    return advance


def written(folder: Path, event: str) -> list[Row]:
    return [row for row in read_rows(folder / EVENTS) if row["event"] == event]


def drop(events: EventLog, name: str, group_number: int, *, outcome: str = "stale") -> bool:
    return events.append("drop", sender=f"{name}/00ff", group_number=group_number, outcome=outcome)


def test_repeated_drop_is_one_line_a_minute_with_a_count(
    tmp_path: Path, wait: Callable[[float], None]
) -> None:
    with JsonLines(tmp_path / EVENTS) as file, EventLog(file, []) as events:
        assert drop(events, "ann", 0)
        assert not any(drop(events, "ann", number) for number in range(1, 1000))
        assert drop(events, "bob", 0) and drop(events, "ann", 0, outcome="invalid")
        assert len(written(tmp_path, "drop")) == 3
        wait(60.0)
        assert not drop(events, "ann", 1000)  # the line of this minute has the count
        wait(60.0)
        events.flush()
        assert not drop(events, "ann", 1001)
        assert list(events.newest) == read_rows(tmp_path / EVENTS)
    of_ann = [row for row in written(tmp_path, "drop") if row["outcome"] == "stale"]
    of_ann = [
        (row["group_number"], row.get("count")) for row in of_ann if row["sender"] == "ann/00ff"
    ]
    assert of_ann == [(0, None), (999, 999), (1000, 1), (1001, 1)]


def test_names_above_the_limit_share_one_count(
    tmp_path: Path, wait: Callable[[float], None]
) -> None:
    with JsonLines(tmp_path / EVENTS) as file, EventLog(file, [], max_counts=3) as events:
        assert [drop(events, f"g{number}", 0) for number in range(6)] == [True] * 4 + [False] * 2
        wait(60.0)
        events.flush()
    assert written(tmp_path, "drop")[-1]["count"] == 2


@pytest.mark.parametrize("event", ["exclude", "skip", "pool_refilled"])
def test_events_without_a_generator_are_limited_per_minute(
    tmp_path: Path, wait: Callable[[float], None], event: str
) -> None:
    with JsonLines(tmp_path / EVENTS) as file, EventLog(file, []) as events:
        num_written = sum(events.append(event, step=number) for number in range(1000))
        assert num_written == len(written(tmp_path, event)) == LIMITS[event]
        wait(60.0)
        events.flush()
    assert written(tmp_path, event)[-1]["count"] == 1000 - num_written


@pytest.mark.parametrize("event", ["join", "mismatch", "silent", "skip", "pool_refilled"])
def test_lines_of_one_event_are_bounded_in_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, event: str
) -> None:
    for session in range(3):  # also after a restart of the trainer
        rows = read_rows(tmp_path / EVENTS)
        with (
            JsonLines(tmp_path / EVENTS) as file,
            EventLog(file, rows, max_bytes=2000) as events,
        ):
            for number in range(100):
                events.append(event, generator=f"g{session}-{number}", incarnation="00ff")
            assert events.append("publish", step=session)
    assert len(written(tmp_path, "publish")) == 3
    assert sum(len(str(row)) for row in written(tmp_path, event)) < 2200
    (note,) = written(tmp_path, "limit_reached")
    assert (note["of"], note["bytes"]) == (event, 2000)
    assert caplog.messages == [f"no more lines in events.jsonl: event={event} bytes=2000"]
