"""Unit files for systemd and launchd."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import service_units

LABEL = "peralta-project-pc-0"


class Machine:
    """A home, a project, and stand-ins for systemctl and launchctl that log their arguments."""

    def __init__(self, folder: Path) -> None:
        self.home, self.project, self._log = folder / "home", folder / "project", folder / "log"
        self._programs = folder / "bin"
        for path in (self.home, self.project, self._programs):
            path.mkdir()
        self.set_exit_code(0)

    def set_exit_code(self, code: int) -> None:
        """Exit code of the stand-ins from now on."""
        for name in ("systemctl", "launchctl"):
            path = self._programs / name
            path.write_text(
                f"#!/bin/sh\necho {name} $* >> {self._log}\necho no bus >&2\nexit {code}\n"
            )
            path.chmod(0o755)

    @property
    def path(self) -> str:
        return f"{self._programs}:/usr/bin:/bin"

    @property
    def commands(self) -> list[str]:
        return self._log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setenv("HOME", str(machine.home))
    monkeypatch.setenv("PATH", machine.path)
    monkeypatch.setattr(service_units.platform, "system", lambda: "Linux")
    monkeypatch.chdir(machine.project)
    return machine


def files(folder: Path) -> Sequence[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_systemd_unit_is_installed_and_removed(machine: Machine) -> None:
    path = machine.home / f".config/systemd/user/{LABEL}.service"
    service_units.main("enable", ["pc-0"])
    assert files(machine.home) == [path]
    text = path.read_text()
    assert f"ExecStart={sys.executable} -m peralta_zmq.operate.supervisor run pc-0\n" in text
    assert f"WorkingDirectory={machine.project}\n" in text and "@" not in text
    assert machine.commands == [
        "systemctl --user daemon-reload", f"systemctl --user enable {LABEL}.service"]  # fmt: skip
    service_units.main("disable", ["pc-0"])
    assert files(machine.home) == []
    assert machine.commands[-1] == f"systemctl --user disable {LABEL}.service"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_accepts_the_unit(machine: Machine) -> None:
    service_units.main("enable", ["pc-0"])
    (path,) = files(machine.home)
    assert verify(path, machine) == (0, "")
    path.write_text(path.read_text().replace("KillMode=mixed", "KillMode=gently"))
    assert "gently" in verify(path, machine)[1]  # the check detects an error


def verify(path: Path, machine: Machine) -> tuple[int, str]:
    """Exit code and errors of `systemd-analyze verify` for a user unit."""
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(path)], capture_output=True, text=True,
        check=False, timeout=30, env={"XDG_RUNTIME_DIR": str(machine.home), "PATH": machine.path},
    )  # fmt: skip
    return ended.returncode, ended.stderr


def test_launchd_agent_runs_the_same_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_units.platform, "system", lambda: "Darwin")
    service_units.main("enable", ["pc-0"])
    (path,) = files(machine.home)
    assert path == machine.home / f"Library/LaunchAgents/{LABEL}.plist"
    agent = plistlib.loads(path.read_bytes())
    assert agent["Label"] == LABEL and agent["RunAtLoad"] is True
    assert agent["WorkingDirectory"] == str(machine.project)
    assert agent["ProgramArguments"] == [
        sys.executable, "-m", "peralta_zmq.operate.supervisor", "run", "pc-0"]  # fmt: skip
    log = f"{machine.project}/.lan/pc-0.log"
    assert agent["StandardOutPath"] == agent["StandardErrorPath"] == log
    assert machine.commands[-1].startswith("launchctl bootstrap gui/")
    assert machine.commands[-1].endswith(str(path))


def test_rejected_unit_is_removed_and_the_reason_reported(machine: Machine) -> None:
    machine.set_exit_code(1)
    with pytest.raises(ConfigError) as refused:
        service_units.main("enable", ["pc-0"])
    assert str(refused.value) == (
        "systemctl --user daemon-reload failed: no bus; "
        "does systemd (macOS: launchd) run for this user?"
    )
    assert files(machine.home) == []
