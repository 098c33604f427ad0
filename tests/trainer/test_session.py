"""Outages at the start of a trainer: an existing run waits and continues, a new run is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults import failing, on_pause, start_and_end
from trainer_sessions import Session

from peralta_zmq.config import Config, load_config
from peralta_zmq.errors import ConfigError, OutageError, WireError, failure_text
from peralta_zmq.observe.metrics import METRICS, read_rows
from peralta_zmq.trainer import trained_model, trainer
from peralta_zmq.trainer.journal import JOURNAL
from peralta_zmq.trainer.session import StopSignal, known_run_id, lock, wait_out, write_identity
from peralta_zmq.trainer.trainer import Trainer
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.wire.auth import TRAINER, make_keys
from peralta_zmq.wire.trainer_address import AddressFile, read_address
from tools.link_proxy import free_ports

REPLACED = "another trainer continues run demo-.*; this one ends"
Outage = Callable[[Config, pytest.MonkeyPatch], Callable[[], None]]  # begins; returns what ends it


def config_in(folder: Path, *settings: str) -> Config:
    arguments = ["--run.dir", str(folder / "runs"), "--wire.port", str(free_ports())]
    return load_config("bin/trainer", [*arguments, "--dashboard.port=None", *settings])


def full_disk(config: Config, patched: pytest.MonkeyPatch) -> Callable[[], None]:
    fsync = os.fsync
    patched.setattr(os, "fsync", failing(errno.ENOSPC))
    return lambda: patched.setattr(os, "fsync", fsync)


def failing_rename(config: Config, patched: pytest.MonkeyPatch) -> Callable[[], None]:
    rename = os.rename
    patched.setattr(os, "rename", failing(errno.ESTALE))
    return lambda: patched.setattr(os, "rename", rename)


def foreign_lock(config: Config, patched: pytest.MonkeyPatch) -> Callable[[], None]:
    lock = config.weights_folder / ".lock-other"
    lock.write_text(json.dumps({"pid": 7, "host": "elsewhere", "started": 0.0}))
    expired = time.time() - 60
    return lambda: os.utime(lock, (expired, expired))


def unmounted(config: Config, patched: pytest.MonkeyPatch) -> Callable[[], None]:
    folder, away = config.weights_folder, config.weights_folder.with_name("away")
    folder.rename(away)

    def end() -> None:
        assert not folder.exists()  # the trainer must not create it
        away.rename(folder)

    return end


OUTAGES: dict[str, tuple[Outage, str]] = {
    "full disk": (full_disk, " cannot be written (No space left on device); mount it"),
    "failing rename": (failing_rename, "cannot be written (Stale file handle); mount it"),
    "unmounted": (unmounted, "is gone; is it mounted? Mount it, or choose another"),
    "lock": (foreign_lock, "another trainer (pid 7 on elsewhere) publishes to"),
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
    run_id = start_and_end(config)
    begin, message = OUTAGES[outage]
    on_pause(monkeypatch, begin(config, monkeypatch))
    with ExitStack() as stack:
        again = Trainer(config, stack)
        assert again.session.run_id == again.publishing.store.run_id == run_id
    waiting, over = (row.getMessage() for row in caplog.records if row.module == "session")
    assert message in waiting and waiting.endswith(". Waiting, nothing is lost")
    assert "\n" not in waiting and over.startswith("the outage is over after")


@pytest.mark.parametrize("name", ["RUN.json", "config.toml", "lock", "metrics.jsonl"])
def test_folder_in_place_of_a_file_ends_the_start_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = config_in(tmp_path)
    start_and_end(config)
    (config.run_folder / name).unlink()
    (config.run_folder / name).mkdir()
    monkeypatch.delattr(StopSignal, "pause")
    with pytest.raises(ConfigError, match=f"{name} .* directory; .* move it"):
        start_and_end(config)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, r"belongs to user \d+ \(mode \d+\)"), (errno.EPERM, "give it access"),
        (errno.ENODEV, "file system cannot"), (errno.EINVAL, "file system cannot"),
        (errno.ENOSYS, "file system cannot"), (errno.ENAMETOOLONG, "choose a shorter name"),
        (errno.EISDIR, "move it away"), (errno.ENOTDIR, "move it away"),
        *((number, "") for number in (
            errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN,
            errno.ENOSPC, errno.EROFS, errno.ENOENT, errno.EMFILE,
        )),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wrapped", [False, True])
def test_only_errors_that_waiting_ends_are_waited_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int, remedy: str, wrapped: bool
) -> None:
    pending = [OSError(number, os.strerror(number), str(tmp_path))]

    def operation() -> str:
        if not pending:
            return "done"
        try:
            raise pending.pop()
        except OSError as error:
            if not wrapped:
                raise
            raise OutageError(f"cannot write: {failure_text(error)}") from error

    def call() -> str:
        return wait_out(operation, folder=tmp_path, stop=StopSignal())

    if remedy:
        with pytest.raises(ConfigError, match=remedy) as caught:
            call()
        assert wrapped or str(tmp_path) in str(caught.value)
    else:
        assert call() == "done"
        assert "Waiting, nothing is lost" in caplog.text


def test_run_folder_that_is_unmounted_during_a_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, away = config_in(tmp_path), tmp_path / "away"
    folder, open_store = config.run_folder, trained_model.open_store
    run_id = start_and_end(config)

    def unmount(config: Config) -> WeightStore:
        folder.rename(away)
        folder.mkdir()
        return open_store(config)

    def mount() -> None:
        folder.rmdir()  # raises an error if the trainer has written into it
        away.rename(folder)

    monkeypatch.setattr(trained_model, "open_store", unmount)
    on_pause(monkeypatch, mount)
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
    run_id = start_and_end(config)
    keys.rename(away)
    if has_mount_point:
        keys.mkdir()
    on_pause(monkeypatch, lambda: away.rename(keys))  # replaces an empty folder
    assert start_and_end(config) == run_id
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


def test_second_trainer_of_a_cluster_waits_until_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Slurm queues a job again whose processes may still run on a node that it has lost."""
    addresses = tmp_path / "addresses"
    config = config_in(tmp_path, "--wire.address-dir", str(addresses), "--wire.host", "node1")
    port = config.wire.port
    run_id = start_and_end(config)
    AddressFile(addresses, "node1", 1, run_id).write()
    first = lock(config.run_folder)
    seen = list[tuple[str, str] | None]()

    def end_the_first() -> None:
        seen.append(read_address(addresses))
        first.close()

    on_pause(monkeypatch, end_the_first)
    with ExitStack() as stack, socket.create_server(("127.0.0.1", port + 1)):
        Trainer(config, stack)
        assert read_address(addresses) == (f"tcp://node1:{port + 4}", run_id)
    assert seen == [("tcp://node1:1", run_id)]  # that of the first one, until it has ended
    assert read_address(addresses) is None  # removed at the end
    assert f"another trainer uses {config.run_folder}; stop it" in caplog.text


def test_second_trainer_of_a_new_run_waits_and_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path, "--wire.address-dir", str(tmp_path / "addresses"))
    config.run_folder.mkdir(parents=True)
    first = lock(config.run_folder)  # before it writes RUN.json

    def end_the_first() -> None:
        write_identity(config.run_folder, run_id="demo-1", weights=None)
        first.close()

    on_pause(monkeypatch, end_the_first)
    with ExitStack() as stack:
        trainer = Trainer(config, stack)
        assert trainer.session.run_id == trainer.session.announcer.announcement.run_id == "demo-1"


def test_new_run_that_another_trainer_has_started_is_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both trainers start at the same time; the other one has ended already."""
    config = config_in(tmp_path)
    open_model = trained_model.open_trained_model

    def opened(*arguments: Any) -> Any:
        config.run_folder.mkdir(parents=True)
        write_identity(config.run_folder, run_id="demo-1", weights=None)
        return open_model(*arguments)

    monkeypatch.setattr(trained_model, "open_trained_model", opened)
    with pytest.raises(ConfigError, match="another trainer uses "):
        trainer.run(config)
    assert known_run_id(config.run_folder) == "demo-1"


def take_over(addresses: Path) -> AddressFile:
    """Write an address as another trainer does that continues the run."""
    other = AddressFile(addresses, "elsewhere", 1, "demo")
    other.write()
    return other


def test_trainer_that_was_replaced_records_no_further_step(tmp_path: Path) -> None:
    addresses, run = tmp_path / "addresses", tmp_path / "demo"
    with ExitStack() as stack:
        session = Session(stack, tmp_path, "--wire.address-dir", str(addresses))
        session.advance()
        session.trainer.publishing.wait()
        before = {file: file.read_bytes() for file in (run / JOURNAL).iterdir()}
        versions = session.trainer.publishing.store.numbers()
        take_over(addresses)
        with pytest.raises(WireError, match=REPLACED):
            session.advance()
        with pytest.raises(WireError, match=REPLACED):
            session.trainer.finish()
        assert len(read_rows(run / METRICS)) == 1
        assert {file: file.read_bytes() for file in (run / JOURNAL).iterdir()} == before
        assert session.trainer.publishing.store.numbers() == versions


def test_trainer_that_is_replaced_while_it_computes_records_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses, run = tmp_path / "addresses", tmp_path / "demo"
    with ExitStack() as stack:
        session = Session(
            stack, tmp_path, "--checkpoint.interval=1", "--wire.address-dir", str(addresses)
        )
        session.advance()
        learner = session.trainer.policy.learner
        finish_step = learner.finish_step

        def suspended(*arguments: Any, **options: Any) -> Any:
            result = finish_step(*arguments, **options)
            session.trainer.collector.commit()
            take_over(addresses)
            return result

        monkeypatch.setattr(learner, "finish_step", suspended)
        with pytest.raises(WireError, match=REPLACED):
            session.advance()
        assert len(read_rows(run / METRICS)) == 1
        with pytest.raises(WireError, match=REPLACED):
            session.trainer.checkpoints.try_write()
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]
        session.trainer.publish()
        with pytest.raises(WireError, match=REPLACED):
            session.trainer.publishing.wait()


def test_waiting_trainer_that_was_replaced_ends(tmp_path: Path) -> None:
    addresses = tmp_path / "addresses"
    with ExitStack() as stack:
        trainer = Trainer(config_in(tmp_path, "--wire.address-dir", str(addresses)), stack)
        trainer.recover()
        take_over(addresses).close()  # the other trainer has ended
        with pytest.raises(WireError, match=REPLACED):
            trainer.advance()
