"""Version loading of a generator: finds new versions, copies, verifies and checks them.

A loaded version is complete and verified: STABLE matches the manifest, each file has the size and
sha256 of the manifest, the tensors have the digest that the trainer computed, and all are finite.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import ChainError, StoreError
from peralta_zmq.weights import tensor_set
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import Version

SLOW_VERSIONS = 2  # in a row until a warning; a single keyframe among deltas may be slow
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingWeights:
    """A complete, verified version in the local replica, which the generator may apply."""

    version: Version
    tensors: Mapping[str, torch.Tensor]  # views of the replica, valid until accepted or rejected
    folder: Path  # of the replica, with all files that `from_pretrained` needs
    bytes_read: int  # from the store; 0 if the replica had this version already
    visible_seconds: float  # from the discovery of the version until it was ready


class VersionLoader:
    """Loads versions of a store into a local replica. Used by one thread, except `announce`."""

    def __init__(self, store: WeightStore, replica: LocalReplica) -> None:
        self.replica = replica
        self.wants_keyframe = False  # a delta that the newest version needs is missing
        self._store = store
        self._announced = -1, ""  # number and weights_id
        self._discovered = -1, 0.0  # newest version found: number and time in monotonic seconds
        self._speed_check = ReadSpeedCheck()
        self._last_warning = ""

    def announce(self, number: int, weights_id: str) -> bool:
        """Look for this version even before the store lists it; returns False if nothing is new.

        A version with another weights_id than the announced one is refused; '' allows any.
        """
        if number < 0 or (number, weights_id) == self._announced:
            return False
        self._announced = number, weights_id
        return True

    def load_newest(
        self,
        known: Sequence[Version],
        *,
        model: str | None,
        before_change: Callable[[], None],
    ) -> PendingWeights | None:
        """Load the newest version, if it is newer than the `known` ones and can be loaded.

        `model` and `before_change` are passed to `LocalReplica.advance`.
        """
        while True:
            target = self._find_announced(known) or self._store.newest()
            if target is None:
                self.wants_keyframe = False  # the chain cannot be checked without the store
                return None
            if not self._is_new(target, known):
                return None
            if self._discovered[0] != target.number:
                self._discovered = target.number, time.monotonic()
            try:
                return self._load(target, model, before_change)
            except StoreError as error:
                self.wants_keyframe = isinstance(error, ChainError)
                self._log_once(f"unread version={target.number} reason={error}")
                if self._store.find(target.number) is not None:
                    return None  # the error may be transient: try again at the next poll
                # The version was quarantined or removed: try the one before it.

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
        logger.warning(
            "no store at %s: serving version=%d of the local copy",
            self._store.address,
            version.number,
        )
        return pending

    def _find_announced(self, known: Sequence[Version]) -> Version | None:
        """The announced version, which a NAS may open before it lists it."""
        number, _ = self._announced
        if number <= max((version.number for version in known), default=-1):
            return None
        version = self._store.find(number)
        return version if version is not None and self._is_new(version, known) else None

    def _is_new(self, version: Version, known: Sequence[Version]) -> bool:
        """Whether `version` is newer than all known versions of the same run."""
        number, weights_id = self._announced
        if version.number == number and weights_id not in ("", version.weights_id):
            self._log_once(
                f"unread version={number} reason=its id is {version.weights_id}, not {weights_id}"
            )
            return False
        return all(
            other.run_id != version.run_id or other.number < version.number for other in known
        )

    def _load(
        self, target: Version, model: str | None, before_change: Callable[[], None]
    ) -> PendingWeights:
        """Update the replica to `target` and check it. Raises StoreError."""
        started = fetched = time.monotonic()

        def fetch_is_complete() -> None:
            nonlocal fetched
            fetched = time.monotonic()
            before_change()

        bytes_read = self.replica.advance(
            self._store, target, model=model, before_change=fetch_is_complete
        )
        pending = self._pending(target, bytes_read)
        failpoint("load.checked")
        if bytes_read:
            warning = self._speed_check.add(
                target.number,
                target.size,
                seen_at=self._discovered[1],
                bytes_per_second=bytes_read / max(1e-6, fetched - started),
            )
            if warning:
                logger.warning(warning)
        self.wants_keyframe, self._last_warning = False, ""
        return pending

    def _pending(self, version: Version, bytes_read: int) -> PendingWeights:
        """The version in the replica; StoreError and a quarantine if a weight is not finite."""
        tensors = self.replica.tensors()
        try:
            tensor_set.check_finite(tensors)
        except ValueError as error:
            self._store.quarantine(version)
            raise StoreError(f"version {version.number}: {error}") from None
        visible_seconds = time.monotonic() - self._discovered[1]
        return PendingWeights(version, tensors, self.replica.folder, bytes_read, visible_seconds)

    def _log_once(self, text: str) -> None:
        """Log a warning unless it repeats the previous one, e.g. at every poll."""
        if text != self._last_warning:
            logger.warning(text)
        self._last_warning = text


class ReadSpeedCheck:
    """Warns once if versions take longer to read than the trainer takes to publish new ones."""

    def __init__(self) -> None:
        self._previous: tuple[int, float] | None = None  # number, seen_at
        self._num_slow = 0  # slow versions in a row

    def add(self, number: int, size: int, *, seen_at: float, bytes_per_second: float) -> str | None:
        """Record that a version of `size` bytes was read; returns the warning if one is due.

        `seen_at` is when the version was discovered, in monotonic seconds.
        """
        previous, self._previous = self._previous, (number, seen_at)
        if previous is None or number <= previous[0] or self._num_slow >= SLOW_VERSIONS:
            return None
        step_seconds = max(1e-3, (seen_at - previous[1]) / (number - previous[0]))
        read_seconds = size / bytes_per_second
        self._num_slow = self._num_slow + 1 if read_seconds > step_seconds else 0
        if self._num_slow < SLOW_VERSIONS:
            return None
        return (
            f"this link cannot keep up: a version of {size / 1e6:.1f} MB takes "
            f"{read_seconds:.1f} s at {bytes_per_second / 1e6:.2f} MB/s, a step {step_seconds:.1f} "
            f"s; this generator loads about one version in {math.ceil(read_seconds / step_seconds)}"
        )
