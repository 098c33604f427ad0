"""Groups are scored while the engine samples, and sent whole, in the order of their completion."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
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
    apply_until,
    environments_of,
    generator_of,
    publish,
)
from sockets import eventually
from user_modules import UserModules

from peralta_zmq import wire
from peralta_zmq.generator.loop import Generator
from peralta_zmq.generator.scoring import SampledGroup, ScoringQueue
from peralta_zmq.generator.trainer_connection import Sockets
from peralta_zmq.generator.weight_sync import ObsoleteGroupsError
from peralta_zmq.rollout import Completion, Request, Sampling, Score
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber

REQUEST = Request(0, np.array([1], np.int32))
GATED = """
import pathlib, time
HERE = pathlib.Path(__file__).parent
def reward(problem, text):
    "Waits for the file that the text names."
    while not (HERE / text).exists(): time.sleep(0.005)
    return float(text)
"""


class StepEngine(FakeEngine):
    """Samples one group at a time; the text of a completion is the number of its group."""

    def __init__(self, num_generations: int = 2) -> None:
        super().__init__()
        self._num_generations = num_generations
        self.num_groups = 0

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None],
    ) -> Iterator[Completion]:
        for request in requests:
            between_steps()
            if request is not None:
                group = request.index // self._num_generations
                self.num_groups = group + 1
                yield completion_of(request, str(group))


def completion_of(request: Request, text: str) -> Completion:
    ids = np.array([5, 6], np.int32)
    zeros = np.zeros(2, np.float32)
    steps = np.ones(2, np.int32)
    return Completion(request.index, request.prompt_ids, ids, zeros, steps, "stop", text)


@pytest.fixture
def gated(user_modules: UserModules) -> Any:
    user_modules.write("gated_reward", GATED)
    return importlib.import_module("gated_reward")


class Run:
    """A generator whose rewards wait for files, and its groups in the outbox."""

    def __init__(
        self, store: WeightStore, subscriber: WeightSubscriber, sockets: Sockets, environments: Any
    ) -> None:
        self.engine = StepEngine()
        version = apply_until(self.engine, subscriber, publish(store, 1, 0.0), 1)
        self.generator: Generator = generator_of(
            self.engine, subscriber, sockets, version, environments=environments,
            sampling={"num_generations": 2}, train={"batch_size": 256},
        )  # fmt: skip

    def start_while(self, condition: Callable[[], bool]) -> None:
        """Sample groups while the condition holds, then end the run."""
        samples = self.generator._training_problems

        def problems() -> Iterator[Any]:
            for problem in samples():
                if not condition():
                    self.generator._connection.is_run_complete = True
                    return
                yield problem

        self.generator._training_problems = problems  # type: ignore[method-assign]
        self.generator._make_training_groups()

    @property
    def rewards(self) -> list[tuple[float, ...]]:
        frames = self.generator._connection.outbox._frames.values()
        return [wire.decode_group(frame, wire.GroupLimits(64)).rewards for frame in frames]


def test_engine_samples_on_until_the_queue_is_full(
    store: WeightStore, subscriber: WeightSubscriber, sockets: Sockets, gated: Any, tmp_path: Path
) -> None:
    with closing(environments_of(gated.reward, bounded=False, queue_limit=6)) as environments:
        run = Run(store, subscriber, sockets, environments)
        num_idle = 0

        def idle_for_a_while() -> bool:
            nonlocal num_idle
            num_idle += not environments.has_room
            return num_idle < 50

        run.start_while(idle_for_a_while)
        # One completion is being scored, and 6 wait: three groups of two, and half of another one.
        assert run.engine.num_groups == 4
        assert run.rewards == [] and len(run.generator._scoring) == 4


def test_groups_are_sent_in_the_order_of_their_completions(
    store: WeightStore, subscriber: WeightSubscriber, sockets: Sockets, gated: Any, tmp_path: Path
) -> None:
    with closing(environments_of(gated.reward, bounded=False, queue_limit=6)) as environments:
        run = Run(store, subscriber, sockets, environments)
        for name in ("0", "1", "2", "3", "4"):
            (tmp_path / name).touch()
        run.start_while(lambda: len(run.rewards) < 4)
        assert run.rewards[:4] == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def sampled(*, cancelled: bool = False) -> SampledGroup:
    scores: Future[list[Score]] = Future()
    if cancelled:
        scores.cancel()
    return SampledGroup(PROBLEM, [completion_of(REQUEST, "1")], scores, -1)


def test_missing_rewards_of_turns_are_zero_in_their_group() -> None:
    group = sampled()
    group = replace(group, completions=[*group.completions] * 2)
    group.scores.set_result([Score(1.0, {}, (0.5,)), Score(0.0)])
    assert [rollout.turn_rewards for rollout in group.rollouts()] == [(0.5,), (0.0,)]


def test_queue_returns_scored_groups_first_in_first_out() -> None:
    queue, groups = ScoringQueue(), [sampled() for _ in range(3)]
    for group in groups:
        queue.add(group)
    groups[1].scores.set_result([Score(2.0)])
    assert queue.next_scored() is None
    groups[0].scores.set_result([Score(1.0)])
    assert [queue.next_scored() for _ in range(3)] == [groups[0], groups[1], None]
    assert len(queue) == 1
    queue.discard()
    assert groups[2].scores.cancelled() and not queue


def test_queue_drops_groups_of_a_closed_environment() -> None:
    queue, last = ScoringQueue(), sampled()
    for group in (sampled(cancelled=True), last):
        queue.add(group)
    last.scores.set_result([Score(1.0)])
    assert queue.next_scored() is last


def test_groups_that_are_being_scored_are_dropped_with_the_weights(
    store: WeightStore, subscriber: WeightSubscriber, sockets: Sockets, gated: Any, tmp_path: Path
) -> None:
    """A roll-back makes groups obsolete whose completions have ended, but which are not sent."""
    with closing(environments_of(gated.reward, bounded=False)) as environments:
        run = Run(store, subscriber, sockets, environments)
        generator = run.generator
        scores = environments.score(PROBLEM, [completion_of(REQUEST, "0")])
        generator._scoring.add(SampledGroup(PROBLEM, [], scores, -1))
        publish(store, 1, 1.0, lineage=1)
        eventually(lambda: subscriber.poll(timeout=0.2))
        with pytest.raises(ObsoleteGroupsError):
            generator._refresh_weights()
        assert not generator._scoring
