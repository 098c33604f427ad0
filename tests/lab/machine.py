"""A guest kernel as a process of the host.

`user-mode-linux` runs without privileges and does not change the host: its root is the host's,
read-only, its disks are sparse files, and killing the process is a power cut.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import packages

TESTS = Path(__file__).parents[1]
DISK_MIB = {"big": 1024, "small": 48}
MEMORY = "1G"


@functools.cache
def check_kernel(cache: Path) -> None:
    """Start the kernel with a program that ends at once.

    Raises LabMissing if it cannot start a program: that of Debian 12 cannot restore the registers
    of a processor with AMX, which are larger than its buffer.
    """
    options = ("mem=256M", "rootfstype=hostfs", "hostfs=/", "ro", "con=null", "con0=null,fd:1")
    command = [str(cache / "usr/bin/linux.uml"), *options, "init=/bin/true"]
    guest = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=60, check=False,
    )  # fmt: skip
    if b"exitcode=0x00000000" not in guest.stdout:  # printed because init has ended
        reason = b" ".join(re.findall(rb"ptrace set fp regs failed.*|Kernel panic.*", guest.stdout))
        raise packages.LabMissing(
            f"the guest kernel cannot start a program on this processor: {reason.decode()}"
        )


class Machine:
    """A guest with two disks in a folder; `on` starts it."""

    def __init__(self, folder: Path) -> None:
        """Raises LabMissing if the guest cannot run here."""
        self._cache = packages.unpacked()
        check_kernel(self._cache)
        self.folder = folder
        for name, size in DISK_MIB.items():
            with (folder / name).open("wb") as file:
                file.truncate(size << 20)
            self._ext4(folder / name)

    def _ext4(self, file: Path) -> None:
        libraries = {**os.environ, "LD_LIBRARY_PATH": str(self._cache / "usr/lib/x86_64-linux-gnu")}
        command = [str(self._cache / "usr/sbin/mke2fs"), "-q", "-t", "ext4", "-m", "0", str(file)]
        subprocess.run(command, check=True, timeout=30, env=libraries)

    @contextlib.contextmanager
    def on(self, scenario: str, **arguments: Any) -> Iterator[Running]:
        """Boot and start a scenario; leaving the block cuts the power."""
        job = {"cache": str(self._cache), "scenario": scenario, "arguments": arguments}
        (self.folder / "job.json").write_text(json.dumps(job), "utf-8")
        running = Running(self._start())
        try:
            yield running
        finally:
            running.cut_power()

    def _start(self) -> subprocess.Popen[bytes]:
        disks = [
            f"ubd{letter}={self.folder / name}" for letter, name in zip("ab", DISK_MIB, strict=True)
        ]
        kernel = [
            str(self._cache / "usr/bin/linux.uml"), f"mem={MEMORY}", *disks,
            "rootfstype=hostfs", "hostfs=/", "ro", "quiet", "con=null", "con0=null,fd:1",
            f"PYTHONPATH={TESTS}:{TESTS.parent}:{TESTS}/support",  # unknown options go to init
            f"init={sys.executable}", "--", "-B", "-m", "lab.guest_init", str(self.folder),
        ]  # fmt: skip
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder)}
        return subprocess.Popen(
            kernel, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip

    def run(self, scenario: str, *, timeout: float, **arguments: Any) -> list[dict[str, Any]]:
        """Boot, run a scenario to its end, and return its events."""
        with self.on(scenario, **arguments) as running:
            return list(running.events(timeout=timeout))


class Running:
    """A running guest."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process, self._console = process, process.stdout
        self._rest = b""
        self._words: list[str] = []

    def events(self, *, timeout: float) -> Iterator[dict[str, Any]]:
        """Events of the scenario until it has finished.

        Raises AssertionError with the end of the guest's console if it fails or times out.
        """
        deadline = time.monotonic() + timeout
        for line in self._lines(deadline):
            if not line.startswith("@{"):
                self._words.append(line)
                continue
            event = json.loads(line[1:])
            if event.get("event") == "failed":
                raise AssertionError(f"in the guest: {event['traceback']}\n{self.last_words}")
            yield event
            if event.get("event") == "finished":
                return
        raise AssertionError(f"the guest did not finish within {timeout} s:\n{self.last_words}")

    @property
    def last_words(self) -> str:
        """The last lines printed by the kernel and its programs."""
        return "\n".join(self._words[-30:])

    def cut_power(self) -> list[dict[str, Any]]:
        """SIGKILL the kernel, which loses all unwritten data; returns the unread events."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._console.closed:
            return []
        lines = list(self._lines(time.monotonic() + 5))
        self._console.close()
        return [json.loads(line[1:]) for line in lines if line.startswith("@{")]

    def _lines(self, deadline: float) -> Iterator[str]:
        """Complete lines of the console until it closes."""
        while True:
            while b"\n" not in self._rest:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._console], [], [], left)[0]:
                    return
                if not (read := os.read(self._console.fileno(), 65536)):
                    return
                self._rest += read
            line, self._rest = self._rest.split(b"\n", 1)
            yield line.decode(errors="replace").strip()
