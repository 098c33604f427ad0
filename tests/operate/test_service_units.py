"""Units for the machine's start: what is installed, whether systems read it, what is undone."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import service_units, supervisor

ROOT = Path(__file__).parents[2]
LABEL = "peralta-project-pc-0"
LINGERING = """
import sys
from pathlib import Path
from peralta_zmq.operate import service_units, supervisor
service_units.LINGERERS = Path.cwd()  # where a file with our name says that we linger
assert service_units.systemd_keeps_us()
words = (sys.executable, "-c", "import signal; signal.pause()")
sys.exit(supervisor.start([supervisor.Job("pc-0", words, {})]))
"""


class Machine:
    """A home, a project, and a systemctl and launchctl that note what they are told."""

    def __init__(self, folder: Path) -> None:
        self.home, self.project, self._said = folder / "home", folder / "project", folder / "said"
        self._programs = folder / "bin"
        for each in (self.home, self.project, self._programs):
            each.mkdir()
        self.answer(0)

    def answer(self, code: int) -> None:
        """From now on they end with this code."""
        for name in ("systemctl", "launchctl", "systemd-run"):
            path = self._programs / name
            path.write_text(
                f"#!/bin/sh\necho {name} $* >> {self._said}\necho no bus >&2\nexit {code}\n"
            )
            path.chmod(0o755)

    @property
    def path(self) -> str:
        return f"{self._programs}:/usr/bin:/bin"

    @property
    def told(self) -> list[str]:
        return self._said.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setenv("HOME", str(made.home))
    monkeypatch.setenv("PATH", made.path)
    monkeypatch.setattr(service_units.platform, "system", lambda: "Linux")
    monkeypatch.chdir(made.project)
    return made


def files(folder: Path) -> Sequence[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]


def test_a_unit_is_installed_for_systemd_and_taken_away_again(machine: Machine) -> None:
    path = machine.home / f".config/systemd/user/{LABEL}.service"
    assert service_units.main("enable", ["pc-0"]) == 0
    assert files(machine.home) == [path]
    text = path.read_text()
    assert f"ExecStart={sys.executable} -m peralta_zmq.operate.supervisor run pc-0\n" in text
    assert f"WorkingDirectory={machine.project}\n" in text and "@" not in text
    assert machine.told == [
        "systemctl --user daemon-reload", f"systemctl --user enable {LABEL}.service"]  # fmt: skip
    assert service_units.main("disable", ["pc-0"]) == 0
    assert files(machine.home) == []
    assert machine.told[-1] == f"systemctl --user disable {LABEL}.service"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_the_unit(machine: Machine) -> None:
    service_units.main("enable", ["pc-0"])
    (path,) = files(machine.home)
    assert verified(path, machine) == (0, "")
    path.write_text(path.read_text().replace("KillMode=mixed", "KillMode=gently"))
    assert "gently" in verified(path, machine)[1]  # it reads what we think it reads


def verified(path: Path, machine: Machine) -> tuple[int, str]:
    """What `systemd-analyze verify` says of a user's unit."""
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(path)], capture_output=True, text=True,
        check=False, timeout=30, env={"XDG_RUNTIME_DIR": str(machine.home), "PATH": machine.path},
    )  # fmt: skip
    return ended.returncode, ended.stderr


def test_launchd_gets_a_property_list_with_the_same_command(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_units.platform, "system", lambda: "Darwin")
    assert service_units.main("enable", ["pc-0"]) == 0
    (path,) = files(machine.home)
    assert path == machine.home / f"Library/LaunchAgents/{LABEL}.plist"
    said = plistlib.loads(path.read_bytes())
    assert said["Label"] == LABEL and said["RunAtLoad"] is True
    assert said["WorkingDirectory"] == str(machine.project)
    assert said["ProgramArguments"] == [
        sys.executable, "-m", "peralta_zmq.operate.supervisor", "run", "pc-0"]  # fmt: skip
    log = f"{machine.project}/.lan/pc-0.log"
    assert said["StandardOutPath"] == said["StandardErrorPath"] == log
    assert machine.told[-1].startswith("launchctl bootstrap gui/")
    assert machine.told[-1].endswith(str(path))


def test_a_unit_that_the_system_refuses_is_taken_away_and_the_reason_told(
    machine: Machine,
) -> None:
    machine.answer(1)
    with pytest.raises(ConfigError) as refused:
        service_units.main("enable", ["pc-0"])
    assert str(refused.value) == (
        "systemctl --user daemon-reload failed: no bus; is it on this machine?"
    )
    assert files(machine.home) == []


# A supervisor of the system's, now.


def test_systemd_run_gets_whole_variables_and_only_those_that_are_set(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert service_units.given_to_systemd("pc-0", ["python", "x"], Path("log"))
    monkeypatch.setenv("PYTHONPATH", "/of/mine")
    assert service_units.given_to_systemd("pc-0", ["python", "x"], Path("log"))
    without, given = machine.told
    assert without.startswith(f"systemd-run --user --quiet --collect --unit={LABEL} ")
    assert without.endswith(f"--setenv=PATH={machine.path} python x")
    assert "PYTHONPATH" not in without and " --setenv=PYTHONPATH=/of/mine python x" in given


@pytest.mark.timeout(60)
def test_a_worker_that_systemd_does_not_take_starts_in_a_session_of_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.project / "me").touch()
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    refuses = Path(str(shutil.which("systemd-run")))
    refuses.write_text("#!/bin/sh\necho No medium found >&2\nexit 1\n")
    try:
        words = [sys.executable, "-c", LINGERING]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=40)
        pid = supervisor.supervisor_of("pc-0")
        assert done.returncode == 0 and pid and os.getsid(pid) == pid, done.stderr
        assert done.stdout == (
            "pc-0: systemd-run failed (No medium found); started without it\n"
            f"pc-0: started pid={pid}\n"
        )
    finally:
        assert supervisor.stop("pc-0") == 0
