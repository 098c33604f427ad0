"""The trainer's side of the weight store: whose it is, what goes out, what became of it.

Knows the store and the run's books; knows nothing of groups.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing

from torch import Tensor

from peralta_zmq import build, models
from peralta_zmq.atomic_files import read_private_token
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError, GoneError, StoreError
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.trainer.adapter_files import CompanionFiles
from peralta_zmq.trainer.status import StatusPublisher
from peralta_zmq.trainer.stop_signal import StopSignal
from peralta_zmq.weights.backends import ProbeFile, open_backend
from peralta_zmq.weights.http_backend import WeightServer
from peralta_zmq.weights.publisher import PublishReport, Retention, WeightPublisher
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import Version

WAITING_SECONDS = 30.0  # between two lines that say that the weights folder is gone
LAST_VERSION_SECONDS = 60.0  # that the end of a run waits for its last version to be out
STOP_SECONDS = 2.0  # and that a stop waits
logger = logging.getLogger(__name__)


class WeightPublishing:
    """Publishes in the background and tells of each version as soon as it is out."""

    def __init__(
        self,
        config: Config,
        store: WeightStore,
        stack: ExitStack,
        *,
        beside: CompanionFiles,
        books: RunLog,
        speaker: StatusPublisher,
        stop: StopSignal,
    ) -> None:
        self.store, self._books, self._speaker = store, books, speaker
        self._about: dict[str, str | int] = {**beside.about}
        self._newest: PublishReport | None = None
        weights, token = config.weights, read_private_token(config.weights.token_file)
        if weights.serve_port:
            server = WeightServer(
                config.weights_folder,
                host=config.wire.bind, port=weights.serve_port, token=token,
            )  # fmt: skip
            stack.enter_context(closing(server))
        self._publisher = WeightPublisher(
            store,
            companions=beside.companions,
            about=self._about,
            dtype=models.DTYPES[weights.dtype],
            retention=Retention(weights.keep_last, weights.keep_interval, weights.keep_seconds),
            keyframe_interval=weights.keyframe_interval,
            max_mbit_per_s=weights.max_mbit_per_s,
            on_published=self.tell,
        )
        stack.callback(lambda: self._publisher.close(STOP_SECONDS if stop.asked else 60.0))

    def begin_line(self) -> None:
        """From now on versions say how often the run was rolled back."""
        self._about["line"] = self._books.lineage

    def publish(self, step: int, weights: Mapping[str, Tensor], *, whole: bool) -> float:
        """Hand over a step's weights; returns the seconds it took. `whole` asks for a keyframe."""
        return self._publisher.publish(step, weights, keyframe=whole)

    def tell(self, version: Version) -> None:
        """Announce a version as soon as it is out, also during a step; any thread may call."""
        self._speaker.say(version=version.number, weights_id=version.weights_id)

    def figures(self) -> dict[str, float]:
        """What the newest finished publication cost; it may be of an earlier step."""
        if (report := self._newest) is None or report.version is None:
            return {}
        return {
            "weights/version": report.version.number,
            "weights/bytes": report.version.size,
            "weights/stall_seconds": report.stall_seconds,
            "weights/encode_seconds": report.encode_seconds,
            "weights/write_seconds": report.write_seconds,
        }

    def wait(self, seconds: float) -> None:
        """Let what was handed over be published; an unfinished one is left behind."""
        if not self._publisher.wait(seconds):
            self._books.note(f"the last version is not published after {seconds:.0f} s")
        self.take_reports()

    def take_reports(self) -> None:
        """Record what was published since, and what was not."""
        for report in self._publisher.take_reports():
            if report.version is None:  # train on: generators serve the version they have
                self._books.event("publish_failed", step=report.step, reason=report.reason)
                self._books.note(report.reason)
                continue
            self._newest = report
            self._record(report.version)

    def record_what_is_out(self) -> None:
        """Record what an earlier session published in the moment before it was killed."""
        try:
            found = self.store.versions()
        except StoreError as error:
            self._books.note(str(error))
            return
        recorded = self._books.published_weights()
        for version in found:
            if version.weights_id not in recorded:
                self._record(version)

    def _record(self, version: Version) -> None:
        self._books.event(
            "publish", step=version.step, number=version.number, weights_id=version.weights_id,
            kind=version.kind, bytes=version.size,
        )  # fmt: skip


def open_store(config: Config) -> WeightStore:
    """The folder or bucket to publish to. Raises ConfigError for one that only serves readers."""
    if config.weights_address.startswith("http://"):
        raise ConfigError(
            f"weights.dir {config.weights.dir} is for generators; the trainer needs a folder, "
            "which weights.serve_port serves"
        )
    read_private_token(config.weights.token_file)  # tried before anything is written
    return WeightStore(open_backend(config.weights_address))


def open_probe(config: Config, stack: ExitStack) -> Callable[[], str] | None:
    """What shows a doctor that its weights folder is ours; None when ours is a bucket."""
    if "://" in config.weights_address:
        return None
    return stack.enter_context(closing(ProbeFile(config.weights_folder))).create


def claim(store: WeightStore, config: Config, *, run_id: str, stop: StopSignal) -> None:
    """Make the weights folder ours; one that we have published to is waited for, not remade.

    The one inside the run's folder cannot be unmounted, and may be deleted to free a disk.
    Raises StoreError.
    """
    folder, where, said = config.run_folder, store.address, float("-inf")
    known = bool(config.weights.dir) and build.weights_of(folder) == where
    while True:
        try:
            store.claim(run_id, known=known)
            break
        except GoneError as error:
            if time.monotonic() - said > WAITING_SECONDS:
                said = time.monotonic()
                logger.warning("%s. Waiting for it", error)
            stop.pause(1.0)
    if not known:
        build.write_identity(folder, run_id=run_id, weights=where)
