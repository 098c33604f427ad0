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
HANDED_ON = ("PATH", "PYTHONPATH")  # of our environment, to a supervisor that systemd starts


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


def given_to_systemd(name: str, words: Sequence[str], log: Path) -> bool:
    """Hand a supervisor over to systemd; False, and said, when it does not take it."""
    problem = _problem(_transient(name, words, log))
    if problem:
        sys.stdout.write(f"{name}: systemd-run failed ({problem}); started without it\n")
    return not problem


def _transient(name: str, words: Sequence[str], log: Path) -> list[str]:
    kept = [f"--setenv={each}={os.environ[each]}" for each in HANDED_ON if each in os.environ]
    return [
        "systemd-run", "--user", "--quiet", "--collect", f"--unit={_label(name)}",
        f"--working-directory={Path.cwd()}", "--property=KillMode=mixed",
        f"--property=StandardOutput=append:{log.absolute()}",
        f"--property=StandardError=append:{log.absolute()}",
        *kept, *words,
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
    if problem := _problem(words):
        raise ConfigError(f"{' '.join(words)} failed: {problem}; is it on this machine?")


def _problem(words: Sequence[str]) -> str | None:
    """Run a program of the system; what is wrong."""
    try:
        asked = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=SECONDS, env=_environment()
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    if asked.returncode == 0:
        return None
    return " ".join((asked.stderr or asked.stdout).split()) or f"exit code {asked.returncode}"


def _environment() -> dict[str, str]:
    """Ours, with the place of the user's systemd, which ssh does not always say."""
    return {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}


def _lingers() -> bool:
    return (LINGERERS / os.environ.get("USER", str(os.getuid()))).exists()


def _label(name: str) -> str:
    return f"peralta-{Path.cwd().name}-{name}"
