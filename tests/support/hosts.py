"""Hosts for tests of bin/lan: two that do not exist, and simulated machines.

A simulated machine is a folder with a Python environment, with an sshd on loopback. Needs no
privileges; all files are in the test's folder.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import tomli_w

from peralta_zmq.config import Config
from peralta_zmq.config.hosts import Host, Hosts
from peralta_zmq.config.sections import SecuritySection, WireSection
from tools.run_history import DEMO_OPTIONS

REPO = Path(__file__).parents[2]
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin:/usr/local/sbin")
needs_rsync = pytest.mark.skipif(not shutil.which("rsync"), reason="no rsync on this machine")
needs_sshd = pytest.mark.skipif(
    not (SSHD and shutil.which("ssh") and shutil.which("rsync")),
    reason="no sshd, ssh or rsync on this machine (Debian: apt install openssh-server rsync)",
)
SMALL = (
    *DEMO_OPTIONS,
    *("--sampling.num-generations", "4", "--train.batch-size", "16", "--engine.slots", "8"),
    *("--eval.num-examples", "4", "--no-eval.eval-base-model", "--checkpoint.interval", "5"),
    *("--train.max-off-policy-steps", "6"),
)
MAC = Host(name="mac", ssh="mac.local", role="trainer", count=1, weights_dir="/Volumes/my nas/w")
PC = Host(name="pc", ssh="-p 2222 me@pc", count=2, device="cuda", weights_dir="/mnt/nas/w",
          python="python3.11", env={"A": "b c"})  # fmt: skip
HOSTS = Hosts(host=(MAC, PC))


def config(**sections: object) -> Config:
    defaults = {"wire": WireSection(host="mac.local", bind="0.0.0.0"),
                "security": SecuritySection(insecure=True)}  # fmt: skip
    return Config.model_validate({**defaults, **sections})


def make_machine(folder: Path) -> Path:
    """A project folder that bin/lan has used before, with our environment and without code."""
    prefix, environment = Path(sys.prefix), folder / ".venv"
    environment.mkdir(parents=True)
    (folder / ".lan").mkdir()
    for name in ("bin", "lib"):
        (environment / name).symlink_to(prefix / name)
    shutil.copy(prefix / "pyvenv.cfg", environment)
    (environment / "ready").touch()
    return folder


def hosts_file(path: Path, *hosts: dict[str, object]) -> Path:
    """Write a hosts file with these [[host]] tables."""
    path.write_text(tomli_w.dumps({"host": hosts}))
    return path


def lan(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run bin/lan to its end."""
    return subprocess.run(  # type: ignore[call-overload]
        [sys.executable, str(REPO / "bin/lan"), *words], capture_output=True, text=True,
        cwd=REPO, check=False, timeout=100, **options,
    )  # fmt: skip


class Sshd:
    """An sshd on a free loopback port, and the config of a client that connects to it."""

    def __init__(self, folder: Path, *extra: str) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("host_key", "user_key", "stranger_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._config = folder / "sshd_config"
        self._config.write_text("\n".join([
            f"Port {self.port}", "ListenAddress 127.0.0.1", f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/authorized_keys", "PidFile none", "UsePAM no",
            "StrictModes no", "PasswordAuthentication no", "KbdInteractiveAuthentication no",
            "PermitRootLogin yes", "MaxStartups 100", *extra, "",
        ]))  # fmt: skip
        public = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {public}")
        self.config = self.client("ssh_config", key="user_key")

    def client(self, name: str, *, key: str, port: int | None = None) -> Path:
        """A file for ssh -F that maps every host name to this server."""
        path = self.folder / name
        path.write_text("\n".join([
            "Host *", "HostName 127.0.0.1", f"Port {port or self.port}",
            f"User {getpass.getuser()}", f"IdentityFile {self.folder / key}",
            "IdentitiesOnly yes", f"UserKnownHostsFile {self.folder}/known_hosts",
            "StrictHostKeyChecking yes", "",
        ]))  # fmt: skip
        return path

    def start(self) -> None:
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # required by sshd of root
        words = [str(SSHD), "-D", "-e", "-f", str(self._config)]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError((self.folder / "log").read_text())

    def drop_connections(self) -> int:
        """Kill every ssh session, as a lost connection would; returns their number."""
        children = psutil.Process(self._process.pid).children()
        for child in children:
            child.kill()
        return len(children)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def sshd(folder: Path, *extra: str) -> Iterator[Sshd]:
    server = Sshd(folder, *extra)
    server.start()
    try:
        yield server
    finally:
        server.drop_connections()
        server.close()


def processes_in(folder: Path) -> dict[int, str]:
    """Command lines, by process id, of processes whose working folder is inside `folder`."""
    commands: dict[int, str] = {}
    for process in psutil.process_iter():
        try:
            cwd, command = Path(process.cwd()), " ".join(process.cmdline())
        except psutil.Error:
            continue
        if cwd.is_relative_to(folder) and command:
            commands[process.pid] = command
    return commands
