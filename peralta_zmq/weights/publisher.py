"""Weight publisher of the trainer: a thread writes copies of the weights as versions.

The trainer waits only until a copy (a snapshot) is made. If the store is slow, a newer snapshot
replaces the waiting one, so versions are skipped and training never waits.
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

from peralta_zmq.atomic_files import FIRST_OUTAGE_DELAY, LONGEST_OUTAGE_DELAY, failpoint
from peralta_zmq.errors import OutageError, StoreError, failure_text
from peralta_zmq.malloc import release_memory
from peralta_zmq.weights import delta, tensor_set
from peralta_zmq.weights.store import Base, Version, WeightStore, folder_name

Tensors = dict[str, torch.Tensor]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    last: int = 3  # number of newest versions, which are not obsolete
    interval: int | None = None  # multiples of this number are not obsolete either
    seconds: float = 0.0  # minimum time to keep obsolete versions, for slow readers
    max_obsolete: int = 64  # the oldest beyond these are removed at once


@dataclass(slots=True)
class Snapshot:
    step: int
    tensors: Tensors  # in memory; if moved, views of a temporary file
    wait_for_copies: Callable[[], None]  # returns when copies from the GPU are complete
    stall_seconds: float  # time that the trainer waited for the copy
    keyframe: bool  # write all weights; also true if a replaced snapshot required it
    is_moved: bool = False


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Outcome of a publication; if it failed, `version` is None and `reason` says why."""

    step: int
    version: Version | None
    reason: str
    stall_seconds: float  # Snapshot.stall_seconds
    encode_seconds: float
    write_seconds: float  # everything else: hashing, disk or network, pruning
    cause: BaseException | None = None  # what made it fail


class WeightPublisher:
    """Owns the publishing thread, and one that renews the publisher lock. Use with `closing`.

    `moves_snapshots`, if memory is short, moves snapshots to a temporary file and returns freed
    memory to the system, which lengthens steps.
    """

    def __init__(
        self,
        writer: VersionWriter,
        *,
        dtype: torch.dtype = torch.bfloat16,
        moves_snapshots: bool = False,
        first_delay: float = FIRST_OUTAGE_DELAY,  # seconds before a retry; doubled at each failure
        renewal_seconds: float = 10.0,  # between two renewals of the publisher lock
    ) -> None:
        self._first_delay = first_delay
        self._renewal_seconds = renewal_seconds
        self._writer = writer
        self._dtype = dtype
        self._moves_snapshots = moves_snapshots
        self._logged_reason = ""  # last logged reason to keep a snapshot in memory
        self.waiting: Snapshot | None = None  # the next one for the thread
        self._reports: list[PublishReport] = []
        self._failure: BaseException | None = None
        self._publishing = self._moving = self._closing = self._backing_off = False
        self._changed = threading.Condition()  # guards the fields above
        self._threads = [
            threading.Thread(target=self._run, name="weight-publisher", daemon=True),
            threading.Thread(target=self._renew_lock, name="lock-renewal", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def publish(
        self, step: int, tensors: Mapping[str, torch.Tensor], *, keyframe: bool = False
    ) -> float:
        """Copy the weights of `step` for the thread; returns the duration in seconds.

        Replaces a snapshot that waits, and inherits its `keyframe`.
        """
        started = time.monotonic()
        with self._changed:
            buffers: Tensors = {}
            if replaced := self.waiting:
                buffers = {} if replaced.is_moved else replaced.tensors
                keyframe = keyframe or replaced.keyframe
            copies, wait_for_copies = copy_weights(tensors, buffers, self._dtype)
            stall = time.monotonic() - started
            self.waiting = Snapshot(step, copies, wait_for_copies, stall, keyframe)
            self._backing_off = False
            self._changed.notify_all()
        return stall

    def take_reports(self) -> list[PublishReport]:
        """Return the reports since the last call. Raises the exception that ended the thread."""
        if self._failure:
            raise self._failure
        with self._changed:
            reports = self._reports
            self._reports = []
        return reports

    @property
    def is_pending(self) -> bool:
        """True if the last snapshot is not published, also between two attempts."""
        with self._changed:
            return self._publishing or self.waiting is not None

    def wait(self, timeout: float) -> bool:
        """Wait until the last snapshot is published or failed once; False at a timeout."""

        def is_settled() -> bool:
            return self._backing_off or self._failure is not None or not self.is_pending

        with self._changed:
            return self._changed.wait_for(is_settled, timeout)

    def lift_rate_limit(self) -> None:
        self._writer.lift_rate_limit()

    def close(self, timeout: float = 60.0) -> None:
        """Write the last snapshot, without rate limit, for up to `timeout` s; then stop."""
        self.lift_rate_limit()
        self.wait(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=1.0)

    # Methods of the threads.

    def _renew_lock(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, self._renewal_seconds):
                    return
            with contextlib.suppress(OSError):  # the store may be unreachable for now
                self._writer.locks.renew()

    def _run(self) -> None:
        try:
            delay = self._first_delay
            while (snapshot := self._next()) is not None:
                if self._publish(snapshot):
                    delay = self._first_delay
                else:
                    self.back_off(snapshot, delay)
                    delay = min(LONGEST_OUTAGE_DELAY, 2 * delay)
                del snapshot  # its memory, until the next one arrives
        except BaseException as error:  # noqa: BLE001  (take_reports raises it)
            with self._changed:
                self._failure = error
                self._publishing = False
                self._changed.notify_all()
        self._writer.locks.release()  # not in `close`, which an unresponsive mount would block

    def _next(self) -> Snapshot | None:
        with self._changed:
            self._publishing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.waiting or self._closing)
            if self._closing:
                return None
            snapshot = self.waiting
            self.waiting = None
            self._publishing = True
            return snapshot

    def _publish(self, snapshot: Snapshot) -> bool:
        snapshot.wait_for_copies()
        if self._moves_snapshots and not snapshot.is_moved:
            with self._changed:
                self._moving = True
            threading.Thread(
                target=self._move_to_file, args=(snapshot,), name="snapshot-mover", daemon=True
            ).start()
        report = self._writer.write(snapshot)
        if self._moves_snapshots:
            release_memory()  # freed activations: the trainer computes meanwhile
        with self._changed:
            self._reports.append(report)
            self._publishing = report.version is None  # a failure is settled by `back_off`
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._moving or self._closing)
        return report.version is not None

    def _move_to_file(self, snapshot: Snapshot) -> None:
        try:
            copies = tensor_set.temporary_copy(snapshot.tensors)
        except OSError as error:
            if (reason := failure_text(error)) != self._logged_reason:
                logger.info("weights to publish stay in memory reason=%s", reason)
            self._logged_reason = reason
        else:
            snapshot.is_moved = True
            snapshot.tensors.update(copies)  # the writer may be reading the equal tensors in memory
            release_memory()  # the copies in memory, and the gradients of the last step
        finally:
            with self._changed:
                self._moving = False
                self._changed.notify_all()

    def back_off(self, snapshot: Snapshot, delay: float) -> None:
        """Wait up to `delay` s for a newer snapshot; then queue the newest for a retry."""
        with self._changed:
            self._backing_off = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.waiting or self._closing, delay)
            self._backing_off = False
            if self.waiting is None:
                self.waiting = snapshot
            else:
                self.waiting.keyframe |= snapshot.keyframe


def copy_weights(
    tensors: Mapping[str, torch.Tensor], buffers: Tensors, dtype: torch.dtype
) -> tuple[Tensors, Callable[[], None]]:
    """Copies in `dtype`, and a function that waits until copies from a GPU are complete.

    Reuses `buffers` where the shapes match. The next step cannot change the weights before they are
    copied: a GPU runs copies and step in order, in one CUDA stream.
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
    """A copy in CPU memory, pinned for a GPU tensor so that the copy does not block."""
    tensor = tensor.detach()
    if buffer is None or buffer.shape != tensor.shape:
        buffer = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
    if tensor.is_cuda:
        return buffer.copy_(tensor.to(dtype), non_blocking=True)
    return buffer.copy_(tensor)


class VersionWriter:
    """Writes snapshots to a store. Used by one thread, except `lift_rate_limit`.

    `companions` are the files that a keyframe has besides its weights, `about` has additional
    manifest fields. `before_write` may raise an error; `on_published` is called with each visible
    version.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        companions: Mapping[str, bytes],
        about: Mapping[str, str | int] | None = None,
        retention: Retention = Retention(),
        keyframe_interval: int = 10,
        max_mbit_per_s: float | None = None,
        before_write: Callable[[], None] = lambda: None,
        on_published: Callable[[Version], None] = lambda version: None,
    ) -> None:
        self.locks = store.backend.locks
        self._store = store
        self._companions = companions
        self._about = about
        self._keyframe_interval = keyframe_interval
        self._before_write = before_write
        self._on_published = on_published
        self._pruner = Pruner(store, retention)
        self._base: Base | None = None  # base of the next delta: the last version
        self._logged_reason = ""  # last logged reason to write keyframes only
        self._encode_seconds = 0.0  # time spent on the current version
        self._seconds_per_byte = 8e-6 / max_mbit_per_s if max_mbit_per_s else 0.0
        self._free_at = 0.0  # when the rate limit permits the next piece, in monotonic seconds
        self._unlimited = threading.Event()  # set: the rate limit is lifted

    def write(self, snapshot: Snapshot) -> PublishReport:
        """Write the snapshot as the next version, and prune old ones; errors go into the report."""
        started = time.monotonic()
        self._encode_seconds = 0.0
        version = None
        reason = ""
        cause = None
        try:
            self._before_write()
            version = self._store.publish(
                snapshot.step,
                snapshot.tensors,
                companions=self._companions,
                about=self._about,
                base=None if snapshot.keyframe else self._base,
                stream=self._paced,
            )
            self._on_published(version)
            self._pruner.prune(version)
            self._base = self._next_base(version, snapshot.tensors)
        except (StoreError, OutageError) as error:
            reason = str(error)
            cause = error.__cause__
        stall = snapshot.stall_seconds
        encode = self._encode_seconds
        write = time.monotonic() - started - encode
        return PublishReport(snapshot.step, version, reason, stall, encode, write, cause)

    def lift_rate_limit(self) -> None:
        """Write the rest of the current version, and all further versions, at full speed."""
        self._unlimited.set()

    def _next_base(self, version: Version, tensors: Tensors) -> Base | None:
        if version.depth + 1 >= self._keyframe_interval:
            return None
        reason = delta.reason_against(tensors)
        if reason and reason != self._logged_reason:
            self._logged_reason = reason
            logger.info("publishing keyframes only reason=%s", reason)
        return None if reason else (version, tensors)

    def _paced(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """Pass on the pieces of a file; measures the encoding time, limits the rate."""
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


class Pruner:
    """Removes obsolete versions after slow readers had time to load them.

    Keeps what `retention` selects, the parents back to a keyframe, and versions that are being
    read.
    """

    def __init__(
        self, store: WeightStore, retention: Retention, *, load_factor: float = 3.0
    ) -> None:
        """`load_factor`: an obsolete version is kept for this many times the slowest load."""
        self._store = store
        self._load_factor = load_factor
        self._retention = retention
        self._parents: dict[int, int] = {}  # parent by version number; -1 for keyframes
        self._obsolete_since: dict[int, float] = {}  # monotonic seconds by version number
        self._reading_since: dict[str, float] = {}  # monotonic seconds by folder name
        self._slowest_load = 0.0  # seconds

    def prune(self, published: Version) -> None:
        """Remove old versions after the publication of a new one.

        Leaves folders with higher numbers, which are not of this run. The next call retries an
        OSError.
        """
        self._parents[published.number] = published.parent
        with contextlib.suppress(OSError):
            numbers = [number for number in self._store.numbers() if number <= published.number]
            for number in self._removable(numbers, time.monotonic()):
                failpoint("prune.remove")  # here a test can kill the process
                self._store.backend.remove(folder_name(number))
        failpoint("publish.pruned")

    def _removable(self, numbers: list[int], now: float) -> list[int]:
        """Numbers of the versions to remove now, newest first: a delta before its parent."""
        being_read = self._observe_readers(now)
        needed = self._needed(numbers)
        obsolete = [number for number in reversed(numbers) if number not in needed]
        known_since = self._obsolete_since
        self._obsolete_since = {number: known_since.get(number, now) for number in obsolete}
        keep_seconds = max(self._retention.seconds, self._load_factor * self._slowest_load)
        return [
            number
            for rank, number in enumerate(obsolete)
            if (
                now - self._obsolete_since[number] >= keep_seconds
                or rank >= self._retention.max_obsolete
            )
            and folder_name(number) not in being_read
        ]

    def _needed(self, numbers: list[int]) -> set[int]:
        interval = self._retention.interval
        needed = set[int]()
        at_interval = [number for number in numbers if interval and number % interval == 0]
        for selected in [*at_interval, *numbers[-self._retention.last :]]:
            number = selected
            while number >= 0 and number not in needed:
                needed.add(number)
                if number not in self._parents and (version := self._store.find(number)):
                    self._parents[number] = version.parent
                number = self._parents.get(number, -1)  # -1 for an unreadable version
        return needed

    def _observe_readers(self, now: float) -> set[str]:
        names = self._store.backend.locks.being_read()
        for finished in self._reading_since.keys() - names:
            self._slowest_load = max(self._slowest_load, now - self._reading_since[finished])
        self._reading_since = {name: self._reading_since.get(name, now) for name in names}
        return names
