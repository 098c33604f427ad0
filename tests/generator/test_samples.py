"""The samples of a generator: granted ones, or its static share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from generators import Scene
from sockets import eventually

from peralta_zmq import wire
from peralta_zmq.errors import ConfigError
from peralta_zmq.generator.training_groups import ProblemSource

GRANTING = wire.Announcement("run", next_sample_index=100)


class Source:
    """The problems of a generator that serves the weights of step 2, without sample ranges."""

    def __init__(self, scene: Scene) -> None:
        sections: dict[str, Any] = {
            "train": {"batch_size": 32},
            "sampling": {"num_generations": 8},
        }
        self._opened = scene.start(2, **sections)
        self._scene = scene
        scene.sockets.announcements.latest = None
        self.connection = self._opened.link
        self.start_run()

    def set_timeout(self, range_timeout: float) -> None:
        """Sample with another timeout from now on."""
        self._source = ProblemSource(
            self._opened.config,
            self._opened.environments,
            self.connection,
            range_timeout=range_timeout,
        )

    def start_run(self) -> None:
        """Begin another run, as the generator does when its weights change to those of one."""
        self.connection.start_run()
        self.set_timeout(30.0)

    def announce(self, announcement: wire.Announcement, sample_range: range | None = None) -> None:
        """Receive an announcement, and a sample range if one is given."""
        if sample_range is not None:
            sender = self.connection.outbox.sender
            granted = wire.SenderProgress(
                range_start=sample_range.start, range_stop=sample_range.stop
            )
            announcement = replace(announcement, senders={sender: granted})
        self._scene.announce(announcement)
        self.connection.exchange()

    def draw(self, num: int) -> list[int | None]:
        """The next sample indices; None while there is none."""
        drawn = [self._source.draw() for _ in range(num)]
        return [None if problem is None else problem.sample_index for problem in drawn]


@pytest.fixture
def source(scene: Scene) -> Source:
    return Source(scene)


def test_granted_samples_are_drawn_in_order(source: Source) -> None:
    source.announce(GRANTING)
    assert source.draw(1) == [None]
    source.announce(GRANTING, range(40, 43))
    source.announce(GRANTING, range(40, 43))
    assert source.draw(4) == [40, 41, 42, None]
    source.announce(GRANTING, range(70, 72))
    assert source.draw(3) == [70, 71, None]


def test_excluded_problems_are_skipped(source: Source) -> None:
    source.announce(replace(GRANTING, excluded=b"\1"), range(40, 43))
    assert source.draw(2) == [None, None]
    source.announce(GRANTING, range(43, 45))
    assert source.draw(2) == [43, 44]


def test_static_share_replaces_ranges_that_a_waiting_trainer_does_not_grant(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    """This generator is the second of three."""
    names = ("aaa/00", source.connection.outbox.sender, "zed/00")
    waiting = replace(GRANTING, waiting=True, senders=dict.fromkeys(names, wire.SenderProgress()))
    source.announce(waiting)
    assert source.draw(2) == [None] * 2 and not caplog.records
    source.set_timeout(0.0)
    source.announce(GRANTING)
    assert source.draw(2) == [None] * 2  # the trainer computes a step
    source.announce(waiting)
    assert source.draw(2) == [100, 103]
    assert "no sample range from the trainer; sampling one problem in 3, so" in caplog.text
    source.announce(waiting, range(102, 106))
    assert source.draw(2) == [104, 105]


def test_other_training_problems_than_those_of_the_trainer_are_refused(source: Source) -> None:
    source.announce(replace(GRANTING, train_set_digest=b"another!"), range(40, 43))
    with pytest.raises(ConfigError, match=r"has other training problems than the trainer; use"):
        source.draw(1)


def test_new_run_drops_the_ranges_of_the_previous_one(source: Source) -> None:
    source.announce(GRANTING, range(40, 43))
    assert source.draw(1) == [40]
    source.start_run()
    assert source.draw(1) == [None]
    source.announce(GRANTING, range(3, 5))
    assert source.draw(3) == [3, 4, None]


def test_status_asks_at_once_when_the_newest_range_begins(
    scene: Scene,
) -> None:
    trainer = scene.status_receiver()
    scene.connect(statuses=trainer.address, status_seconds=1000.0)
    source = Source(scene)
    received: list[tuple[bool, int]] = []

    def has_received(needs_range: bool, next_sample_index: int) -> bool:
        source.connection.exchange()
        for status in trainer.receive(timeout=0.05).values():
            received.append((status.needs_range, status.next_sample_index))
        return (needs_range, next_sample_index) in received

    eventually(lambda: has_received(True, 0))
    source.announce(GRANTING, range(2))
    eventually(lambda: has_received(True, 2))
    source.announce(GRANTING, range(5, 7))
    source.draw(2)  # the first range ends: the second one begins
    eventually(lambda: has_received(True, 7))
    source.draw(1)
    assert not has_received(True, 8)
    assert len(received) <= 4  # once for each range, and at first
