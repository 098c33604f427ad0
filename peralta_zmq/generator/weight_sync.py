"""The generator's side of the weight store: the engine's first weights, and every newer version.

Knows the store, the engines and the config; knows nothing of groups.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from peralta_zmq import build, models, registry, wire
from peralta_zmq.atomic_files import read_private_token
from peralta_zmq.config import Config, files_given
from peralta_zmq.errors import StoreError
from peralta_zmq.weights.backends import open_backend
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import PendingWeights, WeightSubscriber
from peralta_zmq.weights.version import Version

WAITING_SECONDS = 5.0  # between two lines that say what we wait for
logger = logging.getLogger(__name__)


def refresh(engine: registry.Engine, follower: WeightSubscriber, current: Version) -> Version:
    """Apply the newest version that is ready, in place; a bad one changes nothing.

    Returns the version that the engine samples from.
    """
    staged = follower.poll()
    if staged is None:
        return current
    started = time.monotonic()
    try:
        if staged.version.field("adapts") != current.field("adapts"):
            raise ValueError("it is an adapter for another base than that of the one served")
        engine.apply(staged.tensors, staged.version.step)
    except ValueError as error:
        follower.reject()
        logger.warning("refused version=%d reason=%s", staged.version.number, error)
        return current
    follower.accept()
    _log_loaded(staged, apply_seconds=time.monotonic() - started)
    return staged.version


def _log_loaded(staged: PendingWeights, *, apply_seconds: float) -> None:
    version = staged.version
    logger.info(
        "loaded version=%d step=%d weights_id=%s bytes=%d visible_seconds=%.3f apply_seconds=%.3f",
        version.number, version.step, version.weights_id, staged.bytes_read, staged.visible_seconds,
        apply_seconds,
    )  # fmt: skip


def open_follower(config: Config, name: str) -> WeightSubscriber:
    """What follows the store of this run; its copy of the weights outlives the process."""
    address = config.weights_address
    place = open_backend(address, token=read_private_token(config.weights.token_file))
    return WeightSubscriber(
        WeightStore(place),
        config.run_folder / "copies" / name,
        poll_seconds=config.weights.poll_seconds,
        watch=None if "://" in address else config.weights_folder,
    )


def open_engine(
    config: Config,
    follower: WeightSubscriber,
    listener: wire.AnnouncementSubscriber,
    address: str,
    ask_for_keyframe: Callable[[str], None],
) -> tuple[Version, registry.Engine, models.Tokenizer]:
    """An engine over the newest version that can be read; waits for one, saying so every 5 s,
    and asking the run that is announced for a keyframe when there are only deltas.

    The weights are loaded once; later versions go in place. Raises StoreError when
    weights.wait_for_weights_timeout is over.
    """
    started = said = time.monotonic()
    patience = config.weights.wait_for_weights_timeout or float("inf")
    while (staged := follower.poll(timeout=0.2)) is None:
        if time.monotonic() - started > patience:
            raise StoreError(
                f"no weights in {config.weights_address} after {patience:g} s "
                f"(weights.wait_for_weights_timeout). Start the trainer: bin/trainer{files_given()}"
            )
        heard = listener.receive()
        if heard is not None and follower.wants_keyframe:
            ask_for_keyframe(heard.run_id)
        if time.monotonic() - said > WAITING_SECONDS:
            said = time.monotonic()
            seconds, answers = said - started, wire.accepts_connection(address)
            logger.info(waiting_text(address, seconds, config.weights_address, answers=answers))
    started = time.monotonic()
    made = build.make_engine(config, staged)
    follower.accept()
    _log_loaded(staged, apply_seconds=time.monotonic() - started)
    return staged.version, *made


def waiting_text(address: str, seconds: float, weights: str, *, answers: bool) -> str:
    """What is missing, and what to do about it."""
    files, start = files_given(), f"waiting for trainer {address} ({seconds:.0f} s)"
    diagnose = f"Diagnose: bin/doctor{files}"
    if answers:
        reason = f"it answers, but {weights} has no version. Is that its weights.dir?"
        return f"{start}: {reason} {diagnose}"
    return f"{start}: no TCP answer. Start it: bin/trainer{files}. {diagnose}"
