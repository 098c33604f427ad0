"""A long run under random faults, with a report: `make soak MINUTES=30`.

`python -m tools.soak --minutes 30 --seed 7` trains the embedded model with three generators, each
behind a link proxy, while workers are killed, frozen, disconnected, stopped and restarted, bits
are flipped on the links, the disk of the weights or of the journal fails, and a fourth sender sends
invalid and poisoned groups. Every second session of the trainer is with keys. Then the run finishes
without faults and is checked. The disks are mounts: start the soak with
`unshare --map-root-user --mount`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TypeAlias

from peralta_zmq.config import load_config
from peralta_zmq.observe.metrics import METRICS, number
from peralta_zmq.operate.local import local_workers
from peralta_zmq.operate.process_group import ProcessGroup, Record, Worker, recorder, supervise
from peralta_zmq.wire import auth
from tools import hostile_sender
from tools.hostile_sender import HostileSender
from tools.link_proxy import LinkProxy, free_ports
from tools.promise_checker import Check, check, hostile_groups, unexpected_ends
from tools.run_history import DEMO_OPTIONS, RECORDING_OPTIONS, History, last_step, read_history
from tools.small_disk import SmallDisk

NUM_GENERATORS = 3
SESSION_STEPS = 600  # after which the trainer finishes and is started for as many more
SESSION_STEPS_PER_MINUTE = 100  # in a short soak
FINAL_STEPS = 20  # without faults
PAUSE = (2.0, 6.0)  # seconds between two faults
MIN_TRAINER_SECONDS = 15.0  # between two kills of the trainer
SECONDS = (1.0, 10.0)  # duration of a fault
OUTAGE_SECONDS = (5.0, 20.0)  # disk outages last longer than the restart of a worker
FLIPPED_PORTS = ("rollouts", "announcements", "statuses")  # in the order of the ports
# Range of the flipped bit; the handshake of a new connection takes the first 900 bytes.
FLIP_BITS = 8 * 1000
WITH_RESTART = ", with a restart of the trainer"  # end of the kind of an outage
Undo: TypeAlias = Callable[[ProcessGroup], "bool | None"]  # False: try again
SETTINGS = (
    *DEMO_OPTIONS,
    *("--sampling.num-generations", "4", "--train.batch-size", "16"),
    *("--engine.slots", "8", "--train.max-off-policy-steps", "4"),
    # At 1e-5 the task was learned after 1,000 of 5,400 steps, and 19 of 20 groups lacked signal.
    *("--train.lr-scheduler-type", "constant", "--train.learning-rate", "1e-6"),
    *("--eval.num-examples", "4", "--no-eval.eval-base-model"),
    *("--checkpoint.interval", "10"),
)
GENERATORS = tuple(f"generator-{index}" for index in range(NUM_GENERATORS))
NAMES = tuple(f"local-{index}" for index in range(NUM_GENERATORS))  # in their key files
KEYS = "keys"


class FaultInjector:
    """Injects random faults until its time is over; every fault but a kill ends by itself."""

    def __init__(
        self,
        links: Sequence[LinkProxy],
        disks: Mapping[str, SmallDisk],
        hostile: HostileSender,
        record: Record,
        *,
        seed: int,
        seconds: float,
    ) -> None:
        self._links, self._disks, self._hostile, self._record = links, disks, hostile, record
        self._rng = random.Random(seed)
        self._deadline = time.monotonic() + seconds
        self._next_fault = time.monotonic() + PAUSE[1]
        self._trainer_started = time.monotonic()
        self._active: list[tuple[float, str, Undo]] = []  # end time, kind, how to end it
        self._fault_frequencies = {  # relative
            self._kill_generator: 50,
            self._kill_trainer: 25,
            self._freeze: 8,
            self._cut: 8,
            self._reset: 6,
            self._flip: 20,
            self._break_disk: 10,
            self._stop_generator: 4,
            self._send_hostile: 20,
        }

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._deadline

    def on_trainer_start(self) -> None:
        self._trainer_started = time.monotonic()

    def on_tick(self, group: ProcessGroup) -> None:
        """End the faults that are due; inject the next one if it is time."""
        now = time.monotonic()
        due = [fault for fault in self._active if fault[0] <= now or self.is_over]
        ended = [fault for fault in due if fault[2](group) is not False]
        self._active = [fault for fault in self._active if fault not in ended]
        if now >= self._next_fault and not self.is_over:
            self._next_fault = now + self._rng.uniform(*PAUSE)
            faults = self._fault_frequencies
            (inject,) = self._rng.choices(list(faults), list(faults.values()))
            inject(group)

    def _kill_generator(self, group: ProcessGroup) -> str:
        return ", with a restart of a generator" * group[self._rng.choice(GENERATORS)].kill()

    def _kill_trainer(self, group: ProcessGroup) -> str:
        has_just_started = time.monotonic() - self._trainer_started < MIN_TRAINER_SECONDS
        if has_just_started or not group["trainer"].kill():
            return self._kill_generator(group)
        self.on_trainer_start()
        return WITH_RESTART

    def _freeze(self, group: ProcessGroup) -> None:
        worker = self._rng.choice(["trainer", *GENERATORS])

        def resume(group: ProcessGroup) -> None:
            group[worker].send_signal(signal.SIGCONT)

        if group[worker].send_signal(signal.SIGSTOP):
            self._end_later("freeze", worker, resume)

    def _cut(self, group: ProcessGroup) -> None:
        index = self._rng.randrange(NUM_GENERATORS)
        self._links[index].cut()
        self._end_later("cut link", GENERATORS[index], lambda group: self._links[index].restore())

    def _reset(self, group: ProcessGroup) -> None:
        index = self._rng.randrange(NUM_GENERATORS)
        self._links[index].reset()
        self._record("fault", kind="reset link", worker=GENERATORS[index])

    def _flip(self, group: ProcessGroup) -> None:
        """Flip a bit of a port, in every second case of new connections; record it when done."""
        link, port = self._rng.randrange(NUM_GENERATORS), self._rng.randrange(len(FLIPPED_PORTS))
        bit, reconnects = self._rng.randrange(FLIP_BITS), self._rng.random() < 0.5
        name = f"flip {link} {port}"
        kind = f"flip {FLIPPED_PORTS[port]}, {'with' if self._hostile.keys else 'without'} keys"

        def end(group: ProcessGroup) -> None:
            if not self._links[link].cancel_flip(port):
                self._record("fault", kind=kind, worker=GENERATORS[link])

        if not any(active == name for _, active, _ in self._active):
            self._links[link].flip(port, bit)
            if reconnects:
                self._links[link].reset()
            self._active.append((time.monotonic() + SECONDS[1], name, end))

    def _break_disk(self, group: ProcessGroup) -> None:
        """Let one disk fail, and kill a worker in most cases, so that it starts meanwhile."""
        name = self._rng.choice(list(self._disks))
        disk, outage = self._disks[name], self._rng.choice(self._disks[name].outages)
        kill = self._rng.choice((self._kill_trainer, self._kill_generator, None))
        if any(kind.startswith("disk ") for _, kind, _ in self._active) or not disk.begin(outage):
            return
        kind = f"disk {name} {outage}{kill(group) if kill else ''}"
        self._end_later(kind, "trainer", lambda group: disk.end(outage), OUTAGE_SECONDS)

    def _stop_generator(self, group: ProcessGroup) -> None:
        if not any(kind == "stop" for _, kind, _ in self._active):
            name = GENERATORS[-1]
            group[name].stop()
            self._end_later("stop", name, lambda group: group[name].resume())

    def _send_hostile(self, group: ProcessGroup) -> None:
        attacks = self._rng.choice((hostile_sender.INVALID, hostile_sender.POISONED))
        attack = self._rng.choice(list(attacks))
        if self._hostile.send(attack):
            self._record("fault", kind=f"hostile {attack}", worker="trainer")

    def _end_later(
        self, kind: str, worker: str, undo: Undo, duration: tuple[float, float] = SECONDS
    ) -> None:
        seconds = self._rng.uniform(*duration)
        self._active.append((time.monotonic() + seconds, kind, undo))
        self._record("fault", kind=kind, worker=worker, seconds=round(seconds, 1))


def soak(folder: Path, *, minutes: float, seed: int, always_keys: bool) -> int:
    (folder / "logs").mkdir(parents=True)
    for name in (auth.TRAINER, *NAMES, hostile_sender.NAME):
        auth.make_keys(folder / KEYS, name)
    record, port = recorder(folder), free_ports()
    hostile = HostileSender(folder, f"tcp://127.0.0.1:{port}", seed=seed)
    is_last, session, target = False, seed, 0
    session_steps = min(SESSION_STEPS, max(1, round(SESSION_STEPS_PER_MINUTE * minutes)))
    with ExitStack() as stack:
        weights, journal = folder / "nas" / "weights", folder / "journal"
        disks = {
            "weights": SmallDisk(folder / "nas", weights),
            "journal": SmallDisk(journal, journal),
        }
        for disk in disks.values():
            stack.enter_context(disk)
        links = [stack.enter_context(LinkProxy(port)) for _ in range(NUM_GENERATORS)]
        injector = FaultInjector(links, disks, hostile, record, seed=seed, seconds=60 * minutes)
        while not is_last:
            is_last, session = injector.is_over, session + 1
            target = last_step(folder / METRICS) + (FINAL_STEPS if is_last else session_steps)
            keys = folder / KEYS if always_keys or session % 2 else None
            hostile.keys = auth.generator_keys(keys, hostile_sender.NAME) if keys else None
            injector.on_trainer_start()
            workers = soak_workers(folder, links, weights, port=port, max_steps=target, keys=keys)
            if code := supervise(workers, record=record, on_tick=injector.on_tick):
                return code
        history = read_history(folder, max_steps=target)  # before the disks are unmounted
    checks = [
        *check(history),
        hostile_groups(history, minutes=minutes),
        unexpected_ends(history),
        check_faults(history, minutes=minutes),
    ]
    lines = [recovery_text(history), *(result.line for result in checks)]
    sys.stdout.write("\n".join([*lines, ""]))
    return int(any(result.broken for result in checks))


def soak_workers(
    folder: Path,
    links: Sequence[LinkProxy],
    weights: Path,
    *,
    port: int,
    max_steps: int,
    keys: Path | None,
) -> list[Worker]:
    """The trainer, and generators that connect to it through their own links."""
    arguments = [
        *SETTINGS, *RECORDING_OPTIONS, "--run.dir", str(folder.parent), "--run.name", folder.name,
        "--weights.dir", str(weights), "--wire.port", str(port),
        "--train.max-steps", str(max_steps), *(("--security.keys", str(keys)) if keys else ()),
        "--run.num-local-generators", str(NUM_GENERATORS),
    ]  # fmt: skip
    trainer, *generators = local_workers(load_config("soak", arguments), arguments)
    linked = [
        replace(worker, command=(*worker.command, "--wire.port", str(link.port)))
        for worker, link in zip(generators, links, strict=True)
    ]
    return [replace(trainer, log=folder / "logs" / "trainer.log"), *linked]


def check_faults(history: History, *, minutes: float) -> Check:
    """Check that a long soak has made enough kills, and started the trainer during outages."""
    kills = [row for row in history.events if row.get("event") == "killed"]
    faults = Counter(str(row.get("kind")) for row in history.events if row.get("event") == "fault")
    restarts = sum(count for kind, count in faults.items() if kind.endswith(WITH_RESTART))
    missing: list[str] = []
    if minutes >= 30 and len(kills) < 200:
        missing.append("fewer than 200 SIGKILLs")
    if minutes >= 30 and restarts == 0:
        missing.append("no start of the trainer during an outage")
    others = "".join(f"; {count} x {kind}" for kind, count in sorted(faults.items()))
    return Check("faults", f"{len(kills)} SIGKILLs{others}", tuple(missing))


def recovery_text(history: History) -> str:
    """The times from a SIGKILL of the trainer to its next step, as a line of the report."""
    steps = sorted(number(row, "time") for row in history.rows)
    seconds: list[float] = []
    for row in history.events:
        if row.get("event") == "killed" and row.get("worker") == "trainer":
            killed_at = number(row, "time")
            seconds += [step - killed_at for step in steps if step > killed_at][:1]
    if not seconds:
        return "the trainer was not killed"
    return (
        f"from a SIGKILL of the trainer to its next step: median {median(seconds):.1f} s, "
        f"at most {max(seconds):.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--keys", action="store_true", help="in all sessions, not every second")
    parser.add_argument("--run", type=Path, default=Path("runs/soak"), help="run folder, replaced")
    options = parser.parse_args()
    shutil.rmtree(options.run, ignore_errors=True)
    sys.stdout.write(f"soak: seed={options.seed} minutes={options.minutes:g}\n")
    return soak(options.run, minutes=options.minutes, seed=options.seed, always_keys=options.keys)


if __name__ == "__main__":
    sys.exit(main())
