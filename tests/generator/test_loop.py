"""The generator loop: in-place weight changes, roll-backs, failures and evaluations."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine_data import TokenCounter
from generators import PROBLEM, FakeEngine, apply_until, environments_of, generator_of, publish
from sample_data import group_of, tiny_model
from sockets import ANYWHERE, eventually

from peralta_zmq import models, wire
from peralta_zmq.engines.native import NativeEngine
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.errors import (
    EngineError,
    EngineProcessError,
    RewardError,
    RewardUnavailableError,
)
from peralta_zmq.generator import pacing, trainer_connection
from peralta_zmq.generator.loop import MAX_ENGINE_FAILURES, MAX_REWARD_FAILURES, Generator
from peralta_zmq.generator.scoring import SampledGroup
from peralta_zmq.generator.trainer_connection import Sockets
from peralta_zmq.generator.weight_sync import ObsoleteGroupsError
from peralta_zmq.learning.admission import Admission
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.rollout import Completion, Problem, Request, RolloutGroup, Sampling, Score
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber


class Scene:
    """A generator with a fake engine, a weight store and sockets without a trainer."""

    def __init__(self, store: WeightStore, subscriber: WeightSubscriber, sockets: Sockets) -> None:
        self.store, self.subscriber, self.sockets = store, subscriber, sockets
        self.engine = FakeEngine()

    def start(self, step: int, **sections: Any) -> Generator:
        """A generator that serves the weights of `step`."""
        version = apply_until(
            self.engine, self.subscriber, publish(self.store, step, float(step)), step
        )
        self.generator = generator_of(
            self.engine, self.subscriber, self.sockets, version, **sections
        )
        return self.generator

    def publish(self, step: int, value: float, *, lineage: int = 0) -> Any:
        """Publish another version and wait until it can be applied."""
        version = publish(self.store, step, value, lineage=lineage)
        assert self.subscriber.poll(timeout=20) is not None
        return version

    def announce(self, announcement: wire.Announcement) -> None:
        self.sockets.announcements.latest = announcement

    def add_group(self) -> None:
        """Put a group into the outbox as if it had been sent."""
        self.generator._connection.outbox.add(b"a group")


@pytest.fixture
def scene(store: WeightStore, subscriber: WeightSubscriber, sockets: Sockets) -> Scene:
    return Scene(store, subscriber, sockets)


# Weights.


@pytest.mark.parametrize(("update", "during"), [("in_flight", 2), ("between_groups", 1)])
def test_newer_version_is_applied_in_flight_or_between_groups(
    update: str, during: int, scene: Scene
) -> None:
    generator = scene.start(1, weights={"update": update})
    generator._training._start(PROBLEM, 8, None)
    scene.publish(2, 2.0)
    generator._refresh_weights()
    assert scene.engine.step == during
    generator._training.drop()
    generator._refresh_weights()
    assert scene.engine.step == 2


def test_weights_of_another_run_restart_the_generators_count(scene: Scene) -> None:
    generator = scene.start(7)
    connection = generator._connection
    connection.outbox.add(b"a group")
    sender = connection.outbox.sender
    for path in [*scene.store.folder.glob("step_*"), scene.store.folder / "RUN.json"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    WeightStore.open(scene.store.folder).claim("another-run")
    publish(WeightStore.open(scene.store.folder), 1, 1.0)
    assert scene.subscriber.poll(timeout=20) is not None
    with pytest.raises(ObsoleteGroupsError):
        generator._refresh_weights()
    assert (connection.outbox.next_sequence, len(connection.outbox)) == (0, 0)
    assert connection.outbox.sender != sender
    assert generator._weights.version.run_id == "another-run"


@pytest.mark.parametrize("step", [4, 8, 12])
def test_weights_of_another_lineage_are_stale_whatever_their_step(scene: Scene, step: int) -> None:
    """A generator that slept through a roll-back may find a step beyond its own."""
    generator = scene.start(8)
    generator._evaluated_step = 8
    scene.publish(step, 4.0, lineage=1)
    with pytest.raises(ObsoleteGroupsError):
        generator._refresh_weights()
    scene.publish(14, 9.0, lineage=1)
    generator._refresh_weights()
    scene.announce(wire.Announcement("run", evaluation_step=8))
    assert scene.engine.step == 14 and generator._must_evaluate()


def test_equal_weights_of_another_lineage_are_not_stale(scene: Scene) -> None:
    generator = scene.start(8)
    again = scene.publish(8, 8.0, lineage=1)
    generator._refresh_weights()
    version = generator._weights.version
    assert (version.number, version.lineage) == (again.number, 1)
    scene.publish(9, 9.0, lineage=1)
    generator._refresh_weights()
    assert scene.engine.step == 9


def test_rejected_weights_are_replaced_by_the_version_before(scene: Scene) -> None:
    first = apply_until(scene.engine, scene.subscriber, publish(scene.store, 1, 1.0), 1)
    publish(scene.store, 2, 2.0)
    version = apply_until(scene.engine, scene.subscriber, first, 2)
    generator = generator_of(scene.engine, scene.subscriber, scene.sockets, version)
    generator._training._start(PROBLEM, 8, None)
    generator._evaluated_step = 2
    generator._replace_weights(EngineError("not finite"))
    assert generator._evaluated_step == 2  # not a roll-back
    assert (scene.engine.step, scene.engine.weights["w"].tolist()) == (1, [1.0] * 4)
    assert generator._training.num_in_flight == 0
    assert scene.subscriber.poll(timeout=0.3) is None  # it is not offered again


# Whole loops with a real engine.


class Loop:
    """Runs a generator with a real engine of 4 slots until `reward` announces the end."""

    def __init__(self, scene: Scene, step: int) -> None:
        self.scene = scene
        self.tokenizer = models.load_tokenizer(models.EMBEDDED)
        self.engine = self.engine_of(tiny_model(seed=2))
        self.first = scene.store.publish(step, self.weights(1), companions={})
        apply_until(self.engine, scene.subscriber, self.first, step)
        self.steps: list[int] = []  # the engine's step at each reward

    def engine_of(self, model: Any) -> NativeEngine:
        return NativeEngine(model, self.tokenizer, slots=4, max_model_len=32)

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        return models.weights_of(tiny_model(seed=seed))

    def publish(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        self.scene.store.publish(step, weights, companions={})
        assert self.scene.subscriber.poll(timeout=20) is not None

    def end_run(self) -> None:
        self.scene.announce(wire.Announcement("run", done=True))

    def start(self, reward: Any, **sections: Any) -> Generator:
        self.generator = generator_of(
            self.engine, self.scene.subscriber, self.scene.sockets, self.first,
            tokenizer=self.tokenizer, reward=reward, **sections,
        )  # fmt: skip
        return self.generator

    def run(self, reward: Any, **sections: Any) -> list[RolloutGroup]:
        self.start(reward, **sections).run()
        return self.unacknowledged()

    def unacknowledged(self) -> list[RolloutGroup]:
        frames = self.generator._connection.outbox._frames.values()
        return [wire.decode_group(frame, wire.GroupLimits(64)) for frame in frames]


def greedy_logprobs(engine: NativeEngine) -> list[float]:
    request = Request(0, np.array(PROBLEM.input_token_ids, np.int32))
    sampling = Sampling(temperature=0.0, max_completion_length=4)
    (completion,) = engine.generate([request], sampling)
    return completion.logprobs.tolist()


def test_generator_continues_after_weights_with_nan_logits(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Two groups of 2 run together, so 4 rewards come from one step of the engine."""
    loop, norm = Loop(scene, 1), "model.norm.weight"
    good = loop.weights(1)

    def reward(problem: Problem, text: str) -> float:
        loop.steps.append(loop.engine.step)
        if len(loop.steps) == 4:  # finite weights whose logits are not
            loop.publish(2, {**good, norm: torch.full_like(good[norm], 3e38)})
        if len(loop.steps) == 12:
            loop.end_run()
        return 1.0

    groups = loop.run(reward, sampling={"num_generations": 2, "max_completion_length": 4})
    assert "engine failed: version=2 dropped=2 reason=the weights of step 2" in caplog.text
    assert len(loop.steps) >= 12 and set(loop.steps) == {1}
    assert scene.store.find(2) is None
    assert len(groups) == len(loop.steps) // 2 == loop.generator._connection.outbox.next_sequence
    assert {group.policy_step for group in groups} == {1}
    assert greedy_logprobs(loop.engine) == greedy_logprobs(loop.engine_of(tiny_model(seed=1)))


class FailingEngine:
    """An engine in a process of its own, which fails after some decode steps."""

    def __init__(self, engine: NativeEngine, failures: Sequence[int]) -> None:
        self._engine, self._failures = engine, failures
        self._num_steps = 0
        self.applied: list[int] = []  # step of the weights of each start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def apply(self, update: WeightUpdate) -> None:
        self._engine.apply(update)
        self.applied.append(update.step)

    def generate(self, requests: Any, sampling: Sampling, between_steps: Any) -> Any:
        def fail_sometimes() -> None:
            self._num_steps += 1
            if self._num_steps in self._failures:
                self._engine.cancel()  # which yields the completions in flight
            else:
                between_steps()

        yield from self._engine.generate(requests, sampling, fail_sometimes)
        if self._num_steps in self._failures:
            raise EngineProcessError("the process has ended")


@pytest.mark.parametrize(
    ("failures", "update", "num_aborted"),
    [
        ((2, 9), "in_flight", 0),
        ((2, 3), "in_flight", 2),  # in 4 slots two groups of 2, which may be the cause
        ((2, 9), "between_groups", 4),  # the newest weights may not sample their other tokens
    ],
)
def test_failed_engine_gets_newest_weights_and_resumes_groups(
    failures: Sequence[int], update: str, num_aborted: int,
    scene: Scene, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    loop = Loop(scene, 1)
    engine = loop.engine = cast(Any, FailingEngine(loop.engine, failures))

    def reward(problem: Problem, text: str) -> float:
        loop.steps.append(loop.engine.step)
        if len(loop.steps) == 4:
            loop.publish(2, loop.weights(2))
        if len(loop.steps) == 24:
            loop.end_run()
        return 1.0

    groups = loop.run(
        reward, sampling={"num_generations": 2, "max_completion_length": 4},
        weights={"update": update},
    )  # fmt: skip
    connection = loop.generator._connection
    assert engine.applied[0] == 1 and engine.applied.count(2) >= 1  # newest of each time
    assert connection.num_aborted == num_aborted
    assert (connection.num_resumed > 0) == (update == "in_flight")
    assert [group.sequence for group in groups] == list(range(len(groups)))
    assert caplog.text.count("reason=the process has ended") == 2


def test_group_in_flight_at_two_failures_is_dropped(scene: Scene) -> None:
    """Groups of 3 in 4 slots: the first group ends between the failures, the second does not."""
    loop = Loop(scene, 1)
    loop.engine = cast(Any, FailingEngine(loop.engine, failures=(2, 6)))

    def reward(problem: Problem, text: str) -> float:
        loop.steps.append(loop.engine.step)
        if len(loop.steps) == 9:
            loop.end_run()
        return 1.0

    loop.run(
        reward, sampling={"num_generations": 3, "max_completion_length": 4, "min_tokens": 4},
        train={"batch_size": 126},
    )  # fmt: skip
    assert loop.generator._connection.num_aborted == 1


def test_engine_that_fails_repeatedly_without_a_group_ends_the_generator(scene: Scene) -> None:
    loop = Loop(scene, 1)
    loop.engine = cast(Any, FailingEngine(loop.engine, failures=range(99)))
    with pytest.raises(EngineProcessError, match="the process has ended"):
        loop.run(lambda problem, text: 1.0, sampling={"max_completion_length": 4})
    assert len(cast(Any, loop.engine).applied) == MAX_ENGINE_FAILURES - 1


def test_groups_in_flight_across_a_roll_back_are_dropped(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups of 3 in 4 slots: part of the next group is always in flight."""
    loop = Loop(scene, 8)

    def reward(problem: Problem, text: str) -> float:
        loop.steps.append(loop.engine.step)
        if len(loop.steps) == 3:
            loop.publish(4, loop.weights(3))
        if loop.steps[-9:] == [4] * 9:
            loop.end_run()
        return 1.0

    with caplog.at_level("INFO"):
        groups = loop.run(
            reward, sampling={"num_generations": 3, "max_completion_length": 4},
            train={"batch_size": 126},
        )  # fmt: skip
    assert [group.sequence for group in groups] == list(range(len(groups)))
    steps = [(group.policy_step, group.newest_step, group.weights_id) for group in groups]
    rolled_back = loop.generator._weights.version.weights_id
    assert set(steps) == {(8, 8, loop.first.weights_id), (4, 4, rolled_back)}
    assert steps == sorted(steps, reverse=True)  # no group of step 8 after one of step 4
    assert "dropped groups in flight: rolled back to the weights of step 4" in caplog.text


@pytest.mark.parametrize(("cancel", "num_sent"), [(False, 2), (True, 1)])
def test_evaluation_begins_after_groups_in_flight_or_cancels_them(
    scene: Scene, cancel: bool, num_sent: int
) -> None:
    """Groups of 3 in 4 slots: the second group is in flight when the first ends."""
    loop = Loop(scene, 1)

    def reward(problem: Problem, text: str) -> float:
        scene.announce(wire.Announcement("run", evaluation_step=1))
        return 1.0

    generator = loop.start(
        reward, sampling={"num_generations": 3, "max_completion_length": 4},
        train={"batch_size": 126}, eval={"cancel_inflight_rollouts_on_eval": cancel},
    )  # fmt: skip
    generator._make_training_groups()
    assert [group.sequence for group in loop.unacknowledged()] == [*range(num_sent)]
    assert generator._must_evaluate()


class InterruptedLoop(Loop):
    """A loop whose second group is interrupted by an evaluation: two of three completions."""

    def __init__(self, scene: Scene, step: int) -> None:
        super().__init__(scene, step)
        self.engine = self.counter = cast(Any, TokenCounter(self.engine))

    def interrupt(self, **sections: Any) -> None:
        """Sample until the evaluation begins."""

        def reward(problem: Problem, text: str) -> float:
            if len(self.unacknowledged()) == 0:
                self.scene.announce(wire.Announcement("run", evaluation_step=1))
            else:
                self.end_run()
            return 1.0

        self.start(
            reward, sampling={"num_generations": 3, "max_completion_length": 9, "min_tokens": 9},
            eval={"cancel_inflight_rollouts_on_eval": True}, **sections,
        )  # fmt: skip
        self.generator._make_training_groups()
        assert self.generator._must_evaluate()
        assert self.generator._num_unsent == self.generator._training.num_in_flight == 1

    def resume(self, **announcement: Any) -> list[RolloutGroup]:
        """The groups at the end of the run, which is that of the second group."""
        self.scene.announce(wire.Announcement("run", **announcement))
        self.generator.run()
        return self.unacknowledged()


@pytest.mark.parametrize(("update", "newest_step"), [("in_flight", 2), ("between_groups", 1)])
def test_group_interrupted_by_an_evaluation_is_resumed_after_it(
    update: str, newest_step: int, scene: Scene
) -> None:
    loop = InterruptedLoop(scene, 1)
    loop.interrupt(train={"batch_size": 126}, weights={"update": update})
    num_before = loop.counter.num_tokens
    assert 9 * 4 < num_before < 9 * 6
    loop.publish(2, loop.weights(3))
    groups, connection = loop.resume(), loop.generator._connection
    assert [(group.sequence, group.policy_step, group.newest_step) for group in groups] == [
        (0, 1, 1), (1, 1, newest_step),
    ]  # fmt: skip
    steps = [rollout.policy_steps for group in groups for rollout in group.rollouts]
    num_of_step = np.bincount(np.concatenate([each[each >= 0] for each in steps]))
    # Tokens sampled before the evaluation are not sampled again.
    assert num_of_step[1] == (num_before if update == "in_flight" else 9 * 6)
    assert num_of_step.sum() == 9 * 6
    assert (connection.num_resumed, connection.num_aborted) == (2, 0)


@pytest.mark.parametrize(
    ("train", "started_step"),
    [
        ({"max_off_policy_steps": 4}, 5),
        ({"max_off_policy_steps": 3}, 5),
        ({"max_off_policy_steps": 2}, 0),  # the newest weights are of step 4
        ({"max_async_level": 0}, 4),
    ],
)
def test_interrupted_group_is_dropped_if_the_trainer_would(
    train: dict[str, Any], started_step: int, scene: Scene
) -> None:
    loop = InterruptedLoop(scene, 1)
    loop.interrupt(train={"batch_size": 126, **train})
    loop.publish(4, loop.weights(3))
    admission = Admission(loop.generator._config.train.staleness_limit)
    of_step_1 = group_of([1, 0], policy_step=1)
    is_dropped = admission.admit(of_step_1, step=max(started_step, 4) + 1) == "stale"
    groups, connection = loop.resume(started_step=started_step), loop.generator._connection
    assert (connection.num_aborted, connection.num_resumed) == ((1, 0) if is_dropped else (0, 2))
    assert [group.policy_step for group in groups] == [1, 4 if is_dropped else 1]


def test_engine_failing_in_an_evaluation_keeps_training_groups(scene: Scene) -> None:
    loop = InterruptedLoop(scene, 1)
    engine = FailingEngine(loop.engine, failures=[])
    loop.engine = cast(Any, engine)
    loop.interrupt(train={"batch_size": 126})
    engine._failures = [engine._num_steps + 2]
    generator, connection = loop.generator, loop.generator._connection
    generator._evaluation = evaluation = generator._sampler(generator._environments, 1)
    with pytest.raises(EngineProcessError) as failure:
        generator._make_groups(
            evaluation, iter([PROBLEM] * 3), generator._environments,
            sampling=Sampling(max_completion_length=9, min_tokens=9), overrides={},
            between_steps=lambda: None, evaluation_step=1,
        )  # fmt: skip
    generator._replace_weights(failure.value)
    assert (evaluation.num_in_flight, generator._training.num_in_flight) == (0, 1)
    assert connection.num_aborted == 3 and generator._must_evaluate()
    assert [group.evaluation_step for group in loop.resume()] == [-1, -1]
    assert connection.num_resumed == 2


def test_interrupted_group_is_dropped_by_a_roll_back(scene: Scene) -> None:
    loop = InterruptedLoop(scene, 8)
    loop.interrupt(train={"batch_size": 126})
    loop.publish(4, loop.weights(3))
    groups = loop.resume()
    assert [(group.policy_step, group.newest_step) for group in groups] == [(8, 8), (4, 4)]


# Groups.


def completions() -> list[Completion]:
    ids = np.array([5, 6], np.int32)
    return [
        Completion(index, ids, ids, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", text)
        for index, text in enumerate(["right", "wrong"])
    ]


def score_and_send(generator: Generator, environments: Environments) -> None:
    scores = environments.score(PROBLEM, completions())
    generator._scoring.add(SampledGroup(PROBLEM, completions(), scores, -1))
    generator._send_scored()


def fail_if_wrong(problem: Problem, text: str) -> float:
    if text == "wrong":
        raise ValueError("no such move")
    return 1.0


def test_unscored_groups_are_counted_and_end_the_generator_when_consecutive(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    generator = scene.start(0)
    connection = generator._connection
    failing = environments_of(fail_if_wrong)
    working = environments_of(lambda problem, text: float(text == "right"))
    for _ in range(MAX_REWARD_FAILURES - 1):
        score_and_send(generator, failing)
    assert (connection.num_unscored, len(connection.outbox)) == (MAX_REWARD_FAILURES - 1, 0)
    assert "raised ValueError: no such move" in caplog.text
    score_and_send(generator, working)  # restarts the count
    (frame,) = connection.outbox._frames.values()
    assert wire.decode_group(frame, wire.GroupLimits(64)).rewards == (1.0, 0.0)
    for _ in range(MAX_REWARD_FAILURES - 1):
        score_and_send(generator, failing)
    assert connection.num_unscored == 2 * (MAX_REWARD_FAILURES - 1)
    with pytest.raises(RewardError, match="fail_if_wrong raised ValueError: no such move"):
        score_and_send(generator, failing)


def test_unavailable_rewards_do_not_end_the_generator(scene: Scene) -> None:
    generator = scene.start(0)
    unavailable: Future[list[Score]] = Future()
    unavailable.set_exception(RewardUnavailableError("no verifier responds"))
    for _ in range(2 * MAX_REWARD_FAILURES):
        generator._scoring.add(SampledGroup(PROBLEM, completions(), unavailable, -1))
        generator._send_scored()
    assert generator._connection.num_unscored == 2 * MAX_REWARD_FAILURES


def test_silent_trainer_gets_no_more_groups_than_the_outbox_keeps(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = scene.start(0, train={"batch_size": 32, "max_async_level": 0})
    monkeypatch.setattr(pacing, "SILENCE_SECONDS", 0.0)
    while generator._may_start_group():
        scene.add_group()
    outbox = generator._connection.outbox
    assert (len(outbox), outbox.num_lost) == (64, 0)


def test_evaluation_without_usable_prompts_does_not_end_the_generator(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    generator = scene.start(8, tokenizer=tokenizer, eval={"max_completion_length": 500})
    scene.announce(wire.Announcement("run", evaluation_step=8))
    generator._make_evaluation_groups()
    assert "evaluation of step 8 skipped: held-out environment 'calculator': 250 of 250" in (
        caplog.text
    )


@pytest.mark.parametrize(
    "change", [{"evaluation_step": -1}, {"evaluation_step": 9}, {"run_id": "another"}]
)
def test_evaluation_waits_for_a_full_outbox_and_ends_with_the_trainers(
    scene: Scene, change: dict[str, Any]
) -> None:
    generator = scene.start(8, train={"batch_size": 32, "max_async_level": 0})
    announcement = wire.Announcement("run", evaluation_step=8)
    scene.announce(announcement)
    held_out = replace(environments_of(fail_if_wrong), problems=(PROBLEM,) * 100)
    generator._training._start(PROBLEM, 8, None)  # interrupted by the evaluation
    generator._evaluation = evaluation = generator._sampler(held_out, 1)
    problems = generator._held_out_problems(8, held_out)
    for problem in problems:
        if problem is None:
            break
        scene.add_group()
    outbox = generator._connection.outbox
    assert (len(outbox), outbox.num_lost) == (64, 0)  # also without the interrupted group
    durable = {outbox.sender: 9}
    scene.announce(replace(announcement, received=durable, durable=durable))  # room for ten more
    for problem in islice(problems, 10):
        assert problem is PROBLEM
        evaluation._start(problem, 1, None)
    assert next(problems) is None
    scene.announce(replace(announcement, **change))
    assert list(problems) == []


def test_each_live_generator_begins_an_evaluation_with_its_own_share(scene: Scene) -> None:
    generator = scene.start(8, generator={"index": 2, "count": 4})
    examples = tuple(replace(PROBLEM, id=str(number)) for number in range(6))
    held_out = replace(environments_of(fail_if_wrong), problems=examples)

    def order(*others: str) -> list[str]:
        live = dict.fromkeys([*others, generator._connection.outbox.sender], -1)
        scene.announce(wire.Announcement("run", evaluation_step=8, received=live))
        return [problem.id for problem in generator._held_out_problems(8, held_out) if problem]

    assert order() == list("012345")
    assert order("aaa/00", "zed/00") == list("145320")
    scene.announce(wire.Announcement("run", evaluation_step=8))  # as long as it is not live
    assert next(generator._held_out_problems(8, held_out)) == examples[2]


# The connection to the trainer.


def test_status_is_reported_while_a_group_takes_long(scene: Scene, stack: ExitStack) -> None:
    trainer = stack.enter_context(closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id="run")))
    statuses = stack.enter_context(closing(wire.GeneratorStatusSender(trainer.address)))
    scene.sockets = replace(scene.sockets, statuses=statuses)
    generator = scene.start(1)
    eventually(lambda: generator._between_steps() or trainer.receive(timeout=0.05))


def test_group_too_large_to_encode_is_lost_and_skipped(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    connection = scene.start(1)._connection
    connection.send(group_of([1, 0], problem_id="x" * 2000, sequence=0))
    assert "lost group=ann/" in caplog.text and "problem" in caplog.text
    outbox = connection.outbox
    assert (len(outbox), outbox.min_sequence) == (0, 1)  # the latter is sent with the next group
    assert (outbox.next_sequence, outbox.num_lost) == (1, 1)


@pytest.mark.parametrize(
    ("step", "done_run_id", "complete"),
    [(79, "", False), (79, "run", False), (80, "", True)],  # "run": one announcement had `done`
)
def test_silence_after_the_last_step_completes_the_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, step: int, done_run_id: str, complete: bool
) -> None:
    connection = scene.start(step)._connection
    scene.sockets.announcements._done_run_id = done_run_id
    connection.exchange()
    assert not connection.is_run_complete
    monkeypatch.setattr(trainer_connection, "SILENCE_SECONDS", 0.0)
    connection.exchange()
    assert connection.is_run_complete == complete
