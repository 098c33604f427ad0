"""systemd and launchd: services of supervisors, and units that start them at boot.

systemd ends a user's services at the user's last logout, unless lingering is enabled.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from peralta_zmq.errors import ConfigError

DOCS = Path(__file__).resolve().parents[2] / "docs"  # has the templates of the unit files
LINGER_FOLDER = Path("/var/lib/systemd/linger")  # has a file for each user with lingering
COMMAND_SECONDS = 10.0  # time limit of a command of systemd or launchd
PASSED_ENV = ("PATH", "PYTHONPATH")  # variables that a supervisor started by systemd needs


def main(command: str, names: Sequence[str]) -> None:
    """Enable or disable the start of workers at boot. Raises ConfigError."""
    enables = command == "enable"
    for name in names:
        path, text, commands = _unit(name, command)
        if enables:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        for words in commands:
            if problem := _run(words):
                if enables:
                    path.unlink()
                raise ConfigError(
                    f"{' '.join(words)} failed: {problem}; "
                    "does systemd (macOS: launchd) run for this user?"
                )
        if not enables:
            path.unlink(missing_ok=True)
        sys.stdout.write(f"{name}: {command}d, {path}\n")
    if enables and platform.system() == "Linux" and not _lingers():
        sys.stdout.write("to start before you log in: sudo loginctl enable-linger $USER\n")


def systemd_is_usable() -> bool:
    """True if systemd runs for this user and lingering is enabled."""
    if not shutil.which("systemd-run") or not _lingers():
        return False
    return _run(["systemctl", "--user", "show-environment"]) is None


def start_in_systemd(name: str, words: Sequence[str], log: Path) -> bool:
    """Start a supervisor as a transient service, output to `log`; False if systemd-run fails."""
    options = [f"--unit={_label(name)}", f"--working-directory={Path.cwd()}"]
    options += ["--property=KillMode=mixed"]  # SIGTERM to the supervisor only; it stops its worker
    options += [f"--property=Standard{to}=append:{log.absolute()}" for to in ("Output", "Error")]
    options += [f"--setenv={key}={os.environ[key]}" for key in PASSED_ENV if key in os.environ]
    command = ["systemd-run", "--user", "--quiet", "--collect"]
    problem = _run([*command, *options, *words])
    if problem:
        sys.stdout.write(f"{name}: systemd-run failed ({problem}); started without it\n")
    return not problem


def _unit(name: str, command: str) -> tuple[Path, str, list[list[str]]]:
    """Path and text of a worker's unit file, and the commands to enable or disable it."""
    label = _label(name)
    if platform.system() == "Darwin":
        path = Path.home() / "Library/LaunchAgents" / f"{label}.plist"
        domain = f"gui/{os.getuid()}"
        enable = ["bootstrap", domain, str(path)]
        disable = ["bootout", f"{domain}/{label}"]
        words = enable if command == "enable" else disable
        return path, _unit_text("worker.plist", name), [["launchctl", *words]]
    path = Path.home() / ".config/systemd/user" / f"{label}.service"
    systemctl = ["systemctl", "--user"]
    commands = [[*systemctl, "daemon-reload"], [*systemctl, command, path.name]]
    return path, _unit_text("worker.service", name), commands


def _unit_text(template: str, name: str) -> str:
    path = DOCS / template
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; run bin/lan sync") from None
    values = {"NAME": name, "DIR": Path.cwd(), "PYTHON": sys.executable, "LABEL": _label(name)}
    for key, value in values.items():
        text = text.replace(f"@{key}@", str(value))
    return text


def _run(words: Sequence[str]) -> str | None:
    """Run a command of systemd or launchd; returns the problem, None if it succeeds."""
    # systemctl finds the user's systemd by this variable, which an ssh session often lacks.
    environment = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=COMMAND_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {COMMAND_SECONDS:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    if done.returncode == 0:
        return None
    return " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"


def _lingers() -> bool:
    return (LINGER_FOLDER / os.environ.get("USER", str(os.getuid()))).exists()


def _label(name: str) -> str:
    """Name of a worker's unit, with the project folder: a machine may have several."""
    return f"peralta-{Path.cwd().name}-{name}"
