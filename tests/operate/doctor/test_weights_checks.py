"""Checks of the weights folder, each with one that passes and one that fails."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from weight_sets import weights_at

from peralta_zmq.config import load_config
from peralta_zmq.operate.doctor import weights_checks
from peralta_zmq.weights.backends import LocalBackend, ProbeFile
from peralta_zmq.weights.store import WeightStore


@pytest.mark.parametrize(("folder", "role", "ok", "detail", "remedy"), [
    ("", "generator", True, "{} exists (file system ", ""),
    ("nas", "generator", False, "{}/nas does not exist",
     "mount it here, or set weights.dir"),
    ("nas/weights", "trainer", True, "will be created in {}",
     "if it is on a NAS, mount the NAS first"),
    ("file", "trainer", False, "cannot be listed", "mount it again"),
])  # fmt: skip
def test_folder_check_depends_on_the_role(
    tmp_path: Path, folder: str, role: str, ok: bool, detail: str, remedy: str
) -> None:
    (tmp_path / "file").write_text("")
    check = weights_checks.check_folder(tmp_path / folder, role=role)
    assert check.ok is ok and detail.format(tmp_path) in check.detail
    assert check.remedy.startswith(remedy)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]  # a trainer's doctor creates nothing


def test_writing_check_removes_its_files(tmp_path: Path) -> None:
    check = weights_checks.check_writing(tmp_path / "not" / "yet")
    assert check.ok and check.detail.startswith("write, fsync and rename work, ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that refuses all")
def test_read_only_folder_fails() -> None:
    check = weights_checks.check_writing(Path("/proc/self/fdinfo"))
    assert not check.ok and check.detail.startswith("/proc/self/fdinfo cannot be written (")
    assert check.remedy.startswith("give this user write permission")


def test_space_for_three_models(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert weights_checks.check_space(tmp_path, free // 4, num_models=3).ok
    check = weights_checks.check_space(tmp_path, free // 2, num_models=3)
    assert not check.ok and "3 models need" in check.detail
    assert check.remedy == "free some space, or choose another folder"
    assert "not known yet" in weights_checks.check_space(tmp_path, None, num_models=3).detail


def test_new_file_is_visible_by_event_and_by_polling(tmp_path: Path) -> None:
    with closing(ProbeFile(tmp_path)) as probe:
        check = weights_checks.check_visible(tmp_path, probe.create)
    assert check.ok and "the same folder as the trainer's" in check.detail
    assert re.search(r"by event \d+\.\d\d s$", check.detail)
    assert list(tmp_path.iterdir()) == []


def test_file_in_another_folder_is_not_visible(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    with closing(ProbeFile(tmp_path / "there")) as probe:
        check = weights_checks.check_visible(tmp_path / "here", probe.create, timeout_seconds=0.2)
    assert not check.ok and f"does not appear in {tmp_path / 'here'} within" in check.detail
    assert check.remedy == "it is another folder: mount the same one, and set weights.dir to it"


def claim(folder: Path) -> WeightStore:
    """Claim the folder for the run demo-1, as a trainer that has ended since."""
    store = WeightStore(LocalBackend(folder))
    store.claim("demo-1")
    store.backend.locks.release()
    return store


def test_speed_is_that_of_the_newest_version_or_of_a_sample_file(tmp_path: Path) -> None:
    assert "nothing to read yet" in weights_checks.check_speed(tmp_path / "nas", None).detail
    check = weights_checks.check_speed(tmp_path, None)
    assert check.ok and "33.6 MB of a sample file" in check.detail
    assert list(tmp_path.iterdir()) == []
    claim(tmp_path).publish(3, weights_at(3), companions={})
    check = weights_checks.check_speed(tmp_path, 1_000_000_000)
    assert check.ok and "of the newest version; a whole model takes " in check.detail
    assert "MB/s" in check.detail


def test_torn_version_fails(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()
    check = weights_checks.check_speed(tmp_path, None)
    assert not check.ok and "no version can be read" in check.detail


@pytest.mark.parametrize("denied", ["RUN.json", "step_00000001/STABLE"])
def test_file_that_cannot_be_read_fails_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str
) -> None:
    store = claim(tmp_path)
    store.publish(1, weights_at(1), companions={})
    read = LocalBackend.read

    def read_others(backend: LocalBackend, path: str, *, start: int = 0) -> Iterator[bytes]:
        if path == denied:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(backend, path, start=start)

    monkeypatch.setattr(LocalBackend, "read", read_others)
    check = weights_checks.check_speed(tmp_path, None)
    assert not check.ok and check.remedy.startswith("mount it again, or give this user the right")
    assert check.detail.startswith(f"{tmp_path} cannot be read: Permission denied; ")


def write_lock(folder: Path, *, age: float, pid: int = 7, host: str = "elsewhere") -> None:
    """Write the lock of a trainer on another host."""
    lock = folder / ".lock-other"
    lock.write_text(json.dumps({"pid": pid, "host": host, "holder": "demo-1"}))
    now = time.time() - age
    os.utime(lock, (now, now))


def test_lock_of_another_trainer_fails_and_is_kept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_lock(tmp_path, age=5)
    check = weights_checks.check_owner(tmp_path, run, is_running=False)
    assert not check.ok
    assert check.detail == f"another trainer (pid 7 on elsewhere) publishes to {tmp_path}"
    assert check.remedy.startswith("stop it; if it has already ended, wait 30 s")
    assert weights_checks.check_owner(tmp_path, run, is_running=True).ok  # its own lock
    write_lock(tmp_path, age=60)
    assert weights_checks.check_owner(tmp_path, run, is_running=False).ok  # expired
    assert os.listdir(tmp_path) == [".lock-other"]


def test_weights_of_another_run_fail(tmp_path: Path) -> None:
    folder, run = tmp_path / "weights", tmp_path / "run"
    run.mkdir()
    claim(folder)
    check = weights_checks.check_owner(folder, run, is_running=False)
    assert not check.ok and check.detail == f"{folder} belongs to run demo-1, not to {run}"
    assert check.remedy == "choose another folder with weights.dir, or delete this one"
    (run / "RUN.json").write_text('{"run_id": "demo-2", "weights": null, "tokenizer": null}')
    assert weights_checks.check_owner(folder, run, is_running=False).detail.endswith(
        "not to demo-2"
    )
    (run / "RUN.json").write_text('{"run_id": "demo-1", "weights": null, "tokenizer": null}')
    check = weights_checks.check_owner(folder, run, is_running=False)
    assert check.ok and check.detail == "belongs to run demo-1"
    assert os.listdir(folder) == ["RUN.json"]


def test_weights_behind_a_url(tmp_path: Path) -> None:
    from peralta_zmq.weights.server import serve_weights

    claim(tmp_path)
    with closing(serve_weights(tmp_path, host="127.0.0.1", port=0, token=None)) as server:
        address = f"http://127.0.0.1:{server.port}"
        assert weights_checks.check_address(address, None, run_id="demo-1").ok
        check = weights_checks.check_address(address, None, run_id="demo-2")
    assert not check.ok and check.detail.endswith("has the weights of run demo-1, not demo-2")
    with closing(serve_weights(tmp_path, host="127.0.0.1", port=0, token="x" * 16)) as server:
        protected = f"http://127.0.0.1:{server.port}"
        check = weights_checks.check_address(protected, None, run_id="demo-1")
    assert not check.ok
    assert check.detail == f"{protected} requires the password in security.token_file"
    check = weights_checks.check_address(address, None, run_id="demo-1")
    assert not check.ok and "does not answer" in check.detail
    assert check.remedy.startswith("start the trainer with weights.serve_port")


def test_model_bytes_are_read_from_its_files() -> None:
    from peralta_zmq import models

    def model_bytes(*settings: str) -> int | None:
        return weights_checks.model_bytes_of(load_config("doctor", settings))

    model = models.load_model(
        models.EMBEDDED, device=models.choose_device("cpu"), dtype=models.DTYPES["float32"]
    )
    size = 4 * sum(tensor.numel() for tensor in models.weights_of(model).values())
    assert model_bytes("--weights.dtype", "float32") == size
    assert model_bytes() == size // 2
    assert model_bytes("--model.name", "no/such-model") is None
