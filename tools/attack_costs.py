"""Measure what an attacker can cost a trainer: memory, disk and speed (`make attack-costs`).

Starts the trainer of the embedded model with one generator for each attack of tools/attacks.py, on
loopback: without keys; with keys, where the attacker has the key of a generator; and with keys,
where it has none. The trainer may open 1,024 files, as most systems allow without further settings.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import psutil
import zmq

from benchmarks.pages import write_between
from benchmarks.report import when
from peralta_zmq.config.programs import program_command
from peralta_zmq.observe.metrics import METRICS
from peralta_zmq.wire import auth
from tools.attacks import ATTACKS, Attack, Client, Target, version_with_large_file
from tools.hostile_sender import NAME
from tools.link_proxy import NUM_PORTS, free_ports

BEGIN = "<!-- written by make attack-costs: begin -->"
END = "<!-- written by make attack-costs: end -->"
FIRST_STEPS = 250  # before an attack: by then the memory has stopped growing
START_SECONDS = 120.0  # for FIRST_STEPS
QUIET_SECONDS = 3.0  # measured before the attack
HOLD_SECONDS = 4.0  # after the last message of an attack, with open connections
AFTER_SECONDS = 4.0  # after the connections are closed
MAX_MEMORY = 6 << 30  # bytes; a trainer that needs more is killed, to protect this machine
LARGE_FILE = 1 << 30  # bytes
GENERATOR = "local-0"
ANYONE, HOLDER = "without keys: anyone", "with keys: a known generator"
STRANGER = "with keys: anyone without a key"
ULIMIT = ("/bin/sh", "-c", 'ulimit -S -n 1024; exec "$@"', "sh")
SETTINGS = (
    *("--sampling.num-generations", "4", "--train.batch-size", "16", "--engine.slots", "8"),
    *("--sampling.max-completion-length", "16"),  # with small steps the memory soon stops growing
    *("--train.max-off-policy-steps", "100", "--train.max-steps", "1000000"),
    *("--train.lr-scheduler-type", "constant", "--train.learning-rate", "1e-6"),
    *("--eval.num-examples", "4", "--no-eval.eval-base-model"),
    *("--checkpoint.interval", "1000000", "--run.name", "run"),
)
ATTACKERS = (ANYONE, HOLDER, STRANGER)
EVERY = "all of these, one after another"
FORGED = "a forged version that has a file of 1 GiB in the weights folder"


@dataclass(frozen=True, slots=True)
class Cost:
    """What an attack cost, in bytes and as a fraction of the undisturbed speed."""

    sent: int  # messages, connections or bytes
    peak: float  # growth of the process's memory at most
    kept: float  # and after the attack
    disk: float  # growth of the folder, without that of an undisturbed run
    speed: float  # training steps per second during the attack, 1.0 = as before it
    end: str = ""  # how the process ended, if it did

    @property
    def cell(self) -> str:
        """The cell of the table."""
        values = (self.peak, self.kept, self.disk)
        peak, kept, disk = (f"{max(0.0, value) / 1e6:,.0f}" for value in values)
        return self.end or f"{peak} / {kept} MB, {disk} MB, {self.speed:.0%}"


class Sample(NamedTuple):
    """Progress of a run at one time."""

    time: float  # monotonic seconds
    steps: int  # training steps
    disk: int  # bytes


class MemoryWatch:
    """Samples the memory of a process in a thread until the context ends."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.peak = 0  # bytes, largest sample; the caller may reset it
        self.was_killed = False  # because it exceeded MAX_MEMORY
        self._process, self._ended = process, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def now(self) -> int:
        """Resident memory in bytes; 0 if the process has ended."""
        try:
            memory = psutil.Process(self._process.pid).memory_info().rss
        except psutil.Error:
            return 0
        self.peak = max(self.peak, memory)
        return memory

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            if self.now > MAX_MEMORY:
                self._process.kill()
                self.was_killed = True


class AttackedRun:
    """A trainer and a generator in a temporary folder. Use with `with`."""

    def __init__(self, *, has_keys: bool) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="attacked-"))
        self.folder, self.keys = Path(folder) / "run", Path(folder) / "keys"
        self.port = free_ports()
        arguments = [*SETTINGS, "--run.dir", folder, "--wire.port", str(self.port)]
        if has_keys:
            for name in (auth.TRAINER, GENERATOR, NAME):
                auth.make_keys(self.keys, name)
            arguments += ["--security.keys", str(self.keys)]
        self.page = free_ports() + NUM_PORTS - 1
        arguments += ["--dashboard.port", str(self.page)]
        self.log = Path(folder) / "output.log"
        self.trainer = self._start([*ULIMIT, *program_command("trainer"), *arguments])
        command = [*program_command("generator"), *arguments, "--generator.name", GENERATOR]
        self.generator = self._start(command)

    def __enter__(self) -> AttackedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def num_steps(self) -> int:
        """Training steps taken: lines of metrics.jsonl."""
        file = self.folder / METRICS
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def sample(self, *, of_generator: bool) -> Sample:
        """The progress now, with the disk of the trainer or of the generator."""
        folder, skipped = self.folder, {"weights", "copies"}
        if of_generator:
            folder, skipped = self.folder / "copies", set[str]()
        disk = 0
        for path, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if name not in skipped]
            for name in files:
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    disk += (Path(path) / name).stat().st_size
        return Sample(time.monotonic(), self.num_steps, disk)

    def wait_for_steps(self) -> None:
        """Wait for FIRST_STEPS. Raises SystemExit with the output if they are not reached."""
        ends = time.monotonic() + START_SECONDS
        while self.num_steps < FIRST_STEPS:
            if time.monotonic() > ends or self.trainer.poll() is not None:
                raise SystemExit(f"no {FIRST_STEPS} steps:\n{self.log.read_text('utf-8')[-2000:]}")
            time.sleep(0.1)

    def target(self) -> Target:
        """The run as an attacker sees it now."""
        run_id = json.loads((self.folder / "RUN.json").read_bytes())["run_id"]
        return Target(run_id, self.port, self.page, self.num_steps, self.folder / "weights")

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


def measure(
    attacks: Sequence[tuple[Attack, int]], attacker: str, *, of_generator: bool = False
) -> Cost:
    """Start a run, attack it, and return the costs of the trainer, or of the generator.

    Each attack has its count of messages, connections or bytes; one begins after the other's end.

    The disk of the trainer is the run folder without weights, that of the generator its local copy.
    """
    with AttackedRun(has_keys=attacker != ANYONE) as run, ExitStack() as stack:
        run.wait_for_steps()
        process = run.generator if of_generator else run.trainer
        watch = stack.enter_context(MemoryWatch(process))
        before = run.sample(of_generator=of_generator)
        time.sleep(QUIET_SECONDS)
        memory = watch.peak = watch.now
        start = run.sample(of_generator=of_generator)
        sent = 0
        for attack, count in attacks:
            client = run.target(), _keys_of(attacker, run.keys)
            with attacking(attack, count, *client) as number:
                sent += number
                time.sleep(HOLD_SECONDS)
        stop = run.sample(of_generator=of_generator)
        time.sleep(AFTER_SECONDS)
        end = ""
        if (code := process.poll()) is not None:
            end = f"killed at {MAX_MEMORY >> 30} GiB" if watch.was_killed else f"exit code {code}"
        quiet_seconds, seconds = start.time - before.time, stop.time - start.time
        speed_before = max(1, start.steps - before.steps) / quiet_seconds
        usual_growth = (start.disk - before.disk) / quiet_seconds * seconds
        return Cost(
            sent=sent,
            kept=watch.now - memory,
            peak=watch.peak - memory,  # read last: `now` updates it
            disk=stop.disk - start.disk - usual_growth,
            speed=(stop.steps - start.steps) / seconds / speed_before,
            end=end,
        )


@contextmanager
def attacking(
    attack: Attack, count: int, target: Target, keys: auth.GeneratorKeys | None
) -> Generator[int, None, None]:
    """Attack in another process, which is killed at the end; yields what `attack` returns.

    libzmq crashes when it closes a socket with a subscription of 15 MiB.
    """
    spawn = multiprocessing.get_context("spawn")
    receiving, sending = spawn.Pipe(duplex=False)
    arguments = attack, count, target, keys, sending
    process = spawn.Process(target=_attack, args=arguments, daemon=True)
    process.start()
    sending.close()
    try:
        yield receiving.recv()
    finally:
        process.kill()
        process.join()


def _attack(
    attack: Attack,
    count: int,
    target: Target,
    keys: auth.GeneratorKeys | None,
    result: Connection[int, int],
) -> None:
    """The process of an attack."""
    with ExitStack() as connections:
        result.send(attack(Client(target, keys, connections), count))
        signal.pause()


def _keys_of(attacker: str, folder: Path) -> auth.GeneratorKeys | None:
    if attacker == ANYONE:
        return None
    keys = auth.generator_keys(folder, NAME)
    return replace(keys, secret=zmq.curve_keypair()[1]) if attacker == STRANGER else keys


def report(only: str = "") -> str:
    """Measure the attacks whose name contains `only`; returns the section, in Markdown."""
    lines = [_line("attack", *ATTACKERS), _line(*("---",) * (1 + len(ATTACKERS)))]
    for name, (attack, count) in ATTACKS.items():
        if only in name:
            costs = [measure([(attack, count)], attacker) for attacker in (ANYONE, HOLDER)]
            fewer = (f", {cost.sent:,} sent" if cost.sent < count else "" for cost in costs)
            cells = [cost.cell + sent for cost, sent in zip(costs, fewer, strict=True)]
            lines.append(_line(name, *cells, ""))
    if only in EVERY:
        lines.append(_line(EVERY, "", "", measure([*ATTACKS.values()], STRANGER).cell))
    if only in FORGED:
        forgery = (version_with_large_file, LARGE_FILE)
        cell = measure([forgery], ANYONE, of_generator=True).cell
        lines.append(f"\nA generator, with {FORGED}: {cell}.\n")
    return "".join(lines) + f"\n{when()}\n"


def _line(*cells: str) -> str:
    """A row of the table; also shown on the terminal, because each takes long."""
    line = f"| {' | '.join(cells)} |\n"
    sys.stderr.write(line)
    return line


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="attack_costs", description=__doc__)
    parser.add_argument("--only", default="", help="measure the attacks with this text in the name")
    parser.add_argument("--document", type=Path, help="file that receives the table")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # for thousands of connections
    text = report(options.only)
    sys.stdout.write(text)
    if options.document:
        write_between(options.document, BEGIN, END, text)


if __name__ == "__main__":
    main()
