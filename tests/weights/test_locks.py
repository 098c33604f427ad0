"""The publisher lock and the read marks of a weights folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from weight_sets import publish

from peralta_zmq.errors import OutageError, StoreError
from peralta_zmq.weights.store import WeightStore


def write_lock(folder: Path, *, age: float) -> None:
    file = folder / ".lock-other"
    file.write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": 0.0}))
    os.utime(file, (time.time() - age, time.time() - age))


def test_valid_lock_of_another_trainer_is_refused_without_a_change(tmp_path: Path) -> None:
    write_lock(tmp_path, age=5)
    (tmp_path / ".tmp-step_00000001-7").mkdir()  # a version that the other trainer is writing
    with pytest.raises(OutageError, match=r"another trainer \(pid 1 on elsewhere\)"):
        WeightStore.open(tmp_path).claim("run")
    assert sorted(os.listdir(tmp_path)) == [".lock-other", ".tmp-step_00000001-7"]


def test_expired_lock_is_replaced(tmp_path: Path) -> None:
    write_lock(tmp_path, age=60)
    store = WeightStore.open(tmp_path)
    store.claim("run")
    assert store.run_id == "run"
    assert not (tmp_path / ".lock-other").exists()


HOLD_LOCK = """
import sys; from pathlib import Path; from peralta_zmq.weights.locks import FolderLocks
print(FolderLocks(Path(sys.argv[1])).acquire(), flush=True); input()
"""


def test_fresh_lock_of_a_dead_process_is_replaced_only_in_its_pid_space(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # crashes
    (lock,) = tmp_path.glob(".lock-*")
    store, owner = WeightStore.open(tmp_path), json.loads(lock.read_bytes())
    # A pod of the same StatefulSet on another machine: the same host name.
    lock.write_text(json.dumps({**owner, "pid_space": "elsewhere"}))
    with pytest.raises(OutageError, match=rf"another trainer \(pid {owner['pid']} on "):
        store.claim("run")
    lock.write_text(json.dumps(owner))
    store.claim("run")
    assert store.run_id == "run" and not lock.exists()


def test_lock_is_bound_to_the_start_of_its_process_whatever_the_clock_says(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder = stack.enter_context(process)
    stack.callback(holder.kill)
    assert holder.stdout and holder.stdout.readline() == b"None\n"  # no other trainer has it
    if sys.platform == "linux":  # where psutil derives the start of a process from the clock
        boot_time = psutil.boot_time() + 3600  # as after a step of the clock by an hour
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time)
    store = WeightStore.open(tmp_path)
    with pytest.raises(OutageError, match=rf"another trainer \(pid {holder.pid} on "):
        store.claim("run")
    (lock,) = tmp_path.glob(".lock-*")
    owner = json.loads(lock.read_bytes())
    lock.write_text(json.dumps({**owner, "started": owner["started"] - 1}))  # the pid is reused
    store.claim("run")
    assert store.run_id == "run"


def test_lock_from_the_future_expires_if_it_is_not_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, store = time.monotonic(), WeightStore.open(tmp_path)

    def is_refused(*, after: float) -> bool:
        monkeypatch.setattr(time, "monotonic", lambda: now + after)
        try:
            store.claim("run")
        except OutageError:
            return True
        return False

    write_lock(tmp_path, age=-3600)
    assert is_refused(after=0) and is_refused(after=29)
    write_lock(tmp_path, age=-3610)  # its trainer is running
    assert is_refused(after=35) and is_refused(after=64)
    assert not is_refused(after=66)
    assert not (tmp_path / ".lock-other").exists()


def test_trainer_whose_lock_was_taken_over_publishes_nothing(store: WeightStore) -> None:
    publish(store, 1)
    (lock,) = store.folder.glob(".lock-*")
    lock.unlink()  # it had expired, for example while the machine slept
    write_lock(store.folder, age=0)
    with pytest.raises(StoreError, match=r"another trainer \(pid 1 on elsewhere\) publishes there"):
        publish(store, 2)
    assert store.numbers() == [1] and not lock.exists()
    write_lock(store.folder, age=60)
    publish(store, 3)
    assert store.numbers() == [1, 3] and lock.exists()


def test_read_marks_are_valid_without_the_lock_file(store: WeightStore) -> None:
    (lock,) = store.folder.glob(".lock-*")
    lock.unlink()
    with store.backend.locks.reading("step_00000001"):
        assert store.backend.locks.being_read() == {"step_00000001"}


def test_version_is_being_read_until_its_last_reader_has_finished(store: WeightStore) -> None:
    locks = store.backend.locks  # the server has one for all its clients
    with locks.reading("step_00000001"):
        with locks.reading("step_00000001"):
            pass
        assert locks.being_read() == {"step_00000001"}
    assert locks.being_read() == set()


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(64 << 20)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("put", [sparse_file, Path.mkdir, link_to_itself])
@pytest.mark.parametrize("age", [0, 60])
def test_file_that_is_no_lock_neither_fills_the_memory_nor_stops_publishing(
    store: WeightStore, put: Callable[[Path], None], age: float
) -> None:
    (lock,) = store.folder.glob(".lock-*")
    lock.unlink()
    put(store.folder / ".lock-other")
    seconds = time.time() - age
    os.utime(store.folder / ".lock-other", (seconds, seconds), follow_symlinks=False)
    tracemalloc.start()
    publish(store, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20 and lock.exists()
    WeightStore.open(store.folder).claim("run")
