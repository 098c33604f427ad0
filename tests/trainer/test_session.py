"""Outages at the start of a trainer: an existing run waits and continues, a new run is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq.config import Config, load_config
from peralta_zmq.errors import ConfigError, OutageError
from peralta_zmq.trainer import loop as trainer
from peralta_zmq.trainer import policy
from peralta_zmq.trainer.loop import Trainer
from peralta_zmq.trainer.session import StopSignal
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.wire.auth import TRAINER, make_keys
from tools.link_proxy import free_ports

Outage = Callable[[Config, pytest.MonkeyPatch], Callable[[], None]]  # begins; returns what ends it


def config_in(folder: Path, *settings: str) -> Config:
    arguments = ["--run.dir", str(folder / "runs"), "--wire.port", str(free_ports())]
    return load_config("bin/trainer", [*arguments, "--no-dashboard.enabled", *settings])


def replaced_by_a_folder(file: Path) -> Callable[[], None]:
    """Make a file of the run folder unusable; returns a function that puts it back."""
    away = file.with_name("away")
    file.rename(away)
    file.mkdir()

    def end() -> None:
        file.rmdir()
        away.rename(file)

    return end


def full_disk(config: Config, patched: pytest.MonkeyPatch) -> Callable[[], None]:
    def fails(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fsync = os.fsync
    patched.setattr(os, "fsync", fails)
    return lambda: patched.setattr(os, "fsync", fsync)


def failing_rename(config: Config, patched: pytest.MonkeyPatch) -> Callable[[], None]:
    def fails(source: Any, target: Any) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    rename = os.rename
    patched.setattr(os, "rename", fails)
    return lambda: patched.setattr(os, "rename", rename)


def foreign_lease(config: Config, patched: pytest.MonkeyPatch) -> Callable[[], None]:
    lease = config.weights_folder / ".lease-other"
    lease.write_text(json.dumps({"pid": 7, "host": "elsewhere", "started": 0.0}))
    expired = time.time() - 60
    return lambda: os.utime(lease, (expired, expired))


def unmounted(config: Config, patched: pytest.MonkeyPatch) -> Callable[[], None]:
    folder, away = config.weights_folder, config.weights_folder.with_name("away")
    folder.rename(away)

    def end() -> None:
        assert not folder.exists()  # the trainer must not create it
        away.rename(folder)

    return end


def unusable(name: str) -> Outage:
    return lambda config, patched: replaced_by_a_folder(config.run_folder / name)


OUTAGES: dict[str, tuple[Outage, str]] = {
    "full disk": (full_disk, " cannot be written (No space left on device); mount it"),
    "failing rename": (failing_rename, "cannot be written (Stale file handle); mount it"),
    "unmounted": (
        unmounted,
        "is gone; is it mounted? Mount it, or choose another",
    ),
    "lease": (foreign_lease, "another trainer (pid 7 on elsewhere) publishes to"),
    **{
        name: (unusable(name), f"{name} cannot be used: Is a directory")
        for name in ("RUN.json", "config.toml", "lock", "metrics.jsonl")
    },
}


@pytest.mark.parametrize(
    ("outage", "weights"), [*((name, "nas") for name in OUTAGES), ("full disk", None)]
)
def test_existing_run_waits_for_the_end_of_an_outage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    outage: str,
    weights: str | None,
) -> None:
    more = ("--weights.dir", str(tmp_path / weights)) if weights else ()
    config = config_in(tmp_path, *more)
    with ExitStack() as stack:
        run_id = Trainer(config, stack).session.run_id
    begin, message = OUTAGES[outage]
    end = begin(config, monkeypatch)

    def pause(stop: StopSignal, seconds: float) -> None:
        end()

    monkeypatch.setattr(StopSignal, "pause", pause)
    with ExitStack() as stack:
        again = Trainer(config, stack)
        assert again.session.run_id == again.publishing.store.run_id == run_id
    waiting, over = (row.getMessage() for row in caplog.records if row.module == "session")
    assert message in waiting and waiting.endswith(". Waiting, nothing is lost")
    assert "\n" not in waiting and over.startswith("the outage is over after")


def test_run_folder_that_is_unmounted_during_a_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, away = config_in(tmp_path), tmp_path / "away"
    folder, open_store = config.run_folder, policy.open_store
    with ExitStack() as stack:
        run_id = Trainer(config, stack).session.run_id

    def unmount(config: Config) -> WeightStore:
        folder.rename(away)
        folder.mkdir()
        return open_store(config)

    def mount(stop: StopSignal, seconds: float) -> None:
        folder.rmdir()  # raises an error if the trainer has written into it
        away.rename(folder)

    monkeypatch.setattr(policy, "open_store", unmount)
    monkeypatch.setattr(StopSignal, "pause", mount)
    with ExitStack() as stack:
        again = Trainer(config, stack)
        assert again.session.run_id == again.publishing.store.run_id == run_id
    assert not away.exists(), "it has waited"


@pytest.mark.parametrize("has_mount_point", [True, False])
def test_existing_run_waits_for_its_unmounted_key_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_mount_point: bool,
) -> None:
    keys, away = tmp_path / "keys", tmp_path / "away"
    make_keys(keys, TRAINER)
    config = config_in(tmp_path, "--security.keys", str(keys))
    with ExitStack() as stack:
        run_id = Trainer(config, stack).session.run_id
    keys.rename(away)
    if has_mount_point:
        keys.mkdir()

    def mount(stop: StopSignal, seconds: float) -> None:
        away.rename(keys)  # replaces an empty folder

    monkeypatch.setattr(StopSignal, "pause", mount)
    with ExitStack() as stack:
        assert Trainer(config, stack).session.run_id == run_id
    waiting, over = (row.getMessage() for row in caplog.records if row.module == "session")
    reason = r"key .*secret is missing; mount" if has_mount_point else "key folder .* cannot be"
    assert re.match(reason, waiting) and over.startswith("the outage is over after")


def test_new_run_without_its_key_folder_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path, "--security.keys", str(tmp_path / "keys"))
    monkeypatch.delattr(StopSignal, "pause")
    with pytest.raises(OutageError, match=r"key folder .*keys cannot be read \(No such file"):
        trainer.run(config)
    assert not config.run_folder.exists()


def test_new_run_on_a_full_disk_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path)
    full_disk(config, monkeypatch)
    monkeypatch.delattr(StopSignal, "pause")
    with pytest.raises(
        ConfigError, match=r"cannot be written \(No space .*; make room .*--run\.dir"
    ):
        trainer.run(config)
