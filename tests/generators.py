"""A generator with a fake engine, and weights for it, for the generator's tests."""

from __future__ import annotations

from typing import Any

import torch

from peralta_zmq import wire
from peralta_zmq.build.dry_run import PromptReader
from peralta_zmq.config import Config
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.reward_functions import RewardFunction
from peralta_zmq.environments.reward_pool import LocalRewards, RewardPool
from peralta_zmq.generator.loop import Generator
from peralta_zmq.generator.pacing import outbox_limit
from peralta_zmq.generator.trainer_connection import Sockets, TrainerConnection
from peralta_zmq.generator.weight_sync import ServedWeights, apply_newest
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.rollout import Problem
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber
from peralta_zmq.weights.version import Version

PROBLEM = Problem("7", "mine", (), "4", input_token_ids=(5, 9, 33))
BAD_STEP = 13


class FakeEngine:
    """Keeps copies of the applied weights; rejects those of BAD_STEP."""

    def __init__(self) -> None:
        self.step = 0
        self.weights: dict[str, torch.Tensor] = {}

    def apply(self, update: WeightUpdate) -> None:
        if update.step == BAD_STEP:
            raise ValueError("wrong model")
        self.weights = {name: tensor.clone() for name, tensor in update.tensors.items()}
        self.step = update.step


def publish(store: WeightStore, step: int, value: float, *, lineage: int = 0) -> Version:
    """One tensor of `value`."""
    about = {"lineage": lineage}
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
    rewards = LocalRewards([RewardFunction(reward, is_bounded=bounded)], pool)
    return Environments({"mine": 1}, (PROBLEM,), {"mine": rewards}, pool)


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
) -> Generator:
    """A generator that serves `version`; `sections` are those of the config.

    It has an announcement of a trainer without sample leases.
    """
    config = Config.model_validate(sections)
    sockets.announcements.latest = wire.Announcement(version.run_id)
    weights = ServedWeights(
        subscriber, version, between_groups=config.weights.update == "between_groups"
    )
    connection = TrainerConnection(
        sockets, weights, name="ann", incarnation=b"bootboot", worker_info={"python": "3.11"},
        outbox_limit=outbox_limit(config), max_steps=config.train.max_steps,
    )  # fmt: skip
    reader = PromptReader(tokenizer, num_embeddings=1 << 30, context=1 << 30)
    return Generator(
        config, engine, reader, environments or environments_of(reward), weights, connection
    )
