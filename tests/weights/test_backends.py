from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from peralta_zmq.weights.backends import REMOTE_FILESYSTEMS, FolderWatcher, filesystem_of

DEADLINE = 10.0


@pytest.fixture
def changed(tmp_path: Path) -> Iterator[threading.Event]:
    event = threading.Event()
    (tmp_path / "weights").mkdir()
    with closing(FolderWatcher(tmp_path / "weights", event.set, poll_seconds=60.0)):
        yield event


def test_version_that_is_renamed_into_place_is_told(
    changed: threading.Event, tmp_path: Path
) -> None:
    (tmp_path / "weights" / ".tmp-step_00000001").mkdir()
    assert not changed.wait(0.2)  # half-written versions and marks are nobody's business
    (tmp_path / "weights" / ".tmp-step_00000001").rename(tmp_path / "weights" / "step_00000001")
    assert changed.wait(DEADLINE)


def test_reading_a_file_is_not_told(changed: threading.Event, tmp_path: Path) -> None:
    file = tmp_path / "weights" / "RUN.json"
    file.write_text("{}")
    assert changed.wait(DEADLINE)
    changed.clear()
    file.read_text()
    assert not changed.wait(0.2)


def test_another_folder_of_the_same_name_is_not_the_one_that_is_watched(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    with closing(FolderWatcher(folder, lambda: None, poll_seconds=60.0)) as watch:
        assert watch.is_current()
        folder.rename(tmp_path / "away")
        assert watch.is_current()  # nothing else to watch
        folder.mkdir()
        assert not watch.is_current()


def test_folder_that_is_not_there_cannot_be_watched(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        FolderWatcher(tmp_path / "nowhere", lambda: None, poll_seconds=1.0)


@pytest.mark.parametrize(
    "folder, remote",
    [("/mnt/nas/w", True), ("/mnt/nas", True), ("/mnt/nasty", False), ("/mnt/nas/disk/w", False),
     ("/my nas/w", True), ("/home", False)],
)  # fmt: skip
def test_mounts_tell_what_is_remote(tmp_path: Path, folder: str, remote: bool) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\nnas:/w /mnt/nas nfs4 rw 0 0\n/dev/b /mnt/nas/disk ext4 rw 0 0\n"
        "u@h:/ /my\\040nas fuse.sshfs rw 0 0\n"
    )
    assert filesystem_of(Path(folder), mounts).startswith(REMOTE_FILESYSTEMS) is remote


def test_system_without_such_a_table_is_taken_for_local(tmp_path: Path) -> None:
    assert filesystem_of(tmp_path, tmp_path / "nothing") == ""
