"""Ctrl-C, SIGTERM, orphans, and warnings of a run without progress.

See the fault table in docs/reliability.md.
"""

from __future__ import annotations

import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
from real_programs import RealRun, ended_within, processes_that_name, until

from peralta_zmq.observe.metrics import read_rows

chaos = pytest.mark.chaos
pytestmark = pytest.mark.timeout(180)

LONG = ("--train.max-steps", "10000")
SUMS = """
import time
from pathlib import Path

from peralta_zmq.rollout import Message, Problem

def problems(split, seed):
    for number in range(100):
        question = (Message("user", f"add {number} to 1."),)
        yield Problem(id=str(number), task="sums", messages=question, answer="1")

def reward(problem, completion_text):
"""
CONSTANT = f'''"""Every answer has the same reward."""
{SUMS}    return 0.5
'''
SLOW = f'''"""The reward takes four seconds."""
{SUMS}    Path(__file__).with_suffix(".reached").touch()
    time.sleep(4)
    return 0.5
'''
UNINTERRUPTIBLE = '''"""Swallows every exception, as a callback of a library may."""

import time
from pathlib import Path

def problems(split, seed):
    Path(__file__).with_suffix(".reached").touch()
    while True:
        try:
            time.sleep(0.1)
        except BaseException:
            pass

def reward(problem, completion_text):
    return 0.0
'''


@chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_finishes_the_step_and_saves(run: RealRun, number: signal.Signals) -> None:
    trainer, generator = run.trainer(*LONG), run.generator("ann")
    until(lambda: run.step >= 3, trainer, generator)
    trainer.signal(number)
    assert trainer.wait(timeout=3) == 0
    step = run.step
    assert f"stopped after step {step}, saved; the same command resumes it" in trainer.printed
    assert (run.folder / "checkpoints" / f"step_{step:06d}" / "STABLE").exists()
    assert "Traceback" not in trainer.printed


EVALUATES = ("--eval.num-examples", "250", "--eval.rollouts-per-example", "64",
             "--eval.eval-base-model")  # fmt: skip


@chaos  # on an idle machine: the limit is three seconds
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("during", "settings"), [("evaluate", EVALUATES), ("publish", ())])
def test_one_signal_ends_a_waiting_trainer_in_3_seconds(
    run: RealRun, during: str, settings: tuple[str, ...], number: signal.Signals
) -> None:
    trainer = run.trainer(*settings)
    until(lambda: run.events and run.events[-1]["event"] == during, trainer)
    trainer.signal(number)
    assert trainer.wait(timeout=3) == 0
    assert "stopped after step 0, saved; the same command resumes it" in trainer.printed
    assert (run.folder / "checkpoints" / "step_000000" / "STABLE").exists()
    assert read_rows(run.folder / "eval.jsonl") == []


@chaos
def test_second_signal_ends_the_trainer_at_once(run: RealRun, tmp_path: Path) -> None:
    task = task_in(tmp_path, "slow", SLOW)
    trainer = run.trainer("--task.name", "lab.slow", "--eval.eval-base-model", environment=task)
    until((tmp_path / "lab" / "slow.reached").exists, trainer)
    trainer.signal(signal.SIGINT)
    assert not ended_within(trainer, 0.5)  # it computes a reward, and would save
    trainer.signal(signal.SIGINT)
    assert trainer.wait(timeout=3) == -signal.SIGINT


@chaos
def test_generator_with_a_full_queue_ends_in_3_seconds(run: RealRun) -> None:
    eager = ("--train.max-async-level", "16")
    trainer = run.trainer(*LONG, *eager)
    generators = [run.generator(name, *eager) for name in ("ann", "bob")]
    until(lambda: run.step >= 2, trainer, *generators)
    trainer.kill()
    for number, generator in zip((signal.SIGINT, signal.SIGTERM), generators, strict=True):
        full = "waiting for the trainer to take a group"
        until(lambda one=generator, full=full: full in one.printed, generator)
        generator.signal(number)
        assert generator.wait(timeout=3) == -number
        assert "Traceback" not in generator.printed


@pytest.mark.parametrize(
    ("program", "seconds"),  # 20 s on a machine that runs other tests
    [("trainer", 20), pytest.param("trainer", 3, marks=chaos),
     pytest.param("generator", 3, marks=chaos)],
)  # fmt: skip
def test_ctrl_c_during_a_start_ends_the_program(
    run: RealRun, tmp_path: Path, program: str, seconds: float
) -> None:
    task = task_in(tmp_path, "uninterruptible", UNINTERRUPTIBLE)
    started = run.start(
        program, "--task.name", "lab.uninterruptible", log=program, environment=task
    )
    until((tmp_path / "lab" / "uninterruptible.reached").exists, started)
    started.signal(signal.SIGINT)
    assert started.wait(timeout=seconds) == -signal.SIGINT
    assert "Traceback" not in started.printed


@chaos
def test_killed_supervisor_leaves_no_orphan(run: RealRun) -> None:
    lan = run.start("lan", *LONG, log="lan")
    until(lambda: run.step >= 2, lan)
    assert len(processes_that_name(str(run.folder.parent))) >= 3
    lan.kill()
    until(lambda: not processes_that_name(str(run.folder.parent)), seconds=3)


def test_ctrl_c_to_the_supervisor_saves_and_leaves_no_orphan(run: RealRun) -> None:
    lan = run.start("lan", *LONG, log="lan")
    until(lambda: run.step >= 2, lan)
    lan.signal(signal.SIGINT)
    assert lan.wait(timeout=60) == 0, lan.printed
    assert "saved; the same command resumes it" in lan.printed
    assert not processes_that_name(str(run.folder.parent))


@chaos
def test_missing_generator_and_missing_signal_are_reported_in_30_s(
    run: RealRun, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    task, environment = ("--task.name", "lab.constant"), task_in(tmp_path, "constant", CONSTANT)
    with closing(RealRun(tmp_path / "alone")) as lonely:
        alone = lonely.trainer(*LONG)
        trainer = run.trainer(*LONG, *task, environment=environment)
        generator = run.generator("ann", *LONG, *task, environment=environment)
        until(lambda: any(row["event"] == "publish" for row in lonely.events), alone)
        started = time.monotonic()
        until(lambda: run.step >= 1, trainer, generator)
        stepped = time.monotonic()
        until(lambda: "no rollouts for" in alone.printed, alone)
        assert time.monotonic() - started < 30
        assert "Start a generator: bin/generator" in alone.printed
        until(lambda: "learning signal: 100%" in trainer.printed, trainer, generator)
        assert time.monotonic() - stepped < 30


def task_in(folder: Path, name: str, source: str) -> dict[str, str]:
    """Write a task `lab.NAME`; returns the environment that makes it importable."""
    (folder / "lab").mkdir()
    (folder / "lab" / f"{name}.py").write_text(source)
    return {"PYTHONPATH": str(folder)}
