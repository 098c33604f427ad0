"""Files and folders are absent or complete whatever fails; damage is found when they are read."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import CHANGES
from hypothesis import given, settings
from hypothesis import strategies as st

from peralta_zmq import atomic_files

FILES = {"weights.bin": b"w" * 5000, "config.json": b"{}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete folder."""
    atomic_files.write_folder(tmp_path / "step_000001", FILES, {"step": 1})
    return tmp_path / "step_000001"


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, nth: int, code: int) -> list[int]:
    """Make the nth call of os.NAME fail; returns a list that grows with each call."""
    function: Callable[..., Any] = getattr(os, name)
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise OSError(code, os.strerror(code))
        return function(*args, **kwargs)

    monkeypatch.setattr(os, name, call)
    return calls


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


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", ["fsync", "open", "rename", "mkdir"])
def test_folder_is_absent_or_complete_after_a_failing_call(
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
        assert not list(tmp_path.glob(".tmp*"))
        assert not final.exists() or read_all(final) == FILES
        if len(calls) < nth:
            return
    raise AssertionError("write_folder does not terminate")


@pytest.mark.parametrize("name", ["fsync", "open", "replace"])
def test_replaced_file_is_old_or_new_after_a_failing_call(
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
    raise AssertionError("replace_file does not terminate")


def test_failed_fsync_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fail_at(monkeypatch, "fsync", 1, errno.EIO)
    with pytest.raises(OSError):
        atomic_files.write_folder(tmp_path / "step_000001", FILES, {})
    assert len(calls) == 1


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


def test_renamed_folder_needs_no_further_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, limits = os.rename, resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors: list[int] = []

    def rename_and_exhaust_descriptors(source: Path, target: Path) -> None:
        rename(source, target)
        few = max(map(int, os.listdir("/proc/self/fd"))) + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                descriptors.append(os.open(os.devnull, os.O_RDONLY))

    monkeypatch.setattr(os, "rename", rename_and_exhaust_descriptors)
    try:
        atomic_files.write_folder(tmp_path / "step_000001", FILES, {"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in descriptors:
            os.close(descriptor)
    assert read_all(tmp_path / "step_000001") == FILES


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


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["files", "name", "bytes", "sha256", "x"]), inner)
    ),
    max_leaves=12,
)


@given(content=JSON)
@settings(max_examples=200, deadline=None, database=None)
def test_random_manifest_raises_only_corrupt_error(
    tmp_path_factory: pytest.TempPathFactory, content: Any
) -> None:
    folder = tmp_path_factory.mktemp("random")
    write_manifest(folder, json.dumps(content))
    try:
        atomic_files.read_manifest(folder)
    except atomic_files.CorruptError:
        return
    assert "files" in content


@pytest.mark.parametrize("nth", [2, 3])
def test_error_of_a_file_in_a_folder_has_its_whole_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    fail_at(monkeypatch, "open", nth, errno.EACCES)
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
    fail_at(monkeypatch, "rename", 1, errno.EACCES)
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


# Failpoints.

PROGRAM = """
from peralta_zmq.atomic_files import failpoint
for number in range(4):
    failpoint("test.place")
    print(number, flush=True)
"""


@pytest.mark.parametrize(
    "plan, code, num_passes",
    [("x:1,test.place:3", -signal.SIGKILL, 2), ("test.other:1", 0, 4), ("", 0, 4)],
)
def test_failpoint_kills_at_the_named_pass_only(plan: str, code: int, num_passes: int) -> None:
    environment = {**os.environ, atomic_files.FAILPOINT_VARIABLE: plan}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, len(done.stdout.split())) == (code, num_passes)


@pytest.mark.parametrize("plan", ["send:0", "send:x"])
def test_failpoint_with_invalid_count_is_refused(plan: str) -> None:
    with pytest.raises(ValueError):
        atomic_files.parse_failpoints(plan)
