"""Starts with checkpoint.skip_progress and checkpoint.skip_buffer."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from sample_data import group_of
from trainer_sessions import Continued

from peralta_zmq import wire
from peralta_zmq.observe.metrics import METRICS, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.checkpoint import CHECKPOINTS
from peralta_zmq.trainer.journal import LEASED, encode_number
from peralta_zmq.trainer.loop import Trainer
from peralta_zmq.trainer.roll_back import NEW, SKIPPED

SKIP = "--checkpoint.skip-progress"
POOLS = ("--curriculum.easy-threshold=0.9", "--curriculum.hard-threshold=0.1")


def groups(trainer: Trainer, first: int, *, reward: float = 1.0) -> list[RolloutGroup]:
    """Four groups with the sequences from `first` on."""
    ids = list(trainer.collector.curriculum.pools._positions)
    return [
        group_of([reward, 0, 0, reward], sequence=number, seed=number, problem_id=ids[number],
                 run_id=trainer.session.run_id)
        for number in range(first, first + 4)
    ]  # fmt: skip


def buffer(trainer: Trainer, group: RolloutGroup) -> None:
    """Receive one of the two groups of the next step, beside a lease, and make them durable."""
    step = trainer.policy.learner.step + 1
    trainer.collector.journal.append(step, encode_number(8), LEASED)
    assert trainer.collector.add(group, wire.encode_group(group), step=step) == "trained"
    trainer.collector.commit()


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.policy.learner.state().items()}


def assert_equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []


def trained(continued: Continued) -> dict[str, torch.Tensor]:
    """Train two steps, the first with a checkpoint; buffer a fifth group; returns the state."""
    with ExitStack() as stack:
        trainer = continued.open(stack, max_steps=2)
        trainer.recover()
        continued.feed(trainer, groups(trainer, 0)[:2], until=1)
        trainer.checkpoints.write()  # step 2 is in the journal only
        continued.feed(trainer, groups(trainer, 0)[2:], until=2)
        buffer(trainer, groups(trainer, 4)[0])
        return state_of(trainer)


def test_skipped_progress_keeps_weights_and_optimizer_as_step_0(continued: Continued) -> None:
    expected = trained(continued)
    with ExitStack() as stack:
        trainer = continued.open(stack, SKIP, max_steps=2)
        trainer.recover()
        trainer.publishing.wait()
        assert trainer.step == 0
        assert_equal(state_of(trainer), expected)
        versions = list(trainer.publishing.store.versions())
        assert [(v.step, v.lineage) for v in versions] == [(0, 0), (1, 0), (2, 0), (0, 1)]
        assert versions[-1].field("result") == versions[-2].field("result")
        assert trainer.collector.accounting() | {"made": 5} == trainer.collector.accounting()
        outcomes = trainer.collector.admission.ledger.outcomes
        assert (outcomes["trained"], outcomes["abandoned"], outcomes["lost"]) == (4, 1, 0)
        base = groups(trainer, 5)[0]  # of the untrained model, which was step 0 before
        base = group_of([1, 0, 0, 1], sequence=5, weights_id=versions[0].weights_id,
                        run_id=base.run_id)  # fmt: skip
        assert trainer.collector.admission.admit(base, step=1) == "abandoned"
        continued.feed(trainer, groups(trainer, 6)[:2], until=1)
    with ExitStack() as stack:  # the same command continues
        trainer = continued.open(stack, SKIP, max_steps=2)
        trainer.recover()
        assert trainer.step == 1
        continued.feed(trainer, groups(trainer, 8)[:2], until=2)
        assert not trainer.unfinished
    rows = read_rows(continued.folder / METRICS)
    assert [row["step"] for row in rows] == [1, 2, 1, 2]
    assert rows[2]["learning_rate"] == rows[0]["learning_rate"]
    moved = {file.name for file in (continued.folder / SKIPPED).glob("*/*")}
    assert moved >= {"step_000001", "step_000001.msgpack", "step_000003.msgpack"}
    assert replay.main([str(continued.folder)]) == 0


def test_run_that_began_with_skip_progress_continues(continued: Continued) -> None:
    with ExitStack() as stack:
        trainer = continued.open(stack, SKIP, max_steps=2)
        trainer.recover()
        continued.feed(trainer, groups(trainer, 0)[:2], until=1)
    with ExitStack() as stack:
        trainer = continued.open(stack, SKIP, max_steps=2)
        trainer.recover()
        assert trainer.step == 1


class KilledError(Exception):
    """Stands for a SIGKILL."""


@pytest.mark.parametrize("name", ["step_000003.msgpack", "step_000001", "step_000000"])
def test_killed_skip_is_completed_by_the_next_start(
    name: str, continued: Continued, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, rename = trained(continued), os.rename

    def killed(source: Path, target: Path) -> None:
        if Path(target).name == name and str(continued.folder / NEW) not in str(target):
            raise KilledError
        rename(source, target)

    with ExitStack() as stack, monkeypatch.context() as patched:
        trainer = continued.open(stack, SKIP, max_steps=2)
        patched.setattr(os, "rename", killed)
        with pytest.raises(KilledError):
            trainer.recover()
    with ExitStack() as stack:  # also without the setting
        trainer = continued.open(stack, max_steps=2)
        trainer.recover()
        assert trainer.step == 0
        assert_equal(state_of(trainer), expected)
        assert trainer.collector.admission.ledger.outcomes["abandoned"] == 1
        assert [path.name for path in (continued.folder / CHECKPOINTS).iterdir()] == ["step_000000"]


def test_skipped_buffer_drops_waiting_groups_and_pools(continued: Continued) -> None:
    with ExitStack() as stack:
        trainer = continued.open(stack, *POOLS, max_steps=4)
        trainer.recover()
        easy, *others = groups(trainer, 0)
        easy = group_of([1, 1, 1, 1], problem_id=easy.problem_id, run_id=easy.run_id)
        continued.feed(trainer, [easy, others[0]], until=1)
        assert trainer.collector.curriculum.pools.sizes()["easy"] == 1
        buffer(trainer, others[1])
    copy = continued.folder.with_name("copy")
    shutil.copytree(continued.folder, copy)
    for setting in (["--checkpoint.skip-buffer"], []):  # the second start has nothing to drop
        with ExitStack() as stack:
            trainer = continued.open(stack, *POOLS, *setting, max_steps=4)
            trainer.recover()
            assert not trainer.collector.batch
            accounting = trainer.collector.accounting()
            assert (accounting["made"], accounting["abandoned"]) == (3, 1)
            assert accounting["in_flight"] == accounting["lost"] == 0
            if setting:
                assert trainer.collector.acknowledgements.consumed == {easy.sender: 2}
                assert trainer.collector.curriculum.pools.sizes()["easy"] == 0
            else:
                continued.feed(trainer, groups(trainer, 3)[:2], until=2)
                assert trainer.collector.admission.ledger.outcomes["trained"] == 3
    shutil.rmtree(continued.folder)
    shutil.move(copy, continued.folder)
    with ExitStack() as stack:  # without the setting the group is kept
        trainer = continued.open(stack, *POOLS, max_steps=4)
        trainer.recover()
        assert len(trainer.collector.batch) == 1
        assert trainer.collector.curriculum.pools.sizes()["easy"] == 1
