"""A trainer of two ranks under torchrun: Ctrl-C, then the same command to the end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from real_programs import RealRun, ended_within, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RealRun]:
    launchers = {"trainer": TORCHRUN}
    with closing(RealRun(tmp_path, "--train.max-steps", "12", launchers=launchers)) as opened:
        yield opened
        for program in opened.started:  # a killed torchrun would leave its ranks running
            program.signal(signal.SIGCONT)
            program.signal(signal.SIGTERM)
            ended_within(program, 40)


def test_two_ranks_resume_after_ctrl_c_and_complete_the_run(run: RealRun) -> None:
    generator = run.start("generator")
    trainer = run.start("trainer")
    until(lambda: len(run.rows) >= 2, trainer, generator)
    generator.signal(signal.SIGSTOP)  # so that the trainer cannot reach the end
    trainer.signal(signal.SIGINT)
    trainer.wait(timeout=40)
    stopped = int(str(run.rows[-1]["step"]))
    assert 2 <= stopped < 12
    assert f"stopped after step {stopped}, saved; the same command resumes it" in trainer.printed

    generator.signal(signal.SIGCONT)
    trainer = run.start("trainer")
    assert trainer.wait() == 0, trainer.printed
    assert generator.wait() == 0, generator.printed
    assert f"resumed: step={stopped} checkpoint={stopped} replayed=0" in trainer.printed
    assert "steps              12 in" in trainer.printed
    assert [row["step"] for row in run.rows] == [*range(1, 13)]
