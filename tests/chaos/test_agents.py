"""Agents while their generator, the trainer and their own processes are killed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psutil
import pytest
from real_programs import RealRun, until

from tools.run_history import RECORDING_OPTIONS

AGENT = "agent:tests/support/calculator_agent.py:solve"
SMALL = ("--sampling.num-generations", "4", "--train.batch-size", "16", "--eval.num-examples", "8",
         "--checkpoint.interval", "2", "--engine.slots", "8", "--run.num-workers", "3",
         "--task.name", AGENT, "--model.dtype", "float32", "--train.max-steps", "12",
         # So small that the weights of all steps give the same logprobs.
         "--train.learning-rate", "1e-12", "--train.dtype", "float32",
         *RECORDING_OPTIONS)  # fmt: skip


def agent_processes() -> list[psutil.Process]:
    """The processes that run agents."""
    found = list[psutil.Process]()
    for process in psutil.process_iter(["cmdline"]):
        if "environments.reward_worker" in " ".join(process.info["cmdline"] or ()):
            found.append(process)
    return found


pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]


def test_nothing_is_lost_or_trained_twice_when_agents_and_programs_are_killed(
    tmp_path: Path,
) -> None:
    with closing(RealRun(tmp_path, small=SMALL)) as run:
        trainer = run.trainer()
        first = run.generator("first")
        second = run.generator("second", "--engine.name", "hf")
        until(lambda: run.step >= 3, trainer, first, second)
        for process in agent_processes()[:1]:
            process.kill()
        until(lambda: run.step >= 5, trainer, first, second)
        first.kill()
        first = run.generator("first")
        until(lambda: run.step >= 7, trainer, first, second)
        trainer.kill()
        trainer = run.trainer()
        assert trainer.wait(timeout=200) == 0, trainer.printed
        assert first.wait(timeout=60) == 0, first.printed
        assert second.wait(timeout=60) == 0, second.printed
        assert run.broken(max_steps=12) == {}
        rows = run.rows
        assert max(float(str(row["completions/mean_turns"])) for row in rows) == 2
        assert max(float(str(row["mismatch_kl"])) for row in rows) < 1e-5
