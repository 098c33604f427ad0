"""Commands and system calls that run in the guest."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
MNT_DETACH = 2
DISKS = {"big": "/dev/ubda", "small": "/dev/ubdb"}
BUSYBOX = ("modprobe", "insmod", "poweroff")
READY_SECONDS = 30
COMMAND_SECONDS = 120


def send_event(**fields: Any) -> None:
    """Send one JSON line to the host."""
    print("@" + json.dumps(fields), flush=True)


def run(*command: str | Path, check: bool = True) -> str:
    """Output of a command. Raises RuntimeError with its error output."""
    words = [str(word) for word in command]
    if words[0] in BUSYBOX:
        words.insert(0, "busybox")
    result = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_SECONDS
    )
    if check and result.returncode:
        raise RuntimeError(f"{' '.join(words)}: {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def until(ready: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> None:
    """Wait until `ready()` is true. Raises TimeoutError that names the missing condition."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds} s still not: {what}")
        time.sleep(0.05)


def mount(what: str, where: str | Path, kind: str, options: str = "") -> None:
    """Call mount(2), as there is no /bin/mount yet. Raises OSError."""
    arguments = (what.encode(), str(where).encode(), kind.encode(), 0, options.encode())
    if LIBC.mount(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount {kind} {where} {options}")


def unmount(where: Path, *, at_once: bool) -> None:
    """Unmount; without `at_once` raises OSError while files are open."""
    if LIBC.umount2(str(where).encode(), MNT_DETACH if at_once else 0):
        raise OSError(ctypes.get_errno(), f"umount {where}")


def disk(name: str) -> Path:
    """Mount one of the machine's ext4 disks."""
    folder = Path(f"/srv/{name}")
    folder.mkdir(exist_ok=True)
    mount(DISKS[name], folder, "ext4", "commit=1")
    return folder
