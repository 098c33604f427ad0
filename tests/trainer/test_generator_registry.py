"""Who works for the trainer: who comes, who leaves, how they fare.

.venv/bin/python -m pytest tests/test_roster.py
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from fakes import BOOT, RUN
from sockets import ANYWHERE, eventually

from peralta_zmq import wire
from peralta_zmq.observe.metrics import EVENTS, read_rows
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.trainer import generator_registry as rosters
from peralta_zmq.trainer.generator_registry import GeneratorRegistry
from peralta_zmq.wire import generator_status
from peralta_zmq.wire.sockets import ready

pytestmark = pytest.mark.timeout(20)
SAID = wire.GeneratorStatus(
    RUN, "ann", BOOT, step=4, tokens_per_s=100.0, blocked_frac=0.5, queue_frac=0.25, reload_s=1.0
)


@pytest.fixture
def roster(tmp_path: Path) -> Iterator[GeneratorRegistry]:
    """One that has heard from ann."""
    with (
        closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)) as receiver,
        closing(wire.GeneratorStatusSender(receiver.address)) as sender,
        RunLog(tmp_path, run="run", max_steps=9) as books,
    ):
        roster = GeneratorRegistry(receiver, books, {})

        def heard() -> bool:
            sender.send(SAID)
            roster.hear(step=1)
            return bool(roster.live())

        eventually(heard)
        yield roster


def test_a_flood_of_invented_names_drives_nobody_out(
    roster: GeneratorRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rosters, "MAX_LIVE", 3)
    known, *_ = roster.live()
    for number in range(10):
        roster.meet(f"stranger-{number}/{'0' * 16}", step=1)
    assert roster.live() == [known, *(f"stranger-{number}/{'0' * 16}" for number in range(2))]
    joins = [row["generator"] for row in read_rows(tmp_path / EVENTS) if row["event"] == "join"]
    assert joins == ["ann", "stranger-0", "stranger-1"]


def test_one_name_cannot_take_all_places(roster: GeneratorRegistry) -> None:
    ann, *_ = roster.live()
    for number in range(100):
        roster.meet(f"bob/{number:016x}", step=1)
    newest = range(100 - rosters.MAX_STARTS, 100)
    assert roster.live() == [ann, *(f"bob/{number:016x}" for number in newest)]


def test_last_reports_of_invented_starts_are_bounded(
    roster: GeneratorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rosters, "MAX_LAST", 3)
    for number in range(10):
        roster.meet(f"bob/{number:016x}", step=1)
        roster._note_last(f"bob/{number:016x}", 1)
    assert list(roster.last_reports()) == [f"bob/{number:016x}" for number in range(3)]


def test_a_generator_fares_as_it_reported(roster: GeneratorRegistry) -> None:
    assert roster.fares({}) == {
        "gen/ann/tokens_per_s": 100.0, "gen/ann/blocked_frac": 0.5, "gen/ann/queue_frac": 0.25,
        "gen/ann/reload_s": 1.0, "gen/ann/step": 4, "gen/ann/unjudged": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("of_groups", "told"), [(3, 4), (6, 6)])
def test_its_step_is_the_newest_that_a_report_or_a_group_tells(
    roster: GeneratorRegistry, of_groups: int, told: int
) -> None:
    assert roster.fares({"gen/ann/step": of_groups})["gen/ann/step"] == told


def test_one_unheard_for_long_has_left_and_is_told_once(
    roster: GeneratorRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rosters, "SILENCE_SECONDS", 0.2)
    time.sleep(0.2)
    assert len(roster.live()) == 1  # we did not listen: that is no silence of theirs
    eventually(lambda: roster.hear(step=2) or not roster.live())  # one more may be on its way
    assert roster.live() == []
    rows = read_rows(tmp_path / EVENTS)
    assert [row["event"] for row in rows] == ["join", "leave"]
    assert (rows[1]["generator"], rows[1]["incarnation"]) == ("ann", BOOT.hex())
    assert abs(float(str(rows[1]["time"])) - time.time()) < 20


def test_one_whose_report_may_not_be_read_yet_has_not_left(
    roster: GeneratorRegistry, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = stack.enter_context(closing(wire.GeneratorStatusSender(roster._counters.address)))
    ann, *_ = roster.live()

    def queued() -> bool:
        bob.send(replace(SAID, generator_id="bob"))
        return ready(roster._counters._socket, zmq.POLLIN, 0.05)

    eventually(queued)
    monkeypatch.setattr(
        generator_status, "MAX_AT_ONCE", 1
    )  # as of more generators than are read at once
    monkeypatch.setattr(rosters, "SILENCE_SECONDS", 0.2)
    time.sleep(0.2)
    roster.hear(step=2)
    assert ann in roster.live()
    eventually(lambda: roster.hear(step=2) or ann not in roster.live())


def test_the_last_report_of_each_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)) as receiver,
        closing(wire.GeneratorStatusSender(receiver.address)) as sender,
        RunLog(tmp_path, run="run", max_steps=9) as books,
    ):
        roster = GeneratorRegistry(receiver, books, {})
        roster.meet(f"ann/{BOOT.hex()}", step=1)

        def queued() -> bool:
            sender.send(replace(SAID, made=6))
            return bool(receiver._socket.poll(10))

        eventually(queued)  # of before the end: not the last
        monkeypatch.setattr(rosters, "LAST_SECONDS", 15.0)
        late = threading.Timer(0.3, sender.send, [replace(SAID, made=7, last=True)])
        late.start()
        roster.hear_last(step=2)
        assert roster.last_reports() == {f"ann/{BOOT.hex()}": 7}
        roster.meet("bob/00", step=2)
        monkeypatch.setattr(rosters, "LAST_SECONDS", 0.6)
        begun = time.monotonic()
        roster.hear_last(step=2)  # nothing comes of bob: not for ever
        assert 0.5 < time.monotonic() - begun < 30
