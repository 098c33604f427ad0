"""Weights of a generator: start the engine with a version, then apply newer versions to it.

WeightSubscriber offers the newest verified version. A version that the engine rejects is
quarantined: this process does not use it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from peralta_zmq import build, models, registry, wire
from peralta_zmq.addresses import read_private_token
from peralta_zmq.build import fitted_settings
from peralta_zmq.config import Config, files_given
from peralta_zmq.engines.engine_models import loading_errors
from peralta_zmq.errors import EngineProcessError, OutageError, StoreError, program_name
from peralta_zmq.observe.terminal import WaitReport
from peralta_zmq.weights.store import Version, WeightStore
from peralta_zmq.weights.subscriber import PendingWeights, WeightSubscriber

REPORT_SECONDS = 5.0  # between two reports of one wait, and between two attempts
logger = logging.getLogger(__name__)


class Obsolete(NamedTuple):
    """The applied weights do not follow the earlier ones: groups in flight are useless."""

    reason: str
    is_new_run: bool = False
    is_rejection: bool = False  # an earlier version of the run, because a newer one is quarantined


class SettingsChangedError(Exception):
    """The weights belong to a run whose trainer has chosen other settings: start again."""


class ServedWeights:
    """The weight version that the engine uses, and its replacement by newer versions.

    With `between_groups` a newer version waits until no group is in flight; `is_draining` is then
    True, and the generator must start no group.
    """

    def __init__(
        self, subscriber: WeightSubscriber, version: Version, *, between_groups: bool = False
    ) -> None:
        self.subscriber = subscriber
        self._between_groups = between_groups
        self.version = version
        self.is_draining = False
        self.reload_seconds = 0.0  # duration of the latest replacement
        self._retry_at = 0.0  # monotonic seconds; the engine could not take the newest version
        self._weights_ids = {version.step: version.weights_id}  # policy step -> id, of this run

    def weights_id_of(self, step: int) -> str:
        return self._weights_ids[step]

    def apply_due(self, engine: registry.Engine, *, num_in_flight: int) -> Obsolete | None:
        """Apply the newest verified version in place, if it may be applied now.

        Returns Obsolete if the version belongs to another run or follows a roll-back, i.e. has
        another lineage or no higher policy step, unless its weights are equal. A failure for
        another reason than the weights is retried. Raises SettingsChangedError for another run with
        other settings.
        """
        must_wait = num_in_flight > 0 and self._between_groups
        self.is_draining = must_wait and self.subscriber.poll() is not None
        previous = self.version
        started = time.monotonic()
        if must_wait or started < self._retry_at:
            return None
        try:
            self.version = version = apply_newest(engine, self.subscriber, previous)
        except OutageError as error:
            self._retry_at = time.monotonic() + REPORT_SECONDS
            logger.warning("weights not applied, trying again: reason=%s", error)
            return None
        if version is previous:
            return None
        self.reload_seconds = time.monotonic() - started
        is_new_run = version.run_id != previous.run_id
        if is_new_run:
            self._weights_ids.clear()
        self._weights_ids[version.step] = version.weights_id
        if is_new_run:
            reason = f"the weights now belong to run {version.run_id}"
            if version.field("settings") != previous.field("settings"):
                raise SettingsChangedError(f"{reason}, which has other settings")
            return Obsolete(reason, is_new_run=True)
        # "result" is the hash of the weights.
        if version.step == previous.step and version.field("result") == previous.field("result"):
            return None  # equal weights, published again with another number
        if version.lineage == previous.lineage and version.step > previous.step:
            return None
        # A policy step no longer identifies the weights of a sampled token. Weights after a
        # roll-back have a higher version number; a rejection leads to a lower one.
        reason = f"rolled back to the weights of step {version.step}"
        is_rejection = version.number < previous.number
        if version.step == previous.step and not is_rejection:
            reason = f"step {version.step} was trained again, with other results"
        return Obsolete(reason, is_rejection=is_rejection)


def apply_newest(
    engine: registry.Engine, subscriber: WeightSubscriber, current: Version
) -> Version:
    """Apply the newest version, or quarantine it; returns the version now in use."""
    pending = subscriber.poll()
    if pending is None:
        return current
    started = time.monotonic()
    versions = (current, pending.version)
    try:
        # "adapts" is the hash of the base model of a LoRA adapter; None for full weights.
        if pending.version.field("adapts") != current.field("adapts"):
            raise ValueError("the version has another base model than the version in use")
        if changes := models.tokenizer_changes(*(v.field("tokenizer") for v in versions)):
            raise ValueError(f"it has another tokenizer ({changes}); restart this generator")
        engine.apply(build.weight_update(pending))
    except ValueError as error:
        subscriber.reject(pending.version)
        logger.warning("refused version=%d reason=%s", pending.version.number, error)
        return current
    except OSError as error:  # the replica is unreadable; the engine may have a part of it
        raise EngineProcessError(f"version {pending.version.number} not read: {error}") from None
    return _accept(subscriber, pending, started)


def _accept(subscriber: WeightSubscriber, pending: PendingWeights, started: float) -> Version:
    subscriber.accept()
    version = pending.version
    seconds = time.monotonic() - started
    identity = f"version={version.number} step={version.step} weights_id={version.weights_id}"
    logger.info(
        "loaded %s bytes=%d visible_seconds=%.3f apply_seconds=%.3f",
        *(identity, pending.bytes_read, pending.visible_seconds, seconds),
    )
    return version


def open_subscriber(config: Config, name: str) -> WeightSubscriber:
    address = config.weights_address
    return WeightSubscriber(
        WeightStore.open(address, token=read_private_token(config.security.token_file)),
        config.run_folder / "copies" / name,
        poll_seconds=config.weights.poll_seconds,
        watch=None if "://" in address else config.weights_folder,
    )


def open_engine(
    config: Config,
    subscriber: WeightSubscriber,
    announcements: wire.AnnouncementSubscriber,
    trainer: wire.TrainerAddress,
    report_store: Callable[[str], None],
) -> tuple[Config, Version, registry.Engine, models.Tokenizer]:
    """Wait for a loaded version; return it with an engine, its tokenizer, and the settings to use.

    These are `config` with those that the trainer chose. A version whose files cannot be loaded is
    refused, and another one awaited. While waiting, calls `report_store(run_id)` at each
    announcement if the store has only deltas or cannot be read.
    """
    started = reported = time.monotonic()
    waiting = WaitReport(logger.info)
    refused = ""
    while True:
        while (pending := subscriber.poll(timeout=0.2)) is None:
            now = time.monotonic()
            announcement = announcements.receive()
            trainer.poll(silent_seconds=now - announcements.received_at)
            if announcement is not None and (subscriber.wants_keyframe or subscriber.store_error):
                report_store(announcement.run_id)
            if now - reported > REPORT_SECONDS:
                reported = now
                answers = wire.accepts_connection(trainer.current)  # blocks for up to 1 s
                where = trainer.current, now - started, config.weights_address
                why = subscriber.store_error or refused
                waiting.show(waiting_text(*where, answers=answers, why=why))
        waiting.hide()
        opened = time.monotonic()
        version = pending.version
        is_adapter = version.field("adapts") is not None
        try:
            with loading_errors(pending.folder):
                fitted = fitted_settings.adopted(config, version.field("settings"))
            folder = models.model_folder(config.model.name) if is_adapter else pending.folder
            build.check_start(fitted, "generator", folder)
            engine, tokenizer = build.make_engine(fitted, pending)
        except StoreError as error:
            if is_adapter:  # the base model of this machine
                raise
            subscriber.reject(version)
            logger.warning("refused version=%d reason=%s", version.number, error)
            refused = f"version {version.number} is refused: {error}"
        else:
            return fitted, _accept(subscriber, pending, opened), engine, tokenizer


def waiting_text(address: str, seconds: float, store: str, *, answers: bool, why: str = "") -> str:
    """The log message of a generator without weights: what is missing, and the remedy."""
    files = files_given()
    start = f"waiting for trainer {address} ({seconds:.0f} s)"
    diagnose = f"Diagnose: {program_name('doctor')}{files}"
    if answers:
        reason = f"{why}." if why else f"{store} has no weights. Is that the trainer's weights.dir?"
        return f"{start}: it answers, but {reason} {diagnose}"
    reason = f"no TCP answer, and {why}." if why else "no TCP answer."
    return f"{start}: {reason} Start it: {program_name('trainer')}{files}. {diagnose}"
