"""Weight subscription of a generator: a thread loads new weight versions and offers them.

The generator polls an offered version, applies it to its engine and accepts it, or rejects it. One
thread does all reads and writes, because an unresponsive mount blocks the thread that uses it.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path

from peralta_zmq.errors import StoreError
from peralta_zmq.weights.backends import FolderWatcher
from peralta_zmq.weights.loader import PendingWeights, VersionLoader
from peralta_zmq.weights.replica import LocalReplica, locked_folder
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import Version

FIRST_POLL_SECONDS = 0.2  # between polls until the first version is found
OFFLINE_SECONDS = 5.0  # without a store until the replica of an earlier process is offered
JITTER = 0.2  # fraction of the polling interval, so that generators do not all poll at once


class WeightSubscriber:
    """Owns the subscription thread and the local replica. Use with `closing`.

    `folder` keeps the replica across restarts; if another process has locked it, a temporary folder
    is used. The thread polls every `poll_seconds`, and when the folder `watch` changes.
    """

    def __init__(
        self, store: WeightStore, folder: Path, *, poll_seconds: float, watch: Path | None = None
    ) -> None:
        self._store, self._poll_seconds, self._watched = store, poll_seconds, watch
        self._resources = contextlib.ExitStack()
        replica = LocalReplica(self._resources.enter_context(locked_folder(folder)))
        self._loader = VersionLoader(store, replica)
        self._watcher: FolderWatcher | None = None
        self._offered: PendingWeights | None = None  # not yet polled
        self._polled: PendingWeights | None = None  # not yet accepted or rejected
        self._accepted: Version | None = None
        self._failure: BaseException | None = None
        self._wake, self._closing = threading.Event(), False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weight-subscriber", daemon=True)
        self._thread.start()

    @property
    def wants_keyframe(self) -> bool:
        """Whether the newest version needs a delta that is missing, so only a keyframe helps."""
        return self._loader.wants_keyframe

    def notify(self, number: int, weights_id: str = "") -> None:
        """Look for an announced version now, even if the store does not list it yet."""
        if self._loader.announce(number, weights_id):
            self._wake.set()

    def poll(self, *, timeout: float = 0.0) -> PendingWeights | None:
        """The newest version that can be applied; waits up to `timeout` seconds for one.

        Returns the same version until `accept` or `reject`. Raises the exception that ended the
        thread.
        """
        with self._changed:
            if timeout:
                self._changed.wait_for(lambda: self._offered or self._failure, timeout)
            if self._failure:
                raise self._failure
            self._polled, self._offered = self._offered or self._polled, None
            return self._polled

    def accept(self) -> None:
        """Report that the version polled last is applied."""
        with self._changed:
            assert self._polled is not None
            self._accepted, self._polled = self._polled.version, None
            self._changed.notify_all()
        self._wake.set()  # a newer version may have waited for this

    def reject(self, version: Version) -> None:
        """Quarantine the polled or the accepted version, so that the newest other one is offered.

        An accepted version is rejected when it fails in use.
        """
        self._store.quarantine(version)
        with self._changed:
            if self._polled and self._polled.version is version:
                self._polled = None
            elif self._accepted is version:
                self._accepted = None
            self._changed.notify_all()
        self._wake.set()

    def close(self) -> None:
        """Stop the thread; does not wait longer than 2 s, as an unresponsive mount may block it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake.set()
        self._thread.join(timeout=2.0)
        if self._watcher:
            self._watcher.close()
        self._resources.close()

    # Methods of the thread.

    def _run(self) -> None:
        try:
            self._loader.replica.recover()
            started = time.monotonic()
            while not self._closing:
                self._wake.clear()
                self._watch_folder()
                self._load_newest()
                if self._accepted is None and time.monotonic() - started > OFFLINE_SECONDS:
                    self._load_offline()
                self._wake.wait(self._poll_interval())
        except BaseException as error:  # noqa: BLE001  (poll raises it)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _watch_folder(self) -> None:
        """Watch the folder once it exists, and again after a mount has replaced it."""
        if self._watched is None or (self._watcher and self._watcher.is_current()):
            return
        with contextlib.suppress(OSError):
            replaced, self._watcher = self._watcher, None
            if replaced:
                replaced.close()
            self._watcher = FolderWatcher(self._watched, self._wake.set)

    def _load_newest(self) -> None:
        """Load and offer the newest version, until there is no newer one that can be loaded."""
        while not self._closing:
            accepted = self._accepted  # the generator's thread may change it
            weights = self._loader.load_newest(
                self._known_versions(),
                model=accepted.field("model") if accepted else None,
                before_change=self._wait_until_unused,
            )
            if weights is None:
                return
            self._offer(weights)

    def _load_offline(self) -> None:
        """Offer the replica of an earlier process while the store is unreachable."""
        if not self._known_versions() and (weights := self._loader.load_offline()):
            self._offer(weights)

    def _offer(self, weights: PendingWeights) -> None:
        with self._changed:
            # The engine opens the first version with transformers, which memory-maps the file.
            self._loader.replica.mapped = self._accepted is None
            self._offered = weights
            self._changed.notify_all()

    def _known_versions(self) -> list[Version]:
        """The offered, the polled and the accepted version, if any."""
        with self._changed:
            pending = [weights.version for weights in (self._offered, self._polled) if weights]
            return [*pending, self._accepted] if self._accepted else pending

    def _wait_until_unused(self) -> None:
        """Wait until the polled version is accepted or rejected; withdraw an unpolled offer.

        Until then the generator may read the tensors of the replica. Raises StoreError on `close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._polled is None or self._closing)
            if self._closing:
                raise StoreError("closing")
            self._offered = None

    def _poll_interval(self) -> float:
        seconds = self._poll_seconds
        if not self._known_versions():
            seconds = min(FIRST_POLL_SECONDS, seconds)
        # Not the shared generator of `random`, which the run's seed may have set.
        jitter = random.SystemRandom().uniform(1 - JITTER, 1 + JITTER)
        return min(threading.TIMEOUT_MAX, jitter * seconds)
