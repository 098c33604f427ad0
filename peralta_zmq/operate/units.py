"""systemd and launchd: whether a worker can be theirs now, and units for the machine's start.

Knows the two templates in docs/ and where the systems want them; knows nothing of ssh.
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

DOCS = Path(__file__).resolve().parents[2] / "docs"
LINGERERS = Path("/var/lib/systemd/linger")  # users whose services outlive their logins
SECONDS = 10.0  # for a word from systemd


def main(command: str, names: Sequence[str]) -> int:
    """`enable` or `disable` workers at the start of the machine. Raises ConfigError."""
    for name in names:
        path, text, commands = _unit(name, enable=command == "enable")
        if command == "enable":
            _install(path, text, commands)
        else:
            for words in commands:
                _ask(words)
            path.unlink(missing_ok=True)
        sys.stdout.write(f"{name}: {command}d, {path}\n")
    if command == "enable" and platform.system() == "Linux" and not _lingers():
        sys.stdout.write("to start before you log in: sudo loginctl enable-linger $USER\n")
    return 0


def systemd_keeps_us() -> bool:
    """Whether a service of this user outlives the login: systemd is there, and lingers for us."""
    if not shutil.which("systemd-run") or not _lingers():
        return False
    words = ["systemctl", "--user", "show-environment"]
    try:
        asked = subprocess.run(
            words, capture_output=True, check=False, timeout=SECONDS, env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def transient(name: str, words: Sequence[str], log: Path) -> list[str]:
    """The command that hands a supervisor over to systemd."""
    os.environ.update(_environment())
    return [
        "systemd-run", "--user", "--quiet", "--collect", f"--unit={_label(name)}",
        f"--working-directory={Path.cwd()}", "--property=KillMode=mixed",
        f"--property=StandardOutput=append:{log.absolute()}",
        f"--property=StandardError=append:{log.absolute()}",
        "--setenv=PYTHONPATH", "--setenv=PATH", *words,
    ]  # fmt: skip


def unit_text(template: str, name: str) -> str:
    """A template of docs/ filled in for a worker of this folder. Raises ConfigError."""
    path = DOCS / template
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; run bin/lan sync") from None
    filled = {"@NAME@": name, "@DIR@": str(Path.cwd()), "@PYTHON@": sys.executable,
              "@LABEL@": _label(name)}  # fmt: skip
    for place, value in filled.items():
        text = text.replace(place, value)
    return text


def _unit(name: str, *, enable: bool) -> tuple[Path, str, list[list[str]]]:
    label = _label(name)
    if platform.system() == "Darwin":
        path = Path.home() / "Library/LaunchAgents" / f"{label}.plist"
        domain = f"gui/{os.getuid()}"
        words = ["bootstrap", domain, str(path)] if enable else ["bootout", f"{domain}/{label}"]
        return path, unit_text("worker.plist", name), [["launchctl", *words]]
    path = Path.home() / ".config/systemd/user" / f"{label}.service"
    verb = "enable" if enable else "disable"
    commands = [["systemctl", "--user", "daemon-reload"], ["systemctl", "--user", verb, path.name]]
    return path, unit_text("worker.service", name), commands


def _install(path: Path, text: str, commands: Sequence[Sequence[str]]) -> None:
    """Write a unit and announce it; what the system refuses does not stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    try:
        for words in commands:
            _ask(words)
    except ConfigError:
        path.unlink()
        raise


def _ask(words: Sequence[str]) -> None:
    try:
        asked = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=SECONDS, env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{words[0]} does not answer ({error}); is it on this machine?") from None
    if asked.returncode:
        said = " ".join((asked.stderr or asked.stdout).split())
        raise ConfigError(f"{' '.join(words)} failed: {said}; is it on this machine?")


def _environment() -> dict[str, str]:
    """Ours, with the place of the user's systemd, which ssh does not always say."""
    return {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}


def _lingers() -> bool:
    return (LINGERERS / os.environ.get("USER", str(os.getuid()))).exists()


def _label(name: str) -> str:
    return f"peralta-{Path.cwd().name}-{name}"
