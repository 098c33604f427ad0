"""Kills, failing system calls and stray folders: a reader gets an old version or a new one.

See the fault table in docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from child_processes import exit_code
from damage import FailingCall
from weight_sets import loaded, publish, publish_and_subscribe, publish_chain, same, weights_at

from peralta_zmq import atomic_files
from peralta_zmq.errors import StoreError
from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WEIGHTS_FILE, WeightStore, folder_name

PACKAGE = Path(__file__).parents[2] / "peralta_zmq"
SOURCES = [PACKAGE / "atomic_files.py", *sorted((PACKAGE / "weights").glob("*.py"))]
FAILPOINTS = sorted(
    {name for file in SOURCES for name in re.findall(r'failpoint\("(\S+)"\)', file.read_text())}
)


def run_child(root: Path, plan: str) -> tuple[bool, list[int]]:
    """Whether the child was killed, and the steps that it published."""
    (root / "steps").write_text("")
    code = exit_code(publish_and_subscribe, root, plan)
    assert code in (0, -signal.SIGKILL)
    return code != 0, [int(line) for line in (root / "steps").read_text().split()]


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAILPOINTS)
def test_kill_at_a_failpoint_leaves_an_old_or_a_new_version(tmp_path: Path, name: str) -> None:
    num_killed = 0
    for count in (1, 5):
        killed, steps = run_child(tmp_path, f"{name}:{count}")
        num_killed += killed
        store = WeightStore.open(tmp_path / "weights")
        newest = store.newest()
        assert newest is not None or not steps
        if newest is not None:
            assert newest.step >= max(steps, default=0)
            assert same(loaded(store, newest), weights_at(newest.step))
        replica = LocalReplica(tmp_path / "copy")
        if (recovered := replica.recover()) is not None:
            assert same(replica.tensors(), weights_at(recovered.step))
    assert num_killed >= 1, f"{name} was not reached"
    assert not run_child(tmp_path, "")[0]  # works again
    assert not list((tmp_path / "weights").glob(".tmp-*"))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EINTR])
def test_failing_call_of_a_writer_leaves_an_old_or_a_new_version(
    store: WeightStore, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruner = Pruner(store, Retention(last=2))
    base = newest = publish(store, 0, pruner=pruner)
    for nth in range(1, 1000):
        step, before = nth, newest.step
        expected = (step, before)  # a failed last fsync leaves a visible version
        with monkeypatch.context() as patched:
            failing = FailingCall(patched, nth, code)
            with contextlib.suppress(StoreError):
                base = publish(store, step, base=base if step % 5 else None, pruner=pruner)
                expected = (step,)
        newest = store.newest()
        assert newest is not None and newest.step in expected
        assert same(loaded(store, newest), weights_at(newest.step))
        assert not list(store.folder.glob(".tmp-*"))
        if failing.num_calls < nth:
            assert nth > 30
            return
    raise AssertionError("publishing does not terminate")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EINTR])
def test_failing_call_of_a_reader_is_repaired_by_the_next_read(
    store: WeightStore, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(store, 0)
    second = publish(store, 1, base=first)
    for nth in range(1, 1000):
        folder = tmp_path / f"copy-{nth}"
        folder.mkdir()
        replica, reader = LocalReplica(folder), WeightStore.open(store.folder)
        replica.advance(reader, first)
        with monkeypatch.context() as patched:
            failing = FailingCall(patched, nth, code)
            with contextlib.suppress(StoreError):
                if (newest := reader.newest()) is not None:
                    replica.advance(reader, newest)
        version = replica.version
        assert version is None or same(replica.tensors(), weights_at(version.step))
        replica.advance(reader, second)
        assert same(replica.tensors(), weights_at(1))
        if failing.num_calls < nth:
            assert nth > 15
            return
    raise AssertionError("reading does not terminate")


def record_finds(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of all versions that the store opens from now on."""
    numbers, find = list[int](), store.find
    monkeypatch.setattr(store, "find", lambda number: (numbers.append(number), find(number))[1])
    return numbers


def cpu_seconds(function: Callable[[], object]) -> float:
    """Processor time of the fastest of ten calls."""
    seconds: list[float] = []
    for _ in range(10):
        started = time.process_time()
        function()
        seconds.append(time.process_time() - started)
    return min(seconds)


MANY = pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.chaos)])


@MANY
def test_newest_opens_no_stray_folder(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    good = publish(store, 5)
    for number in range(count):
        (store.folder / f"step_{10_000_000 + number}x").mkdir()
    for stray in (".DS_Store", "._step_00000005", "@eaDir", "step_9", "step_00000004"):
        (store.folder / stray).touch()
    (good.folder / ".DS_Store").touch()
    opened = record_finds(store, monkeypatch)
    assert store.newest() == good
    assert opened == [good.number]
    assert cpu_seconds(WeightStore.open(store.folder).newest) < 0.2


@MANY
@pytest.mark.parametrize("content", ["nothing", "STABLE", "another run"])
def test_newest_rechecks_few_invalid_versions(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch, count: int, content: str
) -> None:
    good = publish(store, 5)
    for number in range(1_000_000, 1_000_000 + count):
        folder = store.folder / folder_name(number)
        folder.mkdir()
        if content != "nothing":
            (folder / "STABLE").write_text("0" * 64)
        if content == "another run":
            manifest, text = atomic_files.describe(
                {WEIGHTS_FILE: (0, "0" * 64)}, {"number": number, "step": 1, "run_id": "run-2"}
            )
            (folder / "manifest.json").write_bytes(text)
            (folder / "STABLE").write_text(manifest.digest)
    opened = record_finds(store, monkeypatch)
    assert store.newest() == good
    assert len(opened) == count + 1
    assert store.newest() == good
    assert len(opened) <= count + 1 + store.max_rechecks + 1
    assert cpu_seconds(store.newest) < 0.2


def test_publishing_and_loading_have_enough_failpoints() -> None:
    loading = [name for name in FAILPOINTS if name.startswith("load.")]
    assert len(loading) >= 5
    assert len(FAILPOINTS) - len(loading) >= 12


def test_versions_are_read_one_at_a_time(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish_chain(store, 3)
    opened = record_finds(store, monkeypatch)
    versions = store.versions()
    assert opened == [] and next(versions) == published[0] and opened == [0]
    assert list(versions) == published[1:]
