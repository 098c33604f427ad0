"""Publishing beside the training: a snapshot, then a thread that encodes, writes and prunes.

Knows a store and tensors; knows nothing of models or the run. The trainer waits for the snapshot
only; when the place is slow the newest weights win.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from peralta_zmq.errors import StoreError
from peralta_zmq.weights import delta
from peralta_zmq.weights.store import Timing, WeightStore
from peralta_zmq.weights.version import Version

BEAT_SECONDS = 10.0  # between two signs of life in the folder
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds before a failed publication is tried again
Tensors = dict[str, torch.Tensor]
Arrive = Callable[[], None]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """How a publication went; `version` is None, and `reason` says why, when it failed."""

    step: int
    version: Version | None
    reason: str
    stall_seconds: float  # that the trainer waited for the snapshot
    encode_seconds: float
    write_seconds: float  # all the rest: hashing, the disk, the wire, the prune


@dataclass(frozen=True, slots=True)
class Keep:
    """What pruning leaves."""

    last: int = 3
    interval: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Snapshot:
    step: int
    tensors: Tensors
    arrive: Arrive  # returns when the tensors are all here
    whole: bool
    stall_seconds: float


class Publisher:
    """Owns the thread and the buffers. Use with `closing`."""

    def __init__(
        self,
        store: WeightStore,
        *,
        companions: Mapping[str, bytes],
        about: Mapping[str, str | int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        keep: Keep = Keep(),
        keyframe_interval: int = 10,
        max_mbit_per_s: float | None = None,
        tell: Callable[[Version], None] = lambda version: None,
    ) -> None:
        """`tell` is called in the thread as soon as a version is out."""
        self._tell = tell
        self._store, self._companions, self._dtype = store, companions, dtype
        self._about = about
        self._keep, self._keyframe_interval = keep, keyframe_interval
        self._pace = _Pace(max_mbit_per_s)
        self._base: tuple[Version, Tensors] | None = None  # what the next delta is made from
        self._spare: Tensors = {}
        self._pending: _Snapshot | None = None
        self._reports: list[Report] = []
        self._failure: BaseException | None = None
        self._busy = self._closing = self._stuck = False
        self._said = ""  # why versions are whole
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a snapshot is not yet published."""
        return self._busy or self._pending is not None

    def publish(
        self, step: int, tensors: Mapping[str, torch.Tensor], *, whole: bool = False
    ) -> float:
        """Copy the weights of `step` to be published next; returns the seconds it took.

        An older snapshot that waits is dropped. `whole` asks for a keyframe, of this step or of
        the one that takes its place.
        """
        started = time.monotonic()
        with self._changed:
            waiting, self._pending = self._pending, None
            whole = whole or (waiting is not None and waiting.whole)
            buffers = waiting.tensors if waiting else self._spare
            if not waiting:
                self._spare = {}
        snapshot, arrive = _copy(tensors, buffers, self._dtype)
        stall = time.monotonic() - started
        with self._changed:
            whole = whole or (self._pending is not None and self._pending.whole)
            self._pending = _Snapshot(step, snapshot, arrive, whole, stall)
            self._stuck = False
            self._changed.notify_all()
        return stall

    def take_reports(self) -> list[Report]:
        """What was published or failed since the last call; raises what the thread died of."""
        if self._failure:
            raise self._failure
        with self._changed:
            reports, self._reports = self._reports, []
        return reports

    def wait(self, timeout: float) -> bool:
        """Wait until the last snapshot is published or has failed once; False after `timeout`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._stuck or self._failure is not None or not self.busy, timeout
            )

    def close(self, timeout: float = 60.0) -> None:
        """Give the last snapshot time to be published, without its pace; then leave it."""
        self._pace.stop()
        self.wait(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        self._store.release()

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
        except BaseException as error:  # noqa: BLE001  (the loop raises it)
            with self._changed:
                self._failure, self._busy = error, False
                self._changed.notify_all()

    def _next(self) -> _Snapshot | None:
        """The next snapshot, giving signs of life meanwhile; None when closing."""
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pending or self._closing, BEAT_SECONDS)
                if self._closing:
                    return None
                if snapshot := self._pending:
                    self._pending, self._busy = None, True
                    return snapshot
            self._store.touch()

    def _publish(self, snapshot: _Snapshot) -> bool:
        snapshot.arrive()
        timing = Timing()
        started = time.monotonic()
        version, reason = None, ""
        try:
            version = self._store.publish(
                snapshot.step,
                snapshot.tensors,
                companions=self._companions,
                about=self._about,
                keep_last=self._keep.last,
                keep_interval=self._keep.interval,
                keep_seconds=self._keep.seconds,
                base=self._base_for(snapshot),
                pace=self._pace,
                timing=timing,
            )
        except StoreError as error:
            reason = str(error)
        took = time.monotonic() - started
        if version:
            self._tell(version)
        report = Report(
            snapshot.step, version, reason, snapshot.stall_seconds,
            timing.encode_seconds, took - timing.encode_seconds,
        )  # fmt: skip
        with self._changed:
            self._reports.append(report)
            if version:
                self._spare = self._base[1] if self._base else {}
                self._base = version, snapshot.tensors
        return version is not None

    def _base_for(self, snapshot: _Snapshot) -> tuple[Version, Tensors] | None:
        if self._base is None or snapshot.whole:
            return None
        if reason := delta.unsuitable(snapshot.tensors):
            if reason != self._said:
                self._said = reason
                logger.info("publishing whole versions: %s", reason)
            return None
        return self._base if self._base[0].depth + 1 < self._keyframe_interval else None

    def _prepare_spare(self) -> None:
        """Touch a second buffer's memory here, so that the trainer's next snapshot need not."""
        if self._base and not self._spare:
            spare = {name: torch.zeros_like(each, pin_memory=each.is_pinned())
                     for name, each in self._base[1].items()}  # fmt: skip
            with self._changed:
                self._spare = self._spare or spare

    def _back_off(self, snapshot: _Snapshot, delay: float) -> None:
        """Wait; the same snapshot is next unless there is a newer one."""
        with self._changed:
            self._stuck = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pending or self._closing, delay)
            self._stuck = False
            if self._pending is None:
                self._pending = snapshot
                return
            whole = snapshot.whole or self._pending.whole
            self._pending = replace(self._pending, whole=whole)
            self._spare = self._spare or snapshot.tensors


class _Pace:
    """Spends at most so many Mbit/s, on average since the last idle moment."""

    def __init__(self, max_mbit_per_s: float | None) -> None:
        self._seconds_per_byte = 8e-6 / max_mbit_per_s if max_mbit_per_s else 0.0
        self._free_at = 0.0  # monotonic seconds
        self._stopped = threading.Event()

    def __call__(self, count: int) -> None:
        if self._seconds_per_byte:
            now = time.monotonic()
            self._stopped.wait(max(0.0, self._free_at - now))
            self._free_at = max(now, self._free_at) + count * self._seconds_per_byte

    def stop(self) -> None:
        """From now on as fast as it goes."""
        self._stopped.set()


def _copy(
    tensors: Mapping[str, torch.Tensor], buffers: Tensors, dtype: torch.dtype
) -> tuple[Tensors, Arrive]:
    """The tensors in `dtype`, in the buffers where they fit, and what waits for those under way.

    What a GPU still has to send is ordered in its stream before the next optimizer step.
    """
    copies = {name: _fill(buffers.get(name), each, dtype) for name, each in tensors.items()}
    events = list[torch.cuda.Event]()
    for device in {each.device for each in tensors.values() if each.is_cuda}:
        events.append(torch.cuda.Event(blocking=True))  # who waits leaves the core to others
        events[-1].record(torch.cuda.current_stream(device))

    def arrive() -> None:
        for event in events:
            event.synchronize()

    return copies, arrive


def _fill(buffer: torch.Tensor | None, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A GPU rounds there and sends into memory that is pinned, else the copy would wait."""
    tensor = tensor.detach()
    if buffer is None or buffer.shape != tensor.shape:
        buffer = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
    if tensor.is_cuda:
        return buffer.copy_(tensor.to(dtype), non_blocking=True)
    return buffer.copy_(tensor)
