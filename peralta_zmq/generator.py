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

from peralta_zmq import parts, policy, registry, tasks, wire
from peralta_zmq.config import Config
from peralta_zmq.curriculum.order import walk
from peralta_zmq.engines import ask
from peralta_zmq.errors import EngineError, StoreError, TaskError
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
        return under_way == 0 or under_way + 1 <= share * self.max_async_level

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
        self._ids: dict[int, tuple[str, str]] = {}  # policy step -> run id and wid of its weights
        self._serve(version)
        self._draining = False  # waiting for the groups under way to apply a newer version
        self._done = False  # the run is complete
        self._sequence = 0  # of the next group
        self._under_way = 0  # groups in the engine
        self._boot = os.urandom(8)
        self._outbox = wire.Outbox(sender_of(name, self._boot))
        self._pace = Pace(config.groups_per_step, config.train.max_async_level)

    def work(
        self,
        engine: registry.Engine,
        tokenizer: policy.Tokenizer,
        problems: Sequence[Problem],
        reward: Reward,
    ) -> None:
        """The story: one stream of problems through the engine; score and send what comes out."""
        todo = self._problems_from(engine.step, problems)
        while not self._done:
            answers = ask(
                engine, tokenizer, self._turns(engine, todo),
                num_generations=self._config.sampling.num_generations,
                sampling=self._sampling(engine.step),
                between_steps=lambda: self._refresh(engine),
            )  # fmt: skip
            try:
                for problem, completions in answers:
                    self._under_way -= 1
                    if not self._send_new(self._group_of(problem, completions, reward), engine):
                        self._done = True
                        break
            except EngineError as error:
                self._under_way = 0
                self._serve(go_back(engine, self._store, self._version, error))
        logger.info("run complete: groups=%d", self._sequence)

    def _problems_from(self, step: int, problems: Sequence[Problem]) -> Iterator[Problem]:
        generator = self._config.generator
        start = step * self._config.groups_per_step // generator.count
        return walk(
            problems, seed=self._config.run.seed,
            index=generator.index, count=generator.count, start=start,
        )  # fmt: skip

    def _sampling(self, step: int) -> Sampling:
        who = f"{self._config.run.seed}/{self._name}/{step}"
        return parts.sampling_of(self._config, seed=zlib.crc32(who.encode()))

    def _turns(self, engine: registry.Engine, todo: Iterator[Problem]) -> Iterator[Problem | None]:
        """The next problem whenever it is our turn, None when not; ends when the run is done."""
        while not self._done:
            if self._is_our_turn(engine):
                self._under_way += 1
                self._pace.count()
                yield next(todo)
                continue
            if not self._under_way:  # else the engine has work
                self._listener.listen(timeout=0.02)
            yield None

    def _is_our_turn(self, engine: registry.Engine) -> bool:
        """Whether a further group may be started; notes when the run is complete."""
        self._refresh(engine)
        heard = self._hear()
        self._done = heard is not None and heard.done
        for frame in self._outbox.lost_on_the_way(heard):
            self._done = self._done or not self._send(frame, engine)
        return not (self._done or self._draining) and self._pace.allows(
            step=engine.step,
            under_way=len(self._outbox) + self._under_way,
            generators=len(heard.recv) if heard else 1,
            heard_at=self._listener.heard_at,
        )

    def _hear(self) -> wire.Announcement | None:
        """The newest announcement of the run whose weights we serve."""
        heard = self._listener.listen()
        return heard if heard is not None and heard.run_id == self._version.run_id else None

    def _refresh(self, engine: registry.Engine) -> None:
        """Apply a newer version, at once or when the groups under way have ended."""
        if self._under_way and self._config.weights.update == "between_groups":
            if not self._draining and self._watch.due():
                self._draining = newer(self._store, self._version) is not None
        elif self._draining or self._watch.due():
            self._draining = False
            self._serve(refresh(engine, self._store, self._version))

    def _serve(self, version: Version) -> None:
        self._version = version
        self._ids[version.step] = version.run_id, version.wid

    def _group_of(
        self, problem: Problem, completions: Sequence[Completion], reward: Reward
    ) -> RolloutGroup:
        rollouts = tuple(rollout_of(each, reward(problem, each.text)) for each in completions)
        for rollout in rollouts:
            if not abs(rollout.reward) <= MAX_REWARD:  # NaN too
                raise TaskError(
                    f"task '{problem.task}' rewards an answer to '{problem.id}' with "
                    f"{rollout.reward}; return a number between -{MAX_REWARD:g} and {MAX_REWARD:g}"
                )
        oldest = min(int(each.policy_steps.min()) for each in completions)
        run_id, wid = self._ids[oldest]
        sequence, self._sequence = self._sequence, self._sequence + 1
        return RolloutGroup(
            run_id=run_id,
            generator_id=self._name,
            boot=self._boot,
            sequence=sequence,
            problem_id=problem.id,
            task=problem.task,
            policy_step=oldest,
            wid=wid,
            rollouts=rollouts,
            floor=self._outbox.floor,
        )

    def _send_new(self, group: RolloutGroup, engine: registry.Engine) -> bool:
        logger.debug(
            "made group=%s/%d step=%d wid=%s",
            group.sender, group.sequence, group.policy_step, group.wid,
        )  # fmt: skip
        failpoint("generator.made")
        frame = wire.encode_group(group)
        self._outbox.add(group.sequence, frame, policy_step=group.policy_step)
        sent = self._send(frame, engine)
        failpoint("generator.sent")
        return sent

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


def newer(store: DirectoryStore, current: Version) -> Version | None:
    """The newest version if it is newer than `current`, or of another run."""
    newest = store.newest()
    if newest is None or (newest.run_id == current.run_id and newest.number <= current.number):
        return None
    return newest


def go_back(
    engine: registry.Engine, store: DirectoryStore, bad: Version, error: EngineError
) -> Version:
    """Serve the version before `bad`, whose weights do not compute. Raises `error` if none is."""
    logger.warning("gave up the groups under way: version=%d reason=%s", bad.number, error)
    store.quarantine(bad)
    previous = store.newest()
    if previous is None:
        raise error
    with store.load(previous) as folder:
        engine.apply(LazyTensors(folder / WEIGHTS), previous.step)
    logger.info("went back to version=%d step=%d", previous.number, previous.step)
    return previous


def refresh(engine: registry.Engine, store: DirectoryStore, current: Version) -> Version:
    """Apply the newest version in place if there is a newer one; a bad one changes nothing.

    Returns the version that the engine samples from.
    """
    newest = newer(store, current)
    if newest is None:
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
    dtype, reason = policy.choose_dtype(device, config.model.dtype)
    logger.info("device=%s dtype=%s (%s)", device, str(dtype).removeprefix("torch."), reason)
    with store.load(version) as folder:
        model = policy.load_model(folder, device=device, dtype=dtype)
        tokenizer = policy.load_tokenizer(folder)
        engine = registry.resolve("engine", config.engine.name)
    made = engine(
        model, tokenizer, step=version.step,
        slots=config.engine.slots, max_model_len=config.engine.max_model_len,
    )  # fmt: skip
    return made, tokenizer
