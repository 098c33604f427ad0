"""Run the real programs in tests, and check the promises of their run.

Programs that a test leaves running are killed at its end.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from peralta_zmq.observe.metrics import Row, read_rows
from tools.chaos import SEED, seed_of
from tools.link_proxy import free_ports
from tools.promise_checker import check
from tools.run_history import DEMO_OPTIONS, RECORDING_OPTIONS, read_history
from tools.small_disk import MOUNTING

REPO = Path(__file__).parents[2]
SMALL = (
    *DEMO_OPTIONS,
    *("--sampling.num-generations", "4", "--train.batch-size", "16"),
    *("--engine.slots", "8", "--eval.num-examples", "4", "--no-eval.eval-base-model"),
    *("--checkpoint.interval", "5"),
    *("--run.num-workers", "2"),
    *("--train.max-off-policy-steps", "4", *RECORDING_OPTIONS),
)


class Program:
    """A started program and its output."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=REPO,
                env={**os.environ, **environment},
            )  # fmt: skip

    @property
    def printed(self) -> str:
        """Output of both streams, earlier starts with the same log included."""
        return self.log.read_text("utf-8", errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.process.kill()
        self.process.wait()

    def wait(self, *, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(timeout)


class RealRun:
    """One run folder, its programs, and the files that they write."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.port = free_ports()
        self.folder = folder / "run"
        self._parent = folder
        self._settings = ("--run.dir", str(folder), "--run.name", "run",
                          "--wire.port", str(self.port), *SMALL, *settings)  # fmt: skip
        self._started: list[Program] = []
        self._logs: list[Path] = []

    def trainer(self, *settings: str, **options: Any) -> Program:
        """Start bin/trainer; later settings override. `options` are those of `start`."""
        return self.start("trainer", *settings, log="trainer", **options)

    def generator(self, name: str, *settings: str, **options: Any) -> Program:
        """Start bin/generator under this name."""
        log = f"generator-{name}"
        return self.start("generator", "--generator.name", name, *settings, log=log, **options)

    def start(
        self,
        name: str,
        *settings: str,
        log: str,
        shell: str = 'exec "$@"',
        environment: Mapping[str, str] | None = None,
    ) -> Program:
        """Start a program of bin/ with this run's settings; `shell` may set limits or redirect."""
        program = [sys.executable, str(REPO / "bin" / name)]
        if name == "lan":
            program.append("local")
        command = ["/bin/sh", "-c", shell, "sh", *program, *self._settings, *settings]
        file = self._parent / f"{log}.log"
        if name == "generator":
            self._logs = list(dict.fromkeys([*self._logs, file]))
        self._started.append(Program(command, file, environment or {}))
        return self._started[-1]

    @property
    def rows(self) -> list[Row]:
        """metrics.jsonl so far."""
        return read_rows(self.folder / "metrics.jsonl")

    @property
    def step(self) -> int:
        """Optimizer steps trained so far."""
        rows = self.rows
        return int(str(rows[-1]["step"])) if rows else 0

    @property
    def events(self) -> list[Row]:
        """events.jsonl so far."""
        return read_rows(self.folder / "events.jsonl")

    def broken(self, *, max_steps: int | None = None) -> dict[str, tuple[str, ...]]:
        """Violations of the promises in a run that has ended, by promise; empty if all hold."""
        history = read_history(self.folder, self._logs, max_steps=max_steps)
        return {result.promise: result.broken for result in check(history) if result.broken}

    def replay(self) -> list[str]:
        """Output lines of bin/replay, which trains the run again from its journal."""
        return ran("replay", str(self.folder)).splitlines()

    def close(self) -> None:
        """Kill all programs that still run."""
        for program in self._started:
            program.kill()


def ran(program: str, *arguments: str) -> str:
    """Run a program of bin/ to its successful end; returns what it printed to stdout."""
    command = [sys.executable, str(REPO / "bin" / program), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def until(condition: Callable[[], object], *programs: Program, seconds: float = 120.0) -> None:
    """Wait until the condition is true; fails if one of `programs` ends or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        for program in programs:
            assert program.alive, program.printed[-3000:]
        assert time.monotonic() < deadline, "".join(one.printed[-3000:] for one in programs)
        time.sleep(0.02)


def ended_within(program: Program, seconds: float) -> bool:
    """Whether the program ends by itself within `seconds`."""
    try:
        program.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def has_ended(pid: int) -> bool:
    """Whether the process has ended, also if its parent has not reaped it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def chance() -> random.Random:
    """Random numbers of a test; prints the seed, which an environment variable can set."""
    seed = seed_of(os.environ)
    print(f"{SEED}={seed}")
    return random.Random(seed)


def skip_without_mounting() -> None:
    """Skip the test if `MOUNTING` cannot make a mount namespace."""
    try:
        subprocess.run([*MOUNTING, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not permitted: {error}")


def processes_that_name(words: str) -> list[str]:
    """Command lines of running processes that contain `words`."""
    commands: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if words in command and state != "Z" and int(process.name) != os.getpid():
            commands.append(command)
    return commands
