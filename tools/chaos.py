"""Run the demo while its workers are killed, and check that nothing is lost: `make run-chaos`.

`python -m tools.chaos [@ FILE.toml ...] --run.num-local-generators 2 [OPTIONS]` takes the options
of bin/trainer. The trainer and every generator are killed with SIGKILL; the exit code is 1 if a
promise is broken.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from peralta_zmq.config import Config
from peralta_zmq.config.programs import run_program
from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.metrics import METRICS, Row, number
from peralta_zmq.operate.local import run_local
from peralta_zmq.operate.process_group import DEFAULT_POLICY, ProcessGroup, RestartPolicy
from tools.promise_checker import Check, check, unexpected_ends
from tools.run_history import RECORDING_OPTIONS, History, last_step, read_history

SEED = "PERALTA_CHAOS_SEED"  # environment variable: repeats the same kills
NUM_KILLS = 5  # or one for each worker, if that is more
EARLIEST, LATEST = 0.10, 0.80  # fraction of the steps between which kills happen
REWARD_FLOOR = 0.95  # reached by the demo when no worker is killed


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL: the worker, the last trained step before it, its time in unix seconds."""

    worker: str
    step: int
    time: float


class ChaosMonkey:
    def __init__(self, folder: Path, *, max_steps: int, workers: Sequence[str]) -> None:
        self._folder = folder
        self._seed = seed_of(os.environ)
        self._planned = deque(plan_kills(self._seed, workers, max_steps=max_steps))
        self._kills: list[Kill] = []

    def on_tick(self, group: ProcessGroup) -> None:
        """Kill the next worker when its step is reached; wait while the worker is not running."""
        if not self._planned:
            return
        kill_at, worker = self._planned[0]
        step = last_step(self._folder / METRICS)
        now = time.time()
        if step >= kill_at and group[worker].kill():
            self._planned.popleft()
            self._kills.append(Kill(worker, step, now))

    def report(self) -> int:
        """Print the kills and the checks; 1 if a check fails, else 0."""
        history = read_history(self._folder)
        checks = [
            self._check_kills(),
            *check(history),
            unexpected_ends(history),
            _check_reward(history),
        ]
        lines = ["", "killed         at step   back"]
        for kill in self._kills:
            seconds = seconds_until_back(kill, history.rows, history.events)
            back = "not before the end" if seconds is None else f"after {seconds:.1f} s"
            lines.append(f"{kill.worker:<14} {kill.step:>7}   {back}")
        lines += ["", *(result.line for result in checks)]
        lines.append(f"repeat the same kills: make run-chaos SEED={self._seed}")
        sys.stdout.write("\n".join(lines) + "\n")
        return int(any(result.broken for result in checks))

    def _check_kills(self) -> Check:
        count = len(self._kills)
        text = f"made: {count} of {count + len(self._planned)}"
        return Check("kills", text, ("the run ended earlier",) if self._planned else ())


def run_chaos(
    config: Config, arguments: Sequence[str], *, policy: RestartPolicy = DEFAULT_POLICY
) -> int:
    """Run on this machine, kill workers, report; returns an exit code.

    Raises ConfigError with fewer than two generators: one must work while another is down.
    """
    num_generators = config.run.num_local_generators
    if num_generators < 2:
        raise ConfigError(
            f"run.num_local_generators = {num_generators}, but one generator must work while "
            "another is down; set it to 2 or more"
        )
    workers = ["trainer", *(f"generator-{index}" for index in range(num_generators))]
    monkey = ChaosMonkey(config.run_folder, max_steps=config.train.max_steps, workers=workers)
    arguments = [*arguments, *RECORDING_OPTIONS]
    code = run_local(config, arguments, on_tick=monkey.on_tick, policy=policy)
    return code or monkey.report()


def seed_of(environment: Mapping[str, str]) -> int:
    """The seed in the environment, or a random one. Raises ConfigError."""
    text = environment.get(SEED) or str(random.randrange(10_000))
    if not text.isdecimal():
        raise ConfigError(f"{SEED} = {text!r} is not a seed; set it to a number, or unset it")
    return int(text)


def plan_kills(seed: int, workers: Sequence[str], *, max_steps: int) -> list[tuple[int, str]]:
    """(step, worker) of every kill, ascending; every worker is killed at least once."""
    rng = random.Random(seed)
    victims = [*workers, *rng.choices(workers, k=max(0, NUM_KILLS - len(workers)))]
    rng.shuffle(victims)
    steps = sorted(int(rng.uniform(EARLIEST, LATEST) * max_steps) for _ in victims)
    return list(zip(steps, victims, strict=True))


def seconds_until_back(kill: Kill, rows: Sequence[Row], events: Sequence[Row]) -> float | None:
    """Seconds to the trainer's next step, or to the generator's next join; None if there is none.

    The trainer records a join when it first receives from a restarted generator.
    """
    if kill.worker == "trainer":
        times = [number(row, "time") for row in rows]
    else:
        name = kill.worker.replace("generator", "local")
        joins = [row for row in events if row.get("event") == "join"]
        times = [number(row, "time") for row in joins if row.get("generator") == name]
    back = next((moment for moment in times if moment > kill.time), None)
    return None if back is None else back - kill.time


def _check_reward(history: History) -> Check:
    reward = fmean(number(row, "reward") for row in history.rows[-5:]) if history.rows else 0.0
    broken = () if reward >= REWARD_FLOOR else (f"below {REWARD_FLOOR}",)
    return Check("reward", f"mean of the last 5 steps {reward:.3f}, floor {REWARD_FLOOR}", broken)


def main(config: Config) -> int:
    return run_chaos(config, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run_program(main, "tools.chaos"))
