"""This machine: versions, device, sleep, and what macOS keeps from us. Knows no run and no folder.

Each look takes what it asks the system with as arguments, so that it can be shown another one.
"""

from __future__ import annotations

import errno
import importlib.metadata
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from peralta_zmq.config import Config
from peralta_zmq.operate.doctor.check import Check

PACKAGE = "peralta_zmq"
OLDEST_PYTHON = (3, 10)
LEAKY_PYTHON = ((3, 12, 0), (3, 12, 6))  # from, and below: github.com/python/cpython gh-113993
AT_LEAST = re.compile(r"([A-Za-z0-9_-]+)(?:\[\w+\])?[^;]*?>=([\d.]+)[^;]*(;.*)?")
SHOWN = ("torch", "transformers", "pyzmq")  # of the libraries that are all right
POWER = Path("/sys/class/power_supply")
LOCAL_NETWORK = (
    "allow your terminal (or Python) in System Settings > Privacy & Security > Local Network, "
    "and start it again"
)
INHIBIT = "start it with systemd-inhibit --what=idle:sleep:handle-lid-switch COMMAND"
Ask: TypeAlias = Callable[[Sequence[str]], str]  # what a command prints; empty when it cannot run


def installed_version(library: str) -> str | None:
    """The version of a library of this Python, or None."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def this_python() -> tuple[tuple[int, ...], list[str]]:
    """Its version, and what the package asks for as pyproject.toml has it; nothing when it is not
    installed.
    """
    try:
        asked = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        asked = []
    return tuple(sys.version_info[:3]), asked


def check_versions(
    python: tuple[int, ...],
    requirements: Iterable[str],
    version_of: Callable[[str], str | None] = installed_version,
) -> Check:
    """Python, and every library that the package asks for."""
    here = ".".join(map(str, python[:3]))
    if python[:2] < OLDEST_PYTHON:
        return Check("versions", False, f"Python {here} is too old", "use Python 3.10 or newer")
    asked = [found for each in requirements if (found := AT_LEAST.match(each)) and not found[3]]
    if not asked:
        return Check("versions", False, f"{PACKAGE} is not installed in {sys.executable}",
                     "run make setup, then use .venv/bin/python")  # fmt: skip
    found = {name: version_of(name) for name in (each[1] for each in asked)}
    wrong = [
        f"{name} {found[name] or 'is missing'} (needs {least})"
        for name, least in ((each[1], each[2]) for each in asked)
        if not _reaches(found[name], least)
    ]
    if wrong:
        return Check("versions", False, ", ".join(wrong),
                     "run make setup, or pip install --editable . in this Python")  # fmt: skip
    shown = ", ".join(f"{name} {found.get(name) or version_of(name)}" for name in SHOWN)
    if LEAKY_PYTHON[0] <= python < LEAKY_PYTHON[1]:
        return Check("versions", True, f"Python {here} never frees names that it has read, {shown}",
                     "use Python 3.12.6 or newer, or 3.11, for a trainer")  # fmt: skip
    return Check("versions", True, f"Python {here}, {shown}")


def check_device(config: Config, *, has_gpu: bool | None = None) -> Check:
    """Which device computes, in which numbers, and why. Raises ConfigError for one not here."""
    from peralta_zmq import models

    device = models.choose_device(config.model.device)
    dtype, reason = models.choose_dtype(device, config.model.dtype)
    name = str(dtype).removeprefix("torch.")
    detail = f"{models.device_name(device)}, {name} ({reason}), {models.available_cores()} cores"
    seen = shutil.which("nvidia-smi") is not None if has_gpu is None else has_gpu
    if device.type == "cpu" and seen and config.model.device == "auto":
        return Check("device", True, f"{detail}; nvidia-smi is here, but torch sees no GPU",
                     "install a CUDA build of torch; for a Jetson see README")  # fmt: skip
    return Check("device", True, detail)


def check_sleep(system: str, ask: Ask, *, on_battery: bool) -> Check:
    """Whether the machine may fall asleep in the middle of a run."""
    if system == "Darwin":
        return _sleep_of_mac(ask(["pmset", "-g"]))
    masked = "masked" in ask(["systemctl", "is-enabled", "sleep.target", "suspend.target"])
    held = [line for line in ask(["systemd-inhibit", "--list", "--no-legend"]).splitlines()
            if re.search(r"\bsleep\b.*\bblock\b", line)]  # fmt: skip
    desktop = ask(["systemctl", "is-active", "graphical.target"]).strip() == "active"
    if masked or held or not (on_battery or desktop):
        return Check("sleep", True, "this machine does not fall asleep by itself")
    kind = "laptop" if on_battery else "desktop"
    return Check("sleep", True, f"a {kind} may fall asleep; what is under way then waits", INHIBIT)


def check_local_network(system: str, send: Callable[[], int]) -> Check | None:
    """On a Mac: whether it lets us speak to other machines of its network; None elsewhere.

    `send` sends a packet into the network and returns the error number, 0 for none. macOS refuses
    with EHOSTUNREACH, and asks nobody when there is no window to ask in.
    """
    if system != "Darwin":
        return None
    if send() == errno.EHOSTUNREACH:
        return Check("localnet", False, "macOS keeps this program from the local network",
                     LOCAL_NETWORK)  # fmt: skip
    return Check("localnet", True, "macOS lets this program into the local network")


def send_into(host: str) -> Callable[[], int]:
    """What sends one empty packet to a machine, to a port that nobody listens on."""

    def send() -> int:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
                opened.sendto(b"", (host, 9))  # discard
        except OSError as error:
            return error.errno or 0
        return 0

    return send


def printed_by(command: Sequence[str]) -> str:
    """What a command prints, whatever its exit code; empty when it is not there or hangs."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=False
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""


def system() -> str:
    """Linux or Darwin."""
    return platform.system()


def has_battery(supplies: Path = POWER) -> bool:
    """Whether this is a laptop (Linux)."""
    return supplies.is_dir() and any(supplies.glob("BAT*"))


def _sleep_of_mac(settings: str) -> Check:
    minutes = re.search(r"^\s*sleep\s+(\d+)(.*)$", settings, re.MULTILINE)
    if minutes is None or minutes[1] == "0" or "prevented" in minutes[2]:
        return Check("sleep", True, "this Mac does not fall asleep by itself")
    return Check("sleep", True, f"this Mac falls asleep after {minutes[1]} minutes without use",
                 "start it with caffeinate -is COMMAND")  # fmt: skip


def _reaches(version: str | None, least: str) -> bool:
    return version is not None and _numbers(version) >= _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version.partition("+")[0])[:3])
