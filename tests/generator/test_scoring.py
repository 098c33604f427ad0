"""Groups are scored while the engine samples, and sent whole, in the order of their completion."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generators import (
    PROBLEM,
    FakeEngine,
    Scene,
    completion_of,
    environments_of,
)
from user_modules import UserModules

from peralta_zmq.errors import RewardError, RewardUnavailableError
from peralta_zmq.generator.scoring import MAX_REWARD_FAILURES, SampledGroup
from peralta_zmq.rollout import Problem, Request, Score

REQUEST = Request(0, np.array([1], np.int32))
GATED = """
import pathlib, time
HERE = pathlib.Path(__file__).parent
def reward(problem, text):
    "Waits for the file that the text names."
    while not (HERE / text).exists(): time.sleep(0.005)
    return float(text)
"""


@pytest.fixture
def gated(user_modules: UserModules) -> Any:
    user_modules.write("gated_reward", GATED)
    return importlib.import_module("gated_reward")


class Run:
    """A generator whose rewards wait for files, and an engine of two slots."""

    def __init__(self, scene: Scene, environments: Any) -> None:
        self.engine = PolledEngine(slots=2, num_generations=2)
        scene.engine = self.engine
        self.opened = scene.start(
            1, environments=environments, sampling={"num_generations": 2},
            train={"batch_size": 256},
        )  # fmt: skip

    def run_while(self, condition: Callable[[], bool]) -> None:
        """Run the generator until the condition does not hold."""

        def end_run() -> None:
            self.opened.link.is_run_complete |= not condition()

        self.engine.when_polled = end_run
        self.opened.generator.run()

    @property
    def rewards(self) -> list[tuple[float, ...]]:
        return [group.rewards for group in self.opened.unacknowledged()]


class PolledEngine(FakeEngine):
    """Calls a function whenever the generator looks for a free slot."""

    when_polled: Callable[[], None] = staticmethod(lambda: None)

    def num_free(self) -> int:
        self.when_polled()
        return super().num_free()


def test_engine_samples_on_until_the_queue_is_full(scene: Scene, gated: Any) -> None:
    with closing(environments_of(gated.reward, bounded=False, queue_limit=6)) as environments:
        run = Run(scene, environments)
        num_full = 0

        def is_full_for_a_while() -> bool:
            nonlocal num_full
            num_full += not environments.has_room
            return num_full < 50

        run.run_while(is_full_for_a_while)
        # One completion is being scored, and 6 wait: three groups of two, and half of another one.
        assert len(run.engine.submitted) == 2 * 4
        assert run.rewards == []


def sampled(*, cancelled: bool = False) -> SampledGroup:
    scores: Future[list[Score]] = Future()
    if cancelled:
        scores.cancel()
    return SampledGroup(PROBLEM, [completion_of(REQUEST, "1")], scores, None)


def test_missing_rewards_of_turns_are_zero_in_their_group() -> None:
    group = sampled()
    group = replace(group, completions=[*group.completions] * 2)
    group.scores.set_result([Score(1.0, {}, (0.5,)), Score(0.0)])
    assert [rollout.turn_rewards for rollout in group.rollouts()] == [(0.5,), (0.0,)]


class Queue:
    """A queue of groups, and what it yields."""

    def __init__(self, scene: Scene) -> None:
        opened = scene.start(1)
        self.queue, self.link = opened.rewards(), opened.link

    def send_finished(self) -> list[tuple[float, ...]]:
        """Send the finished groups; returns their rewards."""
        rewards: list[tuple[float, ...]] = []
        for group in self.queue.finished():
            self.link.send(group)
            rewards.append(group.rewards)
        return rewards


@pytest.fixture
def queue(scene: Scene) -> Queue:
    return Queue(scene)


def test_queue_yields_scored_groups_first_in_first_out(queue: Queue) -> None:
    groups = [sampled() for _ in range(3)]
    queue.queue.add(groups)
    groups[1].scores.set_result([Score(2.0)])
    assert queue.send_finished() == []
    groups[0].scores.set_result([Score(1.0)])
    assert queue.send_finished() == [(1.0,), (2.0,)]
    assert len(queue.queue) == 1
    queue.queue.discard()
    assert groups[2].scores.cancelled() and not queue.queue


def test_queue_drops_groups_of_a_closed_environment(queue: Queue) -> None:
    last = sampled()
    queue.queue.add([sampled(cancelled=True), last])
    last.scores.set_result([Score(1.0)])
    assert queue.send_finished() == [(1.0,)]


def scored_by(reward: Any) -> SampledGroup:
    """A group with the completions "right" and "wrong"."""
    completions = [completion_of(REQUEST, text) for text in ("right", "wrong")]
    scores = environments_of(reward).score(PROBLEM, completions)
    return SampledGroup(PROBLEM, completions, scores, None)


def fail_if_wrong(problem: Problem, text: str) -> float:
    if text == "wrong":
        raise ValueError("no such move")
    return 1.0


def test_unscored_groups_are_counted_and_end_the_generator_when_consecutive(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    link, most = queue.link, MAX_REWARD_FAILURES - 1
    queue.queue.add(scored_by(fail_if_wrong) for _ in range(most))
    assert queue.send_finished() == []
    assert (link.num_unscored, len(link.outbox)) == (most, 0)
    assert "raised ValueError: no such move" in caplog.text
    queue.queue.add([scored_by(lambda problem, text: float(text == "right"))])
    assert queue.send_finished() == [(1.0, 0.0)]  # restarts the count
    queue.queue.add(scored_by(fail_if_wrong) for _ in range(most))
    assert queue.send_finished() == []
    assert (link.num_unscored, len(link.outbox)) == (2 * most, 1)
    queue.queue.add([scored_by(fail_if_wrong)])
    with pytest.raises(RewardError, match="fail_if_wrong raised ValueError: no such move"):
        queue.send_finished()


def test_unavailable_rewards_do_not_end_the_generator(queue: Queue) -> None:
    unavailable: Future[list[Score]] = Future()
    unavailable.set_exception(RewardUnavailableError("no verifier responds"))
    for _ in range(2 * MAX_REWARD_FAILURES):
        queue.queue.add([SampledGroup(PROBLEM, [], unavailable, None)])
        assert queue.send_finished() == []
    assert queue.link.num_unscored == 2 * MAX_REWARD_FAILURES


def test_groups_that_are_being_scored_are_dropped_with_the_weights(
    scene: Scene, gated: Any, tmp_path: Path
) -> None:
    """A roll-back makes groups obsolete whose completions have ended, but which are not sent."""
    with closing(environments_of(gated.reward, bounded=False)) as environments:
        run = Run(scene, environments)

        def roll_back() -> None:
            if len(run.engine.submitted) == 4 and run.engine.weights["w"][0] == 1.0:
                scene.publish(1, 2.0, lineage=1)

        def score_after_it() -> bool:
            if run.engine.weights["w"][0] == 2.0:
                for name in ("0", "1", "2", "3"):
                    (tmp_path / name).touch()
            return len(run.rewards) < 2

        run.engine.before_step = roll_back
        run.run_while(score_after_it)
        assert run.rewards[:2] == [(2.0, 2.0), (3.0, 3.0)]
