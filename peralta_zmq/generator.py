"""The generator's loop: newest weights, problems, completions, rewards, groups to the trainer.

Knows the config and every leaf; knows nothing of the trainer's loop. It keeps no state that a
restart needs: the weights tell it how far the run is.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice

import torch

from peralta_zmq import parts, policy, registry, tasks, wire
from peralta_zmq.config import Config
from peralta_zmq.curriculum.order import walk
from peralta_zmq.engines import ask
from peralta_zmq.errors import StoreError, TaskError
from peralta_zmq.failpoints import failpoint
from peralta_zmq.rollout import (
    MAX_REWARD,
    Completion,
    Problem,
    RolloutGroup,
    rollout_of,
    sender_of,
)
from peralta_zmq.stores.directory import WEIGHTS, DirectoryStore, LazyTensors, Version
from peralta_zmq.stores.watch import Watch

WAITING_SECONDS = 5.0  # between two lines that say what we wait for
TRICKLE_SECONDS = 2.0  # a generator that is ahead waits so long for a trainer that waits too
SILENT_TRICKLE_SECONDS = 30.0  # and so long for one that is not heard
Reward = Callable[[Problem, str], "float | dict[str, float]"]
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Pace:
    """Keeps all generators together within `max_async_level` steps' worth of groups.

    A generator may have its share of them under way: made, but not yet safe with the trainer.
    A dead sibling or a lost announcement costs a bounded wait: a generator that has waited makes
    a further batch when the trainer is heard waiting too, and after long silence in any case.
    """

    groups_per_step: int
    max_async_level: int
    batch: int = 1  # groups made together
    made: int = 0
    last_made: float = field(default_factory=time.monotonic)
    _step: int = -1
    _made_from_step: int = 0

    def allows(self, *, step: int, under_way: int, generators: int, heard_at: float) -> bool:
        """Whether a further group from the weights of `step` would be used in time.

        A trainer that waits for groups is heard every second; in a step it is silent.
        """
        waited = time.monotonic() - self.last_made
        patience = TRICKLE_SECONDS if heard_at > self.last_made else SILENT_TRICKLE_SECONDS
        if waited > patience:
            return True
        if step != self._step:
            self._step, self._made_from_step = step, self.made
        share = self.groups_per_step / max(1, generators)
        if self.max_async_level == 0:
            return self.made - self._made_from_step < share
        return under_way == 0 or under_way + self.batch <= share * self.max_async_level

    def count(self) -> None:
        """A group was made."""
        self.made += 1
        self.last_made = time.monotonic()


def run(config: Config) -> None:
    """Sample, score and send until the trainer says that the run is complete.

    Raises ConfigError, TaskError; waits, saying so, for weights and for the trainer.
    """
    threads = policy.use_threads(config.generator.num_workers)
    name = config.generator.name or f"{socket.gethostname()}-{config.generator.index}"
    task = registry.resolve("task", config.task.name)
    problems = tasks.load(task, "train", seed=config.run.seed, options=config.data_options)
    store = DirectoryStore(config.weights_folder)
    address = f"tcp://{config.wire.host}:{config.wire.port}"
    with closing(wire.Listener(wire.next_port(address))) as listener:
        version, engine, tokenizer = open_engine(config, store, listener, address)
        logger.info("generator=%s threads=%d version=%d", name, threads, version.number)
        watch = Watch(store.folder, poll_seconds=config.weights.poll_seconds)
        sender = wire.RolloutSender(address, hwm=config.wire.hwm)
        with closing(watch), closing(sender):
            worker = Generator(config, name, store, listener, watch, sender, version)
            worker.work(engine, tokenizer, problems, task.reward)


class Generator:
    """What stays open while sampling, and the loop itself."""

    def __init__(
        self,
        config: Config,
        name: str,
        store: DirectoryStore,
        listener: wire.Listener,
        watch: Watch,
        sender: wire.RolloutSender,
        version: Version,
    ) -> None:
        self._config, self._name, self._store = config, name, store
        self._listener, self._watch, self._sender = listener, watch, sender
        self._version = version
        self._boot = os.urandom(8)
        self._outbox = wire.Outbox(sender_of(name, self._boot))
        self._pace = Pace(
            config.groups_per_step, config.train.max_async_level, config.engine.prompts_per_batch
        )

    def work(
        self,
        engine: registry.Engine,
        tokenizer: policy.Tokenizer,
        problems: Sequence[Problem],
        reward: Reward,
    ) -> None:
        """The story: refresh, pace, ask, score, send."""
        sampling = parts.sampling_of(self._config)
        todo = self._problems_from(engine.step, problems)
        while self._wait_for_turn(engine):
            version = self._version  # a newer one may be applied between two groups
            asked = list(islice(todo, self._config.engine.prompts_per_batch))
            answers = ask(
                engine, tokenizer, asked,
                num_generations=self._config.sampling.num_generations, sampling=sampling,
            )  # fmt: skip
            for index, completions in answers:
                group = self._group_of(version, asked[index], completions, reward)
                logger.debug(
                    "made group=%s/%d step=%d wid=%s",
                    group.sender, group.sequence, group.policy_step, group.wid,
                )  # fmt: skip
                failpoint("generator.made")
                frame = wire.encode_group(group)
                self._outbox.add(group.sequence, frame)
                if not self._send(frame, engine):
                    return
                failpoint("generator.sent")
        logger.info("run complete: groups=%d", self._pace.made)

    def _problems_from(self, step: int, problems: Sequence[Problem]) -> Iterator[Problem]:
        generator = self._config.generator
        who = f"{self._config.run.seed}/{self._name}/{step}"
        torch.manual_seed(zlib.crc32(who.encode()))
        start = step * self._config.groups_per_step // generator.count
        return walk(
            problems, seed=self._config.run.seed,
            index=generator.index, count=generator.count, start=start,
        )  # fmt: skip

    def _wait_for_turn(self, engine: registry.Engine) -> bool:
        """True when a group may be made; False when the run is complete."""
        while True:
            self._refresh(engine)
            heard = self._hear()
            if heard is not None and heard.done:
                return False
            for frame in self._outbox.lost_on_the_way(heard):
                if not self._send(frame, engine):
                    return False
            if self._pace.allows(
                step=engine.step,
                under_way=len(self._outbox),
                generators=len(heard.recv) if heard else 1,
                heard_at=self._listener.heard_at,
            ):
                return True
            self._listener.listen(timeout=0.02)

    def _hear(self) -> wire.Announcement | None:
        """The newest announcement of the run whose weights we serve."""
        heard = self._listener.listen()
        return heard if heard is not None and heard.run_id == self._version.run_id else None

    def _refresh(self, engine: registry.Engine) -> None:
        if self._watch.due():
            self._version = refresh(engine, self._store, self._version)

    def _group_of(
        self,
        version: Version,
        problem: Problem,
        completions: Sequence[Completion],
        reward: Reward,
    ) -> RolloutGroup:
        rollouts = tuple(rollout_of(each, reward(problem, each.text)) for each in completions)
        for rollout in rollouts:
            if not abs(rollout.reward) <= MAX_REWARD:  # NaN too
                raise TaskError(
                    f"task '{problem.task}' rewards an answer to '{problem.id}' with "
                    f"{rollout.reward}; return a number between -{MAX_REWARD:g} and {MAX_REWARD:g}"
                )
        sequence = self._pace.made
        self._pace.count()
        return RolloutGroup(
            run_id=version.run_id,
            generator_id=self._name,
            boot=self._boot,
            sequence=sequence,
            problem_id=problem.id,
            task=problem.task,
            policy_step=min(int(each.policy_steps.min()) for each in completions),
            wid=version.wid,
            rollouts=rollouts,
            floor=self._outbox.floor,
        )

    def _send(self, frame: bytes, engine: registry.Engine) -> bool:
        """Wait for room in the queue; False when the run is complete instead."""
        started = time.monotonic()
        said = started
        while not self._sender.send(frame, timeout=0.2):
            heard = self._hear()
            if heard is not None and heard.done:
                return False
            self._refresh(engine)
            if time.monotonic() - said > WAITING_SECONDS:
                said = time.monotonic()
                logger.info("waiting for the trainer to take a group (%.0f s)", said - started)
        return True


def refresh(engine: registry.Engine, store: DirectoryStore, current: Version) -> Version:
    """Apply the newest version in place if there is a newer one; a bad one changes nothing.

    Returns the version that the engine samples from.
    """
    newest = store.newest()
    if newest is None:
        return current
    if newest.run_id == current.run_id and newest.number <= current.number:
        return current
    started = time.monotonic()
    try:
        with store.load(newest) as folder:
            engine.apply(LazyTensors(folder / WEIGHTS), newest.step)
    except StoreError as error:  # perhaps a passing fault: look again
        logger.warning("unread version=%d reason=%s", newest.number, error)
        return current
    except ValueError as error:
        store.quarantine(newest)
        logger.warning("refused version=%d reason=%s", newest.number, error)
        return current
    logger.info(
        "loaded version=%d step=%d wid=%s seconds=%.3f",
        newest.number, newest.step, newest.wid, time.monotonic() - started,
    )  # fmt: skip
    return newest


def open_engine(
    config: Config, store: DirectoryStore, listener: wire.Listener, address: str
) -> tuple[Version, registry.Engine, policy.Tokenizer]:
    """The newest version that can be read, and an engine over it; waits for both."""
    while True:
        version = wait_for_version(store, listener, address)
        try:
            return version, *make_engine(config, store, version)
        except StoreError as error:  # pruned while we read it, or a passing fault of the NAS
            logger.warning("unread version=%d reason=%s", version.number, error)
            listener.listen(timeout=0.2)


def wait_for_version(store: DirectoryStore, listener: wire.Listener, address: str) -> Version:
    """The newest version, after waiting for the trainer to publish one; says so every 5 s."""
    started = said = time.monotonic()
    while (version := store.newest()) is None:
        listener.listen(timeout=0.2)
        if time.monotonic() - said > WAITING_SECONDS:
            said = time.monotonic()
            reply = "it answers" if wire.answers(address) else "no TCP answer"
            logger.info(
                "waiting for trainer %s (%.0f s): %s, no version in %s. "
                "Start it: bin/trainer @ CONFIG. Same weights.dir on both?",
                address, said - started, reply, store.folder,
            )  # fmt: skip
    return version


def make_engine(
    config: Config, store: DirectoryStore, version: Version
) -> tuple[registry.Engine, policy.Tokenizer]:
    """The configured engine over the weights of `version`, loaded once; later ones go in place."""
    device = policy.choose_device(config.model.device)
    dtype = policy.choose_dtype(device, config.model.dtype)
    logger.info("device=%s dtype=%s", device, str(dtype).removeprefix("torch."))
    with store.load(version) as folder:
        model = policy.load_model(folder, device=device, dtype=dtype)
        tokenizer = policy.load_tokenizer(folder)
        engine = registry.resolve("engine", config.engine.name)
    return engine(model, tokenizer, step=version.step), tokenizer
