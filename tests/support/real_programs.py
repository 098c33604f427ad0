"""Run the real programs in tests, and check the promises of their run.

Programs that a test leaves running are killed at its end.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from peralta_zmq.config import Config, load_config
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
STEP_KEYS = {
    "step", "time", "step_time", "reward", "reward_std", "frac_reward_zero_std",
    "completions/mean_length", "completions/clipped_ratio", "loss", "grad_norm", "learning_rate",
    "entropy", "mismatch_kl", "staleness/mean", "staleness/max", "dropped/stale", "queue/depth",
    "num_tokens", "num_rollouts", "generators", "time/wait_for_batch", "time/forward_backward",
    "time/publish", "time/journal",
}  # fmt: skip


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
    """One run folder, its programs, and the files that they write.

    Programs have the settings `small`, then `settings`. `launchers` start a program with another
    command than Python's.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        small: Sequence[str] = SMALL,
        launchers: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.port = free_ports()
        self.folder = folder / "run"
        self.started: list[Program] = []
        self._parent = folder
        self._settings = ("--run.dir", str(folder), "--run.name", "run",
                          "--wire.port", str(self.port), *small, *settings)  # fmt: skip
        self._launchers = launchers or {}
        self._logs: list[Path] = []

    def config(self, *settings: str) -> Config:
        """The trainer's config with these settings."""
        return load_config("bin/trainer", [*self._settings, *settings])

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
        log: str | None = None,
        shell: str = 'exec "$@"',
        environment: Mapping[str, str] | None = None,
    ) -> Program:
        """Start a program of bin/ with this run's settings; `shell` may set limits or redirect."""
        program = [*self._launchers.get(name, (sys.executable,)), str(REPO / "bin" / name)]
        if name == "lan":
            program.append("local")
        command = ["/bin/sh", "-c", shell, "sh", *program, *self._settings, *settings]
        file = self._parent / f"{log or len(self.started)}.log"
        if name == "generator":
            self._logs = list(dict.fromkeys([*self._logs, file]))
        self.started.append(Program(command, file, environment or {}))
        return self.started[-1]

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
    def published_step(self) -> int:
        """Step of the newest version; publishing in the background may lag behind the rows."""
        versions = (self.folder / "weights").glob("step_*")
        return max((int(folder.name[5:]) for folder in versions), default=-1)

    @property
    def events(self) -> list[Row]:
        """events.jsonl so far."""
        return read_rows(self.folder / "events.jsonl")

    def broken(self, *, max_steps: int | None = None) -> dict[str, tuple[str, ...]]:
        """Violations of the promises in a run that has ended, by promise; empty if all hold."""
        own = (self.folder / "logs").glob("generator-own.log")  # the trainer's own generator
        history = read_history(self.folder, [*self._logs, *own], max_steps=max_steps)
        return {result.promise: result.broken for result in check(history) if result.broken}

    def replay(self) -> list[str]:
        """Output lines of bin/replay, which trains the run again from its journal."""
        return ran("replay", str(self.folder)).splitlines()

    def close(self) -> None:
        """Kill all programs that still run."""
        for program in self.started:
            program.kill()


def missing_keys(row: Row) -> set[str]:
    """The keys missing in a step's row; a step without signal has no entropy."""
    return STEP_KEYS - row.keys() - ({"entropy"} if row["frac_reward_zero_std"] == 1 else set())


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
    for process in psutil.process_iter(["pid", "status", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        is_zombie = process.info["status"] == psutil.STATUS_ZOMBIE
        if words in command and not is_zombie and process.pid != os.getpid():
            commands.append(command)
    return commands
