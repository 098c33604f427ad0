"""A long run under a random mix of faults, with a report: `make soak MINUTES=30`.

`python -m tools.soak --minutes 30 --seed 7` trains the embedded model with three
generators, each behind a link of its own, while workers are killed, frozen, cut off, sent away and
called back, and the weights folder vanishes. Then it lets the run end in peace and has the checker
judge it. Knows the group, links and folders; knows nothing of models.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from peralta_zmq.observe.metrics import METRICS, last_step
from peralta_zmq.operate.local import event_recorder, local_workers
from peralta_zmq.operate.process_group import ProcessGroup, Record, Worker, supervise
from peralta_zmq.wire import auth
from tools.link_proxy import Link, free_ports
from tools.promise_checker import check, own_ends
from tools.run_history import RECORDING_OPTIONS, read_history
from tools.soak_report import figures_of, section, struck_enough, write_section

NUM_GENERATORS = 3
CHUNK = 600  # optimizer steps after which the trainer ends, and is started for as many more
CHUNK_A_MINUTE = 100  # of a soak too short for so many
LAST = 20  # steps in peace at the end
PAUSE = (2.0, 6.0)  # seconds between two faults
TRAINER_LIFE = 15.0  # seconds that the trainer has at least between two kills
Undo: TypeAlias = Callable[[ProcessGroup], "bool | None"]  # False when it has to be tried again
SETTINGS = (
    *("--sampling.num-generations", "4", "--train.batch-size", "16"),
    *("--engine.slots", "8", "--train.max-off-policy-steps", "4"),
    # At 1e-5 the task was learned after 1,000 of 5,400 steps, and 19 of 20 groups lacked signal.
    *("--train.lr-scheduler-type", "constant", "--train.learning-rate", "1e-6"),
    *("--eval.num-examples", "4", "--no-eval.eval-base-model"),
    *("--checkpoint.interval", "10", "--weights.poll-seconds", "1"),
)
GENERATORS = tuple(f"generator-{index}" for index in range(NUM_GENERATORS))
NAMES = tuple(f"local-{index}" for index in range(NUM_GENERATORS))  # as their keys have them
KEYS = "keys"


class ChaosMonkey:
    """Strikes at random moments until its time is over; every fault but a kill ends by itself."""

    def __init__(
        self, links: Sequence[Link], weights: Path, record: Record, *, seed: int, seconds: float
    ) -> None:
        self._links, self._weights, self._record = links, weights, record
        self._hidden = weights.with_name("hidden")
        self._chance = random.Random(seed)
        self._ends = time.monotonic() + seconds
        self._next = time.monotonic() + PAUSE[1]
        self._trainer_started = time.monotonic()
        self._undo: list[tuple[float, str, Undo]] = []  # when, whose fault, how it ends
        self._faults = {
            self._kill_generator: 50, self._kill_trainer: 25, self._freeze: 8, self._cut: 8,
            self._reset: 6, self._hide_weights: 4, self._send_away: 4,
        }  # fmt: skip

    @property
    def over(self) -> bool:
        """Whether its time is up."""
        return time.monotonic() > self._ends

    def trainer_starts(self) -> None:
        """From now on it is that old."""
        self._trainer_started = time.monotonic()

    def on_tick(self, group: ProcessGroup) -> None:
        """End what is due; then do the next fault, if it is time for one."""
        now = time.monotonic()
        due = [each for each in self._undo if each[0] <= now or self.over]
        ended = [each for each in due if each[2](group) is not False]
        self._undo = [each for each in self._undo if each not in ended]
        if now >= self._next and not self.over:
            self._next = now + self._chance.uniform(*PAUSE)
            (fault,) = self._chance.choices(list(self._faults), list(self._faults.values()))
            fault(group)

    def _kill_generator(self, group: ProcessGroup) -> None:
        group[self._chance.choice(GENERATORS)].kill()

    def _kill_trainer(self, group: ProcessGroup) -> None:
        if self._trainer_age < TRAINER_LIFE or not group["trainer"].kill():
            self._kill_generator(group)
        else:
            self.trainer_starts()

    def _freeze(self, group: ProcessGroup) -> None:
        worker = self._chance.choice(["trainer", *GENERATORS])
        if group[worker].send_signal(signal.SIGSTOP):
            self._last(
                "freeze", worker, lambda group: group[worker].send_signal(signal.SIGCONT) or None
            )

    def _cut(self, group: ProcessGroup) -> None:
        index = self._chance.randrange(NUM_GENERATORS)
        self._links[index].cut()
        self._last("cut link", GENERATORS[index], lambda group: self._links[index].mend())

    def _reset(self, group: ProcessGroup) -> None:
        index = self._chance.randrange(NUM_GENERATORS)
        self._links[index].reset()
        self._record("fault", kind="reset link", worker=GENERATORS[index])

    def _hide_weights(self, group: ProcessGroup) -> None:
        if not self._hidden.exists() and any(self._weights.glob("step_*")):  # only a run's own
            self._weights.rename(self._hidden)
            self._last("hide weights", "trainer", lambda group: self._show_weights())

    def _show_weights(self) -> None:
        if self._hidden.exists():
            self._hidden.rename(self._weights)

    def _send_away(self, group: ProcessGroup) -> None:
        if not any(kind == "send away" for _, kind, _ in self._undo):
            group[GENERATORS[-1]].stop()
            self._last("send away", GENERATORS[-1], lambda group: group[GENERATORS[-1]].resume())

    @property
    def _trainer_age(self) -> float:
        return time.monotonic() - self._trainer_started

    def _last(self, kind: str, worker: str, undo: Undo) -> None:
        """Let a fault last for some seconds."""
        seconds = self._chance.uniform(1.0, 10.0)
        self._undo.append((time.monotonic() + seconds, kind, undo))
        self._record("fault", kind=kind, worker=worker, seconds=round(seconds, 1))


def soak(folder: Path, *, minutes: float, seed: int, document: Path | None) -> int:
    """Run for so long under faults, then in peace to the end; returns an exit code."""
    (folder / "logs").mkdir(parents=True)
    for name in (auth.TRAINER, *NAMES):
        auth.make_keys(folder / KEYS, name)
    record, weights, port = event_recorder(folder), folder / "nas" / "weights", free_ports()
    over, target, chunk = False, 0, min(CHUNK, max(1, round(CHUNK_A_MINUTE * minutes)))
    with ExitStack() as stack:
        links = [stack.enter_context(Link(port)) for _ in range(NUM_GENERATORS)]
        monkey = ChaosMonkey(links, weights, record, seed=seed, seconds=60 * minutes)
        while not over:
            over = monkey.over  # then this is the last time, in peace
            target = (last_step(folder / METRICS) or 0) + (LAST if over else chunk)
            monkey.trainer_starts()
            workers = soak_workers(folder, links, port=port, max_steps=target)
            if code := supervise(workers, record=record, on_tick=monkey.on_tick):
                return code
    history = read_history(folder, max_steps=target)
    figures = figures_of(history)
    checks = [*check(history), own_ends(history), struck_enough(figures, minutes=minutes)]
    text = section(figures, checks, minutes=minutes, seed=seed)
    sys.stdout.write(f"{text}\n")
    if document:
        write_section(text, document)
    return int(any(each.broken for each in checks))


def soak_workers(folder: Path, links: Sequence[Link], *, port: int, max_steps: int) -> list[Worker]:
    """The trainer, and generators that reach it each through its own link."""
    arguments = [
        *SETTINGS, *RECORDING_OPTIONS, "--run.dir", str(folder.parent), "--run.name", folder.name,
        "--weights.dir", str(folder / "nas" / "weights"), "--wire.port", str(port),
        "--train.max-steps", str(max_steps), "--security.keys", str(folder / KEYS),
    ]  # fmt: skip
    trainer, *generators = local_workers(folder, arguments, num_generators=NUM_GENERATORS)
    linked = [
        replace(worker, command=(*worker.command, "--wire.port", str(link.port)))
        for worker, link in zip(generators, links, strict=True)
    ]
    return [replace(trainer, log=folder / "logs" / "trainer.log"), *linked]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--run", type=Path, default=Path("runs/soak"), help="folder, made anew")
    parser.add_argument("--document", type=Path, help="file that the report is written into")
    options = parser.parse_args()
    shutil.rmtree(options.run, ignore_errors=True)
    sys.stdout.write(f"soak: seed={options.seed} minutes={options.minutes:g}\n")
    return soak(options.run, minutes=options.minutes, seed=options.seed, document=options.document)


if __name__ == "__main__":
    sys.exit(main())
