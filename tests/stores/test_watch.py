from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic

import pytest

from peralta_zmq.stores.watch import Watch

NEVER = 1000.0  # seconds between looks, so that only an event can be the reason
DEADLINE = 10.0


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    with closing(Watch(tmp_path, poll_seconds=NEVER)) as opened:
        yield opened


def test_first_look_is_due(watch: Watch) -> None:
    assert watch.due()


def test_second_look_is_not_due_without_a_reason(watch: Watch) -> None:
    watch.due()
    assert not watch.due(timeout=0.05)


def test_version_that_is_renamed_into_place_makes_it_due(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / ".tmp-step_00000001").mkdir()
    watch.due(timeout=DEADLINE)
    while watch.due(timeout=0.2):  # the folder made before
        pass
    (tmp_path / ".tmp-step_00000001").rename(tmp_path / "step_00000001")
    assert watch.due(timeout=DEADLINE)


def test_event_is_a_reason_once(watch: Watch, tmp_path: Path) -> None:
    watch.due()
    (tmp_path / "step_00000001").mkdir()
    assert watch.due(timeout=DEADLINE)
    assert not watch.due(timeout=0.05)


def test_reading_a_file_is_no_reason(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "RUN.json").write_text("{}")
    while watch.due(timeout=0.2):
        pass
    (tmp_path / "RUN.json").read_text()
    assert not watch.due(timeout=0.2)


def test_timer_alone_makes_it_due(tmp_path: Path) -> None:
    with closing(Watch(tmp_path, poll_seconds=0.1)) as watch:
        watch.due()
        started = monotonic()
        assert watch.due(timeout=DEADLINE)
        assert 0.09 < monotonic() - started < DEADLINE / 2


def test_silent_folder_is_not_waited_for_longer_than_asked(watch: Watch) -> None:
    watch.due()
    started = monotonic()
    assert not watch.due(timeout=0.1)
    assert monotonic() - started < DEADLINE / 2
