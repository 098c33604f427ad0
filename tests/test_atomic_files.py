"""Files and folders are absent or complete whatever fails; damage is found when they are read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import CHANGES, FailingCall

from peralta_zmq import atomic_files

FILES = {"weights.bin": b"w" * 5000, "config.json": b"{}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete folder."""
    atomic_files.write_folder(tmp_path / "step_000001", FILES, {"step": 1})
    return tmp_path / "step_000001"


def read_all(folder: Path) -> dict[str, bytes]:
    manifest = atomic_files.read_manifest(folder)
    return {
        name: b"".join(atomic_files.read_verified(folder, name, manifest))
        for name in manifest.files
    }


def change_entry(folder: Path, field: str, value: Any) -> None:
    """Change a field of the first file in the manifest, with a STABLE that matches."""
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    manifest["files"][0][field] = value
    write_manifest(folder, json.dumps(manifest))


def write_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text, "utf-8")
    (folder / "STABLE").write_text(hashlib.sha256(text.encode()).hexdigest(), "ascii")


# Writing.


def test_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = atomic_files.write_folder(tmp_path / "step_000001", FILES, {"step": 1})
    assert read_all(tmp_path / "step_000001") == FILES
    assert atomic_files.read_manifest(tmp_path / "step_000001") == written
    assert written.about == {"step": 1}
    assert os.listdir(tmp_path) == ["step_000001"]


def test_files_are_readable_by_other_users(folder: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert (folder / "weights.bin").stat().st_mode & 0o777 == 0o644 & ~umask


@pytest.mark.parametrize("name", ["fsync", "open", "replace"])
def test_replaced_file_is_old_or_new_after_a_failing_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = tmp_path / "RUN.json"
    for nth in range(1, 50):
        file.write_bytes(b"old")
        with monkeypatch.context() as patched:
            failing = FailingCall(patched, nth, errno.EIO, names=[name])
            try:
                atomic_files.replace_file(file, b"new")
            except OSError:
                assert file.read_bytes() in (b"old", b"new")
            else:
                assert file.read_bytes() == b"new"
        assert os.listdir(tmp_path) == ["RUN.json"]
        if failing.num_calls < nth:
            return
    raise AssertionError("replace_file does not terminate")


def test_failed_fsync_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingCall(monkeypatch, 1, errno.EIO, names=["fsync"])
    with pytest.raises(OSError):
        atomic_files.write_folder(tmp_path / "step_000001", FILES, {})
    assert failing.num_calls == 1


def test_everything_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []  # inodes
    synced_before_rename: dict[str, bool] = {}
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        for path in (source, *Path(source).iterdir()):
            synced_before_rename[path.name] = path.stat().st_ino in synced
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    atomic_files.write_folder(tmp_path / "step_000001", FILES, {})
    assert len(synced_before_rename) == 5 and all(synced_before_rename.values())
    assert synced[-1] == tmp_path.stat().st_ino  # the new name


def test_partial_folder_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    partial = tmp_path / f".tmp-step_000001-{os.getpid()}-{atomic_files.PROCESS_TAG}"
    partial.mkdir()
    (partial / "weights.bin").write_bytes(b"partial")
    atomic_files.write_folder(tmp_path / "step_000001", FILES, {})
    assert read_all(tmp_path / "step_000001") == FILES


# Damage.


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json", "STABLE"])
@pytest.mark.parametrize("damage", CHANGES)
def test_damaged_file_is_refused(folder: Path, damage: Callable[[Path], None], name: str) -> None:
    damage(folder / name)
    with pytest.raises(atomic_files.CorruptError):
        read_all(folder)


@pytest.mark.parametrize("field, value", [("bytes", 4999), ("sha256", "0" * 64), ("bytes", -1)])
def test_wrong_size_or_hash_in_the_manifest_is_refused(
    folder: Path, field: str, value: Any
) -> None:
    change_entry(folder, field, value)
    with pytest.raises(atomic_files.CorruptError, match=r"weights\.bin"):
        read_all(folder)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a\0b"])
def test_file_name_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    change_entry(folder, "name", name)
    with pytest.raises(atomic_files.CorruptError, match="plain file name"):
        atomic_files.read_manifest(folder)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", '{"files": 3}', '{"files": [1]}', "[" * 99999),
        *(
            f'{{"files": [{{"name": "weights.bin", "bytes": {size}, "sha256": "0"}}]}}'
            for size in ("1e999", "NaN", "null", '"x"', "[]", "{}")
        ),
    ],
)
def test_malformed_manifest_is_refused(folder: Path, text: str) -> None:
    write_manifest(folder, text)
    with pytest.raises(atomic_files.CorruptError):
        atomic_files.read_manifest(folder)


@pytest.mark.parametrize("nth", [2, 3])
def test_error_of_a_file_in_a_folder_has_its_whole_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    FailingCall(monkeypatch, nth, errno.EACCES, names=["open"])
    with pytest.raises(PermissionError) as caught:
        atomic_files.open_regular(folder.parent, folder.name, "weights.bin")
    assert caught.value.filename == str([folder, folder / "weights.bin"][nth - 2])


def test_stable_without_manifest_is_no_complete_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(OSError):
        atomic_files.read_manifest(folder)


# Listing and removing.


def test_steps_are_ordered_by_number_and_other_names_ignored(tmp_path: Path) -> None:
    for name in ("step_001000", "step_000999", "step_00001001", "step_1", "step_000001x",
                 ".tmp-step_000001-9", "xstep_000001", "step_-00001"):  # fmt: skip
        (tmp_path / name).mkdir()
    assert list(atomic_files.steps_in(tmp_path)) == [999, 1000, 1001]
    assert atomic_files.steps_in(tmp_path / "missing") == {}


def test_removed_folder_is_gone_with_all_its_files(folder: Path) -> None:
    for _ in range(2):  # the second call finds nothing
        atomic_files.remove_folder(folder)
        assert os.listdir(folder.parent) == []


def test_sweep_continues_after_a_deep_folder_and_a_link_without_target(tmp_path: Path) -> None:
    deepest = tmp_path.joinpath(".tmp-deep", *"a" * 1100)
    folders = [deepest, *deepest.parents[:1100]]
    for folder in reversed(folders):
        folder.mkdir()
    (tmp_path / ".tmp-link").symlink_to("x" * 300)  # a name that no file can have
    (tmp_path / ".trash-file").touch()
    atomic_files.sweep(tmp_path)
    with contextlib.suppress(FileNotFoundError):  # if the deep folder was deleted, too
        for folder in folders:
            folder.rmdir()
    assert os.listdir(tmp_path) == []


def test_folder_that_cannot_be_renamed_stays_complete(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FailingCall(monkeypatch, 1, errno.EACCES, names=["rename"])
    atomic_files.remove_folder(folder)
    assert read_all(folder) == FILES


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EIO])
def test_folder_is_not_fsynced_where_the_file_system_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fsync = os.fsync

    def call(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", call)
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output"):
            atomic_files.replace_file(tmp_path / "file", b"x")
        return
    atomic_files.replace_file(tmp_path / "file", b"x")
    atomic_files.write_folder(tmp_path / "step_000001", FILES, {"step": 1})
    assert read_all(tmp_path / "step_000001") == FILES


# Foreign JSON.


@pytest.mark.parametrize(
    "text",
    ["[" * depth + "]" * depth for depth in (102, 500, 5_000, 200_000)]
    + ['{"a":' * 102 + "1" + "}" * 102, "[]", "1", "{", '{"a": "\\ud800"}'],
    ids=lambda text: text[:12],
)
def test_foreign_json_is_refused_with_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        atomic_files.parse_object(text.encode())


def test_json_of_the_permitted_depth_is_read() -> None:
    content = atomic_files.parse_object(b'{"a":' * 90 + b'"\\ud83d\\ude42"' + b"}" * 90)
    assert content["a"]
