"""A generator with a fake engine, and weights for it, for the generator's tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sockets import ANYWHERE

from peralta_zmq import wire
from peralta_zmq.build.dry_run import PromptReader
from peralta_zmq.config import Config
from peralta_zmq.engines import Sampler
from peralta_zmq.engines.sessions import Sessions
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.reward_functions import RewardFunction
from peralta_zmq.environments.reward_pool import LocalFunctions, RewardPool
from peralta_zmq.generator.evaluation_groups import EvaluationGroups
from peralta_zmq.generator.generator import Generator, outbox_limit
from peralta_zmq.generator.scoring import ScoringQueue
from peralta_zmq.generator.trainer_link import Sockets, TrainerLink
from peralta_zmq.generator.training_groups import TrainingGroups
from peralta_zmq.generator.weight_sync import ServedWeights, apply_newest
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.rollout import Completion, Problem, Request, RolloutGroup
from peralta_zmq.serving.chats import ChatQueue
from peralta_zmq.weights.store import Version, WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber

PROBLEM = Problem("7", "mine", (), "4", input_token_ids=(5, 9, 33))
BAD_STEP = 13


class FakeEngine:
    """Keeps copies of the applied weights; rejects those of BAD_STEP.

    Every completion ends in its first decode step, with the number of its group as its text, unless
    the test says in `ending` which end in the next steps.
    """

    max_model_len = 64

    def __init__(self, *, slots: int = 4, num_generations: int = 8) -> None:
        self.step = 0
        self.weights: dict[str, torch.Tensor] = {}
        self.submitted: list[Request] = []
        self.before_step: Callable[[], None] = lambda: None  # called by `advance`
        self.after_apply: Callable[[], None] = lambda: None
        self.is_endless = False  # no completion ends
        self.ending: list[Sequence[int]] = []  # indices of requests
        self.partial: dict[int, int] = {}  # index -> policy step of the tokens of a dropped one
        self._slots, self._num_generations = slots, num_generations
        self._in_flight: dict[int, Request] = {}

    def apply(self, update: WeightUpdate) -> None:
        if update.step == BAD_STEP:
            raise ValueError("wrong model")
        self.weights = {name: tensor.clone() for name, tensor in update.tensors.items()}
        self.step = update.step
        self.after_apply()

    def num_free(self) -> int:
        return self._slots - len(self._in_flight)

    def submit(self, requests: Sequence[Request]) -> None:
        assert len(requests) <= self.num_free()
        self.submitted += requests
        self._in_flight |= {request.index: request for request in requests}

    def advance(self) -> list[Completion]:
        self.before_step()
        if self.is_endless:
            return []
        indices = self.ending.pop(0) if self.ending else [*self._in_flight]
        ended = [self._in_flight.pop(index) for index in indices]
        return [
            completion_of(each, str(each.index // self._num_generations), self.step)
            for each in ended
        ]

    def drop(self, ids: Collection[int]) -> list[Completion]:
        dropped = [self._in_flight.pop(index) for index in ids if index in self._in_flight]
        return [
            completion_of(each, "", self.partial[each.index])
            for each in dropped
            if each.index in self.partial
        ]


def completion_of(request: Request, text: str, step: int = 1) -> Completion:
    """A completion of two tokens."""
    ids, zeros = np.array([5, 6], np.int32), np.zeros(2, np.float32)
    steps = np.full(2, step, np.int32)
    return Completion(request.index, request.prompt_ids, ids, zeros, steps, "stop", text)


def publish(
    store: WeightStore, step: int, value: float, *, lineage: int = 0, **fields: str
) -> Version:
    """One tensor of `value`; `fields` are further ones of the manifest."""
    about = {"lineage": lineage, **fields}
    return store.publish(step, {"w": torch.full((4,), value)}, companions={}, about=about)


def apply_until(engine: Any, subscriber: WeightSubscriber, version: Version, step: int) -> Version:
    """Apply pending versions until the engine is at `step`; the test's deadline ends a hang."""
    while engine.step != step:
        subscriber.poll(timeout=0.2)
        version = apply_newest(engine, subscriber, version)
    return version


def environments_of(reward: Any, *, bounded: bool = True, queue_limit: int = 9) -> Environments:
    """One environment with one problem."""
    pool = RewardPool(num_workers=1, concurrency=1, timeout_seconds=9, queue_limit=queue_limit)
    rewards = LocalFunctions([RewardFunction(reward, is_bounded=bounded)], pool)
    return Environments({"mine": 1}, (PROBLEM,), {"mine": rewards}, pool)


@dataclass(frozen=True)
class OpenedGenerator:
    """A generator and its parts."""

    generator: Generator
    config: Config
    engine: Any
    reader: PromptReader
    environments: Environments
    weights: ServedWeights
    link: TrainerLink

    def run(self) -> list[RolloutGroup]:
        """Run until the end of the run; returns the groups in the outbox."""
        self.generator.run()
        return self.unacknowledged()

    def unacknowledged(self) -> list[RolloutGroup]:
        """The groups in the outbox."""
        frames = self.link.outbox.frames.values()
        return [wire.decode_group(frame, wire.GroupLimits(468)) for frame in frames]

    def rewards(self) -> ScoringQueue:
        return ScoringQueue(self.weights, self.link)

    def sources(self) -> tuple[Sampler, TrainingGroups, EvaluationGroups]:
        """Further sources of groups, for a test that does what the generator's loop does."""
        rewards, common = self.rewards(), (self.weights, self.link)
        training = TrainingGroups(self.config, self.environments, *common, rewards, Sessions())
        evaluation = EvaluationGroups(self.config, self.reader, training, *common, rewards)
        return Sampler(self.engine, self.reader.tokenizer), training, evaluation


def generator_of(
    engine: Any,
    subscriber: WeightSubscriber,
    sockets: Sockets,
    version: Version,
    *,
    tokenizer: Any = None,
    reward: Any = lambda problem, text: 1.0,
    environments: Environments | None = None,
    **sections: dict[str, object],
) -> OpenedGenerator:
    """A generator that serves `version`; `sections` are those of the config.

    It has an announcement of a trainer, and all samples.
    """
    config = Config.model_validate(sections)
    sockets.announcements.latest = wire.Announcement(version.run_id)
    weights = ServedWeights(
        subscriber, version, between_groups=config.weights.update == "between_groups"
    )
    link = TrainerLink(
        sockets, weights, name="ann", incarnation=b"bootboot", worker_info={"python": "3.11"},
        outbox_limit=outbox_limit(config), max_steps=config.train.max_steps,
    )  # fmt: skip
    link.ranges.add(range(1 << 30))
    reader = PromptReader(tokenizer, num_embeddings=1 << 30, context=1 << 30)
    environments = environments or environments_of(reward)
    chats = ChatQueue(slots=4, max_model_len=64)
    generator = Generator(config, engine, reader, environments, weights, link, chats)
    return OpenedGenerator(generator, config, engine, reader, environments, weights, link)


class Scene:
    """A fake engine, a weight store of run `run`, and sockets without a trainer."""

    def __init__(
        self, store: WeightStore, subscriber: WeightSubscriber, sockets: Sockets, stack: ExitStack
    ) -> None:
        self.store, self.subscriber, self.sockets = store, subscriber, sockets
        self.engine = FakeEngine()
        self._stack = stack

    def connect(
        self, *, rollouts: str = "", announcements: str = "", statuses: str = "", **options: Any
    ) -> None:
        """Connect these sockets to addresses of a trainer."""
        opened: dict[str, Any] = {}
        if rollouts:
            opened["rollouts"] = wire.RolloutSender(rollouts, **options)
            self._stack.callback(opened["rollouts"].close, linger_seconds=0)
        if announcements:
            opened["announcements"] = wire.AnnouncementSubscriber(announcements)
            self._stack.enter_context(closing(opened["announcements"]))
        if statuses:
            opened["statuses"] = wire.GeneratorStatusSender(statuses, **options)
            self._stack.enter_context(closing(opened["statuses"]))
        self.sockets = replace(self.sockets, **opened)

    def status_receiver(self) -> wire.GeneratorStatusReceiver:
        receiver = wire.GeneratorStatusReceiver(ANYWHERE, run_id="run")
        return self._stack.enter_context(closing(receiver))

    def start(self, step: int, **options: Any) -> OpenedGenerator:
        """A generator that serves the weights of `step`; `options` are those of `generator_of`."""
        first = publish(self.store, step, float(step))
        version = apply_until(self.engine, self.subscriber, first, step)
        return generator_of(self.engine, self.subscriber, self.sockets, version, **options)

    def publish(self, step: int, value: float, *, lineage: int = 0) -> Version:
        """Publish another version and wait until it can be applied."""
        version = publish(self.store, step, value, lineage=lineage)
        assert self.subscriber.poll(timeout=20) is not None
        return version

    def announce(self, announcement: wire.Announcement) -> None:
        self.sockets.announcements.latest = announcement
