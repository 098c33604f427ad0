"""Sample ranges with real programs: generators join, die and restart, and the trainer restarts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from real_programs import RealRun, until

from peralta_zmq import wire
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer.journal import DROPPED, GROUP, decode_record, files_in, read_records


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_generators_and_trainer_that_restart_draw_no_sample_twice(tmp_path: Path) -> None:
    run = RealRun(tmp_path, "--train.max-steps", "14")
    with closing(run):
        trainer = run.trainer()
        run.generator("ann")
        bob = run.generator("bob")
        until(lambda: run.step >= 4, trainer, bob)
        bob.kill()
        run.generator("bob")
        run.generator("cid")
        trainer.kill()
        trainer = run.trainer()
        until(lambda: run.step == 14, trainer)
        assert trainer.wait(timeout=30) == 0
        assert run.broken(max_steps=14) == {}
    journal, limits = run.folder / "journal", wire.GroupLimits(1 << 31)
    records = [record for step in files_in(journal) for record in read_records(journal, step)[0]]
    kinds = (GROUP, DROPPED)
    groups = [decode_record(record, limits) for record in records if record.kind in kinds]
    drawn = [group.sample_index for group in groups if isinstance(group, RolloutGroup)]
    assert len(set(drawn)) == len(drawn) >= 14 * 4
    assert run.replay()[-1].count("as published") == 1
