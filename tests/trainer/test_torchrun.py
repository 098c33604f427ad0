"""A trainer of two ranks under torchrun: Ctrl-C, then the same command to the end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_programs import REPO, Program, until
from test_end_to_end import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")  # fmt: skip


class Ranks(Machine):
    """Starts trainers with two ranks."""

    def start_plain(self, program: str, *arguments: str) -> Program:
        """Start a program; a trainer under torchrun."""
        before = TORCHRUN if program == "trainer" else (sys.executable,)
        config = ("@", str(REPO / "configs" / "demo.toml"))
        command = [*before, str(REPO / "bin" / program), *config, *arguments]
        self._started.append(Program(command, self._folder / f"{len(self._started)}.log", {}))
        return self._started[-1]

    def close(self) -> None:
        """Terminate all programs: a killed torchrun would leave its ranks running."""
        for program in self._started:
            program.process.send_signal(signal.SIGCONT)
            program.process.terminate()
            try:
                program.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                program.process.kill()
                program.process.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    yield started
    started.close()


def test_two_ranks_resume_after_ctrl_c_and_complete_the_run(machine: Ranks) -> None:
    generator = machine.start("generator", "--train.max-steps", "12")
    trainer = machine.start("trainer", "--train.max-steps", "12")
    until(lambda: len(machine.rows()) >= 2, trainer, generator)
    generator.process.send_signal(signal.SIGSTOP)  # so that the trainer cannot reach the end
    trainer.process.send_signal(signal.SIGINT)
    trainer.wait(timeout=40)
    stopped = int(str(machine.rows()[-1]["step"]))
    assert 2 <= stopped < 12
    assert f"stopped after step {stopped}, saved; the same command resumes it" in trainer.printed

    generator.process.send_signal(signal.SIGCONT)
    trainer = machine.start("trainer", "--train.max-steps", "12")
    assert trainer.wait() == 0, trainer.printed
    assert generator.wait() == 0, generator.printed
    assert f"resumed: step={stopped} checkpoint={stopped} replayed=0" in trainer.printed
    assert "steps              12 in" in trainer.printed
    assert [row["step"] for row in machine.rows()] == [*range(1, 13)]
