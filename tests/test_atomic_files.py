from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peralta_zmq import atomic_files

FILES = {"weights.bin": b"w" * 5000, "config.json": b"{}"}
SYSCALLS = ["fsync", "open", "rename", "mkdir"]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    atomic_files.write_folder(tmp_path / "step_000001", FILES, {"step": 1})
    return tmp_path / "step_000001"


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, nth: int, code: int) -> list[int]:
    """Make the nth call of os.NAME fail once; returns the list of calls seen."""
    real: Callable[..., Any] = getattr(os, name)
    calls: list[int] = []

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, sometimes)
    return calls


def read_whole(folder: Path) -> dict[str, bytes]:
    manifest = atomic_files.read_manifest(folder)
    return {
        name: b"".join(atomic_files.read_verified(folder, name, manifest))
        for name in manifest.files
    }


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and make STABLE agree with it."""
    said = json.loads((folder / "manifest.json").read_text("utf-8"))
    changed = change(said)
    write_manifest(folder, json.dumps(said if changed is None else changed))


def write_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text, "utf-8")
    (folder / "STABLE").write_text(hashlib.sha256(text.encode()).hexdigest(), "ascii")


def test_a_folder_that_is_out_needs_no_further_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, soft_and_hard = os.rename, resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def rename_with_the_last_one(source: Path, target: Path) -> None:
        rename(source, target)
        few = max(map(int, os.listdir("/proc/self/fd"))) + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, soft_and_hard[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    monkeypatch.setattr(os, "rename", rename_with_the_last_one)
    try:
        atomic_files.write_folder(tmp_path / "step_000001", FILES, {"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft_and_hard)
        for each in taken:
            os.close(each)
    assert read_whole(tmp_path / "step_000001") == FILES


def test_what_is_written_is_read_back(finished: Path) -> None:
    assert read_whole(finished) == FILES


def test_manifest_keeps_the_writers_own_fields(finished: Path) -> None:
    assert atomic_files.read_manifest(finished).about == {"step": 1}


def test_writer_and_reader_agree_on_the_manifest(tmp_path: Path) -> None:
    written = atomic_files.write_folder(tmp_path / "step_000001", FILES, {"step": 1})
    assert atomic_files.read_manifest(tmp_path / "step_000001") == written


def test_finished_folder_is_the_only_thing_left(finished: Path) -> None:
    assert os.listdir(finished.parent) == ["step_000001"]


def test_others_may_read_the_files(finished: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert (finished / "weights.bin").stat().st_mode & 0o777 == 0o644 & ~umask


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", SYSCALLS)
def test_folder_is_absent_or_complete_at_every_failing_syscall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    for nth in range(1, 50):
        final = tmp_path / f"step_{nth:06d}"
        with monkeypatch.context() as patched:
            calls = fail_at(patched, name, nth, code)
            try:
                atomic_files.write_folder(final, FILES, {"step": nth})
            except OSError as error:
                assert error.errno == code
        names = os.listdir(tmp_path)
        assert not [each for each in names if each.startswith(".tmp")]
        assert final.name not in names or read_whole(final) == FILES
        if len(calls) < nth:  # every call has had its turn
            return
    raise AssertionError("the writer never came to an end")


@pytest.mark.parametrize("name", ["fsync", "open", "replace"])
def test_replaced_file_is_old_or_new_at_every_failing_syscall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = tmp_path / "RUN.json"
    for nth in range(1, 50):
        file.write_bytes(b"old")
        with monkeypatch.context() as patched:
            calls = fail_at(patched, name, nth, errno.EIO)
            try:
                atomic_files.replace_file(file, b"new")
            except OSError:
                assert file.read_bytes() in (b"old", b"new")
            else:
                assert file.read_bytes() == b"new"
        assert os.listdir(tmp_path) == ["RUN.json"]
        if len(calls) < nth:
            return
    raise AssertionError("the writer never came to an end")


def test_failed_fsync_is_never_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fail_at(monkeypatch, "fsync", 1, errno.EIO)
    with pytest.raises(OSError):
        atomic_files.write_folder(tmp_path / "step_000001", FILES, {})
    assert len(calls) == 1


def test_everything_is_on_disk_before_the_folder_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []  # inodes
    seen: dict[str, bool] = {}
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        for each in (source, *Path(source).iterdir()):
            seen[each.name] = each.stat().st_ino in synced
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    atomic_files.write_folder(tmp_path / "step_000001", FILES, {})
    assert len(seen) == 5 and all(seen.values())
    assert synced[-1] == tmp_path.stat().st_ino  # and then its name


def test_unfinished_attempt_of_a_killed_process_is_ignored(tmp_path: Path) -> None:
    (tmp_path / f".tmp-step_000001-{os.getpid()}-{atomic_files.PROCESS_TAG}").mkdir()
    (
        tmp_path / f".tmp-step_000001-{os.getpid()}-{atomic_files.PROCESS_TAG}" / "weights.bin"
    ).write_bytes(b"half")
    atomic_files.write_folder(tmp_path / "step_000001", FILES, {})
    assert read_whole(tmp_path / "step_000001") == FILES


def damage_truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def damage_zero_tail(file: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, size - 1)
    os.truncate(file, size)


def damage_bit_flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def damage_longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


DAMAGES = [damage_truncated, damage_zero_tail, damage_bit_flip, damage_longer]


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json", "STABLE"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_refused(finished: Path, damage: Callable[[Path], None], name: str) -> None:
    damage(finished / name)
    with pytest.raises(atomic_files.CorruptError):
        read_whole(finished)


@pytest.mark.parametrize("field, lie", [("bytes", 4999), ("sha256", "0" * 64), ("bytes", -1)])
def test_manifest_that_lies_about_a_file_is_refused(finished: Path, field: str, lie: Any) -> None:
    rewrite_manifest(finished, lambda said: said["files"][0].__setitem__(field, lie))
    with pytest.raises(atomic_files.CorruptError, match=r"weights\.bin"):
        read_whole(finished)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a\0b"])
def test_name_that_leaves_the_folder_is_refused(finished: Path, name: str) -> None:
    rewrite_manifest(finished, lambda said: said["files"][0].__setitem__("name", name))
    with pytest.raises(atomic_files.CorruptError, match="plain file name"):
        atomic_files.read_manifest(finished)


@pytest.mark.parametrize("size", ["1e999", "NaN", "null", '"x"', "[]", "{}"])
def test_size_that_is_no_number_is_refused(finished: Path, size: str) -> None:
    text = '{"files": [{"name": "weights.bin", "bytes": %s, "sha256": "0"}]}'
    write_manifest(finished, text % size)
    with pytest.raises(atomic_files.CorruptError):
        atomic_files.read_manifest(finished)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"files": 3}', '{"files": [1]}', "[" * 99999])
def test_manifest_of_another_shape_is_refused(finished: Path, text: str) -> None:
    write_manifest(finished, text)
    with pytest.raises(atomic_files.CorruptError):
        atomic_files.read_manifest(finished)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["files", "name", "bytes", "sha256", "x"]), inner)
    ),
    max_leaves=12,
)


@given(said=JSON)
@settings(max_examples=200, deadline=None, database=None)
def test_nothing_but_corrupt_error_comes_out_of_a_strange_manifest(
    tmp_path_factory: pytest.TempPathFactory, said: Any
) -> None:
    folder = tmp_path_factory.mktemp("strange")
    write_manifest(folder, json.dumps(said))
    try:
        atomic_files.read_manifest(folder)
    except atomic_files.CorruptError:
        return
    assert "files" in said


def test_stable_without_manifest_is_not_a_finished_folder(finished: Path) -> None:
    (finished / "manifest.json").unlink()
    with pytest.raises(OSError):
        atomic_files.read_manifest(finished)


def test_steps_are_ordered_by_number_and_not_by_text(tmp_path: Path) -> None:
    for name in ("step_001000", "step_000999", "step_00001001"):
        (tmp_path / name).mkdir()
    assert list(atomic_files.steps_in(tmp_path)) == [999, 1000, 1001]


def test_stray_names_are_ignored(tmp_path: Path) -> None:
    for name in ("step_1", "step_000001x", ".tmp-step_000001-9", "xstep_000001", "step_-00001"):
        (tmp_path / name).mkdir()
    assert atomic_files.steps_in(tmp_path) == {}


def test_folder_that_is_not_there_has_no_steps(tmp_path: Path) -> None:
    assert atomic_files.steps_in(tmp_path / "nowhere") == {}


def test_removed_folder_is_gone_with_all_its_files(finished: Path) -> None:
    atomic_files.remove_folder(finished)
    assert os.listdir(finished.parent) == []


def test_removing_a_folder_that_is_not_there_does_nothing(tmp_path: Path) -> None:
    atomic_files.remove_folder(tmp_path / "step_000001")
    assert os.listdir(tmp_path) == []


def test_folder_that_cannot_be_renamed_away_stays_whole(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, "rename", 1, errno.EACCES)
    atomic_files.remove_folder(finished)
    assert read_whole(finished) == FILES
