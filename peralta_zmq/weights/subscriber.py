"""Weight subscription of a generator: a thread loads new weight versions and offers them.

The generator polls for a loaded version, applies it to its engine, and then accepts or rejects it.
Only the thread reads and writes files, so that an unresponsive mount blocks no other thread. A
loaded version is complete (STABLE has the hash of the manifest) and verified: each file has the
size and sha256 of the manifest, the tensors have the digest that the trainer computed, and all are
finite.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peralta_zmq.atomic_files import MAX_REASON, failpoint
from peralta_zmq.errors import ChainError, StoreError, printable
from peralta_zmq.weights import tensor_set
from peralta_zmq.weights.backends import FolderWatcher
from peralta_zmq.weights.replica import LocalReplica, locked_folder
from peralta_zmq.weights.store import Version, WeightStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingWeights:
    """A complete, verified version in the replica, for the generator to apply."""

    version: Version
    tensors: Mapping[str, torch.Tensor]  # read from `folder` when accessed
    folder: Path  # the replica, with all files that `from_pretrained` needs
    bytes_read: int  # from the store; 0 if the replica had this version already
    visible_seconds: float  # from the discovery of the version until it was ready


class WeightSubscriber:
    """Owns the subscription thread and the local replica. Use with `closing`.

    `folder` keeps the replica across restarts; if another process has locked it, a temporary one is
    used. The thread polls every `poll_seconds`, when a version is announced, and when a name
    appears in the folder `watch` or that folder itself appears.
    """

    def __init__(
        self,
        store: WeightStore,
        folder: Path,
        *,
        poll_seconds: float = 2.0,
        watch: Path | None = None,
        first_poll_seconds: float = 0.2,  # between polls until the first version is found
        offline_seconds: float = 5.0,  # without a store, until an earlier replica is offered
    ) -> None:
        self._store = store
        self._first_poll_seconds = first_poll_seconds
        self._offline_seconds = offline_seconds
        self._poll_seconds = poll_seconds
        self._watched = watch
        self._resources = contextlib.ExitStack()
        replica = LocalReplica(self._resources.enter_context(locked_folder(folder)))
        self._loader = VersionLoader(store, replica)
        self._watcher: FolderWatcher | None = None
        self._offered: PendingWeights | None = None  # loaded, not yet polled
        self._polled: PendingWeights | None = None  # not yet accepted or rejected
        self._accepted: Version | None = None
        self._failure: BaseException | None = None
        self._wake = threading.Event()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weight-subscriber", daemon=True)
        self._thread.start()

    @property
    def wants_keyframe(self) -> bool:
        """Whether a needed delta is missing, so that only a new keyframe helps."""
        return self._loader.wants_keyframe

    @property
    def store_error(self) -> str:
        """Why newer weights cannot be read; empty if they can, or there are none."""
        return self._loader.store_error[:MAX_REASON]

    def notify(self, number: int, weights_id: str = "") -> None:
        """Load an announced version now, even if the store does not list it yet."""
        if self._loader.announce(number, weights_id):
            self._wake.set()

    def poll(self, *, timeout: float = 0.0) -> PendingWeights | None:
        """The newest version that can be applied; the same one until `accept` or `reject`.

        Waits up to `timeout` seconds for one. Raises the exception that ended the thread.
        """
        with self._changed:
            if timeout:
                self._changed.wait_for(lambda: self._offered or self._failure, timeout)
            if self._failure:
                raise self._failure
            self._polled = self._offered or self._polled
            self._offered = None
            return self._polled

    def accept(self) -> None:
        """Report that the engine has applied the version polled last."""
        with self._changed:
            assert self._polled is not None
            self._accepted = self._polled.version
            self._polled = None
            self._changed.notify_all()
        self._wake.set()  # a newer version may have waited for this

    @property
    def has_accepted(self) -> bool:
        return self._accepted is not None

    def offer_again(self) -> None:
        """Offer the accepted version, or a newer one, because the engine has lost its weights."""
        with self._changed:
            self._accepted = None
            self._changed.notify_all()
        self._wake.set()

    def reject(self, version: Version) -> None:
        """Quarantine the polled or the accepted version, so that the newest other is offered."""
        self._store.quarantine(version)
        with self._changed:
            if self._polled and self._polled.version is version:
                self._polled = None
            elif self._accepted is version:
                self._accepted = None
            self._changed.notify_all()
        self._wake.set()

    def close(self) -> None:
        """Stop the thread; waits at most 2 s: an unresponsive mount may block it."""
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
                seconds = time.monotonic() - started
                if weights := self._load(offline=seconds > self._offline_seconds):
                    with self._changed:
                        self._offered = weights
                        self._changed.notify_all()
                else:
                    self._wake.wait(self._poll_interval())
        except BaseException as error:  # noqa: BLE001  (`poll` raises it; else nobody would see it)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _watch_folder(self) -> None:
        """Watch the folder, or its parent until it exists, and again after a mount replaced it."""
        if self._watched is None:
            return
        folder = self._watched
        name = ""
        try:
            os.stat(folder)
        except FileNotFoundError:
            folder, name = folder.parent, folder.name
        except OSError:
            return  # unreadable for now: keep the watcher
        if self._watcher and self._watcher.folder == folder and self._watcher.is_current():
            return
        with contextlib.suppress(OSError):
            replaced = self._watcher
            self._watcher = None
            if replaced:
                replaced.close()
            self._watcher = FolderWatcher(folder, self._wake.set, name=name)

    def _load(self, *, offline: bool) -> PendingWeights | None:
        """Load the newest version, if it is new; `offline`: the replica of an earlier process."""
        accepted = self._accepted  # read once, because the generator's thread may change it
        model = accepted.field("model") if accepted else None
        known = self._known_versions()
        weights = self._loader.load_newest(known, model, self._wait_until_unused)
        if weights is None and offline and not known:
            return self._loader.load_offline()
        return weights

    def _known_versions(self) -> list[Version]:
        with self._changed:
            pending = [weights.version for weights in (self._offered, self._polled) if weights]
            return [*pending, self._accepted] if self._accepted else pending

    def _wait_until_unused(self) -> None:
        """Wait until the generator no longer reads the replica; withdraw an unpolled offer.

        Raises StoreError on `close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._polled is None or self._closing)
            if self._closing:
                raise StoreError("closing")
            self._offered = None

    def _poll_interval(self) -> float:
        longest = self._poll_seconds if self._known_versions() else self._first_poll_seconds
        # Jitter, so that generators do not all poll at once. SystemRandom, because the run's seed
        # may make `random` equal in all generators.
        jitter = random.SystemRandom().uniform(0.8, 1.2)
        return min(threading.TIMEOUT_MAX, jitter * min(longest, self._poll_seconds))


class VersionLoader:
    """Loads versions of a store into a local replica. Used by one thread, except `announce`."""

    def __init__(self, store: WeightStore, replica: LocalReplica) -> None:
        self.replica = replica
        self.wants_keyframe = False  # a delta that the newest version needs is missing
        self._store = store
        self._announced = -1, ""  # number and weights_id
        self._discovered = -1, 0.0  # newest version found: number and time in monotonic seconds
        self._previous = self._discovered  # of the version that was loaded before
        self._num_slow = 0  # slow versions in a row; 1 may be a keyframe, 2 make a warning
        self._last_warning = ""
        self.store_error = ""  # why the newest version cannot be read

    def announce(self, number: int, weights_id: str) -> bool:
        """Record an announced version; False if it was announced before.

        A version of this number with another weights_id is refused; '' allows any.
        """
        if number < 0 or (number, weights_id) == self._announced:
            return False
        self._announced = number, weights_id
        return True

    def load_newest(
        self, known: Sequence[Version], model: str | None, before_change: Callable[[], None]
    ) -> PendingWeights | None:
        """Load the newest version; None if it is not newer than each `known` one, or not readable.

        `model` and `before_change` as in `LocalReplica.advance`.
        """
        while True:
            target = self._find_announced(known) or self._store.newest()
            if target is None:
                self.wants_keyframe = False  # the chain cannot be checked without the store
            if target is None or not self._is_new(target, known):
                gone = f"{self._store.address} has no weights any more; is it mounted?"
                self._note(self._store.last_error or gone * bool(target is None and known))
                return None
            if self._discovered[0] != target.number:
                self._discovered = target.number, time.monotonic()
            try:
                return self._load(target, model, before_change)
            except StoreError as error:
                self.wants_keyframe = isinstance(error, ChainError)
                self._log_once(f"load failed version={target.number} reason={error}")
                if self._store.find(target.number) is not None:
                    self.store_error = "" if self.wants_keyframe else printable(str(error))
                    return None  # the error may be transient: try again at the next poll
                # The version was quarantined or removed: try the version before it.

    def load_offline(self) -> PendingWeights | None:
        """The replica of an earlier process, if the store is unreachable."""
        version = self.replica.version
        if version is None or self._store.run_id is not None:
            return None
        self._discovered = version.number, time.monotonic()
        try:
            pending = self._pending(version, bytes_read=0)
        except StoreError as error:
            self.replica.version = None
            self._log_once(str(error))
            return None
        text = "no store at %s: serving version=%d of the local copy"
        logger.warning(text, self._store.address, version.number)
        return pending

    def _find_announced(self, known: Sequence[Version]) -> Version | None:
        """The announced version, which can be opened on some NAS before it is listed."""
        number, _ = self._announced
        if number <= max((version.number for version in known), default=-1):
            return None
        version = self._store.find(number)
        return version if version is not None and self._is_new(version, known) else None

    def _is_new(self, version: Version, known: Sequence[Version]) -> bool:
        number, weights_id = self._announced
        if version.number == number and weights_id not in ("", version.weights_id):
            self._log_once(
                f"load failed version={number} "
                f"reason=its id is {version.weights_id}, not {weights_id}"
            )
            return False
        return all(
            other.run_id != version.run_id or other.number < version.number for other in known
        )

    def _load(
        self, target: Version, model: str | None, before_change: Callable[[], None]
    ) -> PendingWeights:
        bytes_read = self.replica.advance(
            self._store, target, model=model, before_change=before_change
        )
        pending = self._pending(target, bytes_read)
        failpoint("load.checked")  # here a test can kill the process
        if bytes_read:
            self._check_speed(target.size, bytes_read / max(1e-6, self.replica.read_seconds))
        self.wants_keyframe = False
        self._last_warning = ""
        self.store_error = ""
        return pending

    def _check_speed(self, size: int, bytes_per_second: float) -> None:
        """Warn once if versions take longer to read than the trainer takes to publish new ones."""
        previous, previous_seen_at = self._previous
        number, seen_at = self._discovered
        self._previous = self._discovered
        if not 0 <= previous < number or self._num_slow >= 2:
            return
        step_seconds = max(1e-3, (seen_at - previous_seen_at) / (number - previous))
        read_seconds = size / bytes_per_second
        self._num_slow = self._num_slow + 1 if read_seconds > step_seconds else 0
        if self._num_slow == 2:
            logger.warning(
                f"this link cannot keep up: a version of {size / 1e6:.1f} MB takes "
                f"{read_seconds:.1f} s at {bytes_per_second / 1e6:.2f} MB/s, a step "
                f"{step_seconds:.1f} s; this generator loads about one version in "
                f"{math.ceil(read_seconds / step_seconds)}"
            )

    def _pending(self, version: Version, bytes_read: int) -> PendingWeights:
        """Check the weights in the replica, and return them. Raises StoreError."""
        tensors = self.replica.tensors()
        try:
            tensor_set.check_finite(tensors)
        except ValueError as error:
            self._store.quarantine(version)
            raise StoreError(f"version {version.number}: {error}") from None
        except OSError as error:
            self.replica.version = None  # the next attempt reads it again
            raise StoreError(f"{self.replica.folder} cannot be read: {error}") from None
        visible_seconds = time.monotonic() - self._discovered[1]
        return PendingWeights(version, tensors, self.replica.folder, bytes_read, visible_seconds)

    def _note(self, error: str) -> None:
        if error and error != self.store_error:
            logger.warning("weights not read: reason=%s", error)
        self.store_error = error

    def _log_once(self, text: str) -> None:
        if text != self._last_warning:
            logger.warning(text)
        self._last_warning = text
