"""Lost steps and damaged checkpoints: version numbers rise, an older checkpoint is used.

See the fault table in docs/reliability.md.
"""

from __future__ import annotations

import shutil

import pytest
from real_programs import RealRun, until

from peralta_zmq import atomic_files

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
EVERY_TWO = ("--checkpoint.interval", "2", "--checkpoint.keep-last", "4")
LOST = {"P3", "P6"}  # promises that a lost journal breaks


def trained_to(run: RealRun, step: int, *settings: str) -> str:
    """Train a session up to `step`; returns the trainer's output."""
    log = run.folder.parent / "trainer.log"
    before = log.read_text() if log.exists() else ""
    trainer = run.trainer("--train.max-steps", str(step), *EVERY_TWO, *settings)
    generator = run.generator("ann", "--train.max-steps", str(step))
    assert trainer.wait(timeout=120) == 0, trainer.printed
    assert generator.wait(timeout=30) == 0, generator.printed
    return trainer.printed.removeprefix(before)


def lose_steps(run: RealRun) -> None:
    """Remove the checkpoints and the journal of all steps after step 4."""
    for name in ("checkpoints", "journal"):
        for step, path in atomic_files.steps_in(
            run.folder / name, suffix=".msgpack" if name == "journal" else ""
        ).items():
            if step > 4:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def published(run: RealRun) -> list[tuple[int, int]]:
    """(number, step) of every version, in the order of publication."""
    return [
        (int(str(row["number"])), int(str(row["step"])))
        for row in run.events if row["event"] == "publish"
    ]  # fmt: skip


def test_damaged_checkpoint_is_replaced_by_an_older_one_and_the_journal(run: RealRun) -> None:
    trained_to(run, 6)
    newest = run.folder / "checkpoints" / "step_000006" / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(bytes(content))
    printed = trained_to(run, 8)
    assert "does not verify" in printed
    assert "resumed: step=6 checkpoint=4 replayed=2" in printed
    assert run.broken() == {}


def test_roll_back_trains_new_steps_under_rising_version_numbers(run: RealRun) -> None:
    trained_to(run, 8)
    before = published(run)
    lose_steps(run)
    printed = trained_to(run, 10)
    assert "the journal has lost groups: steps 5 to 8 are trained again" in printed
    after = published(run)[len(before) :]
    assert after[0][1] == 4  # the step of the roll-back is published first
    assert min(number for number, _ in after) > max(number for number, _ in before)
    assert [number for number, _ in after] == sorted(number for number, _ in after)
    assert after[-1][1] == 10
    steps = [int(str(row["step"])) for row in run.rows]
    assert steps == [*range(1, 9), *range(5, 11)]
    assert run.broken().keys() <= LOST


def test_generator_makes_no_group_of_two_lineages(run: RealRun) -> None:
    long = ("--train.max-steps", "14", *EVERY_TWO)
    generator, trainer = run.generator("ann", *long), run.trainer(*long)
    until(lambda: run.step >= 8, generator, trainer)
    trainer.kill()
    lose_steps(run)
    trainer = run.trainer(*long)
    assert trainer.wait(timeout=120) == 0, trainer.printed
    assert generator.wait(timeout=30) == 0, generator.printed
    assert "dropped groups in flight: rolled back to the weights of step 4" in generator.printed
    assert run.broken().keys() <= LOST
