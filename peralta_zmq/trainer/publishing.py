"""Weight publishing of the trainer: publishes versions in the background, records the outcome."""

from __future__ import annotations

from contextlib import ExitStack, closing

from peralta_zmq import models
from peralta_zmq.atomic_files import read_private_token
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError, StoreError
from peralta_zmq.models import lora
from peralta_zmq.observe.run_log import published_weights
from peralta_zmq.trainer.policy import Policy
from peralta_zmq.trainer.session import Session
from peralta_zmq.weights.http_backend import serve_weights
from peralta_zmq.weights.publisher import PublishReport, Retention, WeightPublisher
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import Version

COMPLETE_SECONDS = 60.0  # timeout for the last version of a complete run
STOP_SECONDS = 2.0  # timeout for the last version when a stop is requested


class WeightPublishing:
    """Publishes the policy's weights and announces each version as soon as it is committed."""

    def __init__(
        self, session: Session, store: WeightStore, policy: Policy, stack: ExitStack
    ) -> None:
        self.store = store
        self._session, self._model = session, policy.model
        self._manifest_fields: dict[str, str | int] = {**policy.manifest_fields}
        self._newest: PublishReport | None = None
        weights = session.config.weights
        token = read_private_token(weights.token_file)
        if weights.serve_port:
            server = serve_weights(
                session.config.weights_folder,
                host=session.config.wire.bind, port=weights.serve_port, token=token,
            )  # fmt: skip
            stack.enter_context(closing(server))
        self._publisher = WeightPublisher(
            store,
            companions=policy.companions,
            about=self._manifest_fields,
            dtype=models.DTYPES[weights.dtype],
            retention=Retention(weights.keep_last, weights.keep_interval, weights.keep_seconds),
            keyframe_interval=weights.keyframe_interval,
            max_mbit_per_s=weights.max_mbit_per_s,
            on_published=self.announce,
        )
        stack.callback(self._close)

    def set_lineage(self, lineage: int) -> None:
        """Record the number of roll-backs so far in the manifest of each later version."""
        self._manifest_fields["lineage"] = lineage

    def publish(self, step: int, *, keyframe: bool = False) -> float:
        """Copy the weights of `step` for the publishing thread; returns the seconds it took.

        The last step is always a keyframe, so that transformers can load the folder.
        """
        keyframe = keyframe or step >= self._session.config.train.max_steps
        return self._publisher.publish(step, lora.published_weights(self._model), keyframe=keyframe)

    def announce(self, version: Version) -> None:
        """Announce a committed version. Called by the publishing thread, also during a step."""
        self._session.status.publish(version=version.number, weights_id=version.weights_id)

    def metrics(self) -> dict[str, float]:
        """Size and timing of the newest version; it may be of an earlier step."""
        if (report := self._newest) is None or report.version is None:
            return {}
        return {
            "weights/version": report.version.number,
            "weights/bytes": report.version.size,
            "weights/stall_seconds": report.stall_seconds,
            "weights/encode_seconds": report.encode_seconds,
            "weights/write_seconds": report.write_seconds,
        }

    def wait(self, timeout: float) -> None:
        """Wait until the waiting version is published; report it if the timeout passes."""
        if not self._publisher.wait(timeout):
            self._session.run_log.note(f"the last version is not published after {timeout:.0f} s")
        self.record_reports()

    def record_reports(self) -> None:
        """Record the versions that were published since the last call, and the failures."""
        for report in self._publisher.take_reports():
            if report.version is None:  # training continues: generators keep their version
                run_log = self._session.run_log
                run_log.event("publish_failed", step=report.step, reason=report.reason)
                run_log.note(report.reason)
            else:
                self._newest = report
                self._record(report.version)

    def record_unrecorded(self) -> None:
        """Record versions that an earlier session committed just before it was killed."""
        try:
            versions = self.store.versions()
        except StoreError as error:
            self._session.run_log.note(str(error))
            return
        recorded = published_weights(self._session.folder)
        for version in versions:
            if version.weights_id not in recorded:
                self._record(version)

    def _record(self, version: Version) -> None:
        self._session.run_log.event(
            "publish", step=version.step, number=version.number, weights_id=version.weights_id,
            kind=version.kind, bytes=version.size,
        )  # fmt: skip

    def _close(self) -> None:
        stopping = self._session.stop.requested
        self._publisher.close(STOP_SECONDS if stopping else COMPLETE_SECONDS)


def open_store(config: Config) -> WeightStore:
    """The folder or bucket to publish to. Raises ConfigError for a read-only address."""
    if config.weights_address.startswith("http://"):
        raise ConfigError(
            f"weights.dir {config.weights.dir} is for generators; the trainer needs a folder, "
            "which weights.serve_port serves"
        )
    read_private_token(config.weights.token_file)  # raises before anything is written
    return WeightStore.open(config.weights_address)
