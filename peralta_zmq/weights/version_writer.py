"""Writes one snapshot of the trainer's weights as a version and prunes old versions.

A version is a keyframe (all weights) or a delta (the changes since the previous version).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from peralta_zmq.errors import StoreError
from peralta_zmq.weights import delta
from peralta_zmq.weights.pruning import KEEP_LAST_THREE, Pruner, Retention
from peralta_zmq.weights.store import Base, WeightStore
from peralta_zmq.weights.version import Version

Tensors = dict[str, torch.Tensor]
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Snapshot:
    """A copy of the weights after an optimizer step."""

    step: int
    tensors: Tensors
    wait_for_copies: Callable[[], None]  # returns when copies from the GPU are complete
    stall_seconds: float  # for which the trainer waited for the copy
    keyframe: bool  # required for this snapshot or for one that it replaces


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Outcome of a publication; if it failed, `version` is None and `reason` says why."""

    step: int
    version: Version | None
    reason: str
    stall_seconds: float  # of the snapshot
    encode_seconds: float
    write_seconds: float  # everything else: hashing, disk or network, pruning


class VersionWriter:
    """Writes snapshots to a store. Used by one thread, except `lift_rate_limit`.

    `companions` are the files that a keyframe has besides its weights (config, tokenizer), `about`
    has additional manifest fields. `on_published` is called with each version once it is visible.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        companions: Mapping[str, bytes],
        about: Mapping[str, str | int] | None = None,
        retention: Retention = KEEP_LAST_THREE,
        keyframe_interval: int = 10,
        max_mbit_per_s: float | None = None,
        on_published: Callable[[Version], None] = lambda version: None,
    ) -> None:
        self.leases = store.backend.leases
        self._store, self._companions, self._about = store, companions, about
        self._keyframe_interval, self._on_published = keyframe_interval, on_published
        self._pruner = Pruner(store, retention)
        self._base: tuple[Version, Tensors] | None = None  # of the next delta
        self._logged_reason = ""  # why only keyframes are published
        self._encode_seconds = 0.0  # of the current version
        self._seconds_per_byte = 8e-6 / max_mbit_per_s if max_mbit_per_s else 0.0
        self._free_at = 0.0  # when the rate limit permits the next piece, in monotonic seconds
        self._unlimited = threading.Event()

    @property
    def base_tensors(self) -> Tensors:
        """The weights of the newest version, to which the next delta refers; {} before it."""
        return self._base[1] if self._base else {}

    def write(self, snapshot: Snapshot) -> PublishReport:
        """Write the snapshot as the next version, then prune old ones.

        A StoreError is not raised: the report has its message.
        """
        snapshot.wait_for_copies()
        started, self._encode_seconds = time.monotonic(), 0.0
        version, reason = None, ""
        try:
            version = self._store.publish(
                snapshot.step,
                snapshot.tensors,
                companions=self._companions,
                about=self._about,
                base=self._base_for(snapshot),
                stream=self._paced,
            )
            self._on_published(version)
            self._pruner.prune(version)
            self._base = version, snapshot.tensors
        except StoreError as error:
            reason = str(error)
        stall, encode = snapshot.stall_seconds, self._encode_seconds
        write = time.monotonic() - started - encode
        return PublishReport(snapshot.step, version, reason, stall, encode, write)

    def lift_rate_limit(self) -> None:
        """Write the rest of the current version, and all further versions, at full speed."""
        self._unlimited.set()

    def _base_for(self, snapshot: Snapshot) -> Base | None:
        """The previous version, as the base of a delta; None if a keyframe is needed."""
        if snapshot.keyframe or self._base is None:
            return None
        if self._base[0].depth + 1 >= self._keyframe_interval:
            return None
        reason = delta.unsuitable(snapshot.tensors)
        if reason and reason != self._logged_reason:
            self._logged_reason = reason
            logger.info("publishing keyframes only reason=%s", reason)
        return None if reason else self._base

    def _paced(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """The pieces of a file; measures the time to encode them and keeps the rate limit."""
        while True:
            started = time.monotonic()
            piece = next(pieces, None)
            now = time.monotonic()
            self._encode_seconds += now - started
            if piece is None:
                return
            if self._seconds_per_byte:
                self._unlimited.wait(max(0.0, self._free_at - now))
                self._free_at = max(now, self._free_at) + len(piece) * self._seconds_per_byte
            yield piece
