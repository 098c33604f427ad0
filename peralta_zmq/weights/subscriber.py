"""Weight subscription of a generator: finds, fetches, verifies and offers new versions.

One thread does all reads and writes, because an unresponsive mount blocks the thread that uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import random
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import ChainError, StoreError
from peralta_zmq.weights import tensors as sets
from peralta_zmq.weights.backends import FolderWatcher
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import Version

FIRST_POLL_SECONDS = 0.2  # between polls until the first version is found
MAX_WATCHER_POLL_SECONDS = 60.0  # between two listings of a remote folder by the watcher
OFFLINE_SECONDS = 5.0  # without a store until the copy of an earlier process is offered
JITTER = 0.2  # fraction of the polling interval, so that generators do not all poll at once
SLOW_VERSIONS = 2  # in a row until a warning; a single keyframe among deltas may be slow
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingWeights:
    """A complete, verified version in the local copy."""

    version: Version
    tensors: Mapping[str, torch.Tensor]  # views of the copy, valid until `accept` or `reject`
    folder: Path  # with everything that `from_pretrained` needs
    bytes_read: int
    visible_seconds: float  # from the discovery of the version until it was ready


class WeightSubscriber:
    """Owns the subscription thread and the local copy. Use with `closing`.

    `folder` keeps the copy across restarts; if another process has locked it, a temporary folder is
    used. The thread polls every `poll_seconds`, and when the folder `watch` changes.
    """

    def __init__(
        self, store: WeightStore, folder: Path, *, poll_seconds: float, watch: Path | None = None
    ) -> None:
        self.wants_keyframe = False  # the newest version's chain is broken
        self._store, self._poll_seconds, self._watched = store, poll_seconds, watch
        self._resources = contextlib.ExitStack()
        self._replica = LocalReplica(self._lock_folder(folder))
        self._watcher: FolderWatcher | None = None
        self._offered: PendingWeights | None = None  # not yet polled
        self._polled: PendingWeights | None = None  # not yet accepted or rejected
        self._accepted: Version | None = None
        self._announced = -1, ""  # number and weights_id
        self._discovered = -1, 0.0  # newest version found: number and time in monotonic seconds
        self._fetched_at = 0.0  # monotonic seconds, end of the last download
        self._speed_check = LinkSpeedCheck()
        self._last_warning = ""
        self._failure: BaseException | None = None
        self._wake, self._closing = threading.Event(), False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weight-subscriber", daemon=True)
        self._thread.start()

    def notify(self, number: int, weights_id: str = "") -> None:
        """Look for an announced version now, even if the store does not list it yet."""
        if number >= 0 and (number, weights_id) != self._announced:
            self._announced = number, weights_id
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

    def _lock_folder(self, folder: Path) -> Path:
        """`folder`, locked until `close`, or a temporary folder if it cannot be locked."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = self._resources.enter_context((folder / "lock").open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder
        except OSError as error:
            temporary = tempfile.TemporaryDirectory(prefix="peralta-", ignore_cleanup_errors=True)
            logger.info(
                "copying to %s: cannot lock %s (%s)", temporary.name, folder, error.strerror
            )
            return Path(self._resources.enter_context(temporary))

    # Methods of the thread.

    def _run(self) -> None:
        try:
            self._replica.recover()
            started = time.monotonic()
            while not self._closing:
                self._wake.clear()
                self._watch_folder()
                self._fetch_newest()
                if self._accepted is None and time.monotonic() - started > OFFLINE_SECONDS:
                    self._offer_offline()
                self._wake.wait(self._poll_interval())
        except BaseException as error:  # noqa: BLE001  (poll raises it)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _poll_interval(self) -> float:
        seconds = self._poll_seconds
        if not self._known_versions():
            seconds = min(FIRST_POLL_SECONDS, seconds)
        # Not the shared generator of `random`, which the run's seed may have set.
        jitter = random.SystemRandom().uniform(1 - JITTER, 1 + JITTER)
        return min(threading.TIMEOUT_MAX, jitter * seconds)

    def _watch_folder(self) -> None:
        """Watch the folder once it exists, and again after a mount has replaced it."""
        if self._watched is None or (self._watcher and self._watcher.is_current()):
            return
        with contextlib.suppress(OSError):
            replaced, self._watcher = self._watcher, None
            if replaced:
                replaced.close()
            poll_seconds = min(MAX_WATCHER_POLL_SECONDS, self._poll_seconds)
            self._watcher = FolderWatcher(self._watched, self._wake.set, poll_seconds=poll_seconds)

    def _fetch_newest(self) -> None:
        while not self._closing:
            target = self._find_announced() or self._store.newest()
            if target is None:
                self.wants_keyframe = False  # the chain cannot be checked without the store
                return
            if not self._is_new(target):
                return
            if self._discovered[0] != target.number:
                self._discovered = target.number, time.monotonic()
            try:
                self._fetch(target)
            except StoreError as error:
                self.wants_keyframe = isinstance(error, ChainError)
                self._log_once(f"unread version={target.number} reason={error}")
                if self._store.find(target.number) is not None:
                    return  # possibly a transient error: try again at the next poll
                # quarantined or removed: try the version before it

    def _find_announced(self) -> Version | None:
        """The announced version, which a NAS may open before it lists it."""
        number, _ = self._announced
        if number <= max((version.number for version in self._known_versions()), default=-1):
            return None
        version = self._store.find(number)
        return version if version is not None and self._is_new(version) else None

    def _is_new(self, version: Version) -> bool:
        """Whether `version` is newer than all known versions of the same run."""
        number, weights_id = self._announced
        if version.number == number and weights_id not in ("", version.weights_id):
            self._log_once(
                f"unread version={number} reason=its id is {version.weights_id}, not {weights_id}"
            )
            return False
        return all(
            known.run_id != version.run_id or known.number < version.number
            for known in self._known_versions()
        )

    def _known_versions(self) -> list[Version]:
        """The offered, the polled and the accepted version, if any."""
        with self._changed:
            pending = [weights.version for weights in (self._offered, self._polled) if weights]
            return [*pending, self._accepted] if self._accepted else pending

    def _fetch(self, target: Version) -> None:
        """Update the local copy to `target`, check it and offer it."""
        accepted = self._accepted  # another thread may change it
        model = accepted.field("model") if accepted else None
        started = time.monotonic()
        bytes_read = self._replica.advance(
            self._store, target, model=model, before_change=self._wait_until_unused
        )
        tensors = self._checked_tensors(target)
        failpoint("load.checked")
        self._offer(target, tensors, bytes_read)
        if bytes_read:
            bytes_per_second = bytes_read / max(1e-6, self._fetched_at - started)
            seen_at = self._discovered[1]
            if warning := self._speed_check.add(
                target.number, target.size, seen_at=seen_at, bytes_per_second=bytes_per_second
            ):
                logger.warning(warning)

    def _checked_tensors(self, version: Version) -> Mapping[str, torch.Tensor]:
        """The tensors of the copy; StoreError, and a quarantine, if some are not finite."""
        tensors = self._replica.tensors()
        try:
            sets.check_finite(tensors)
        except ValueError as error:
            self._store.quarantine(version)
            raise StoreError(f"version {version.number}: {error}") from None
        return tensors

    def _wait_until_unused(self) -> None:
        """Wait until the polled version is accepted or rejected; withdraw an unpolled offer."""
        self._fetched_at = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._polled is None or self._closing)
            if self._closing:
                raise StoreError("closing")
            self._offered = None

    def _offer(
        self, version: Version, tensors: Mapping[str, torch.Tensor], bytes_read: int
    ) -> None:
        visible_seconds = time.monotonic() - self._discovered[1]
        self._replica.mapped = self._accepted is None  # transformers memory-maps the first version
        self.wants_keyframe, self._last_warning = False, ""
        with self._changed:
            self._offered = PendingWeights(
                version, tensors, self._replica.folder, bytes_read, visible_seconds
            )
            self._changed.notify_all()

    def _offer_offline(self) -> None:
        """Offer the copy of an earlier process while the store is unreachable."""
        version = self._replica.version
        if version is None or self._known_versions() or self._store.run_id is not None:
            return
        try:
            tensors = self._checked_tensors(version)
        except StoreError as error:
            self._replica.version = None
            self._log_once(str(error))
            return
        self._log_once(
            f"no store at {self._store.address}: serving version={version.number} of the local copy"
        )
        self._discovered = version.number, time.monotonic()
        self._offer(version, tensors, 0)

    def _log_once(self, text: str) -> None:
        """Log a warning unless it repeats the previous one, e.g. at every poll."""
        if text != self._last_warning:
            logger.warning(text)
        self._last_warning = text


class LinkSpeedCheck:
    """Compares how long versions take to read with how often new ones appear; warns once."""

    def __init__(self) -> None:
        self._previous: tuple[int, float] | None = None  # number, seen_at
        self._num_slow = 0  # slow versions in a row
        self._warned = False

    def add(self, number: int, size: int, *, seen_at: float, bytes_per_second: float) -> str | None:
        """Record that a version of `size` bytes was read; returns a warning if one is due.

        `seen_at` is when the version was discovered, in monotonic seconds.
        """
        previous, self._previous = self._previous, (number, seen_at)
        if previous is None or number <= previous[0]:
            return None
        step_seconds = (seen_at - previous[1]) / (number - previous[0])
        warning = link_warning(size, bytes_per_second, step_seconds)
        self._num_slow = self._num_slow + 1 if warning else 0
        if self._warned or self._num_slow < SLOW_VERSIONS:
            return None
        self._warned = True
        return warning


def link_warning(size: float, bytes_per_second: float, step_seconds: float) -> str | None:
    """A warning if a version of `size` bytes takes longer to read than a training step."""
    read_seconds = size / bytes_per_second
    if read_seconds <= step_seconds:
        return None
    nth = -(-read_seconds // max(step_seconds, 1e-3))
    return (
        f"this link cannot keep up: a version of {size / 1e6:.1f} MB takes {read_seconds:.1f} s at "
        f"{bytes_per_second / 1e6:.2f} MB/s, a step {step_seconds:.1f} s; this generator serves "
        f"about every {nth:.0f}th version"
    )
