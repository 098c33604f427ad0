"""How far something is: said late, seldom, and with the time that is left."""

from __future__ import annotations

import io

import pytest

from peralta_zmq.observe.progress import Progress, duration, progress_on

pytestmark = pytest.mark.timeout(20)


class Walk:
    """Progress of 100 things that take a second each, from the given one to the next."""

    def __init__(self, *, lively: bool) -> None:
        self.said: list[str] = []
        self._now = 0.0
        show, clock = self.said.append, lambda: self._now
        with Progress("walking", 100, show=show, lively=lively, clock=clock) as progress:
            for done in range(1, 101):
                self._now = float(done)
                progress.reach(done)


def test_off_a_terminal_it_is_said_after_two_seconds_and_then_every_ten() -> None:
    said = Walk(lively=False).said
    assert said[:2] == [
        "walking: 2 of 100 (2%), 1m38s left", "walking: 12 of 100 (12%), 1m28s left",
    ]  # fmt: skip
    assert said[-1] == "walking: 92 of 100 (92%), 8s left"
    assert len(said) == 10


def test_on_a_terminal_it_is_drawn_at_every_step_and_taken_away_at_the_end() -> None:
    said = Walk(lively=True).said
    assert len(said) == 99  # 2 to 99, and the end
    assert said[-2:] == ["walking: 99 of 100 (99%), 1s left", ""]


@pytest.mark.parametrize("lively", [True, False])
def test_what_is_done_within_two_seconds_is_not_spoken_of(lively: bool) -> None:
    said: list[str] = []
    clock = iter([0.0, 0.5, 1.9]).__next__
    with Progress("blinking", 3, show=said.append, lively=lively, clock=clock) as progress:
        progress.reach(1)
        progress.reach(2)
    assert said == []


def test_nothing_done_yet_has_no_estimate() -> None:
    said: list[str] = []
    clock = iter([0.0, 3.0]).__next__
    with Progress("waiting", 3, show=said.append, lively=False, clock=clock) as progress:
        progress.reach(0)
    assert said == ["waiting: 0 of 3 (0%)"]


def test_in_its_place_it_makes_room_for_a_line() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    progress = progress_on("drawing", 10, screen)
    progress._due = 0.0
    progress.reach(0)
    progress.hide()
    progress.hide()
    assert screen.getvalue() == "\rdrawing: 0 of 10 (0%)\x1b[K\r\x1b[K"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (60, "1m00s"), (3599, "59m59s"), (3720, "1h02m")],
)
def test_a_duration_is_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
