"""The local folder: renames, named pipes, folder events and file system types."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from weight_sets import loaded, publish

from peralta_zmq.errors import StoreError
from peralta_zmq.weights.backends import FolderWatcher, filesystem_of
from peralta_zmq.weights.store import WEIGHTS_FILE, WeightStore

DEADLINE = 10.0


def test_file_system_that_cannot_rename_folders_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(source: Any, target: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "rename", fails)
    reason = r"cannot be written \(Operation not supported; its file system .*--weights\.dir"
    with pytest.raises(StoreError, match=reason) as caught:
        WeightStore.open(tmp_path / "weights").claim("run")
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(10)  # opening a named pipe would block
def test_named_pipes_in_the_folder_block_no_process(store: WeightStore) -> None:
    version = publish(store, 1)

    def put_pipe(path: Path) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    put_pipe(store.folder / ".lock-other")
    store.claim("run")
    put_pipe(version.folder / WEIGHTS_FILE)
    with pytest.raises(StoreError, match=f"version 1 has no file {WEIGHTS_FILE}"):
        loaded(store, version)
    for path in (version.folder / "manifest.json", version.folder / "STABLE"):
        put_pipe(path)
        assert store.newest() is None
    put_pipe(store.folder / "RUN.json")
    assert store.run_id is None


# Folder events.


def test_watcher_reports_new_names_but_no_temporary_names_or_reads(tmp_path: Path) -> None:
    changed = threading.Event()
    with closing(FolderWatcher(tmp_path, changed.set)):
        (tmp_path / ".tmp-step_00000001").mkdir()
        assert not changed.wait(0.2)
        (tmp_path / ".tmp-step_00000001").rename(tmp_path / "step_00000001")
        assert changed.wait(DEADLINE)
        changed.clear()
        (tmp_path / "RUN.json").write_text("{}")
        assert changed.wait(DEADLINE)
        changed.clear()
        (tmp_path / "RUN.json").read_text()
        assert not changed.wait(0.2)


def test_watcher_of_one_name_reports_no_other(tmp_path: Path) -> None:
    changed = threading.Event()
    with closing(FolderWatcher(tmp_path, changed.set, name="weights")):
        (tmp_path / "other").mkdir()
        (tmp_path / "other").rename(tmp_path / "another")
        assert not changed.wait(0.2)
        (tmp_path / "weights").mkdir()
        assert changed.wait(DEADLINE)


def test_watcher_is_not_current_after_the_folder_was_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    with closing(FolderWatcher(folder, lambda: None)) as watcher:
        assert watcher.is_current()
        folder.rename(tmp_path / "away")
        assert watcher.is_current()  # there is no other folder to watch
        folder.mkdir()
        assert not watcher.is_current()


@pytest.mark.parametrize(
    "folder, kind",
    [
        ("/mnt/nas/w", "nfs4"),
        ("/mnt/nas", "nfs4"),
        ("/mnt/nasty", "ext4"),
        ("/mnt/nas/disk/w", "ext4"),
        ("/my nas/w", "fuse.sshfs"),
        ("/home", "ext4"),
    ],
)
def test_filesystem_is_that_of_the_innermost_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, kind: str
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert filesystem_of(Path(folder)) == ""  # unknown
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mounts").write_text(
        "/dev/a / ext4 rw 0 0\nnas:/w /mnt/nas nfs4 rw 0 0\n/dev/b /mnt/nas/disk ext4 rw 0 0\n"
        "u@h:/ /my\\040nas fuse.sshfs rw 0 0\n"
    )
    assert filesystem_of(Path(folder)) == kind
