"""Problems of real hosts are reported with name and remedy, and nothing is started.

.venv/bin/python -m pytest -m lan tests/operate/test_lan_refusals.py
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import SMALL, hosts_file, lan, make_machine, needs_rsync, needs_sshd, processes_in, sshd

from tools.link_proxy import free_ports

pytestmark = [pytest.mark.lan, pytest.mark.timeout(200), needs_rsync]
TOOLS = ("sh", "dirname", "df", "awk", "tail", "ls", "make", "mkdir", "touch", "rm", "cat")
NOTHING = "nothing was started: beta failed; --partial continues without it\n"


@pytest.fixture(autouse=True)
def machines(tmp_path: Path) -> Iterator[None]:
    """Two machines; their processes are killed at the end."""
    for name in ("alpha", "beta"):
        make_machine(tmp_path / name)
    (tmp_path / "nas").mkdir()
    yield
    for pid in processes_in(tmp_path):
        os.kill(pid, signal.SIGKILL)


def up(
    folder: Path, beta: dict[str, object], *words: str, command: str = "up"
) -> subprocess.CompletedProcess[str]:
    """Run a command on a good trainer host with a generator, and on host `beta`."""
    nas = str(folder / "nas/weights")
    alpha = {"name": "alpha", "role": "trainer", "dir": str(folder / "alpha"), "count": 1,
             "python": sys.executable, "weights_dir": nas}  # fmt: skip
    path = hosts_file(folder / "hosts.toml", alpha, {
        "name": "beta", "dir": str(folder / "beta"), "python": sys.executable,
        "weights_dir": nas, **beta,
    })  # fmt: skip
    settings = [*SMALL, "--wire.port", str(free_ports()), "--wire.host", "127.0.0.2",
                "--wire.bind", "127.0.0.2", *words]  # fmt: skip
    return lan(command, "--hosts", str(path), *(settings if command in ("up", "sync") else words))


def started(folder: Path) -> list[Path]:
    return [*folder.glob("*/.lan/*.state"), *folder.glob("*/.lan/*.lock")]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with the programs that bin/lan needs on a host, except rsync."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


@needs_sshd
def test_unreachable_host_and_rejected_key(tmp_path: Path) -> None:
    with sshd(tmp_path / "ssh") as server:
        off = server.client("off", key="user_key", port=free_ports())
        failed = up(tmp_path, {"ssh": f"-F {off} beta"})
        assert failed.returncode == 1
        assert "beta: probe: ssh: " in failed.stderr and "Connection refused: no" in failed.stderr
        assert failed.stderr.endswith(NOTHING)
        stranger = server.client("stranger", key="stranger_key")
        failed = up(tmp_path, {"ssh": f"-F {stranger} beta"})
        assert f"does not accept your ssh key; run ssh-copy-id -F {stranger} beta" in failed.stderr
        assert failed.stderr.endswith(NOTHING)
    assert not (tmp_path / "alpha/bin").exists()  # not copied either
    assert started(tmp_path) == []


@needs_sshd
def test_host_without_rsync(tmp_path: Path, tools: Path) -> None:
    with sshd(tmp_path / "ssh", f"SetEnv PATH={tools}") as server:
        failed = up(tmp_path, {"ssh": f"-F {server.config} beta"})
    assert "beta: probe: there is no rsync; install it there" in failed.stderr
    assert started(tmp_path) == []


@needs_sshd
def test_interrupted_copy_starts_nothing(tmp_path: Path, tools: Path) -> None:
    (tools / "rsync").write_text("#!/bin/sh\nexit 12\n")  # fails during the transfer
    (tools / "rsync").chmod(0o755)
    with sshd(tmp_path / "ssh", f"SetEnv PATH={tools}") as server:
        failed = up(tmp_path, {"ssh": f"-F {server.config} beta"})
        assert "beta: copy: copying stopped halfway (rsync code 12" in failed.stderr
        assert "the same command again continues the copy" in failed.stderr
        assert (tmp_path / "beta/.lan/copying").exists() and started(tmp_path) == []
    assert up(tmp_path, {}, command="sync").returncode == 0
    assert not (tmp_path / "beta/.lan/copying").exists()
    (tmp_path / "beta/.lan/copying").touch()
    failed = up(tmp_path, {}, "beta", command="restart")
    message = "the copied code is incomplete: a sync was interrupted; run bin/lan sync"
    assert f"beta: restart: {message}" in failed.stderr


def test_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        failed = up(tmp_path, {"dir": str(small / "beta")})
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert f"beta: probe: the disk of {small}/beta is full: 8 MB free, 3000 MB" in failed.stderr


def test_folder_with_other_files_is_not_changed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    failed = up(tmp_path, {"dir": str(other)})
    assert f"beta: probe: {other} holds files that bin/lan did not put there" in failed.stderr
    assert [each.name for each in other.iterdir()] == ["thesis.tex"]


def test_port_in_use(tmp_path: Path) -> None:
    port = free_ports()
    with socket.create_server(("127.0.0.2", port)):
        failed = up(tmp_path, {}, "--wire.port", str(port))
    assert "beta" not in failed.stderr
    assert f"alpha: doctor: ports: port {port} is in use by pid {os.getpid()}" in failed.stderr
    assert "failed, which includes the trainer's host" in failed.stderr
    assert started(tmp_path) == []


def test_different_weights_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    failed = up(tmp_path, {"weights_dir": str(tmp_path / "elsewhere")})
    assert "beta: doctor: visible: " in failed.stderr
    assert "it is another folder: mount the same one" in failed.stderr
    assert failed.stderr.endswith(NOTHING) and started(tmp_path) == []


def test_failed_start_leaves_the_other_workers_running(tmp_path: Path) -> None:
    (tmp_path / "beta/.lan/beta-0.json").mkdir()  # where its job is written
    failed = up(tmp_path, {}, "--train.max-steps", "5000")
    try:
        assert failed.returncode == 1 and "beta: start: " in failed.stderr
        assert "nothing was started" not in failed.stderr
        assert failed.stderr.endswith(
            "beta did not start completely; bin/lan status shows what runs, "
            f"bin/lan down --hosts {tmp_path}/hosts.toml stops all\n"
        )
    finally:
        assert up(tmp_path, {}, command="down").returncode == 0
    assert processes_in(tmp_path) == {}


def test_weights_over_http_with_a_sent_password(tmp_path: Path) -> None:
    token, port = tmp_path / "token", free_ports()
    token.write_text("x" * 32)
    token.chmod(0o600)
    path = hosts_file(
        tmp_path / "hosts.toml",
        {"name": "alpha", "role": "trainer", "dir": str(tmp_path / "alpha"),
         "python": sys.executable},
        {"name": "beta", "dir": str(tmp_path / "beta"), "python": sys.executable,
         "weights_dir": f"http://127.0.0.2:{port}"},
    )  # fmt: skip
    done = lan("up", "--hosts", str(path), *SMALL, "--wire.port", str(free_ports()),
               "--wire.host", "127.0.0.2", "--wire.bind", "127.0.0.2", "--train.max-steps", "2",
               "--weights.serve-port", str(port), "--security.token-file", str(token))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "beta-0 | " in done.stdout and "alpha-trainer | step=2/2" in done.stdout
    sent = tmp_path / "beta/.lan/weights-token"
    assert sent.read_text() == token.read_text() and sent.stat().st_mode & 0o077 == 0
    assert not (tmp_path / "beta/runs/demo/weights").exists()


def test_partial_continues_without_failed_generators(tmp_path: Path) -> None:
    done = up(tmp_path, {"python": "python2.0"}, "--partial", "--train.max-steps", "2")
    assert done.returncode == 0, done.stderr
    assert "beta: probe: python2.0 does not run" in done.stderr
    assert "alpha-trainer | step=2/2" in done.stdout
    assert not (tmp_path / "beta/bin").exists()
