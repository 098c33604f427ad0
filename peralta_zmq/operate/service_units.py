"""Units of systemd and launchd, which start supervisors at boot."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from peralta_zmq.errors import ConfigError

DOCS = Path(__file__).resolve().parents[2] / "docs"  # has the templates of the unit files


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
    if enables and platform.system() == "Linux":
        sys.stdout.write("to start before you log in: sudo loginctl enable-linger $USER\n")


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


def _run(words: Sequence[str], seconds: float = 10.0) -> str | None:
    """Run a command of systemd or launchd; returns the problem, None if it succeeds."""
    # systemctl finds the user's systemd by this variable, which an ssh session often lacks.
    environment = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    if done.returncode == 0:
        return None
    return " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"


def _label(name: str) -> str:
    """Name of a worker's unit, with the project folder: a machine may have several."""
    return f"peralta-{Path.cwd().name}-{name}"
