"""The trainer hands over its weights and continues; failures are reported and retried."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_programs import until
from weight_sets import COMPANIONS, loaded, reports_of, same, weights_at

from peralta_zmq.weights import publisher as publisher_module
from peralta_zmq.weights import tensor_set
from peralta_zmq.weights.publisher import Snapshot, VersionWriter, WeightPublisher
from peralta_zmq.weights.store import Version, WeightStore

Opener = Callable[..., WeightPublisher]


@pytest.fixture
def open_publisher(store: WeightStore) -> Iterator[Opener]:
    opened: list[WeightPublisher] = []

    def open_one(
        *,
        keyframe_interval: int = 10,
        max_mbit_per_s: float | None = None,
        before_write: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> WeightPublisher:
        writer = VersionWriter(
            store, companions=COMPANIONS, keyframe_interval=keyframe_interval,
            max_mbit_per_s=max_mbit_per_s, before_write=before_write,
        )  # fmt: skip
        opened.append(WeightPublisher(writer, **options))
        return opened[-1]

    yield open_one
    for publisher in opened:
        publisher.close(timeout=5)


def masters(step: int) -> dict[str, torch.Tensor]:
    """float32 weights."""
    return {name: tensor.float() for name, tensor in weights_at(step).items()}


def published(
    publisher: WeightPublisher,
    step: int,
    tensors: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> Version:
    """The version of a step, after it is published."""
    publisher.publish(step, tensors or masters(step), **options)
    (report,) = reports_of(publisher)
    assert report.version is not None, report.reason
    return report.version


def test_keyframe_interval_is_kept_and_every_version_is_bit_exact(
    store: WeightStore, open_publisher: Opener
) -> None:
    publisher = open_publisher(keyframe_interval=3)
    versions = [published(publisher, step) for step in range(4)]
    assert same(loaded(store, versions[3]), weights_at(3))
    versions += [published(publisher, step) for step in range(4, 7)]
    assert [version.kind for version in versions] == (
        ["keyframe", "delta", "delta"] * 2 + ["keyframe"]
    )
    assert all(same(loaded(store, each), weights_at(each.step)) for each in versions[4:])


@pytest.mark.parametrize(
    "dtype, name, kind",
    [
        (torch.float16, "w", "delta"),
        (torch.float32, "w", "keyframe"),
        (torch.bfloat16, "q.lora_A.weight", "keyframe"),
    ],
)
def test_deltas_are_published_of_16_bit_models_only(
    store: WeightStore, open_publisher: Opener, dtype: torch.dtype, name: str, kind: str
) -> None:
    publisher = open_publisher(dtype=dtype)
    weights = torch.randn(2000)
    published(publisher, 0, {name: weights})
    version = published(publisher, 1, {name: weights * 1.001})
    assert version.kind == kind
    assert torch.equal(loaded(store, version)[name], (weights * 1.001).to(dtype))


class RecordedCopies:
    """Weak references to the copies of weights that publishers make in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy, self._found = publisher_module.copy_weights, list[Any]()
        monkeypatch.setattr(publisher_module, "copy_weights", self._recorded_copy)

    def _recorded_copy(self, *arguments: Any) -> Any:
        tensors, wait_for_copies = self._copy(*arguments)
        self._found = [weakref.ref(tensor) for tensor in tensors.values()]
        return tensors, wait_for_copies

    def are_freed(self) -> bool:
        """Whether no copy of the newest weights is in memory."""
        return bool(self._found) and not any(each() is not None for each in self._found)


def test_copies_are_freed_while_their_version_is_written(
    store: WeightStore, open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, publisher = RecordedCopies(monkeypatch), open_publisher(moves_snapshots=True)
    disk_works = stuck_disk(monkeypatch, publisher)
    until(copies.are_freed)
    assert publisher.is_pending
    disk_works.set()
    assert [report.step for report in reports_of(publisher)] == [90]
    versions = [published(publisher, step) for step in (91, 92)]
    assert [each.kind for each in versions] == ["delta", "delta"]
    assert same(loaded(store, versions[1]), weights_at(92))


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"keyframe_interval": 1}])
def test_copies_that_are_no_base_of_a_delta_are_freed(
    open_publisher: Opener, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    copies, publisher = RecordedCopies(monkeypatch), open_publisher(**options)
    published(publisher, 0)
    until(copies.are_freed)


def test_writer_reads_copies_while_they_are_moved(
    store: WeightStore, open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary_copy, is_published = tensor_set.temporary_copy, threading.Event()

    def slow_copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        is_published.wait(10)
        return temporary_copy(tensors)

    monkeypatch.setattr(tensor_set, "temporary_copy", slow_copy)
    publisher = open_publisher(moves_snapshots=True)
    first = published(publisher, 0)  # before its copies are moved
    publisher.publish(1, masters(1))
    is_published.set()
    (report,) = reports_of(publisher)
    assert report.version is not None and report.version.kind == "delta"
    assert same(loaded(store, first), weights_at(0))
    assert same(loaded(store, report.version), weights_at(1))


MEMORY_AFTER_PUBLISHING = """
import logging, sys, torch
from contextlib import closing
from pathlib import Path
from real_programs import until
from peralta_zmq import models
from peralta_zmq.weights.publisher import VersionWriter, WeightPublisher
from peralta_zmq.weights.store import WeightStore

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

logging.basicConfig(level=logging.INFO)
models.keep_memory()
store = WeightStore.open(Path(sys.argv[1]))
store.claim("run")
weights = {"w": torch.ones(1 << 24)}  # the copy has 32 MiB
before = anonymous_bytes()
writer = VersionWriter(store, companions={})
with closing(WeightPublisher(writer, moves_snapshots=True)) as publisher:
    publisher.publish(0, weights)
    assert anonymous_bytes() - before > 30 << 20
    assert publisher.wait(30)
    until(lambda: anonymous_bytes() - before < 16 << 20, seconds=30)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs malloc_trim")
def test_memory_of_a_copy_is_returned_to_the_system(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY_AFTER_PUBLISHING, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stderr


def test_copies_stay_in_memory_until_there_is_a_temporary_folder(
    store: WeightStore, open_publisher: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    copies, publisher = RecordedCopies(monkeypatch), open_publisher(moves_snapshots=True)
    versions = [published(publisher, step) for step in range(3)]
    assert [each.kind for each in versions] == ["keyframe", "delta", "delta"]
    assert same(loaded(store, versions[2]), weights_at(2))
    assert not copies.are_freed()
    (tmp_path / "missing").mkdir()
    assert published(publisher, 3).kind == "delta"
    until(copies.are_freed)


def test_gpu_copies_that_arrive_late_are_published(
    store: WeightStore, open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies from a GPU may arrive in their buffers until `wait_for_copies` returns."""
    copy = publisher_module.copy_weights

    def slow_copy(*arguments: Any) -> Any:
        copies, wait_for_copies = copy(*arguments)
        buffers = {name: torch.zeros_like(tensor) for name, tensor in copies.items()}

        def arrive() -> None:
            wait_for_copies()
            for name, tensor in copies.items():
                buffers[name].copy_(tensor)

        return buffers, arrive

    monkeypatch.setattr(publisher_module, "copy_weights", slow_copy)
    publisher = open_publisher()
    for step in range(3):
        assert same(loaded(store, published(publisher, step)), weights_at(step))


def no_space(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(f_bavail=0, f_frsize=1)


@pytest.mark.parametrize("fails", [False, True])
def test_requested_keyframe_survives_its_snapshot(
    open_publisher: Opener, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    publisher = open_publisher(keyframe_interval=100)
    published(publisher, 0)
    assert published(publisher, 1).kind == "delta"
    disk_works = threading.Event()
    if fails:
        with monkeypatch.context() as full:
            full.setattr(os, "statvfs", no_space)
            publisher.publish(2, masters(2), keyframe=True)
            (report,) = reports_of(publisher)
            assert report.version is None
    else:
        disk_works = stuck_disk(monkeypatch, publisher)
        publisher.publish(91, masters(91), keyframe=True)
    publisher.publish(92, masters(92))
    disk_works.set()
    report = reports_of(publisher)[-1]
    while report.step != 92 or report.version is None:
        (*_, report) = reports_of(publisher)
    assert report.version.kind == "keyframe"


def test_keyframe_of_a_retry_survives_a_snapshot_that_is_being_copied(
    open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher(keyframe_interval=100, first_delay=0.3)
    published(publisher, 0)
    copy, back_off, is_copied = publisher_module.copy_weights, publisher.back_off, threading.Event()

    def copy_until_the_retry(*arguments: Any) -> Any:
        deadline = time.monotonic() + 1.0
        while not publisher.waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        return copy(*arguments)

    def back_off_until_copied(*arguments: Any) -> None:
        back_off(*arguments)
        is_copied.wait(10)

    monkeypatch.setattr(publisher, "back_off", back_off_until_copied)
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", no_space)
        publisher.publish(1, masters(1), keyframe=True)
        assert [report.version for report in reports_of(publisher)] == [None]
    with monkeypatch.context() as slow:
        slow.setattr(publisher_module, "copy_weights", copy_until_the_retry)
        publisher.publish(2, masters(2))
    is_copied.set()
    version = reports_of(publisher)[-1].version
    assert version is not None and (version.step, version.kind) == (2, "keyframe")


def test_close_does_not_wait_for_an_unresponsive_mount(
    open_publisher: Opener, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = threading.Event()
    monkeypatch.setattr(store.backend.locks, "release", lambda: mounted.wait(20))
    started = time.monotonic()
    open_publisher().close(timeout=1)
    assert time.monotonic() - started < 10
    mounted.set()


def stuck_disk(monkeypatch: pytest.MonkeyPatch, publisher: WeightPublisher) -> threading.Event:
    """Keep the thread busy with version 90 until the returned event is set."""
    fsync, disk_works = os.fsync, threading.Event()

    def slow_fsync(descriptor: int) -> None:
        disk_works.wait(10)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    publisher.publish(90, masters(90))
    while publisher.waiting:
        time.sleep(0.001)
    return disk_works


def test_stuck_disk_stalls_no_step_and_the_newest_snapshot_wins(
    open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher()
    disk_works = stuck_disk(monkeypatch, publisher)
    stalls = [publisher.publish(step, masters(step)) for step in range(91, 100)]
    assert max(stalls) < 5
    disk_works.set()
    assert [report.step for report in reports_of(publisher)] == [90, 99]


def test_lock_is_renewed_while_a_version_is_written(
    store: WeightStore, open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lock,) = store.folder.glob(".lock-*")
    publisher = open_publisher(renewal_seconds=0.02)
    disk_works = stuck_disk(monkeypatch, publisher)  # for at most 10 s
    os.utime(lock, (0, 0))
    until(lambda: lock.stat().st_mtime > 0, seconds=8)
    disk_works.set()


def test_failed_publication_is_reported_and_retried(
    store: WeightStore, open_publisher: Opener, tmp_path: Path
) -> None:
    publisher = open_publisher(first_delay=0.05)
    store.folder.rename(tmp_path / "away")
    publisher.publish(1, masters(1))
    failed, *_ = reports_of(publisher)
    assert failed.version is None
    assert "cannot publish step 1" in failed.reason and "is it mounted?" in failed.reason
    assert not store.folder.exists() and publisher.is_pending
    (tmp_path / "away").rename(store.folder)
    while not (reports := [report for report in publisher.take_reports() if report.version]):
        publisher.wait(0.1)
    assert [report.step for report in reports] == [1]
    assert publisher.wait(30) and not publisher.is_pending


def test_retry_follows_an_outage_within_5_seconds_on_average(
    open_publisher: Opener, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher()
    back_off, now = publisher.back_off, 0.0
    tries = [0.0]  # simulated seconds since the first failure, without newer snapshots
    is_over = threading.Event()

    def back_off_without_waiting(snapshot: Snapshot, delay: float) -> None:
        nonlocal now
        now += delay
        tries.append(now)
        if now > 300:
            monkeypatch.setattr(store.backend, "free_bytes", lambda: 1 << 40)
            is_over.set()
        back_off(snapshot, 0.0)

    monkeypatch.setattr(publisher, "back_off", back_off_without_waiting)
    monkeypatch.setattr(store.backend, "free_bytes", lambda: 0)
    publisher.publish(1, masters(1))
    assert is_over.wait(30)
    # An outage of 20 s ends at most 20 s after the first failure; longer ones end at any time.
    for longest in (20.0, 300.0):
        ends = [0.1 * number for number in range(1, round(longest / 0.1) + 1)]
        waited = [min(each for each in tries if each >= end) - end for end in ends]
        # Of the 10 s, 2 s are for the writing of the version.
        assert max(waited) <= 8 and sum(waited) / len(waited) <= 5


def test_delta_after_a_failure_has_a_published_base(
    store: WeightStore, open_publisher: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = open_publisher()
    published(publisher, 0)
    with monkeypatch.context() as full:
        full.setattr(store.backend, "free_bytes", lambda: 0)
        publisher.publish(1, masters(1))
        assert [report.version for report in reports_of(publisher)] == [None]
    publisher.publish(2, masters(2))
    version = reports_of(publisher)[-1].version
    assert version is not None and version.parent == 0
    assert same(loaded(store, version), weights_at(2))


def test_rate_limit_holds_on_average(open_publisher: Opener) -> None:
    publisher = open_publisher(max_mbit_per_s=1.0)
    started = time.monotonic()
    for step in range(2):
        published(publisher, step, {"w": torch.randn(50_000)})  # 100 kB: 0.8 s
    assert 0.7 < time.monotonic() - started < 30


def test_close_publishes_a_copy_of_the_last_weights_without_rate_limit(
    store: WeightStore, open_publisher: Opener
) -> None:
    weights = masters(3)
    with closing(open_publisher(max_mbit_per_s=0.001)) as publisher:
        publisher.publish(3, weights)
        weights["wide"].zero_()  # the next training step
    newest = store.newest()
    assert newest is not None and same(loaded(store, newest), weights_at(3))


def test_exception_in_the_thread_is_raised_in_the_trainer(open_publisher: Opener) -> None:
    def fail() -> None:
        raise AttributeError

    publisher = open_publisher(before_write=fail)
    publisher.publish(1, masters(1))
    assert publisher.wait(30)
    with pytest.raises(AttributeError):
        publisher.take_reports()
