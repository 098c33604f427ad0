"""Weights of a generator: start the engine with a version, then apply newer versions to it.

The engine samples completions; a group (all rollouts of one problem) is in flight while the engine
samples it. WeightSubscriber downloads and verifies weight versions in a thread, and offers the
newest verified one. A version that the engine rejects is quarantined: this process does not use it
again. The manifest of a version has

- its number,
- the policy step: the number of training steps that produced the weights,
- the run, and the lineage: how often the run was rolled back to an older checkpoint,
- `result`, the hash of the weights. The hash of the manifest itself is the weights_id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from peralta_zmq import build, models, registry, wire
from peralta_zmq.config import Config, files_given
from peralta_zmq.errors import OutageError, StoreError, program_name
from peralta_zmq.http_server import read_private_token
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import PendingWeights, WeightSubscriber
from peralta_zmq.weights.version import Version

LOG_SECONDS = 5.0  # between two log lines of one wait
logger = logging.getLogger(__name__)


class ObsoleteGroupsError(Exception):
    """The new weights are of another run or follow a roll-back: groups in flight are useless."""


class ServedWeights:
    """The weight version that the engine uses, and its replacement by newer versions.

    With `between_groups` a newer version waits until no group is in flight; while it waits,
    `is_draining` is True and the generator must start no group.
    """

    def __init__(
        self, subscriber: WeightSubscriber, version: Version, *, between_groups: bool = False
    ) -> None:
        self._subscriber, self._between_groups = subscriber, between_groups
        self.version = version
        self.is_draining = False
        self.reload_seconds = 0.0  # duration of the latest replacement
        self._retry_at = 0.0  # monotonic seconds; the engine could not take the newest version
        self._weights_ids = {version.step: version.weights_id}  # policy step -> id, of this run

    @property
    def needs_keyframe(self) -> bool:
        """Whether the newest version needs a delta (change of weights) that is missing.

        A generator reports this in its status; the trainer then publishes a keyframe (all weights).
        """
        return self._subscriber.wants_keyframe

    def weights_id_of(self, step: int) -> str:
        """The weights_id of the version with this policy step, which the engine must have used."""
        return self._weights_ids[step]

    def poll_for(self, announcement: wire.Announcement) -> None:
        """Poll the store for the announced version now, instead of at the next regular poll."""
        self._subscriber.notify(announcement.version, announcement.weights_id)

    @property
    def are_applied(self) -> bool:
        """Whether the engine has weights."""
        return self._subscriber.has_accepted

    def request_again(self) -> None:
        """Let `refresh` apply the newest version to an engine that has lost its weights."""
        self._subscriber.offer_again()

    def reject(self) -> None:
        """Quarantine the version in use; `refresh` then applies the newest of the others."""
        self._subscriber.reject(self.version)

    def refresh(self, engine: registry.Engine, *, num_in_flight: int) -> None:
        """Apply the newest verified version in place, if it may be applied now.

        If that fails for another reason than the weights, it is tried again every LOG_SECONDS.
        Raises ObsoleteGroupsError, after applying the version, if it belongs to another run or
        follows a roll-back: it has another lineage, or no higher policy step. Not if it only
        publishes equal weights again.
        """
        must_wait = num_in_flight > 0 and self._between_groups
        self.is_draining = must_wait and self._subscriber.poll() is not None
        previous, started = self.version, time.monotonic()
        if must_wait or started < self._retry_at:
            return
        try:
            self.version = version = apply_newest(engine, self._subscriber, previous)
        except OutageError as error:
            self._retry_at = time.monotonic() + LOG_SECONDS
            logger.warning("weights not applied, trying again: reason=%s", error)
            return
        if version is previous:
            return
        self.reload_seconds = time.monotonic() - started
        is_new_run = version.run_id != previous.run_id
        if is_new_run:
            self._weights_ids.clear()
        self._weights_ids[version.step] = version.weights_id
        if is_new_run:
            raise ObsoleteGroupsError(f"the weights now belong to run {version.run_id}")
        # "result" is the hash of the weights.
        if version.step == previous.step and version.field("result") == previous.field("result"):
            return  # equal weights, published again with another number
        if version.lineage != previous.lineage or version.step <= previous.step:
            # After a roll-back, a policy step no longer identifies the weights of a sampled token.
            raise ObsoleteGroupsError(f"rolled back to the weights of step {version.step}")


def apply_newest(
    engine: registry.Engine, subscriber: WeightSubscriber, current: Version
) -> Version:
    """Apply the newest verified version in place; returns the version now in use.

    If the engine rejects the newest version, that version is quarantined and `current` stays.
    """
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
    return _accept(subscriber, pending, started)


def _accept(subscriber: WeightSubscriber, pending: PendingWeights, started: float) -> Version:
    """Accept and log an applied version; `started`: monotonic seconds before it was applied."""
    subscriber.accept()
    version, seconds = pending.version, time.monotonic() - started
    identity = f"version={version.number} step={version.step} weights_id={version.weights_id}"
    logger.info(
        "loaded %s bytes=%d visible_seconds=%.3f apply_seconds=%.3f",
        *(identity, pending.bytes_read, pending.visible_seconds, seconds),
    )
    return version


def open_subscriber(config: Config, name: str) -> WeightSubscriber:
    """Subscribe to the weight store; the local copy of the weights is kept for later starts."""
    address = config.weights_address
    return WeightSubscriber(
        WeightStore.open(address, token=read_private_token(config.weights.token_file)),
        config.run_folder / "copies" / name,
        poll_seconds=config.weights.poll_seconds,
        watch=None if "://" in address else config.weights_folder,
    )


def open_engine(
    config: Config,
    subscriber: WeightSubscriber,
    announcements: wire.AnnouncementSubscriber,
    trainer: wire.TrainerAddress,
    request_keyframe: Callable[[str], None],
) -> tuple[Version, registry.Engine, models.Tokenizer]:
    """Wait for a loaded version; return it with an engine and its tokenizer.

    While waiting, follows the trainer to another address, logs every LOG_SECONDS, and calls
    `request_keyframe(run_id)` at each announcement if the store has only deltas. Raises
    StoreError after weights.wait_for_weights_timeout seconds.
    """
    started = logged = time.monotonic()
    timeout = config.weights.wait_for_weights_timeout or float("inf")
    while (pending := subscriber.poll(timeout=0.2)) is None:
        now = time.monotonic()
        if now - started > timeout:
            raise StoreError(
                f"no weights in {config.weights_address} after {timeout:g} s "
                "(weights.wait_for_weights_timeout). "
                f"Start the trainer: {program_name('trainer')}{files_given()}"
            )
        announcement = announcements.receive()
        trainer.poll(silent_seconds=now - announcements.received_at)
        if announcement is not None and subscriber.wants_keyframe:
            request_keyframe(announcement.run_id)
        if now - logged > LOG_SECONDS:
            logged, address = now, trainer.current
            answers = wire.accepts_connection(address)  # blocks for up to 1 s
            logger.info(
                waiting_text(address, now - started, config.weights_address, answers=answers)
            )
    is_adapter = pending.version.field("adapts") is not None
    folder = models.model_folder(config.model.name) if is_adapter else pending.folder
    build.check_start(config, "generator", folder)
    started = time.monotonic()
    engine, tokenizer = build.make_engine(config, pending)
    return _accept(subscriber, pending, started), engine, tokenizer


def waiting_text(address: str, seconds: float, weights: str, *, answers: bool) -> str:
    """The log message of a generator without weights: what is missing, and the remedy.

    `weights` is the address of the store. `answers` is True if the trainer's address accepts TCP
    connections.
    """
    files, start = files_given(), f"waiting for trainer {address} ({seconds:.0f} s)"
    diagnose = f"Diagnose: {program_name('doctor')}{files}"
    if answers:
        reason = f"it answers, but {weights} has no weights. Is that the trainer's weights.dir?"
        return f"{start}: {reason} {diagnose}"
    return f"{start}: no TCP answer. Start it: {program_name('trainer')}{files}. {diagnose}"
