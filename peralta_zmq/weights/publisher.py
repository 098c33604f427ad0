"""Publishes weights in the background: the trainer copies them, a thread encodes and writes them.

The trainer waits only for the copy. If the store is slow, snapshots that were not written yet are
replaced by newer ones. After each publication the thread prunes old versions.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import StoreError
from peralta_zmq.weights import delta
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import Version, folder_name

LEASE_RENEWAL_SECONDS = 10.0
FIRST_DELAY, LONGEST_DELAY = 1.0, 10.0  # seconds before a failed publication is retried
MAX_OBSOLETE_VERSIONS = 64  # that are kept because slow readers may need them
KEPT_LOADS = 3.0  # an obsolete version is kept for this many times the duration of the slowest load
Tensors = dict[str, torch.Tensor]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Outcome of a publication; if it failed, `version` is None and `reason` says why."""

    step: int
    version: Version | None
    reason: str
    stall_seconds: float  # for which the trainer waited for the copy
    encode_seconds: float
    write_seconds: float  # everything else: hashing, disk or network, pruning


@dataclass(frozen=True, slots=True)
class Retention:
    """Which versions pruning keeps."""

    last: int = 3  # the newest versions
    interval: int | None = None  # also every version whose number is a multiple of this
    seconds: float = 0.0  # also, for this long, every version that became obsolete


@dataclass(slots=True)
class _Snapshot:
    step: int
    tensors: Tensors
    wait_for_copies: Callable[[], None]  # returns when copies from the GPU are complete
    stall_seconds: float
    keyframe: bool  # required for this snapshot or for one that it replaces


class WeightPublisher:
    """Owns the publishing thread and the buffers of the copies. Use with `closing`."""

    def __init__(
        self,
        store: WeightStore,
        *,
        companions: Mapping[str, bytes],
        about: Mapping[str, str | int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        retention: Retention = Retention(),
        keyframe_interval: int = 10,
        max_mbit_per_s: float | None = None,
        on_published: Callable[[Version], None] = lambda version: None,
    ) -> None:
        """`about` has additional fields of each manifest; the thread calls `on_published`."""
        self._store, self._companions, self._about = store, companions, about
        self._dtype, self._keyframe_interval = dtype, keyframe_interval
        self._on_published = on_published
        self._pruner = Pruner(store, retention)
        self._rate_limit = _RateLimit(max_mbit_per_s)
        self._base: tuple[Version, Tensors] | None = None  # of the next delta
        self._spare: Tensors = {}  # buffers for the next copy
        self._waiting: _Snapshot | None = None
        self._reports: list[PublishReport] = []
        self._failure: BaseException | None = None
        self._publishing = self._closing = self._backing_off = False
        self._logged_reason = ""  # for publishing keyframes only
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    def publish(
        self, step: int, tensors: Mapping[str, torch.Tensor], *, keyframe: bool = False
    ) -> float:
        """Copy the weights of `step`, to be published next; returns the seconds it took.

        Replaces a waiting snapshot. `keyframe` requests a keyframe: of this snapshot, or of the
        one that replaces it.
        """
        started = time.monotonic()
        with self._changed:
            replaced, self._waiting = self._waiting, None
            buffers = replaced.tensors if replaced else self._spare
            if not replaced:
                self._spare = {}
        copies, wait_for_copies = _copy(tensors, buffers, self._dtype)
        stall = time.monotonic() - started
        with self._changed:
            keyframe = keyframe or (replaced is not None and replaced.keyframe)
            self._waiting = _Snapshot(step, copies, wait_for_copies, stall, keyframe)
            self._backing_off = False
            self._changed.notify_all()
        return stall

    def take_reports(self) -> list[PublishReport]:
        """Reports since the last call. Raises the exception that ended the thread."""
        if self._failure:
            raise self._failure
        with self._changed:
            reports, self._reports = self._reports, []
        return reports

    def wait(self, timeout: float) -> bool:
        """Wait until the last snapshot is published or has failed once.

        Returns False after `timeout` seconds.
        """

        def is_settled() -> bool:
            pending = self._publishing or self._waiting is not None
            return self._backing_off or self._failure is not None or not pending

        with self._changed:
            return self._changed.wait_for(is_settled, timeout)

    def close(self, timeout: float = 60.0) -> None:
        """Stop after the last snapshot, which has up to `timeout` seconds and no rate limit."""
        self._rate_limit.disable()
        self.wait(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        self._store.backend.leases.release()

    def _run(self) -> None:
        try:
            delay = FIRST_DELAY
            while (snapshot := self._next()) is not None:
                if self._publish(snapshot):
                    delay = FIRST_DELAY
                    self._prepare_spare()
                else:
                    self._back_off(snapshot, delay)
                    delay = min(LONGEST_DELAY, 2 * delay)
        except BaseException as error:  # noqa: BLE001  (take_reports raises it)
            with self._changed:
                self._failure, self._publishing = error, False
                self._changed.notify_all()

    def _next(self) -> _Snapshot | None:
        """The next snapshot; None when closing. Renews the publishing lease while it waits."""
        while True:
            with self._changed:
                self._publishing = False
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._waiting or self._closing, LEASE_RENEWAL_SECONDS
                )
                if self._closing:
                    return None
                if snapshot := self._waiting:
                    self._waiting, self._publishing = None, True
                    return snapshot
            with contextlib.suppress(OSError):  # the store may be unreachable for now
                self._store.backend.leases.renew()

    def _publish(self, snapshot: _Snapshot) -> bool:
        snapshot.wait_for_copies()
        started, encode_timer = time.monotonic(), _IteratorTimer()
        version, reason = None, ""
        try:
            version = self._store.publish(
                snapshot.step,
                snapshot.tensors,
                companions=self._companions,
                about=self._about,
                base=self._base_for(snapshot),
                stream=lambda pieces: self._rate_limit.apply(encode_timer.measure(pieces)),
            )
            self._on_published(version)
            self._pruner.prune(version)
        except StoreError as error:
            reason = str(error)
        seconds = time.monotonic() - started
        report = PublishReport(
            snapshot.step, version, reason, snapshot.stall_seconds, encode_timer.seconds,
            seconds - encode_timer.seconds,
        )  # fmt: skip
        with self._changed:
            self._reports.append(report)
            if version:
                self._spare = self._base[1] if self._base else {}
                self._base = version, snapshot.tensors
        return version is not None

    def _base_for(self, snapshot: _Snapshot) -> tuple[Version, Tensors] | None:
        """The base for a delta; None if the snapshot must be a keyframe."""
        if snapshot.keyframe or self._base is None:
            return None
        if self._base[0].depth + 1 >= self._keyframe_interval:
            return None
        reason = delta.unsuitable(snapshot.tensors)
        if reason and reason != self._logged_reason:
            self._logged_reason = reason
            logger.info("publishing keyframes only reason=%s", reason)
        return None if reason else self._base

    def _prepare_spare(self) -> None:
        """Allocate the second set of buffers in this thread, so that the next copy is faster."""
        if self._base and not self._spare:
            spare = {  # zeros, because writing allocates the memory pages
                name: torch.zeros_like(tensor, pin_memory=tensor.is_pinned())
                for name, tensor in self._base[1].items()
            }
            with self._changed:
                self._spare = self._spare or spare

    def _back_off(self, snapshot: _Snapshot, delay: float) -> None:
        """Wait `delay` seconds, less if a newer snapshot arrives; then retry, with the newest."""
        with self._changed:
            self._backing_off = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closing, delay)
            self._backing_off = False
            if self._waiting is None:
                self._waiting = snapshot
            else:
                self._waiting.keyframe |= snapshot.keyframe
                self._spare = self._spare or snapshot.tensors


class _IteratorTimer:
    """Measures the time that an iterator takes to produce its pieces."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measure(self, pieces: Iterator[Any]) -> Iterator[Any]:
        while True:
            started = time.monotonic()
            piece = next(pieces, None)
            self.seconds += time.monotonic() - started
            if piece is None:
                return
            yield piece


class _RateLimit:
    """Delays the pieces of an iterator so that their average rate does not exceed a limit."""

    def __init__(self, max_mbit_per_s: float | None) -> None:
        self._seconds_per_byte = 8e-6 / max_mbit_per_s if max_mbit_per_s else 0.0
        self._free_at = 0.0  # when the next piece may be sent, in monotonic seconds
        self._disabled = threading.Event()

    def apply(self, pieces: Iterator[Any]) -> Iterator[Any]:
        for piece in pieces:
            if self._seconds_per_byte:
                now = time.monotonic()
                self._disabled.wait(max(0.0, self._free_at - now))
                self._free_at = max(now, self._free_at) + len(piece) * self._seconds_per_byte
            yield piece

    def disable(self) -> None:
        self._disabled.set()


def _copy(
    tensors: Mapping[str, torch.Tensor], buffers: Tensors, dtype: torch.dtype
) -> tuple[Tensors, Callable[[], None]]:
    """Copies in `dtype`, and a function that waits until copies from a GPU are complete.

    Reuses `buffers` where the shapes match. The next optimizer step runs after the copies, because
    it is queued in the same CUDA stream.
    """
    copies = {
        name: _copy_tensor(tensor, buffers.get(name), dtype) for name, tensor in tensors.items()
    }
    events: list[torch.cuda.Event] = []
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        events.append(torch.cuda.Event(blocking=True))  # do not busy-wait
        events[-1].record(torch.cuda.current_stream(device))

    def wait_for_copies() -> None:
        for event in events:
            event.synchronize()

    return copies, wait_for_copies


def _copy_tensor(
    tensor: torch.Tensor, buffer: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """A copy in CPU memory; pinned if the tensor is on a GPU, else the copy would block."""
    tensor = tensor.detach()
    if buffer is None or buffer.shape != tensor.shape:
        buffer = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
    if tensor.is_cuda:
        return buffer.copy_(tensor.to(dtype), non_blocking=True)
    return buffer.copy_(tensor)


class Pruner:
    """Removes obsolete versions after slow readers had time to load them.

    Keeps the versions that `retention` selects, their chains, and versions that are being read.
    """

    def __init__(self, store: WeightStore, retention: Retention) -> None:
        self._store, self._retention = store, retention
        self._parents: dict[int, int | None] = {}
        self._obsolete_since: dict[int, float] = {}  # monotonic seconds by version number
        self._reading_since: dict[str, float] = {}  # monotonic seconds by folder name
        self._slowest_load = 0.0  # seconds

    def prune(self, published: Version) -> None:
        """Prune after a publication. Ignores OSError, because the next publication prunes again."""
        self._remember_parent(published)
        with contextlib.suppress(OSError):
            self._prune(self._store.numbers(), time.monotonic())
        failpoint("publish.pruned")

    def _prune(self, numbers: list[int], now: float) -> None:
        being_read = self._observe_readers(now)
        needed = self._needed(numbers)
        obsolete = [number for number in numbers if number not in needed]
        self._obsolete_since = {each: self._obsolete_since.get(each, now) for each in obsolete}
        keep_seconds = max(self._retention.seconds, KEPT_LOADS * self._slowest_load)
        for rank, number in enumerate(reversed(obsolete)):
            expired = now - self._obsolete_since[number] >= keep_seconds
            if (expired or rank >= MAX_OBSOLETE_VERSIONS) and folder_name(number) not in being_read:
                failpoint("prune.remove")
                self._store.backend.remove(folder_name(number))

    def _needed(self, numbers: list[int]) -> set[int]:
        """The versions that the retention selects, and the chains that their deltas need."""
        interval, needed = self._retention.interval, set[int]()
        at_interval = [number for number in numbers if interval and number % interval == 0]
        for start in [*at_interval, *numbers[-self._retention.last :]]:
            number: int | None = start
            while number is not None and number not in needed:
                needed.add(number)
                number = self._parent_of(number)
        return needed

    def _parent_of(self, number: int) -> int | None:
        """The number of a delta's parent; None for a keyframe or an unreadable version."""
        if number not in self._parents and (version := self._store.find(number)):
            self._remember_parent(version)
        return self._parents.get(number)

    def _remember_parent(self, version: Version) -> None:
        self._parents[version.number] = version.parent if version.kind == "delta" else None

    def _observe_readers(self, now: float) -> set[str]:
        """Names of the folders that are being read; updates the duration of the slowest load."""
        names = self._store.backend.leases.being_read()
        for finished in self._reading_since.keys() - names:
            load_seconds = now - self._reading_since[finished]
            self._slowest_load = max(self._slowest_load, load_seconds)
        self._reading_since = {name: self._reading_since.get(name, now) for name in names}
        return names
