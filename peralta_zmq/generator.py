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

from peralta_zmq import policy, registry, tasks, wire
from peralta_zmq.config import Config
from peralta_zmq.curriculum.order import walk
from peralta_zmq.engines import ask
from peralta_zmq.errors import StoreError
from peralta_zmq.rollout import Completion, Problem, RolloutGroup, Sampling, rollout_of, sender_of
from peralta_zmq.stores.directory import WEIGHTS, DirectoryStore, LazyTensors, Version
from peralta_zmq.stores.watch import Watch

WAITING_SECONDS = 5.0  # between two lines that say what we wait for
TRICKLE_SECONDS = 2.0  # a generator that is ahead still makes a group this often
Reward = Callable[[Problem, str], "float | dict[str, float]"]
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Pace:
    """Keeps all generators together within `max_async_level` steps' worth of groups.

    A generator may have its share of them under way: made, but not yet taken in by the trainer.
    A lost announcement, a dead sibling or a restarted trainer costs a bounded wait: now and then
    a generator goes on all the same.
    """

    sender: str
    groups_per_step: int
    max_async_level: int
    batch: int = 1  # groups made together
    made: int = 0
    last_made: float = field(default_factory=time.monotonic)
    _settled: int = 0  # groups that are no longer under way
    _trainer: bytes = b""  # the start of the trainer that we last heard
    _step: int = -1
    _made_from_step: int = 0

    def allows(self, heard: wire.Announcement | None, *, step: int) -> bool:
        """Whether a further group from the weights of `step` would be used in time."""
        if time.monotonic() - self.last_made > TRICKLE_SECONDS:
            return True
        if step != self._step:
            self._step, self._made_from_step = step, self.made
        share = self.groups_per_step / max(1, len(heard.received) if heard else 1)
        if self.max_async_level == 0:
            return self.made - self._made_from_step < share
        under_way = self.made - self._settle(heard)
        return under_way == 0 or under_way + self.batch <= share * self.max_async_level

    def count(self) -> None:
        """A group was made."""
        self.made += 1
        self.last_made = time.monotonic()

    def _settle(self, heard: wire.Announcement | None) -> int:
        if heard is not None:
            if self._trainer and heard.boot != self._trainer:
                self._settled = self.made  # what its predecessor had in its queue is gone
            self._trainer = heard.boot
            self._settled = max(self._settled, heard.received.get(self.sender, -1) + 1)
        return self._settled


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
        version = wait_for_version(store, listener, address)
        engine, tokenizer = make_engine(config, store, version)
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
        self._pace = Pace(
            sender_of(name, self._boot),
            config.groups_per_step,
            config.train.max_async_level,
            config.engine.prompts_per_batch,
        )

    def work(
        self,
        engine: registry.Engine,
        tokenizer: policy.Tokenizer,
        problems: Sequence[Problem],
        reward: Reward,
    ) -> None:
        """The story: refresh, pace, ask, score, send."""
        sampling = sampling_of(self._config)
        todo = self._problems_from(engine.step, problems)
        while self._wait_for_turn(engine):
            asked = list(islice(todo, self._config.engine.prompts_per_batch))
            answers = ask(
                engine, tokenizer, asked,
                num_generations=self._config.sampling.num_generations, sampling=sampling,
            )  # fmt: skip
            for index, completions in answers:
                group = self._group_of(asked[index], completions, reward)
                if not self._send(wire.encode_group(group), engine):
                    return
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
            heard = self._listener.listen()
            if heard is not None and heard.done and heard.run_id == self._store.run_id:
                return False
            if self._pace.allows(heard, step=engine.step):
                return True
            self._listener.listen(timeout=0.02)

    def _refresh(self, engine: registry.Engine) -> None:
        if self._watch.due():
            self._version = refresh(engine, self._store, self._version)

    def _group_of(
        self, problem: Problem, completions: Sequence[Completion], reward: Reward
    ) -> RolloutGroup:
        rollouts = tuple(rollout_of(each, reward(problem, each.text)) for each in completions)
        sequence = self._pace.made
        self._pace.count()
        return RolloutGroup(
            run_id=self._store.run_id or "",
            generator_id=self._name,
            boot=self._boot,
            sequence=sequence,
            problem_id=problem.id,
            task=problem.task,
            policy_step=min(int(each.policy_steps.min()) for each in completions),
            rollouts=rollouts,
        )

    def _send(self, frame: bytes, engine: registry.Engine) -> bool:
        """Wait for room in the queue; False when the run is complete instead."""
        started = time.monotonic()
        said = started
        while not self._sender.send(frame, timeout=0.2):
            heard = self._listener.listen()
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
    if newest is None or newest.number <= current.number:
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
        newest.number, newest.step, newest.manifest.digest[:16], time.monotonic() - started,
    )  # fmt: skip
    return newest


def sampling_of(config: Config) -> Sampling:
    """How this run draws tokens."""
    return Sampling(
        temperature=config.sampling.temperature,
        top_k=config.sampling.top_k,
        top_p=config.sampling.top_p,
        max_completion_length=config.sampling.max_completion_length,
    )


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
