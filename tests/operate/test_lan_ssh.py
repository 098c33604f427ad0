"""A run over real ssh: two hosts on loopback, each with its own folder and mount.

.venv/bin/python -m pytest -m lan tests/operate/test_lan_ssh.py
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import (
    MAC,
    REPO,
    SMALL,
    Sshd,
    hosts_file,
    lan,
    make_machine,
    needs_sshd,
    processes_in,
    sshd,
)
from real_programs import until

from peralta_zmq.config.hosts import Host, Hosts
from peralta_zmq.observe.metrics import read_rows
from peralta_zmq.operate import host_setup, lan_monitor, ssh
from tools.link_proxy import free_ports

pytestmark = [pytest.mark.lan, pytest.mark.timeout(400), needs_sshd]
TRAINER_ADDRESS = "127.0.0.2"  # not 127.0.0.1, which bin/lan refuses


@pytest.mark.parametrize("target", ["alpha", "-t alpha", "ssh://alpha:{port}/", "{user}@[::1]"])
def test_command_and_copy_ignore_terminal_and_command_of_the_ssh_config(
    tmp_path: Path, target: str
) -> None:
    (tmp_path / "file").touch()
    with sshd(tmp_path / "ssh") as server:
        with server.config.open("a") as config:
            config.write("RemoteCommand echo mine\nRequestTTY force\n")
        words = target.format(port=server.port, user=getpass.getuser())
        host = Host(name="alpha", ssh=f"-F {server.config} {words}", dir=str(tmp_path / "copy"))
        result = ssh.run(ssh.on_host(host, "sh -s", "echo out; echo error >&2\n"))
        assert (result.stdout, result.stderr) == ("out\n", "error\n")
        copied = ssh.run(ssh.rsync_to(host, [str(tmp_path / "file")], f"{tmp_path}/copy/"))
    assert copied.returncode == 0, copied.stderr
    assert (tmp_path / "copy" / "file").exists()


def test_shell_that_prints_is_named_and_does_not_disturb_the_status(tmp_path: Path) -> None:
    machine = make_machine(tmp_path / "alpha")
    (machine / "peralta_zmq").symlink_to(REPO / "peralta_zmq")
    talkative = 'ForceCommand printf hello; eval "$SSH_ORIGINAL_COMMAND"'
    with sshd(tmp_path / "ssh", talkative) as server:
        host = Host(name="alpha", ssh=f"-F {server.config} alpha", dir=str(machine), count=1)
        (probe,) = host_setup.probe(host)
        problem = probe.find_problem(ssh.run(probe)) or ""
        rows = lan_monitor.query_all(Hosts(host=(host, MAC.model_copy(update={"ssh": None}))))
    assert problem.startswith("its shell prints 'hello' before")
    assert (rows[0]["name"], rows[0]["state"]) == ("alpha-0", "not started")


@dataclass
class Home:
    """Two machines behind one ssh server, and one NAS."""

    folder: Path
    server: Sshd
    port: int

    @property
    def hosts(self) -> Path:
        return self.folder / "hosts.toml"

    @property
    def run(self) -> Path:
        return self.folder / "alpha/runs/demo"

    @property
    def step(self) -> int:
        rows = read_rows(self.run / "metrics.jsonl")
        return int(str(rows[-1]["step"])) if rows else 0

    def settings(self) -> list[str]:
        return [*SMALL, "--train.max-steps", "5000", "--train.learning-rate", "1e-5",
                "--wire.host", TRAINER_ADDRESS, "--wire.bind", TRAINER_ADDRESS,
                "--wire.port", str(self.port), "--security.keys", str(self.folder / "keys"),
                ]  # fmt: skip

    def lan(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        return lan(command, "--hosts", str(self.hosts), *words)

    def states(self) -> dict[str, list[str]]:
        """Words of each worker's line in the output of bin/lan status."""
        lines = self.lan("status").stdout.splitlines()[1:]
        return {words[0]: words for words in map(str.split, lines)}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with sshd(tmp_path / "ssh") as server:
        (tmp_path / "nas").mkdir()
        hosts: list[dict[str, object]] = []
        for name, role in (("alpha", "trainer"), ("beta", "generator")):
            machine = make_machine(tmp_path / name)
            (tmp_path / f"mount-of-{name}").symlink_to(tmp_path / "nas")
            hosts.append({
                "name": name, "role": role, "ssh": f"-F {server.config} {name}",
                "dir": str(machine), "python": sys.executable,
                "weights_dir": str(tmp_path / f"mount-of-{name}" / "weights"),
            })  # fmt: skip
        hosts_file(tmp_path / "hosts.toml", *hosts)
        opened = Home(tmp_path, server, free_ports())
        yield opened
        for pid in processes_in(tmp_path):
            os.kill(pid, signal.SIGKILL)


def worker_pid(folder: Path, door: str) -> int:
    """Process id of the worker, not of its supervisor or guard; waits until it is the only one."""
    pids: list[int] = []

    def is_alone() -> bool:
        pids[:] = [pid for pid, words in processes_in(folder).items()
                    if f" bin/{door} " in words and not words.startswith("/bin/sh")]  # fmt: skip
        return len(pids) == 1

    until(is_alone, seconds=20)
    return pids[0]


def assert_other_settings_are_refused(home: Home) -> None:
    """`up` with other settings does not change a running worker."""
    alpha = home.folder / "alpha"
    (settings,) = (alpha / ".lan").glob("config-*.toml")
    other = home.lan("up", *home.settings(), "--train.learning-rate", "2e-5")
    assert other.returncode == 1, other.stdout
    for host, name in (("alpha", "alpha-trainer"), ("beta", "beta-0")):
        reason = f"{name} is already running with other settings; bin/lan stop {name} first"
        assert f"{host}: check: {reason}" in other.stderr
    assert f" @ .lan/{settings.name} " in processes_in(alpha)[worker_pid(alpha, "trainer")]


def test_run_over_ssh_survives_faults_and_leaves_no_process(home: Home) -> None:
    screen = home.folder / "screen"
    with screen.open("w") as out:
        viewer = subprocess.Popen(
            [sys.executable, str(REPO / "bin/lan"), "up", "--hosts", str(home.hosts),
             *home.settings()],
            stdout=out, stderr=subprocess.STDOUT, cwd=REPO, start_new_session=True,
        )  # fmt: skip

    def seen(text: str) -> bool:
        return bool(re.search(text, screen.read_text(), re.MULTILINE))

    def step_after(step: int) -> None:
        until(lambda: home.step > step, seconds=60)

    try:
        there = r"^alpha-trainer \| step=3/"
        until(lambda: seen(there) or viewer.poll() is not None, seconds=150)
        assert viewer.poll() is None, screen.read_text()
        assert seen(r"^beta-0 \| .*loaded version="), screen.read_text()

        # A lost connection kills no worker, and the logs resume.
        workers = {worker_pid(home.folder / "alpha", "trainer"),
                   worker_pid(home.folder / "beta", "generator")}  # fmt: skip
        assert home.server.drop_connections() >= 2
        until(lambda: seen("^alpha: connection lost, its workers continue"), seconds=60)
        step_after(home.step)
        lost = len(screen.read_text())
        until(lambda: "\nalpha-trainer | step=" in screen.read_text()[lost:], seconds=60)
        assert workers == {worker_pid(home.folder / "alpha", "trainer"),
                           worker_pid(home.folder / "beta", "generator")}  # fmt: skip

        # Ctrl-C ends the log output, not the run.
        os.killpg(viewer.pid, signal.SIGINT)
        assert viewer.wait(timeout=20) == 0
        assert seen("^the run continues; logs: bin/lan logs --hosts .*, stop: bin/lan down")
        step_after(home.step)
        states = home.states()
        assert states["alpha-trainer"][2] == states["beta-0"][2] == "running", states

        assert_other_settings_are_refused(home)
        step_after(home.step)

        # A generator is restarted by name.
        before = worker_pid(home.folder / "beta", "generator")
        restarted = home.lan("restart", "beta-0")
        assert restarted.returncode == 0, restarted.stderr
        assert "beta-0: stopped" in restarted.stdout and "beta-0: started" in restarted.stdout
        assert worker_pid(home.folder / "beta", "generator") != before
        step_after(home.step)

        # The supervisor restarts a killed trainer, and status shows it.
        os.kill(worker_pid(home.folder / "alpha", "trainer"), signal.SIGKILL)
        step = home.step
        step_after(step + 2)
        line = home.lan("status").stdout.splitlines()[1].split()
        assert line[:3] == ["alpha-trainer", "alpha", "running"] and line[4] == "1", line

        assert home.lan("stop", "beta").returncode == 0
        assert home.states()["beta-0"][2] == "stopped"
    finally:
        viewer.kill()
        down = home.lan("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert processes_in(home.folder) == {}
    for port in range(home.port, home.port + 4):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((TRAINER_ADDRESS, port), timeout=1)
    assert json.loads((home.folder / "alpha/.lan/alpha-trainer.state").read_text())["stopped"]
    secrets = sorted(each.name for each in (home.folder / "beta/.lan/keys").iterdir())
    assert secrets == ["beta-0.secret", "trainer.public"]
