"""The weights folder: each look passes on a good one and fails on a bad one."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from weight_sets import weights_at

from peralta_zmq.config import load_config
from peralta_zmq.operate.doctor import weights, workload
from peralta_zmq.weights.backends import LocalBackend, ProbeFile
from peralta_zmq.weights.store import WeightStore

MIB = 1 << 20
ROOT = os.geteuid() == 0


def test_folder_that_is_there_names_its_file_system(tmp_path: Path) -> None:
    found = weights.check_there(tmp_path, role="generator")
    assert found.ok and found.detail.startswith(f"{tmp_path} is there (file system ")


def test_generator_does_not_make_the_folder(tmp_path: Path) -> None:
    found = weights.check_there(tmp_path / "nas", role="generator")
    assert not found.ok and found.detail == f"{tmp_path / 'nas'} does not exist"
    assert found.remedy.startswith("mount it here, or name it")


def test_trainer_will_make_the_folder_and_is_warned_of_a_missing_mount(tmp_path: Path) -> None:
    found = weights.check_there(tmp_path / "nas" / "weights", role="trainer")
    assert found.ok and f"will be made in {tmp_path}" in found.detail
    assert found.remedy == "if it is on a NAS, mount that first"
    assert not (tmp_path / "nas").exists()


def test_file_in_the_place_of_the_folder_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    found = weights.check_there(tmp_path / "weights", role="trainer")
    assert not found.ok and "cannot be listed" in found.detail
    assert found.remedy.startswith("mount it again")


def test_writing_works_and_leaves_nothing(tmp_path: Path) -> None:
    found = weights.check_writing(tmp_path / "not" / "yet", size=2 * MIB)
    assert found.ok and found.detail.startswith("write, fsync and rename work, ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that refuses all")
def test_folder_that_refuses_writes_is_told() -> None:
    found = weights.check_writing(Path("/proc/self/fdinfo"), size=MIB)
    assert not found.ok and found.detail.startswith("/proc/self/fdinfo cannot be written (")
    assert found.remedy.startswith("give this user the right to write there")


def test_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    found = weights.check_writing(tmp_path, size=MIB)
    monkeypatch.undo()
    assert not found.ok and "No space left on device" in found.detail
    assert list(tmp_path.iterdir()) == []


def test_room_for_three_models(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert weights.check_space(tmp_path, free // 4).ok
    found = weights.check_space(tmp_path, free // 2)
    assert not found.ok and "3 models need" in found.detail
    assert found.remedy == "free some, or choose another folder"
    assert "not known yet" in weights.check_space(tmp_path, None).detail


def test_file_of_the_other_side_is_seen_by_event_and_by_looking(tmp_path: Path) -> None:
    with closing(ProbeFile(tmp_path)) as probe:
        found = weights.check_visible(tmp_path, lambda: (probe.create(), ""), poll_seconds=0.1)
    assert found.ok and "the same folder as the trainer's" in found.detail
    assert re.search(r"by event \d+\.\d\d s$", found.detail)
    assert list(tmp_path.iterdir()) == []


def test_file_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    def late() -> tuple[str, str]:
        threading.Timer(0.5, (tmp_path / "doctor-1").touch).start()
        return "doctor-1", ""

    found = weights.check_visible(tmp_path, late, poll_seconds=0.1)
    seconds = re.search(r"after (\S+) s by looking", found.detail)
    assert found.ok and seconds and 0.25 < float(seconds[1]) < weights.VISIBLE_SECONDS


def test_another_folder_on_this_machine_is_told(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    with closing(ProbeFile(tmp_path / "there")) as probe:
        found = weights.check_visible(
            tmp_path / "here", lambda: (probe.create(), ""), poll_seconds=0.1, patience=0.2
        )
    assert not found.ok and f"does not appear in {tmp_path / 'here'} within" in found.detail
    assert found.remedy == "it is another folder: mount the same one, and name it with weights.dir"


def test_trainer_that_cannot_write_its_folder_is_told(tmp_path: Path) -> None:
    found = weights.check_visible(tmp_path, lambda: ("", "it is full"), poll_seconds=0.1)
    assert not found.ok and found.detail == "the trainer's machine: it is full"
    assert found.remedy == "see its own bin/doctor"


def test_reading_the_newest_version_tells_what_a_reload_takes(tmp_path: Path) -> None:
    store = WeightStore(LocalBackend(tmp_path))
    store.claim("demo-1")
    store.publish(3, weights_at(3), companions={})
    store.backend.release_lease()
    found = weights.check_speed(tmp_path, 1_000_000_000)
    assert found.ok and "of the newest version; a whole model takes " in found.detail
    assert "MB/s" in found.detail


def test_without_a_version_a_file_of_our_own_is_read(tmp_path: Path) -> None:
    found = weights.check_speed(tmp_path, None)
    assert found.ok and "33.6 MB of our own" in found.detail
    assert list(tmp_path.iterdir()) == []
    assert "nothing to read yet" in weights.check_speed(tmp_path / "nas", None).detail


def test_torn_version_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()
    found = weights.check_speed(tmp_path, None)
    assert not found.ok and "step_00000001 cannot be read" in found.detail


def lease_in(folder: Path, *, age: float, pid: int = 7, host: str = "elsewhere") -> None:
    """As a trainer on that host leaves it."""
    lease = folder / ".lease-other"
    lease.write_text(json.dumps({"pid": pid, "host": host, "holder": "demo-1"}))
    now = time.time() - age
    os.utime(lease, (now, now))


def test_another_trainer_that_publishes_here_is_told_and_its_lease_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lease_in(tmp_path, age=5)
    found = weights.check_owner(tmp_path, run, trains=False)
    assert not found.ok
    assert found.detail == f"another trainer (pid 7 on elsewhere) publishes to {tmp_path}"
    assert found.remedy.startswith("stop it, wait 30 s if it is gone")
    assert weights.check_owner(tmp_path, run, trains=True).ok  # ours, which runs already
    lease_in(tmp_path, age=60)
    assert weights.check_owner(tmp_path, run, trains=False).ok  # it is dead
    assert os.listdir(tmp_path) == [".lease-other"]


def test_the_weights_of_another_run_are_told(tmp_path: Path) -> None:
    folder, run = tmp_path / "weights", tmp_path / "run"
    run.mkdir()
    store = WeightStore(LocalBackend(folder))
    store.claim("demo-1")
    store.backend.release_lease()
    found = weights.check_owner(folder, run, trains=False)
    assert not found.ok and found.detail == f"{folder} belongs to run demo-1, not to {run}"
    assert found.remedy == "choose another with weights.dir, or delete it"
    (run / "RUN.json").write_text('{"run_id": "demo-2", "weights": null}')
    assert weights.check_owner(folder, run, trains=False).detail.endswith("not to demo-2")
    (run / "RUN.json").write_text('{"run_id": "demo-1", "weights": null}')
    found = weights.check_owner(folder, run, trains=False)
    assert found.ok and found.detail == "of run demo-1"
    assert os.listdir(folder) == ["RUN.json"]


def test_weights_behind_an_address(tmp_path: Path) -> None:
    from peralta_zmq.weights.http_backend import WeightServer

    store = WeightStore(LocalBackend(tmp_path))
    store.claim("demo-1")
    store.backend.release_lease()
    with closing(WeightServer(tmp_path, host="127.0.0.1", port=0, token=None)) as server:
        address = f"http://127.0.0.1:{server.port}"
        assert weights.check_address(address, None, run_id="demo-1").ok
        found = weights.check_address(address, None, run_id="demo-2")
    assert not found.ok and found.detail.endswith("has the weights of run demo-1, not demo-2")
    found = weights.check_address(address, None, run_id="demo-1")
    assert not found.ok and "does not answer" in found.detail
    assert found.remedy.startswith("start the trainer with weights.serve_port")


def test_bytes_of_a_model_are_read_from_its_files() -> None:
    from peralta_zmq import models

    size = workload.model_bytes(load_config("doctor", ["--weights.dtype", "float32"]))
    model = models.load_model(
        models.EMBEDDED, device=models.choose_device("cpu"), dtype=models.DTYPES["float32"]
    )
    assert size == 4 * sum(each.numel() for each in models.weights_of(model).values())
    assert workload.model_bytes(load_config("doctor", [])) == size // 2
    assert workload.model_bytes(load_config("doctor", ["--model.name", "no/such-model"])) is None
