"""The generator loop: in-place weight changes, roll-backs, failures and evaluations."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine_data import GREEDY, TokenCounter, sampled
from generators import (
    PROBLEM,
    FakeEngine,
    Scene,
    apply_until,
    generator_of,
    publish,
)
from sample_data import group_of, tiny_model

from peralta_zmq import models, wire
from peralta_zmq.engines.native.native_engine import native_engine
from peralta_zmq.engines.row_engine import RowEngine
from peralta_zmq.errors import EngineProcessError
from peralta_zmq.generator.generator import MAX_ENGINE_FAILURES
from peralta_zmq.generator.weight_sync import SettingsChangedError
from peralta_zmq.learning.admission import Admission
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import Completion, Problem, Request, RolloutGroup
from peralta_zmq.weights.store import WeightStore

# Weights.


@pytest.mark.parametrize(("update", "during"), [("in_flight", 2), ("between_groups", 1)])
def test_newer_version_is_applied_in_flight_or_between_groups(
    update: str, during: int, scene: Scene
) -> None:
    weights = scene.start(1, weights={"update": update}).weights
    scene.publish(2, 2.0)
    assert weights.apply_due(scene.engine, num_in_flight=1) is None
    assert (scene.engine.step, weights.is_draining) == (during, during == 1)
    assert weights.apply_due(scene.engine, num_in_flight=0) is None
    assert (scene.engine.step, weights.is_draining) == (2, False)


def replace_run(scene: Scene, **fields: str) -> None:
    """Another run publishes into the weights folder; `fields` are further ones of the manifest."""
    for path in [*scene.store.folder.glob("step_*"), scene.store.folder / "RUN.json"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    WeightStore.open(scene.store.folder).claim("another-run")
    publish(WeightStore.open(scene.store.folder), 1, 1.0, **fields)
    assert scene.subscriber.poll(timeout=20) is not None


def test_another_run_with_other_settings_starts_the_generator_again(scene: Scene) -> None:
    opened = scene.start(7)
    replace_run(scene, settings='{"sampling.max_completion_length": 512}')
    with pytest.raises(SettingsChangedError, match="other settings"):
        opened.generator.run()


def test_weights_of_another_run_restart_the_generators_count(scene: Scene) -> None:
    opened = scene.start(7)
    link = opened.link
    link.outbox.add(b"a group")
    sender = link.outbox.sender
    replace_run(scene)
    scene.engine.after_apply = lambda: setattr(link, "is_run_complete", True)
    opened.generator.run()
    assert (link.outbox.next_group_number, len(link.outbox)) == (0, 0)
    assert link.outbox.sender != sender
    assert opened.weights.version.run_id == "another-run"


@pytest.mark.parametrize("step", [4, 8, 12])
def test_weights_of_another_lineage_are_stale_whatever_their_step(scene: Scene, step: int) -> None:
    """A generator that slept through a roll-back may find a step beyond its own."""
    weights = scene.start(8).weights
    scene.publish(step, 4.0, lineage=1)
    obsolete = weights.apply_due(scene.engine, num_in_flight=0)
    assert obsolete is not None and not (obsolete.is_new_run or obsolete.is_rejection)
    scene.publish(14, 9.0, lineage=1)
    assert weights.apply_due(scene.engine, num_in_flight=0) is None
    assert scene.engine.step == 14


def test_equal_weights_of_another_lineage_are_not_stale(scene: Scene) -> None:
    weights = scene.start(8).weights
    again = scene.publish(8, 8.0, lineage=1)
    assert weights.apply_due(scene.engine, num_in_flight=0) is None
    assert (weights.version.number, weights.version.lineage) == (again.number, 1)
    scene.publish(9, 9.0, lineage=1)
    assert weights.apply_due(scene.engine, num_in_flight=0) is None
    assert scene.engine.step == 9


def test_rejected_weights_are_replaced_by_the_version_before(scene: Scene) -> None:
    first = apply_until(scene.engine, scene.subscriber, publish(scene.store, 1, 1.0), 1)
    publish(scene.store, 2, 2.0)
    version = apply_until(scene.engine, scene.subscriber, first, 2)
    weights = generator_of(scene.engine, scene.subscriber, scene.sockets, version).weights
    scene.subscriber.reject(weights.version)
    assert not scene.subscriber.has_accepted
    assert scene.subscriber.poll(timeout=20) is not None
    obsolete = weights.apply_due(scene.engine, num_in_flight=0)
    assert obsolete is not None and obsolete.is_rejection  # not a roll-back
    assert (scene.engine.step, scene.engine.weights["w"].tolist()) == (1, [1.0] * 4)
    assert scene.subscriber.poll(timeout=0.3) is None  # it is not offered again


# Whole loops with a real engine.


class Loop:
    """Runs a generator with a real engine until `reward` announces the end."""

    def __init__(self, scene: Scene, step: int, *, slots: int = 4) -> None:
        self.scene, self._slots = scene, slots
        self.tokenizer = models.load_tokenizer(models.EMBEDDED)
        self.engine = self.engine_of(self.model(2))
        self.first = scene.store.publish(step, self.weights(1), companions={})
        apply_until(self.engine, scene.subscriber, self.first, step)
        self.steps: list[int] = []  # the engine's step at each reward

    def engine_of(self, model: Any) -> RowEngine:
        return native_engine(
            model, self.tokenizer, EngineSettings(slots=self._slots, max_model_len=128)
        )

    def model(self, seed: int) -> Any:
        return tiny_model(seed=seed, vocab_size=468)

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        return models.weights_of(self.model(seed))

    def publish(self, step: int, weights: dict[str, torch.Tensor], *, lineage: int = 0) -> None:
        about = {"lineage": lineage}
        self.scene.store.publish(step, weights, companions={}, about=about)
        assert self.scene.subscriber.poll(timeout=20) is not None

    def end_run(self) -> None:
        self.scene.announce(wire.Announcement("run", done=True))

    def run(self, reward: Any, **sections: Any) -> list[RolloutGroup]:
        self.opened = generator_of(
            self.engine, self.scene.subscriber, self.scene.sockets, self.first,
            tokenizer=self.tokenizer, reward=reward, **sections,
        )  # fmt: skip
        groups = self.opened.run()
        self.engine.drop(range(1000))  # what was in flight at the end
        return groups


def greedy_logprobs(engine: RowEngine) -> list[float]:
    request = Request(0, np.array(PROBLEM.input_token_ids, np.int32))
    (completion,) = sampled(engine, replace(GREEDY, max_completion_length=4), [request])
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
    assert len(groups) == len(loop.steps) // 2 == loop.opened.link.outbox.next_group_number
    assert {group.policy_step for group in groups} == {1}
    assert greedy_logprobs(loop.engine) == greedy_logprobs(loop.engine_of(loop.model(1)))


class FailingEngine:
    """An engine in a process of its own, which fails in some decode steps."""

    def __init__(self, engine: Any, failures: Sequence[int]) -> None:
        self._engine, self.failures = engine, failures
        self.num_steps = 0
        self.applied: list[int] = []  # step of the weights of each start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def apply(self, update: WeightUpdate) -> None:
        self._engine.apply(update)
        self.applied.append(update.step)

    def advance(self) -> list[Completion]:
        self.num_steps += 1
        if self.num_steps in self.failures:
            raise EngineProcessError("the process has ended")
        return self._engine.advance()


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
    link = loop.opened.link
    assert engine.applied[0] == 1 and engine.applied.count(2) >= 1  # newest of each time
    assert link.num_aborted == num_aborted
    assert (link.num_resumed > 0) == (update == "in_flight")
    assert [group.group_number for group in groups] == list(range(len(groups)))
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
    assert loop.opened.link.num_aborted == 1


def test_engine_that_fails_repeatedly_without_a_group_ends_the_generator(scene: Scene) -> None:
    loop = Loop(scene, 1)
    loop.engine = cast(Any, FailingEngine(loop.engine, failures=range(99)))
    with pytest.raises(EngineProcessError, match="the process has ended"):
        loop.run(lambda problem, text: 1.0, sampling={"max_completion_length": 4})
    assert len(cast(Any, loop.engine).applied) == MAX_ENGINE_FAILURES - 1


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (4, "rolled back to the weights of step 4"),
        (8, "step 8 was trained again, with other results"),
    ],
)
def test_groups_in_flight_across_a_roll_back_are_dropped(
    scene: Scene, caplog: pytest.LogCaptureFixture, step: int, reason: str
) -> None:
    """Groups of 3 in 4 slots: part of the next group is always in flight."""
    loop = Loop(scene, 8)

    def reward(problem: Problem, text: str) -> float:
        version = loop.opened.weights.version
        loop.steps.append(version.number)
        if len(loop.steps) == 3:
            loop.publish(step, loop.weights(3))
        if loop.steps[-9:] == [9] * 9:
            loop.end_run()
        return 1.0

    with caplog.at_level("INFO"):
        groups = loop.run(
            reward, sampling={"num_generations": 3, "max_completion_length": 4},
            train={"batch_size": 126},
        )  # fmt: skip
    assert [group.group_number for group in groups] == list(range(len(groups)))
    steps = [(group.policy_step, group.newest_step, group.weights_id) for group in groups]
    rolled_back = loop.opened.weights.version.weights_id
    assert [*dict.fromkeys(steps)] == [(8, 8, loop.first.weights_id), (step, step, rolled_back)]
    assert f"dropped groups in flight: {reason}" in caplog.text


TRAINING = {"num_generations": 3, "max_completion_length": 9, "min_tokens": 9}


class WatchedEngine(TokenCounter):
    """An engine that counts the tokens of training groups, which have a minimum length.

    After `countdown` decode steps it calls `when_counted`.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.countdown, self.when_counted = 0, lambda: None
        self.on_evaluation: Callable[[], None] = lambda: None  # called before its first request
        self.num_before_evaluation = 0  # tokens

    def submit(self, requests: Sequence[Request]) -> None:
        if not self.num_before_evaluation and not requests[0].sampling.min_tokens:
            self.num_before_evaluation = self.num_tokens
            self.on_evaluation()
        for request in requests:
            is_training = request.sampling.min_tokens > 0
            watched = replace(request, sampled=self._sampled if is_training else None)
            self._engine.submit([watched])

    def advance(self) -> list[Completion]:
        if self.countdown:
            self.countdown -= 1
            if not self.countdown:
                self.when_counted()
        return self._engine.advance()


class EvaluatedLoop(Loop):
    """A loop with groups of 3 in 3 slots; an evaluation becomes due within the second one."""

    def __init__(self, scene: Scene, step: int) -> None:
        super().__init__(scene, step, slots=3)
        self.watched = WatchedEngine(self.engine)
        self.engine = cast(Any, self.watched)

    def announce(self, **announcement: Any) -> None:
        self.scene.announce(wire.Announcement("run", evaluation_step=1, **announcement))

    def run_with_evaluation(
        self, *, cancel: bool = True, num_rewards: int = 6, **sections: Any
    ) -> list[RolloutGroup]:
        def reward(problem: Problem, text: str) -> float:
            self.steps.append(self.engine.step)
            if len(self.steps) == 1:
                self.watched.countdown, self.watched.when_counted = 4, self.announce
            elif len(self.steps) == num_rewards:
                self.end_run()
            return 1.0

        sections = {"train": {"batch_size": 126}, "sampling": TRAINING, **sections}
        sections["eval"] = {
            "cancel_inflight_rollouts_on_eval": cancel, "num_examples": 3,
            "sampling": {"max_completion_length": 4},
        }  # fmt: skip
        return self.run(reward, **sections)


def evaluation_steps(groups: Sequence[RolloutGroup]) -> list[int]:
    return [group.evaluation_step for group in groups]


def training(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    return [group for group in groups if group.evaluation_step is None]


def test_evaluation_begins_after_groups_in_flight(scene: Scene) -> None:
    loop = EvaluatedLoop(scene, 1)
    groups = loop.run_with_evaluation(cancel=False, num_rewards=9)
    assert evaluation_steps(groups) == [None, None, 1, 1, 1, None]
    assert loop.opened.link.num_resumed == 0


@pytest.mark.parametrize(("update", "newest_step"), [("in_flight", 2), ("between_groups", 1)])
def test_group_interrupted_by_an_evaluation_is_resumed_after_it(
    update: str, newest_step: int, scene: Scene
) -> None:
    loop = EvaluatedLoop(scene, 1)
    loop.watched.on_evaluation = lambda: loop.publish(2, loop.weights(3))  # which waits for its end
    groups = loop.run_with_evaluation(weights={"update": update})
    assert 9 * 3 < loop.watched.num_before_evaluation < 9 * 6
    assert evaluation_steps(groups) == [None, 1, 1, 1, None]
    assert [(each.policy_step, each.newest_step) for each in groups] == [
        (1, 1), (1, 1), (1, 1), (1, 1), (1, newest_step),
    ]  # fmt: skip
    steps = [each.policy_steps for group in training(groups) for each in group.rollouts]
    num_of_step = np.bincount(np.concatenate([each[each >= 0] for each in steps]))
    # Tokens sampled before the evaluation are not sampled again.
    assert num_of_step[1] == (
        loop.watched.num_before_evaluation if update == "in_flight" else 9 * 6
    )
    assert num_of_step.sum() == loop.watched.num_tokens == 9 * 6
    assert (loop.opened.link.num_resumed, loop.opened.link.num_aborted) == (3, 0)


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
    loop = EvaluatedLoop(scene, 1)

    def go_on() -> None:
        loop.publish(4, loop.weights(3))
        loop.announce(started_step=started_step)

    loop.watched.on_evaluation = go_on
    groups = training(loop.run_with_evaluation(train={"batch_size": 126, **train}))
    link = loop.opened.link
    admission = Admission(loop.opened.config.train.staleness_limit)
    of_step_1 = group_of([1, 0], policy_step=1)
    is_dropped = admission.admit(of_step_1, step=max(started_step, 4) + 1) == "stale"
    assert (link.num_aborted, link.num_resumed) == ((1, 0) if is_dropped else (0, 3))
    assert [group.policy_step for group in groups] == [1, 4 if is_dropped else 1]


def test_engine_failing_in_an_evaluation_keeps_training_groups(scene: Scene) -> None:
    loop = EvaluatedLoop(scene, 1)
    failing = FailingEngine(loop.engine, failures=[])
    loop.engine = cast(Any, failing)
    loop.watched.on_evaluation = lambda: setattr(failing, "failures", [failing.num_steps + 2])
    groups = loop.run_with_evaluation()
    assert evaluation_steps(groups) == [None, 1, 1, 1, None]  # the evaluation begins again
    link = loop.opened.link
    assert link.num_aborted == 3  # answers
    assert link.num_resumed == 3
    assert loop.watched.num_tokens == 9 * 6


def test_interrupted_group_is_dropped_by_a_roll_back_and_the_evaluation_repeated(
    scene: Scene,
) -> None:
    loop = EvaluatedLoop(scene, 8)
    loop.watched.on_evaluation = lambda: loop.publish(4, loop.weights(3), lineage=1)
    groups = loop.run_with_evaluation()
    assert evaluation_steps(groups) == [None, 1, 1, 1, 1, 1, 1, None]
    assert [group.policy_step for group in groups] == [8] * 4 + [4] * 4
    assert all(group.newest_step == group.policy_step for group in groups)


# When groups are started.


def test_silent_trainer_gets_no_more_groups_than_the_outbox_keeps(
    scene: Scene,
) -> None:
    scene.engine = FakeEngine(slots=10_000)
    opened = scene.start(0, train={"batch_size": 32, "max_async_level": 0})
    opened.link.silence_seconds = 0.0
    sampler, training, _ = opened.sources()
    for _ in range(9):
        opened.link.outbox.add(b"a group")
    training.submit_due(sampler)
    assert len(training.groups) == 64 - 9


def test_evaluation_without_usable_prompts_does_not_end_the_generator(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    longest = 1012  # of the 1024 tokens that the model reads
    opened = scene.start(
        8, tokenizer=tokenizer, eval={"sampling": {"max_completion_length": longest}}
    )
    scene.announce(wire.Announcement("run", evaluation_step=8))
    sampler, training, evaluation = opened.sources()
    evaluation.submit_due(sampler)
    assert "evaluation of step 8 skipped: held-out environment 'calculator': 250 of 250" in (
        caplog.text
    )
    assert not evaluation.is_running
    evaluation.submit_due(sampler)
    assert not training.is_paused


@pytest.mark.parametrize(
    "change", [{"evaluation_step": None}, {"evaluation_step": 9}, {"run_id": "another"}]
)
def test_evaluation_waits_for_a_full_outbox_and_ends_with_the_trainers(
    scene: Scene, change: dict[str, Any]
) -> None:
    scene.engine = FakeEngine(slots=10_000)
    opened = scene.start(
        8, train={"batch_size": 32, "max_async_level": 0},
        tokenizer=models.load_tokenizer(models.EMBEDDED),
    )  # fmt: skip
    announcement = wire.Announcement("run", evaluation_step=8)
    scene.announce(announcement)
    sampler, training, evaluation = opened.sources()
    outbox = opened.link.outbox
    for _ in range(50):
        outbox.add(b"a group")
    scene.engine.is_endless = True
    training.submit_due(sampler)
    sampler.interrupt(training.groups)  # also without the interrupted groups
    evaluation.submit_due(sampler)
    assert sampler.num_in_flight == 14
    durable = {outbox.sender: wire.SenderProgress(settled=10, durable=10)}
    scene.announce(replace(announcement, senders=durable))  # room for ten more
    opened.link.exchange()
    evaluation.submit_due(sampler)
    assert sampler.num_in_flight == 24
    scene.announce(replace(announcement, **change))
    scene.engine.is_endless = False
    evaluation.submit_due(sampler)
    assert evaluation.is_running  # until its groups have ended
    assert len(evaluation.take(sampler.advance())) == 24
    evaluation.submit_due(sampler)
    assert not evaluation.is_running and sampler.num_in_flight == 0


def test_each_live_generator_begins_an_evaluation_with_its_own_share(scene: Scene) -> None:
    scene.engine = FakeEngine(slots=10_000)
    opened = scene.start(
        8, eval={"num_examples": 6},
        tokenizer=models.load_tokenizer(models.EMBEDDED),
    )  # fmt: skip
    sampler, _, evaluation = opened.sources()

    def order(*senders: str) -> list[str]:
        live = dict.fromkeys(senders, wire.SenderProgress())
        scene.announce(wire.Announcement("run", evaluation_step=8, senders=live))
        evaluation.repeat()
        evaluation.submit_due(sampler)
        problems = [each.problem.id for each in evaluation.take(sampler.advance())]
        evaluation.submit_due(sampler)
        assert not evaluation.is_running
        return problems

    sender = opened.link.outbox.sender
    examples = order(sender)
    assert len(set(examples)) == 6
    assert order("aaa/00", sender, "zed/00") == [examples[int(number)] for number in "145320"]
    assert order("aaa/00")[0] == examples[1]  # although it is not announced as live yet


# The connection to the trainer.


def test_status_is_reported_while_a_group_takes_long(scene: Scene) -> None:
    trainer = scene.status_receiver()
    scene.connect(statuses=trainer.address)
    opened = scene.start(1)
    scene.engine.is_endless = True

    def end_when_received() -> None:
        opened.link.is_run_complete |= trainer.receive(timeout=0.05) is not None

    scene.engine.before_step = end_when_received
    opened.generator.run()  # the test's deadline ends a hang


@pytest.mark.parametrize(
    ("step", "done_run_id", "complete"),
    [(79, "", False), (79, "run", False), (80, "", True)],  # "run": one announcement had `done`
)
def test_silence_after_the_last_step_completes_the_run(
    scene: Scene, step: int, done_run_id: str, complete: bool
) -> None:
    connection = scene.start(step).link
    if done_run_id:
        scene.sockets.announcements.accept(wire.Announcement(done_run_id, done=True))
    connection.exchange()
    assert not connection.is_run_complete
    connection.silence_seconds = 0.0
    connection.exchange()
    assert connection.is_run_complete == complete
