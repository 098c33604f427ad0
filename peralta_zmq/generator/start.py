"""The start of a generator: opens all that its loop needs, and runs the loop."""

from __future__ import annotations

import gc
import logging
import os
from contextlib import ExitStack, closing

from peralta_zmq import build, models, wire
from peralta_zmq.addresses import with_port
from peralta_zmq.build import dry_run
from peralta_zmq.config import Config
from peralta_zmq.errors import OutOfMemoryError
from peralta_zmq.generator import serving
from peralta_zmq.generator.loop import Generator
from peralta_zmq.generator.pacing import outbox_limit
from peralta_zmq.generator.trainer_connection import Sockets, TrainerConnection
from peralta_zmq.generator.weight_sync import (
    ServedWeights,
    SettingsChangedError,
    open_engine,
    open_subscriber,
)
from peralta_zmq.observe.terminal import WaitReport

logger = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Sample, score and send groups until the trainer announces the end of the run.

    After a failed allocation it starts again with half the slots, and with the settings of another
    run when the weights belong to it; both give up the groups in flight. Waits for the first
    weights, and for an absent trainer. Raises ConfigError, StoreError (no weights in time),
    TaskError (unusable problems), WireError (the trainer refuses the keys) and OutOfMemoryError
    (with one slot).
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
        gc.collect()  # of the engine, which the traceback of the error referred to


def run_once(config: Config) -> None:
    """As `run`, but a failed allocation ends it with the error of the library."""
    build.choose_engine(config)  # refuses settings before it waits for weights
    serving.check_settings(config)
    models.keep_memory()  # freed memory stays in the process, for the next step
    threads = models.use_threads(config.generator.num_workers)
    device = models.choose_device(config.model.device)
    worker_info = models.worker_info(device, models.choose_dtype(device, config.model.dtype)[0])
    name = config.generator.full_name
    address = f"tcp://{with_port(config.wire.host, config.wire.port)}"
    keys_folder = config.keys_folder
    keys = wire.generator_keys(keys_folder, name) if keys_folder else None
    incarnation = os.urandom(8)  # identifies this start of the generator
    with ExitStack() as stack:
        environments = stack.enter_context(closing(build.open_environments(config, "train")))
        timeout = config.weights.wait_for_weights_timeout
        waiting = WaitReport(logger.info)
        trainer = wire.find_trainer(
            address, config.address_folder, timeout=timeout, report=waiting.show
        )
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
        chats = serving.serve_chats(config, engine, tokenizer, stack)
        reader = dry_run.PromptReader.of(config, tokenizer)
        environments = dry_run.usable_environments(config, environments, "train", reader)
        rollouts = wire.RolloutSender(trainer.current, hwm=config.wire.hwm, keys=keys)
        stack.enter_context(closing(rollouts))
        trainer.add(rollouts.connection)
        weights = ServedWeights(
            subscriber, version, between_groups=config.weights.update == "between_groups"
        )
        connection = TrainerConnection(
            Sockets(announcements, rollouts, statuses, trainer),
            weights,
            name=name,
            incarnation=incarnation,
            worker_info=worker_info,
            outbox_limit=outbox_limit(config),
            max_steps=config.train.max_steps,
        )
        Generator(config, engine, reader, environments, weights, connection, chats).run()
