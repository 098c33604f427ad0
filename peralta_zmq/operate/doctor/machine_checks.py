"""Checks of this machine: versions, device, reward, sleep, local network."""

from __future__ import annotations

import errno
import importlib.metadata
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress

from packaging.requirements import Requirement
from packaging.version import Version

from peralta_zmq.config import Config
from peralta_zmq.operate.doctor.checks import Check

# Remedy for a Mac without the Local Network permission.
LOCAL_NETWORK = (
    "allow your terminal (or Python) in System Settings > Privacy & Security > Local Network, "
    "and start it again"
)


def installed_version(library: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(library)


def check_installation() -> Check:
    try:
        requirements = importlib.metadata.requires("peralta_zmq") or []
    except importlib.metadata.PackageNotFoundError:
        detail = f"peralta_zmq is not installed in {sys.executable}"
        return Check(False, detail, "run make setup, then use .venv/bin/python")
    return check_versions(sys.version_info[:3], requirements)


def check_versions(
    python: tuple[int, ...],
    requirements: Iterable[str],
    version_of: Callable[[str], str | None] = installed_version,
) -> Check:
    """Check the version of Python and of every library in lines such as "torch>=2.4"."""
    wrong: list[str] = []
    for library in map(Requirement, requirements):
        if library.marker:  # belongs to an extra, or to another Python
            continue
        version = version_of(library.name)
        # NVIDIA's torch for Jetson is a pre-release (2.6.0a0+nv25.01); it counts as the release.
        if version is None or Version(version).base_version not in library.specifier:
            wrong.append(f"{library.name} {version or 'is missing'} (needs {library.specifier})")
    if wrong:
        remedy = "run make setup, or pip install --editable . in this Python"
        return Check(False, ", ".join(wrong), remedy)
    shown = [f"{name} {version_of(name)}" for name in ("torch", "transformers", "pyzmq")]
    detail = ", ".join([f"Python {'.'.join(map(str, python))}", *shown])
    if (3, 12, 0) <= python < (3, 12, 6):  # cpython issue 113993
        detail += "; this Python leaks the memory of field names in messages"
        return Check(True, detail, "use Python 3.12.6 or newer, or 3.11, for a trainer")
    return Check(True, detail)


def check_device(config: Config) -> Check:
    """Report device, dtype and cores. Raises ConfigError if the device is missing."""
    from peralta_zmq import models

    device = models.choose_device(config.model.device)
    dtype, reason = models.choose_dtype(device, config.model.dtype)
    name = str(dtype).removeprefix("torch.")
    detail = f"{models.device_name(device)}, {name} ({reason}), {models.available_cores()} cores"
    if device.type == "cpu" and config.model.device == "auto" and shutil.which("nvidia-smi"):
        detail = f"{detail}; nvidia-smi is installed, but torch finds no GPU"
        return Check(True, detail, "install a CUDA build of torch; for a Jetson see README")
    return Check(True, detail)


def check_reward(config: Config) -> Check:
    """Score one correct answer per environment. Raises ConfigError or TaskError."""
    from peralta_zmq.build import open_environments

    details: list[str] = []
    with closing(open_environments(config, "train")) as environments:
        for name, size in environments.sizes.items():
            problem = next(each for each in environments.problems if each.task == name)
            if environments.has_agent(problem):
                details.append(f"{name}: {size} problems, rewarded by an agent, which was not run")
                continue
            # Not timed: the first call starts the reward processes.
            environments.reward(problem, problem.answer)
            started = time.monotonic()
            reward = environments.reward(problem, problem.answer)
            seconds = time.monotonic() - started
            example = f"the answer {problem.answer[:20]!r} earns {reward:g}"
            details.append(f"{name}: {size} problems, {example} in {1e3 * seconds:.1f} ms")
    return Check(True, "; ".join(details))


def check_sleep(system: str, has_battery: bool) -> Check:
    """Check whether the machine may fall asleep; `system` is that of platform.system()."""
    if system == "Darwin":
        settings = output_of(["pmset", "-g"])
        minutes = re.search(r"^\s*sleep\s+(\d+)(.*)$", settings, re.MULTILINE)
        if minutes is None or minutes[1] == "0" or "prevented" in minutes[2]:
            return Check(True, "this Mac does not fall asleep by itself")
        detail = f"this Mac falls asleep after {minutes[1]} minutes without use"
        return Check(True, detail, "start the worker with caffeinate -is COMMAND")
    targets = output_of(["systemctl", "is-enabled", "sleep.target", "suspend.target"])
    inhibitors = output_of(["systemd-inhibit", "--list", "--no-legend"])
    is_inhibited = re.search(r"\bsleep\b.*\bblock\b", inhibitors) is not None
    is_desktop = output_of(["systemctl", "is-active", "graphical.target"]).strip() == "active"
    if "masked" in targets or is_inhibited or not (has_battery or is_desktop):
        return Check(True, "this machine does not fall asleep by itself")
    kind = "laptop" if has_battery else "desktop"
    inhibit = "start the worker with systemd-inhibit --what=idle:sleep:handle-lid-switch COMMAND"
    return Check(True, f"a {kind} may fall asleep, which pauses its workers", inhibit)


def check_local_network(system: str, host: str) -> Check | None:
    """Check the Local Network permission of a Mac by sending to a host; None on other systems.

    Without the permission the send fails with EHOSTUNREACH; macOS asks for it only in programs with
    a window.
    """
    if system != "Darwin":
        return None
    if send_packet(host) == errno.EHOSTUNREACH:
        detail = "macOS keeps this program from the local network"
        return Check(False, detail, LOCAL_NETWORK)
    return Check(True, "macOS lets this program into the local network")


def send_packet(host: str) -> int:
    """Send an empty packet to the discard port of a host; returns errno or 0."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as opened:
            opened.sendto(b"", (host, 9))
    except OSError as error:
        return error.errno or 0
    return 0


def output_of(command: Sequence[str]) -> str:
    """The output of a command; empty if the command does not exist or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
