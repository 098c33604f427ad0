"""SIGKILL at random and at every failpoint: no group lost or trained twice, no torn weights.

See the fault table in docs/reliability.md.
"""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from real_programs import REPO, Program, RealRun, chance, ended_within, until

from peralta_zmq.atomic_files import FAILPOINT_VARIABLE

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_KILLS = 30
# Two groups fill a micro-batch, so that some are computed while groups arrive.
STEPS = ("--train.max-steps", "60", "--train.max-tokens-per-microbatch", "128")
TESTED_ELSEWHERE = ("atomic_files.", "load.", "prune.")  # tested by tests/weights/test_faults.py
TWO_TURNS = """
from peralta_zmq.environments.calculator import problems, reward
from peralta_zmq.rollout import Message

REWARD_IS_BOUNDED = True

def reply(problem, messages):
    return [Message("user", "again")] if len(messages) == 2 else None
"""
IN_GENERATORS = ("generator.", "wire.send")
FAILPOINTS = sorted(
    {
        place
        for file in (REPO / "peralta_zmq").rglob("*.py")
        for place in re.findall(r'failpoint\("([\w.]+)"\)', file.read_text("utf-8"))
        if not place.startswith(TESTED_ELSEWHERE)
    }
)


def num_starts(run: RealRun) -> int:
    return sum(row["event"] in ("start", "resume") for row in run.events)


def is_as_published(run: RealRun) -> bool:
    """True if an uninterrupted replay of the journal gives the published weights."""
    last = run.replay()[-1]
    return last.startswith("step=60 ") and last.endswith("  as published")


def test_trainer_killed_many_times_gives_the_weights_of_a_replay(run: RealRun) -> None:
    random, kills, start_seconds = chance(), 0, 0.0
    generators = [run.generator(name) for name in ("ann", "bob")]
    while kills < NUM_KILLS and run.step < 50:
        starts, trainer = num_starts(run), run.trainer(*STEPS)
        begun, longest = time.monotonic(), 0.4
        if not start_seconds or random.random() < 0.7:
            until(lambda starts=starts: num_starts(run) > starts, trainer, *generators)
            start_seconds = time.monotonic() - begun
            target = run.step + random.choice([0, 0, 1, 1])
            until(lambda target=target: run.step >= target, trainer, *generators)
        else:  # killed in the second half of its start: reading, replaying, binding
            longest = start_seconds / 2
            assert not ended_within(trainer, start_seconds / 2)
        if ended_within(trainer, random.uniform(0.0, longest)):
            assert trainer.wait() == 0, trainer.printed
            break
        trainer.kill()
        kills += 1
    last = run.trainer(*STEPS)
    assert last.wait(timeout=120) == 0, last.printed
    print(f"kills: {kills}")
    assert kills >= 10
    assert "in use" not in last.printed  # the port was free at each start
    for each in generators:
        assert each.wait(timeout=30) == 0, each.printed
    assert run.broken() == {}
    assert is_as_published(run)


def test_generators_killed_30_times_while_sending_tear_no_group(run: RealRun) -> None:
    random, kills, target = chance(), 0, 20
    trainer = run.trainer("--train.max-steps", str(target))
    names = ("ann", "bob", "cid")
    running = {name: run.generator(name) for name in names}
    made = dict.fromkeys(names, 0)
    while kills < NUM_KILLS:
        if not trainer.alive:  # complete: continue with more steps
            assert trainer.wait() == 0, trainer.printed
            target = run.step + 20
            trainer = run.trainer("--train.max-steps", str(target))
        name = random.choice(names)
        generator = running[name]
        if not generator.alive:
            assert generator.wait() in (0, -signal.SIGKILL), generator.printed
            running[name] = run.generator(name)
        elif (count := generator.printed.count("made group=")) > made[name]:
            made[name] = count
            if not ended_within(generator, random.uniform(0.0, 0.05)):
                generator.kill()
                kills += 1
    running = {name: run.generator(name) for name in names}
    assert trainer.wait(timeout=120) == 0, trainer.printed
    assert all(row["dropped/invalid"] == 0 for row in run.rows)
    assert run.broken(max_steps=target) == {}


def test_kills_within_episodes_lose_no_group_and_train_none_twice(
    run: RealRun, tmp_path: Path
) -> None:
    """Episodes of two turns: kills of generators, and of the workers that compute the replies."""
    random, kills = chance(), Counter[str]()
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "two_turns.py").write_text(TWO_TURNS)
    settings = (*STEPS, "--task.name", "my_lab.two_turns", "--task.reward-workers", "1")
    options = {"environment": {"PYTHONPATH": str(tmp_path)}}
    trainer = run.trainer(*settings, **options)
    running = {name: run.generator(name, *settings, **options) for name in ("ann", "bob")}
    made = dict.fromkeys(running, 0)
    while not ended_within(trainer, random.uniform(0.0, 0.2)):
        name = random.choice(list(running))
        generator = running[name]
        if not generator.alive:
            running[name] = run.generator(name, *settings, **options)
        elif (count := generator.printed.count("made group=")) > made[name]:
            made[name] = count
            if random.random() < 0.2:
                generator.kill()
                kills["generator"] += 1
            else:
                kills["worker"] += kill_reward_workers(generator)
    assert trainer.wait() == 0, trainer.printed
    print(f"kills: {dict(kills)}")
    assert min(kills["generator"], kills["worker"]) >= 3
    assert all(row["dropped/invalid"] == 0 for row in run.rows)
    assert all(row["completions/mean_turns"] == 2 for row in run.rows)
    assert any("dropped an unscored group" in each.printed for each in running.values())
    assert run.broken() == {}
    assert is_as_published(run)


def kill_reward_workers(generator: Program) -> int:
    """Kill the reward workers of a generator; returns their number."""
    workers = [
        child
        for child in psutil.Process(generator.process.pid).children()
        if "peralta_zmq.environments.reward_worker" in " ".join(child.cmdline())
    ]
    for worker in workers:
        worker.kill()
    return len(workers)


def test_kill_at_each_failpoint_leaves_ledger_and_weights_consistent(run: RealRun) -> None:
    settings = (*STEPS, "--checkpoint.interval", "2")
    running: dict[str, Program] = {}

    def start(program: str, environment: Mapping[str, str]) -> None:
        if program in running:
            running[program].kill()
        running[program] = (
            run.trainer(*settings, environment=environment) if program == "trainer"
            else run.generator("ann", environment=environment)
        )  # fmt: skip

    def is_killed_at(place: str) -> bool:
        """True if the program reaches the failpoint; the other program keeps running."""
        program, other = "trainer", "generator"
        if place.startswith(IN_GENERATORS):
            program, other = other, program
        starts, target = num_starts(run) + (program == "trainer"), run.step + 4
        start(program, {FAILPOINT_VARIABLE: place})
        if other not in running or not running[other].alive:
            start(other, {})
        until(
            lambda: (
                not running[program].alive or (num_starts(run) >= starts and run.step >= target)
            ),
            running[other],
        )
        if running[program].alive:
            running[program].kill()
            return False
        assert running[program].wait() == -signal.SIGKILL, running[program].printed[-3000:]
        return True

    reached = [place for place in FAILPOINTS if run.step < 50 and is_killed_at(place)]
    for program in ("trainer", "generator"):
        start(program, {})
    trainer, generator = running["trainer"], running["generator"]
    assert trainer.wait(timeout=120) == 0, trainer.printed
    assert generator.wait(timeout=30) == 0, generator.printed
    print(f"reached: {reached}")
    assert set(FAILPOINTS) - set(reached) <= {"publish.identity"}
    assert run.broken() == {}
    assert is_as_published(run)
