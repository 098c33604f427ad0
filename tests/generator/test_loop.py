"""Pace and hot reload, the two things a generator decides for itself.

.venv/bin/python -m pytest tests/test_generator.py
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch
from fakes import group_of, tiny_model
from sockets import ANYWHERE, eventually

from peralta_zmq import atomic_files, models, wire
from peralta_zmq.config import Config, load_config
from peralta_zmq.engines.native import NativeEngine
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.reward_runner import RewardRunner
from peralta_zmq.errors import EngineError, RewardError, StoreError
from peralta_zmq.generator import loop as generator
from peralta_zmq.generator import pacing
from peralta_zmq.generator.loop import MAX_FAILURES, Generator, StaleRunError, TrainerConnection
from peralta_zmq.generator.pacing import HUNGRY_SECONDS, SILENT_SECONDS, SamplingPacer
from peralta_zmq.generator.weight_sync import open_engine, open_follower, refresh
from peralta_zmq.rollout import Completion, Problem, Request, Sampling
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber
from peralta_zmq.weights.version import WEIGHTS, Version


class Clock:
    """Time that moves when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def begins(
    pace: SamplingPacer, *, step: int = 0, begun: int = 0, generators: int = 1, hungry: bool = False
) -> int:
    """Groups that the pace allows before it says wait, when none is under way."""
    count = 0
    while count < 100 and pace.allows(
        step=step, begun=begun, under_way=count, generators=generators, hungry=hungry
    ):
        pace.count()
        count += 1
    return count


@pytest.mark.parametrize(
    ("level", "begun", "groups"),
    [
        (0, 7, 16),  # what the next step takes
        (0, 8, 0),  # it has begun: on-policy waits for its weights
        (1, 7, 32),  # the next step's and the one's after it
        (1, 8, 16),
        (1, 9, 0),
        (2, 7, 48),
        (1, 0, 32),  # announcements are cut off, weights still come: no more than with them
    ],
)
def test_groups_land_in_steps_that_are_near_enough(
    clock: Clock, level: int, begun: int, groups: int
) -> None:
    assert begins(SamplingPacer(16, max_async_level=level), step=7, begun=begun) == groups


@pytest.mark.parametrize(("generators", "groups"), [(2, 8), (3, 6), (16, 1), (40, 1)])
def test_generators_share_a_step(clock: Clock, generators: int, groups: int) -> None:
    assert begins(SamplingPacer(16, max_async_level=0), generators=generators) == groups


def test_a_trainer_that_waits_and_has_all_of_ours_gets_one_more(clock: Clock) -> None:
    pace = SamplingPacer(16, max_async_level=1)
    pace.count()
    clock.now += HUNGRY_SECONDS + 0.1
    assert begins(pace, begun=2, hungry=True) == 1
    assert begins(pace, begun=2) == 0


def test_a_trainer_that_is_not_heard_gets_one_only_after_long_silence(clock: Clock) -> None:
    pace = SamplingPacer(16, max_async_level=1)
    pace.count()
    clock.now += SILENT_SECONDS - 0.1
    assert begins(pace, begun=2) == 0
    clock.now += 0.2
    assert begins(pace, begun=2) == 1


class Spy:
    """An engine that keeps what it is given, unless it is not a model's."""

    def __init__(self) -> None:
        self.step = 0
        self.weights: dict[str, torch.Tensor] = {}

    def apply(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
        if step == 13:
            raise ValueError("not a model's")
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.step = step


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore.open(tmp_path / "weights")
    store.claim("run")
    return store


@pytest.fixture
def follower(store: WeightStore, tmp_path: Path) -> Iterator[WeightSubscriber]:
    with closing(WeightSubscriber(store, tmp_path / "copy", poll_seconds=0.05)) as opened:
        yield opened


def published(store: WeightStore, step: int, value: float, *, line: int = 0) -> Version:
    about = {"line": line}
    return store.publish(step, {"w": torch.full((4,), value)}, companions={}, about=about)


def until_step(engine: Any, follower: WeightSubscriber, version: Version, step: int) -> Version:
    """Refresh until the engine has it; the test's deadline ends a hang."""
    while engine.step != step:
        follower.poll(timeout=0.2)
        version = refresh(engine, follower, version)
    return version


def test_the_newest_version_is_applied(store: WeightStore, follower: WeightSubscriber) -> None:
    first = published(store, 1, 1.0)
    newest = published(store, 3, 3.0)
    engine = Spy()
    assert until_step(engine, follower, first, 3).weights_id == newest.weights_id
    assert engine.weights["w"].tolist() == [3.0] * 4


def test_a_version_once_applied_is_not_applied_again(
    store: WeightStore, follower: WeightSubscriber
) -> None:
    newest = until_step(engine := Spy(), follower, published(store, 1, 1.0), 1)
    engine.weights.clear()
    assert follower.poll(timeout=0.3) is None
    assert refresh(engine, follower, newest) is newest
    assert engine.weights == {}


def test_a_version_that_the_engine_refuses_changes_nothing_and_a_later_one_is_taken(
    store: WeightStore, follower: WeightSubscriber
) -> None:
    first = until_step(engine := Spy(), follower, published(store, 1, 1.0), 1)
    published(store, 13, 13.0)
    assert follower.poll(timeout=20) is not None
    assert refresh(engine, follower, first) is first
    assert engine.weights["w"].tolist() == [1.0] * 4
    published(store, 14, 14.0)
    assert until_step(engine, follower, first, 14).step == 14


def test_a_real_model_serves_what_was_published_bit_for_bit(
    store: WeightStore, follower: WeightSubscriber
) -> None:
    trained, serving = tiny_model(seed=1), tiny_model(seed=2)
    version = store.publish(5, models.weights_of(trained), companions={})

    class Applies:
        step = 0

        def apply(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
            models.apply_weights(serving, weights)
            self.step = step

    until_step(Applies(), follower, version, 5)
    for name, tensor in models.weights_of(trained).items():
        assert torch.equal(models.weights_of(serving)[name], tensor)


def test_a_generator_starts_from_a_keyframe_and_deltas_and_its_model_is_its_own(
    tmp_path: Path,
) -> None:
    store = WeightStore.open(tmp_path / "run" / "weights")
    store.claim("run")
    model = models.load_model(
        models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32
    ).bfloat16()
    companions = models.companion_files(models.EMBEDDED)
    first = models.weights_of(model)
    versions = [store.publish(4, first, companions=companions)]
    for step in (5, 6):
        base = {name: tensor.clone() for name, tensor in first.items()}
        first["model.norm.weight"].view(-1)[step] += 1
        versions.append(
            store.publish(step, first, companions=companions, base=(versions[-1], base))
        )
    config = load_config(
        "bin/generator",
        ["--run.dir", str(tmp_path), "--run.name", "run", "--model.dtype", "bfloat16"],
    )
    asked: list[str] = []
    with (
        closing(wire.AnnouncementSubscriber("tcp://127.0.0.1:9")) as listener,
        closing(open_follower(config, "ann")) as follower,
    ):
        version, engine, _ = open_engine(
            config, follower, listener, "tcp://127.0.0.1:9", asked.append
        )
        assert asked == []
        assert (version.step, engine.step) == (6, 6)
        served = cast(Any, engine)._model.state_dict()
        before = served["model.norm.weight"].clone()
        assert torch.equal(before, first["model.norm.weight"])
        base = {name: tensor.clone() for name, tensor in first.items()}
        first["model.norm.weight"].add_(1)
        store.publish(7, first, companions=companions, base=(versions[-1], base))
        assert follower.poll(timeout=20) is not None  # the copy has changed, the model not
        assert torch.equal(served["model.norm.weight"], before)


def test_a_generator_gives_up_waiting_for_weights_when_it_is_told_to(tmp_path: Path) -> None:
    arguments = ["--run.dir", str(tmp_path), "--weights.wait-for-weights-timeout", "0.3"]
    config = load_config("bin/generator", arguments)
    with (
        closing(wire.AnnouncementSubscriber("tcp://127.0.0.1:9")) as listener,
        closing(open_follower(config, "ann")) as follower,
        pytest.raises(StoreError, match=r"no weights in .* after 0\.3 s .*bin/trainer"),
    ):
        open_engine(config, follower, listener, "tcp://127.0.0.1:9", lambda run_id: None)


def damaged(weights: dict[str, torch.Tensor], damage: str) -> dict[str, torch.Tensor]:
    if damage == "missing":
        return {name: each for name, each in weights.items() if name != "model.norm.weight"}
    if damage == "shape":
        return {**weights, "model.norm.weight": torch.ones(7)}
    return {
        **weights,
        "model.norm.weight": torch.full_like(weights["model.norm.weight"], torch.nan),
    }


@pytest.mark.parametrize("damage", ["missing", "shape", "nan", "integers", "of a lie"])
def test_a_version_that_does_not_fit_leaves_the_live_model_untouched(
    store: WeightStore, follower: WeightSubscriber, damage: str
) -> None:
    serving = tiny_model(seed=2)

    class Applies:
        step = 0

        def apply(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
            models.apply_weights(serving, weights)
            self.step = step

    good = models.weights_of(tiny_model(seed=1))
    first = until_step(engine := Applies(), follower, store.publish(1, good, companions={}), 1)
    if damage in ("integers", "of a lie"):
        bits = {name: each.to(torch.int16) for name, each in good.items()}
        about = {"run_id": "run", "number": 2, "step": 2}
        if damage == "of a lie":  # the names and shapes of the model, as far as the manifest says
            about["model"] = first.field("model")
        weights = {WEIGHTS: safetensors.torch.save(bits)}
        atomic_files.write_folder(store.folder / "step_00000002", weights, about)
    else:
        store.publish(2, damaged(good, damage), companions={})
    follower.notify(2)
    assert follower.poll(timeout=0.5) is None or refresh(engine, follower, first) is first
    for name, tensor in good.items():
        assert torch.equal(models.weights_of(serving)[name], tensor)
    store.publish(3, {name: each + 1 for name, each in good.items()}, companions={})
    assert until_step(engine, follower, first, 3).number == 3


@pytest.fixture
def line() -> Iterator[TrainerConnection]:
    """Sockets to nobody."""
    address = "tcp://127.0.0.1:9"
    opened = TrainerConnection(
        wire.AnnouncementSubscriber(address),
        wire.RolloutSender(address),
        wire.GeneratorStatusSender(address),
    )
    with closing(opened.listener), closing(opened.sender), closing(opened.counters):
        yield opened


def generator_of(
    follower: WeightSubscriber,
    line: TrainerConnection,
    version: Version,
    **sections: dict[str, object],
) -> Generator:
    config = Config.model_validate(sections)
    return Generator(config, "ann", b"bootboot", follower, line, version, {"python": "3.11"})


@pytest.mark.parametrize(("update", "during"), [("in_flight", 2), ("between_groups", 1)])
def test_a_version_is_applied_in_flight_or_when_no_group_is_under_way(
    update: str,
    during: int,
    store: WeightStore,
    follower: WeightSubscriber,
    line: TrainerConnection,
) -> None:
    first = until_step(engine := Spy(), follower, published(store, 1, 1.0), 1)
    worker = generator_of(follower, line, first, weights={"update": update})
    worker._under_way = 1
    published(store, 2, 2.0)
    assert follower.poll(timeout=20) is not None
    worker._refresh(engine)
    assert engine.step == during
    worker._under_way = 0
    worker._refresh(engine)
    assert engine.step == 2


def test_a_group_that_takes_long_is_no_silence(
    store: WeightStore, follower: WeightSubscriber, line: TrainerConnection, stack: ExitStack
) -> None:
    first = until_step(engine := Spy(), follower, published(store, 1, 1.0), 1)
    trainer = stack.enter_context(closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id="run")))
    counters = stack.enter_context(closing(wire.GeneratorStatusSender(trainer.address)))
    worker = generator_of(follower, replace(line, counters=counters), first)
    eventually(lambda: worker._between_steps(engine) or trainer.receive(timeout=0.05))


def test_a_trainer_that_does_not_speak_of_us_has_taken_what_it_had_taken(
    store: WeightStore, follower: WeightSubscriber, line: TrainerConnection
) -> None:
    worker = generator_of(follower, line, published(store, 1, 1.0))
    silent = wire.Announcement(
        "run", incarnation=b"trainer!", received={}, durable={}, highest_received={}
    )
    assert worker._taken(None) == worker._taken(silent) == 0
    assert worker._taken(replace(silent, consumed={worker._outbox.sender: 6})) == 7
    assert worker._taken(silent) == worker._taken(None) == 7
    worker._begin(worker._version, b"newstart")
    assert worker._taken(silent) == 0


def test_weights_that_do_not_compute_are_given_up_for_the_version_before(
    store: WeightStore, follower: WeightSubscriber, line: TrainerConnection
) -> None:
    first = until_step(engine := Spy(), follower, published(store, 1, 1.0), 1)
    published(store, 2, 2.0)
    worker = generator_of(follower, line, until_step(engine, follower, first, 2))
    worker._under_way = 3
    worker._evaluated = 2
    worker._give_up(engine, EngineError("not finite"))
    assert worker._evaluated == 2  # no roll-back
    assert (engine.step, engine.weights["w"].tolist()) == (1, [1.0] * 4)
    assert worker._under_way == 0
    assert follower.poll(timeout=0.3) is None  # and not taken again


def test_weights_of_another_run_begin_anew(
    store: WeightStore, follower: WeightSubscriber, line: TrainerConnection, tmp_path: Path
) -> None:
    first = until_step(engine := Spy(), follower, published(store, 7, 7.0), 7)
    worker = generator_of(follower, line, first)
    worker._sequence, worker._under_way = 9, 2
    before = worker._outbox.sender
    for each in [*store.folder.glob("step_*"), store.folder / "RUN.json"]:
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    other = WeightStore.open(store.folder)
    other.claim("another-run")
    published(other, 1, 1.0)
    assert follower.poll(timeout=20) is not None
    with pytest.raises(StaleRunError):
        worker._refresh(engine)
    assert (worker._sequence, worker._under_way, len(worker._outbox)) == (0, 0, 0)
    assert worker._outbox.sender != before
    assert worker._ids[1][0] == "another-run"


def test_a_group_that_is_too_large_is_given_up_and_the_next_one_is_sent(
    follower: WeightSubscriber,
    line: TrainerConnection,
    store: WeightStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = until_step(Spy(), follower, published(store, 1, 1.0), 1)
    worker = generator_of(follower, line, first)
    assert worker._send_new(group_of([1, 0], problem_id="x" * 2000, sequence=0))
    assert "lost group=ann/" in caplog.text and "problem" in caplog.text
    assert (len(worker._outbox), worker._outbox.min_sequence) == (0, 1)  # the next one tells of it


PROBLEM = Problem("7", "mine", (), "4", input_token_ids=(5, 9, 33))


def fails_when_wrong(problem: Problem, text: str) -> float:
    if text == "wrong":
        raise ValueError("no such move")
    return 1.0


def answers() -> list[Completion]:
    ids = np.array([5, 6], np.int32)
    return [
        Completion(index, ids, ids, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", text)
        for index, text in enumerate(["right", "wrong"])
    ]


def judged_by(reward: Callable[..., float]) -> Environments:
    judge = RewardRunner(reward, timeout_seconds=9, bounded=True)
    return Environments({"mine": 1}, (PROBLEM,), {"mine": judge})


def test_a_group_whose_reward_fails_is_given_up_and_counted_and_the_next_one_is_made(
    follower: WeightSubscriber,
    line: TrainerConnection,
    store: WeightStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = until_step(Spy(), follower, published(store, 0, 1.0), 0)
    worker = generator_of(follower, line, first)
    sound = {"right": 1.0, "wrong": 0.0}
    judges = (fails_when_wrong, 0, 1), (lambda problem, text: sound[text], 1, 1)
    for reward, made, given_up in judges:
        worker._score_and_send(PROBLEM, answers(), judged_by(reward))
        assert (worker._sequence, worker._unjudged) == (made, given_up)
    assert "raised ValueError: no such move" in caplog.text


def likeliest(engine: NativeEngine) -> list[float]:
    asked = Request(0, np.array(PROBLEM.input_token_ids, np.int32))
    sampling = Sampling(temperature=0.0, max_completion_length=4)
    return [each for made in engine.generate([asked], sampling) for each in made.logprobs.tolist()]


def test_a_generator_whose_weights_give_nan_goes_on_with_those_before(
    follower: WeightSubscriber,
    line: TrainerConnection,
    store: WeightStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The whole loop with a real engine; 2 groups run together, so 4 answers come from a step."""
    good, norm = models.weights_of(tiny_model(seed=1)), "model.norm.weight"
    bad = {**good, norm: torch.full_like(good[norm], 3e38)}  # finite, its logits are not
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    engine = NativeEngine(tiny_model(seed=2), tokenizer, slots=4, max_model_len=32)
    first = until_step(engine, follower, store.publish(1, good, companions={}), 1)
    judged: list[int] = []  # the engine's step at each answer

    def reward(problem: Problem, text: str) -> float:
        judged.append(engine.step)
        if len(judged) == 4:
            store.publish(2, bad, companions={})
            assert follower.poll(timeout=20) is not None
        if len(judged) == 12:
            line.listener.latest = wire.Announcement("run", done=True)
        return 1.0

    with closing(wire.RolloutSender("tcp://127.0.0.1:9", hwm=64)) as sender:
        worker = generator_of(
            follower, replace(line, sender=sender), first,
            sampling={"num_generations": 2, "max_completion_length": 4},
        )  # fmt: skip
        worker.work(engine, tokenizer, judged_by(reward))
    assert "gave up the groups under way: version=2 reason=the weights of step 2" in caplog.text
    assert len(judged) >= 12 and set(judged) == {1}
    assert store.find(2) is None
    groups = [wire.decode_group(each, vocab_size=64) for each in worker._outbox._frames.values()]
    assert len(groups) == len(judged) // 2 == worker._sequence
    assert {each.policy_step for each in groups} == {1}
    fresh = NativeEngine(tiny_model(seed=1), tokenizer, slots=4, max_model_len=32)
    assert likeliest(engine) == likeliest(fresh)


def test_groups_under_way_across_a_roll_back_are_not_made(
    follower: WeightSubscriber,
    line: TrainerConnection,
    store: WeightStore,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of 3 answers to each problem 4 are made together: one of the next is always under way."""
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    engine = NativeEngine(tiny_model(seed=2), tokenizer, slots=4, max_model_len=32)
    ahead = store.publish(8, models.weights_of(tiny_model(seed=1)), companions={})
    first, judged = until_step(engine, follower, ahead, 8), list[int]()

    def reward(problem: Problem, text: str) -> float:
        judged.append(engine.step)
        if len(judged) == 3:
            store.publish(4, models.weights_of(tiny_model(seed=3)), companions={})
            assert follower.poll(timeout=20) is not None
        if judged[-9:] == [4] * 9:
            line.listener.latest = wire.Announcement("run", done=True)
        return 1.0

    with (
        closing(wire.RolloutSender("tcp://127.0.0.1:9", hwm=64)) as sender,
        caplog.at_level("INFO"),
    ):
        worker = generator_of(
            follower, replace(line, sender=sender), first,
            sampling={"num_generations": 3, "max_completion_length": 4},
            train={"batch_size": 126},
        )  # fmt: skip
        worker.work(engine, tokenizer, judged_by(reward))
    groups = [wire.decode_group(each, vocab_size=64) for each in worker._outbox._frames.values()]
    assert [each.sequence for each in groups] == list(range(worker._sequence))
    steps = [(each.policy_step, each.newest_step, each.weights_id) for each in groups]
    assert set(steps) == {(8, 8, ahead.weights_id), (4, 4, worker._version.weights_id)}
    assert steps == sorted(steps, reverse=True)  # nothing of step 8 after what is of step 4
    assert "at step 4 of another line; groups under way are given up" in caplog.text


def test_so_many_groups_in_a_row_without_a_reward_end_the_generator(
    follower: WeightSubscriber, line: TrainerConnection, store: WeightStore
) -> None:
    first = until_step(Spy(), follower, published(store, 0, 1.0), 0)
    worker = generator_of(follower, line, first)
    few = [fails_when_wrong] * (MAX_FAILURES - 1)
    for reward in (*few, lambda problem, text: 1.0, *few):  # one with a reward begins anew
        worker._score_and_send(PROBLEM, answers(), judged_by(reward))
    assert (worker._sequence, worker._unjudged) == (1, 2 * len(few))
    with pytest.raises(RewardError, match="fails_when_wrong raised ValueError: no such move"):
        worker._score_and_send(PROBLEM, answers(), judged_by(fails_when_wrong))


@pytest.mark.parametrize(
    ("train", "factor", "in_step", "groups"),
    [
        ({"batch_size": 32}, 1.0, 0, 4),
        ({"batch_size": 32}, 1.5, 0, 6),
        ({"batch_size": 32}, 1.1, 0, 5),  # 4.4
        ({"batch_size": 32}, 1.0, 10, 4),  # as many as the settings say, whatever a step took
        ({"batch_size": 32, "token_batch_size": 4000}, 1.0, 0, 4),  # no step was taken yet
        ({"batch_size": 32, "token_batch_size": 4000}, 1.0, 10, 10),
        ({"batch_size": 32, "token_batch_size": 4000}, 1.5, 10, 15),
    ],
)
def test_as_many_groups_are_begun_as_a_step_takes_times_the_factor(
    follower: WeightSubscriber, line: TrainerConnection, store: WeightStore,
    train: dict[str, object], factor: float, in_step: int, groups: int,
) -> None:  # fmt: skip
    version = until_step(engine := Spy(), follower, published(store, 0, 1.0), 0)
    worker = generator_of(
        follower, line, version,
        train={**train, "max_async_level": 0}, curriculum={"oversampling_factor": factor},
    )  # fmt: skip
    line.listener.latest = wire.Announcement("run", groups_in_step=in_step)
    while worker._under_way < 100 and worker._is_our_turn(engine):
        worker._under_way += 1
    assert worker._under_way == groups


def test_a_trainer_that_is_silent_for_hours_is_left_no_more_groups_than_are_kept_for_it(
    follower: WeightSubscriber,
    line: TrainerConnection,
    store: WeightStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = until_step(engine := Spy(), follower, published(store, 0, 1.0), 0)
    worker = generator_of(follower, line, version, train={"batch_size": 32, "max_async_level": 0})
    monkeypatch.setattr(pacing, "SILENT_SECONDS", 0.0)
    while worker._is_our_turn(engine):
        worker._outbox.add(worker._sequence, b"a group")
        worker._sequence += 1
    assert (len(worker._outbox), worker._outbox.lost) == (64, 0)


@pytest.mark.parametrize(
    "other", [{"evaluation_step": -1}, {"evaluation_step": 9}, {"run_id": "another"}]
)
def test_an_evaluation_waits_where_its_groups_cannot_be_kept_and_ends_with_the_trainers(
    follower: WeightSubscriber, line: TrainerConnection, store: WeightStore, other: dict[str, Any]
) -> None:
    version = until_step(Spy(), follower, published(store, 8, 0.0), 8)
    worker = generator_of(follower, line, version, train={"batch_size": 32, "max_async_level": 0})
    line.listener.latest = heard = wire.Announcement("run", evaluation_step=8)
    examples = worker._examples(8, [PROBLEM] * 100)
    for example in examples:
        if example is None:
            break
        worker._under_way -= 1
        worker._outbox.add(worker._sequence, b"a group")
        worker._sequence += 1
    assert (len(worker._outbox), worker._outbox.lost) == (64, 0)
    durable = {worker._outbox.sender: 9}
    line.listener.latest = replace(heard, received=durable, durable=durable)  # ten more can be kept
    assert [next(examples) for _ in range(10)] == [PROBLEM] * 10 and next(examples) is None
    line.listener.latest = replace(heard, **other)
    assert list(examples) == []


@pytest.mark.parametrize("step", [4, 8, 12])
def test_weights_of_another_line_are_told_apart_whatever_their_step(
    follower: WeightSubscriber, line: TrainerConnection, store: WeightStore, step: int
) -> None:
    """Who sleeps through a roll-back may wake at a step beyond the one it fell asleep at."""
    version = until_step(engine := Spy(), follower, published(store, 8, 8.0), 8)
    worker = generator_of(follower, line, version)
    worker._evaluated = 8
    published(store, step, 4.0, line=1)
    assert follower.poll(timeout=20) is not None
    with pytest.raises(StaleRunError):
        worker._refresh(engine)
    published(store, 14, 9.0, line=1)
    assert follower.poll(timeout=20) is not None
    worker._refresh(engine)
    line.listener.latest = wire.Announcement("run", evaluation_step=8)
    assert engine.step == 14 and worker._has_to_evaluate(engine)


def test_the_same_weights_published_again_are_of_the_same_line(
    follower: WeightSubscriber, line: TrainerConnection, store: WeightStore
) -> None:
    version = until_step(engine := Spy(), follower, published(store, 8, 8.0), 8)
    worker = generator_of(follower, line, version)
    again = published(store, 8, 8.0, line=1)
    assert follower.poll(timeout=20) is not None
    worker._refresh(engine)
    assert (worker._version.number, worker._version.lineage) == (again.number, 1)
    published(store, 9, 9.0, line=1)
    assert follower.poll(timeout=20) is not None
    worker._refresh(engine)  # what is under way is of this line
    assert engine.step == 9


@pytest.mark.parametrize(("step", "over"), [(79, False), (80, True)])
def test_a_trainer_that_is_silent_after_the_last_step_has_ended_the_run(
    follower: WeightSubscriber, line: TrainerConnection, store: WeightStore,
    monkeypatch: pytest.MonkeyPatch,
    step: int, over: bool,
) -> None:  # fmt: skip
    version = until_step(Spy(), follower, published(store, step, 1.0), step)
    worker = generator_of(follower, line, version)
    assert not worker._is_over(worker._hear())
    monkeypatch.setattr(generator, "SILENT_SECONDS", 0.0)
    assert worker._is_over(worker._hear()) == over
