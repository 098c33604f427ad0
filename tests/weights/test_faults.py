"""Killed at any moment, refused by any system call: a reader sees an old version or a new one.

Rows 3, 6 and 18 of the fault table.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import exit_code
from weight_sets import publish, publish_and_follow, same, weights_at

from peralta_zmq import atomic_files
from peralta_zmq.errors import StoreError
from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.replica import LocalReplica, load_version
from peralta_zmq.weights.store import MAX_RECHECKS, WeightStore
from peralta_zmq.weights.tensors import MappedTensors
from peralta_zmq.weights.version import WEIGHTS, folder_name

PACKAGE = Path(__file__).parents[2] / "peralta_zmq"
SOURCES = [PACKAGE / "atomic_files.py", *sorted((PACKAGE / "weights").glob("*.py"))]
PLACES = sorted(
    {name for file in SOURCES for name in re.findall(r'failpoint\("(\S+)"\)', file.read_text())}
)


def test_there_are_enough_places_to_die_at() -> None:
    publishing = [
        name for name in PLACES if name.startswith(("atomic_files.", "publish.", "prune."))
    ]
    assert len(publishing) >= 12
    assert len([name for name in PLACES if name.startswith("load.")]) >= 5


def run_child(root: Path, plan: str) -> tuple[int, list[int]]:
    """Exit code, and the steps that were published."""
    said = root / "said"
    said.write_text("")
    code = exit_code(publish_and_follow, root, plan)
    assert code in (0, -signal.SIGKILL)
    return code, [int(line) for line in said.read_text().split()]


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", PLACES)
def test_killed_there_a_reader_sees_an_old_version_or_a_new_one(tmp_path: Path, place: str) -> None:
    killed = 0
    for count in (1, 5):
        code, said = run_child(tmp_path, f"{place}:{count}")
        killed += code != 0
        store = WeightStore.open(tmp_path / "weights")
        newest = store.newest()
        assert newest is not None or not said
        if newest is not None:
            assert newest.step >= max(said, default=0)
            with load_version(store, newest) as folder:
                assert same(MappedTensors(folder / WEIGHTS), weights_at(newest.step))
        copy = LocalReplica(tmp_path / "copy")
        if (kept := copy.recover()) is not None:
            assert same(copy.tensors(), weights_at(kept.step))
    assert killed >= 1, f"nobody came to {place}"
    assert run_child(tmp_path, "")[0] == 0  # and it goes on
    assert not list((tmp_path / "weights").glob(".tmp-*"))


CALLS = ["open", "write", "read", "fsync", "close", "rename", "replace", "mkdir", "listdir",
         "statvfs", "lseek", "unlink", "rmdir", "utime", "scandir"]  # fmt: skip


class Faulty:
    """Lets the nth system call, of whatever kind, fail once."""

    def __init__(self, patched: pytest.MonkeyPatch, nth: int, code: int) -> None:
        self.seen, self._nth, self._code = 0, nth, code
        for name in CALLS:
            patched.setattr(os, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            if self.seen == self._nth:
                if name == "close":  # it is closed all the same
                    real(*args, **kwargs)
                raise OSError(self._code, os.strerror(self._code))
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EINTR])
def test_any_failing_call_leaves_an_old_version_or_a_new_one(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore.open(tmp_path / "weights")
    store.claim("run-1")
    pruner = Pruner(store, Retention(last=2))
    base = newest = publish(store, 0, pruner=pruner)
    for nth in range(1, 1000):
        step, before = nth, newest.step  # one refused may be out: its last fsync has failed
        outcome = "refused"
        with monkeypatch.context() as patched:
            faulty = Faulty(patched, nth, code)
            with contextlib.suppress(StoreError):
                base = publish(store, step, base=base if step % 5 else None, pruner=pruner)
                outcome = "published"
        newest = store.newest()
        assert newest is not None
        assert newest.step in ((step,) if outcome == "published" else (step, before))
        with load_version(store, newest) as folder:
            assert same(MappedTensors(folder / WEIGHTS), weights_at(newest.step))
        assert not list(store.folder.glob(".tmp-*"))
        if faulty.seen < nth:
            assert nth > 30
            return
    raise AssertionError("publishing never came to an end")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EINTR])
def test_any_failing_call_of_a_reader_is_made_good_by_looking_again(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore.open(tmp_path / "weights")
    store.claim("run-1")
    first = publish(store, 0)
    second = publish(store, 1, base=first)
    for nth in range(1, 1000):
        folder = tmp_path / f"copy-{nth}"
        folder.mkdir()
        copy, reader = LocalReplica(folder), WeightStore.open(store.folder)
        copy.advance(reader, first)
        with monkeypatch.context() as patched:
            faulty = Faulty(patched, nth, code)
            with contextlib.suppress(StoreError):
                if (newest := reader.newest()) is not None:
                    copy.advance(reader, newest)
        assert copy.version is None or same(copy.tensors(), weights_at(copy.version.step))
        copy.advance(reader, second)
        assert same(copy.tensors(), weights_at(1))
        if faulty.seen < nth:
            assert nth > 15
            return
    raise AssertionError("reading never came to an end")


def looked_at(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of all versions that the store opens files of from now on."""
    numbers, look = list[int](), store.find
    monkeypatch.setattr(store, "find", lambda number: (numbers.append(number), look(number))[1])
    return numbers


def seconds_of(look: Callable[[], object]) -> float:
    """Of the processor, for the quickest of ten."""
    spent: list[float] = []
    for _ in range(10):
        started = time.process_time()
        look()
        spent.append(time.process_time() - started)
    return min(spent)


MANY = pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.chaos)])


@MANY
def test_thousands_of_folders_and_strangers_cost_one_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    store = WeightStore.open(tmp_path / "weights")
    store.claim("run-1")
    good = publish(store, 5)
    for number in range(count):
        (store.folder / f"step_{10_000_000 + number}x").mkdir()
    for stranger in (".DS_Store", "._step_00000005", "@eaDir", "#recycle", "Thumbs.db"):
        (store.folder / stranger).touch()
    (good.folder / ".DS_Store").touch()
    looked = looked_at(store, monkeypatch)
    assert store.newest() == good
    assert looked == [good.number]
    assert seconds_of(WeightStore.open(store.folder).newest) < 0.2


@MANY
@pytest.mark.parametrize("left", ["nothing", "STABLE", "another run"])
def test_thousands_of_versions_that_are_none_cost_little_after_the_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, left: str
) -> None:
    store = WeightStore.open(tmp_path / "weights")
    store.claim("run-1")
    good = publish(store, 5)
    for number in range(1_000_000, 1_000_000 + count):
        folder = store.folder / folder_name(number)
        folder.mkdir()
        if left != "nothing":
            (folder / "STABLE").write_text("0" * 64)
        if left == "another run":
            manifest, text = atomic_files.describe(
                {WEIGHTS: (0, "0" * 64)}, {"number": number, "step": 1, "run_id": "run-2"}
            )
            (folder / "manifest.json").write_bytes(text)
            (folder / "STABLE").write_text(manifest.digest)
    looked = looked_at(store, monkeypatch)
    assert store.newest() == good
    assert len(looked) == count + 1
    assert store.newest() == good
    assert len(looked) <= count + 1 + MAX_RECHECKS + 1
    assert seconds_of(store.newest) < 0.2


def test_version_that_could_not_be_read_at_first_is_found_later(tmp_path: Path) -> None:
    store = WeightStore.open(tmp_path / "weights")
    store.claim("run-1")
    first, second = publish(store, 0), publish(store, 1)
    (second.folder / "STABLE").rename(tmp_path / "hidden")
    assert store.newest() == first
    (tmp_path / "hidden").rename(second.folder / "STABLE")
    assert store.newest() == second


def test_folder_that_cannot_rename_folders_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Any, target: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StoreError, match=r"cannot rename folders.*--weights\.dir") as caught:
        WeightStore.open(tmp_path / "weights").claim("run-1")
    assert "\n" not in str(caught.value)


def lease_of(store: WeightStore, pid: int, host: str, age: float) -> None:
    file = store.folder / ".lease-other"
    file.write_text(f'{{"pid": {pid}, "host": "{host}"}}')
    now = time.time() - age
    os.utime(file, (now, now))


def test_fresh_lease_of_another_trainer_refuses(tmp_path: Path) -> None:
    store = WeightStore.open(tmp_path)
    lease_of(store, 1, "elsewhere", age=5)
    with pytest.raises(StoreError, match=r"another trainer \(pid 1 on elsewhere\)"):
        store.claim("run-1")


@pytest.mark.parametrize("host, age", [("elsewhere", 60), ("here", 0)])
def test_lease_that_is_old_or_of_a_dead_process_of_this_machine_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, age: float
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    store = WeightStore.open(tmp_path)
    lease_of(store, dead.pid, host, age)
    store.claim("run-1")
    assert store.run_id == "run-1"


def test_young_versions_stay_for_slow_readers_and_those_being_read_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("peralta_zmq.weights.publisher.time.monotonic", lambda: now[0])
    store = WeightStore.open(tmp_path / "weights")
    store.claim("run-1")

    pruner = Pruner(store, Retention(last=1, seconds=60))

    def step(number: int) -> list[int]:
        publish(store, number, pruner=pruner)
        return list(atomic_files.steps_in(store.folder))

    assert step(1) == [1]
    assert step(2) == [1, 2]
    now[0] += 59
    assert step(3) == [1, 2, 3]
    now[0] += 2
    with store.backend.reading("step_00000001"):
        assert step(4) == [1, 2, 3, 4]  # 2 is spare since 59 s
        now[0] += 100  # this reader takes its time: 100 s
        assert step(5) == [1, 4, 5]
    now[0] += 1
    assert step(6) == [1, 4, 5, 6]  # others get 3 x 101 s from now on
    now[0] += 150
    assert step(7) == [4, 5, 6, 7]  # 1 is spare since 312 s
