"""The generator: sample completions, score them, send them to the trainer.

A restarted generator needs nothing that its predecessor had in memory.
"""

from __future__ import annotations

import gc
import logging
import os
from contextlib import ExitStack, closing

from peralta_zmq import build, models, registry, serving, wire
from peralta_zmq.addresses import with_port
from peralta_zmq.build import dry_run
from peralta_zmq.config import Config
from peralta_zmq.engines import Sampler
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.errors import EngineError, EngineProcessError, OutOfMemoryError
from peralta_zmq.generator.evaluation_groups import EvaluationGroups
from peralta_zmq.generator.scoring import ScoringQueue
from peralta_zmq.generator.trainer_link import Sockets, TrainerLink
from peralta_zmq.generator.training_groups import TrainingGroups
from peralta_zmq.generator.weight_sync import (
    ServedWeights,
    SettingsChangedError,
    open_engine,
    open_subscriber,
)
from peralta_zmq.observe.terminal import WaitReport
from peralta_zmq.serving.chats import ChatQueue

MAX_ENGINE_FAILURES = 3  # crashes of the engine's process without a group in between
logger = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Sample, score and send groups until the trainer announces the end of the run.

    It starts again with half the slots after a failed allocation, and with the settings of another
    run when the weights have become those of that run. Raises ConfigError, StoreError (a LoRA
    adapter of another base), TaskError (unusable problems), WireError (the trainer refuses the
    keys), EngineProcessError (it fails again and again) and OutOfMemoryError.
    """
    while True:
        try:
            with build.memory_errors(config, "generator"):
                return run_once(config)
        except SettingsChangedError as change:
            logger.info("starting again: %s", change)
        except OutOfMemoryError as error:
            if (slots := config.engine.slots // 2) == 0:
                raise
            logger.warning("%s; continuing with engine.slots=%d", error, slots)
            engine = config.engine.model_copy(update={"slots": slots})
            config = config.model_copy(update={"engine": engine})
        gc.collect()  # the traceback of the error referred to the engine


def run_once(config: Config) -> None:
    """Like `run`, but a failed allocation raises the error of the library."""
    build.engine_name(config)  # refuses settings before it waits for weights
    serving.check_settings(config)
    models.keep_memory()  # freed memory stays in the process, for the next step
    threads = models.use_threads(config.run.num_workers)
    device = models.choose_device(config.model.device)
    worker_info = models.worker_info(device, models.choose_dtype(device, config.model.dtype)[0])
    name = config.generator.full_name
    address = f"tcp://{with_port(config.wire.host, config.wire.port)}"
    keys_folder = config.keys_folder
    keys = wire.generator_keys(keys_folder, name) if keys_folder else None
    incarnation = os.urandom(8)  # identifies this start of the generator
    with ExitStack() as stack:
        environments = stack.enter_context(closing(build.open_environments(config, "train")))
        waiting = WaitReport(logger.info)
        trainer = wire.find_trainer(address, config.address_folder, report=waiting.show)
        waiting.hide()
        # Rollouts go to the first port; announcements and statuses use the next two ports.
        announcements = wire.AnnouncementSubscriber(
            wire.next_port(trainer.current), keys=keys, has_run=trainer.has_run
        )
        stack.enter_context(closing(announcements))
        subscriber = stack.enter_context(closing(open_subscriber(config, name)))
        statuses = wire.GeneratorStatusSender(wire.next_port(trainer.current, 2), keys=keys)
        stack.enter_context(closing(statuses))
        trainer.add(announcements.connection, port_offset=1)
        trainer.add(statuses.connection, port_offset=2)

        def report_store(run_id: str) -> None:
            """Report in a status that a keyframe is needed, or why no version can be read."""
            if statuses.check_due():
                status = wire.GeneratorStatus(
                    run_id, name, incarnation, store_error=subscriber.store_error,
                    wants_keyframe=subscriber.wants_keyframe, worker_info=worker_info,
                )  # fmt: skip
                statuses.send(status)

        fitted, version, engine, tokenizer = open_engine(
            config, subscriber, announcements, trainer, report_store
        )
        if fitted != config:  # reward functions may depend on lengths
            config = fitted
            environments = build.open_environments(config, "train")
            stack.enter_context(closing(environments))
        logger.info("generator=%s threads=%d version=%d", name, threads, version.number)
        chats = serving.open_server(
            config, tokenizer, stack, max_model_len=engine.max_model_len, serves_chats=True
        )
        reader = dry_run.PromptReader.of(config, tokenizer)
        environments = dry_run.usable_environments(config, environments, "train", reader)
        rollouts = wire.RolloutSender(trainer.current, keys=keys)
        stack.enter_context(closing(rollouts))
        trainer.add(rollouts.connection)
        weights = ServedWeights(
            subscriber, version, between_groups=config.weights.update == "between_groups"
        )
        link = TrainerLink(
            Sockets(announcements, rollouts, statuses, trainer),
            weights,
            name=name,
            incarnation=incarnation,
            worker_info=worker_info,
            outbox_limit=outbox_limit(config),
            max_steps=config.train.max_steps,
        )
        Generator(config, engine, reader, environments, weights, link, chats).run()


def outbox_limit(config: Config) -> int:
    """Number of groups that the training steps could consume which still accept them."""
    steps = (config.train.max_async_level + 1) * config.weights.interval + 1
    return max(64, steps * config.groups_per_step)


class Generator:
    """Samples, scores and sends groups for the problems of a run, until the run ends."""

    def __init__(
        self,
        config: Config,
        engine: registry.Engine,
        reader: dry_run.PromptReader,
        environments: Environments,
        weights: ServedWeights,
        link: TrainerLink,
        chats: ChatQueue,
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._link = link
        self._chats = chats
        self._sampler = Sampler(
            engine, reader.tokenizer, max_turns=config.task.max_turns, sessions=chats.sessions
        )
        self._rewards = ScoringQueue(weights, link)
        self._training = TrainingGroups(
            config, environments, weights, link, self._rewards, chats.sessions
        )
        self._evaluation = EvaluationGroups(
            config, reader, self._training, weights, link, self._rewards
        )
        self._keeps_weights = config.weights.update == "between_groups"
        self._num_engine_failures = 0  # crashes of its process since the last finished group

    def run(self) -> None:
        """Make training groups and announced evaluations until the run is complete."""
        link = self._link
        sampler = self._sampler
        rewards = self._rewards
        try:
            while not link.is_run_complete:
                try:
                    self._apply_due()
                    if self._weights.subscriber.has_accepted:
                        for source in (self._evaluation, self._training, self._chats):
                            source.submit_due(sampler)
                    is_idle = not sampler.num_in_flight
                    ended = sampler.advance()
                except EngineError as error:
                    self._recover(error)
                    continue
                self._chats.complete(ended)
                if groups := self._training.take(ended) + self._evaluation.take(ended):
                    self._num_engine_failures = 0
                    rewards.add(groups)
                link.num_resumed = sampler.num_resumed
                link.num_branched = sampler.num_branched
                for group in rewards.finished():
                    link.send(group)
                can_start = self._weights.subscriber.has_accepted and not rewards
                timeout = 0.002 if is_idle else 0.0  # longest wait for an announcement
                link.exchange(timeout=timeout, is_idle=is_idle and can_start)
        # After an exception too: `run` may start again in this process, whose engine then has no
        # memory for the caches of these groups.
        finally:
            self._evaluation.drop(sampler)
            self._training.drop(sampler)
        link.send_status(last=True)
        logger.info("run complete: groups=%d", link.outbox.next_group_number)

    def _apply_due(self) -> None:
        """Apply newer weights if there are any; an evaluation keeps those that it began with.

        Drops the groups in flight if they are useless with the new weights.
        """
        if self._evaluation.is_running:
            return
        num_in_flight = len(self._training.groups)
        obsolete = self._weights.apply_due(self._engine, num_in_flight=num_in_flight)
        if obsolete is None:
            return
        if obsolete.is_new_run:
            self._link.start_run()
            self._training.start_run()
        if not obsolete.is_rejection:
            self._evaluation.repeat()
            self._rewards.discard()
        self._training.drop(self._sampler)
        self._chats.interrupt(self._sampler)
        logger.info("dropped groups in flight: %s", obsolete.reason)

    def _recover(self, error: EngineError) -> None:
        """Let the engine get weights again.

        Weights with non-finite logits are quarantined, and the groups in flight dropped. An engine
        whose process failed gets the newest weights again, and resumes the training groups, except
        those of an earlier failure. The MAX_ENGINE_FAILURES-th failure without a group in between
        is raised.
        """
        version = self._weights.version
        sampler = self._sampler
        training = self._training
        self._chats.interrupt(sampler)
        num_dropped = self._evaluation.drop(sampler)
        if isinstance(error, EngineProcessError):
            self._num_engine_failures += 1
            if self._num_engine_failures == MAX_ENGINE_FAILURES:
                raise error
            sampler.interrupt(training.groups)
            # The newest weights may be newer than those of the groups.
            if self._num_engine_failures > 1 or self._keeps_weights:
                num_dropped += training.drop(sampler)
            num_dropped += training.drop_failed(sampler)
            self._link.num_aborted += num_dropped
            self._evaluation.repeat()  # an interrupted evaluation goes on
            self._weights.subscriber.offer_again()
        else:
            num_dropped += training.drop(sampler)
            self._weights.subscriber.reject(version)
        logger.warning(
            "engine failed: version=%d dropped=%d reason=%s", version.number, num_dropped, error
        )
