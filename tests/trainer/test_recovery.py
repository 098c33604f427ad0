"""A start after lost, rolled back or refused steps, and while the disk is away or full."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import failing, on_pause
from sample_data import group_of
from trainer_sessions import Continued, Session, groups_for, states_of, weights_of

from peralta_zmq import atomic_files, wire
from peralta_zmq.config import RESOLVED, load_config
from peralta_zmq.errors import JournalError
from peralta_zmq.learning.learner import StepResult
from peralta_zmq.observe.metrics import EVENTS, METRICS, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.journal import HEADER
from peralta_zmq.trainer.trained_model import PolicyPublisher
from peralta_zmq.trainer.trainer import Trainer
from peralta_zmq.weights.store import Version


def lose_step_3(folder: Path, *more: str) -> Version:
    """Train three steps and truncate the journal of the last; returns the newest version."""
    with ExitStack() as stack:
        first = Session(stack, folder, *more)
        for _ in range(3):  # the checkpoint is of step 2
            first.advance()
            first.trainer.publishing.wait()
        newest = first.trainer.publishing.store.newest()
        file = first.trainer.collector.journal.file_of(3)
    assert newest is not None
    os.truncate(file, HEADER.size)
    return newest


def test_step_lost_by_the_journal_is_trained_again(tmp_path: Path) -> None:
    lost = lose_step_3(tmp_path).weights_id
    with ExitStack() as stack:
        second = Session(stack, tmp_path)
        second.trainer.publishing.wait()
        config = second.trainer.session.config
        published, problems = replay.published_ids(second.trainer.session.folder, config)
        assert 3 not in published and not problems
        assert [version.lineage for version in second.trainer.publishing.store.versions()][-1] == 1
        assert [second.advance()["step"] for _ in range(2)] == [3, 4]
        late = group_of([1, 0], group_number=1000, policy_step=3, weights_id=lost)
        assert second.trainer.collector.admission.admit(late, step=5) == "abandoned"
    with ExitStack() as stack:  # not again at the third start
        assert Session(stack, tmp_path).trainer.session.run_log.last_step == 4
    run = tmp_path / "demo"
    assert [row["step"] for row in read_rows(run / METRICS)] == [1, 2, 3, 3, 4]
    roll_backs = [row["step"] for row in read_rows(run / EVENTS) if row["event"] == "roll_back"]
    assert roll_backs == [2]


def test_replay_of_the_journal_is_recorded_before_the_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states_of(tmp_path, 3)  # the checkpoint is of step 2
    capsys.readouterr()
    with ExitStack() as stack:
        Session(stack, tmp_path)
    assert "replaying the journal from step 3 on\n" in capsys.readouterr().out
    events = read_rows(tmp_path / "demo" / EVENTS)
    starts = [row for row in events if row["event"] in ("start", "replay", "resume")]
    assert [row["event"] for row in starts] == ["start", "replay", "resume"]
    assert (starts[1]["checkpoint"], starts[1]["steps"]) == (2, 1)


def test_stop_during_the_replay_ends_the_session(tmp_path: Path) -> None:
    run = Continued(tmp_path)
    run.train(max_steps=4, until=2)
    with ExitStack() as stack:
        trainer = run.open(stack, max_steps=4)
        trainer.session.stop.requested = True
        trainer.recover()
        trainer.finish()
    assert [row["event"] for row in read_rows(run.folder / EVENTS)][-2:] == ["replay", "stop"]


def test_roll_back_to_the_published_step_publishes_the_new_lineage(tmp_path: Path) -> None:
    assert lose_step_3(tmp_path, "--weights.interval=2").step == 2
    for _ in range(2):  # the second start rolls nothing back
        with ExitStack() as stack:
            again = Session(stack, tmp_path, "--weights.interval=2").trainer
            versions = list(again.publishing.store.versions())
            steps = [(version.step, version.lineage) for version in versions]
            assert steps[-2:] == [(2, 0), (2, 1)]
            assert versions[-1].field("result") == versions[-2].field("result")


def not_published(publisher: PolicyPublisher, step: int, *, keyframe: bool = False) -> float:
    return 0.0


def test_abandoned_weights_of_a_step_are_not_announced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_step_3(tmp_path).weights_id
    with ExitStack() as stack, monkeypatch.context() as patched:
        patched.setattr(PolicyPublisher, "publish", not_published)  # the folder is unavailable
        assert Session(stack, tmp_path).advance()["step"] == 3
    with ExitStack() as stack:
        third = Session(stack, tmp_path).trainer
        newest = third.publishing.store.newest()
        assert newest is not None and newest.step == 3 and newest.weights_id != lost
        assert third.session.announcer.announcement.weights_id == newest.weights_id


def test_run_without_its_checkpoints_is_refused(tmp_path: Path) -> None:
    states_of(tmp_path, 2, "--checkpoint.keep-last=1")
    assert not any((tmp_path / "demo" / "journal").iterdir())
    shutil.rmtree(tmp_path / "demo" / "checkpoints")
    with ExitStack() as stack, pytest.raises(JournalError, match=r"put .*/checkpoints back"):
        Session(stack, tmp_path, "--checkpoint.keep-last=1")


@pytest.mark.parametrize("keeps_journal", [True, False])
def test_run_with_damaged_checkpoints_names_the_way_back(
    tmp_path: Path, keeps_journal: bool
) -> None:
    settings = ("--checkpoint.keep-journal",) if keeps_journal else ()
    settings += ("--checkpoint.keep-last=1",)
    state = states_of(tmp_path, 4, *settings)[-1]
    run = tmp_path / "demo"
    for path in (run / "checkpoints").glob("*/state.safetensors"):
        os.truncate(path, 100)
    with ExitStack() as stack, pytest.raises(JournalError) as caught:
        Session(stack, tmp_path, *settings)
    if not keeps_journal:
        assert str(caught.value).endswith(
            "put a copy back, or continue from published weights: --run.name NEW --run.fork demo "
            "--run.from-step STEP"
        )
        shutil.rmtree(run / "checkpoints")
        with ExitStack() as stack:
            fork = ("--run.name=new", "--run.fork=demo", "--run.from-step=3")
            assert Session(stack, tmp_path, *settings, *fork).trainer.step == 0
        return
    assert "move the folder away: the next start trains all steps from the" in str(caught.value)
    (run / "checkpoints").rename(tmp_path / "away")
    with ExitStack() as stack:
        learner = Session(stack, tmp_path, *settings).trainer.policy.learner
        assert learner.step == 4
        restored = learner.state()
    assert all(torch.equal(restored[name], each) for name, each in state["tensors"].items())


def steps_published(folder: Path) -> list[object]:
    return [row["step"] for row in read_rows(folder / EVENTS) if row["event"] == "publish"]


def test_run_with_publish_interval_continues_after_a_kill_between_two_versions(
    continued: Continued,
) -> None:
    interval = ("--weights.interval=3", "--eval.interval=5", "--checkpoint.interval=2")
    continued.train(*interval, max_steps=9, until=4)
    assert steps_published(continued.folder) == [0, 3]
    with continued.session(*interval, max_steps=9, until=8) as trainer:
        assert steps_published(continued.folder) == [0, 3, 4, 5, 6]  # 5 is evaluated
        trainer.session.stop.requested = True
        trainer.finish()  # publishes the weights of step 8
        accounting = trainer.collector.accounting()
    continued.train(*interval, max_steps=9, until=9)
    assert steps_published(continued.folder) == [0, 3, 4, 5, 6, 8, 9]
    assert accounting["trained"] + accounting["no_signal"] == 16  # 8 steps of 2 groups
    assert accounting["lost"] == accounting["stale"] == 0
    assert replay.main([str(continued.folder)]) == 0  # all versions are as published


def test_stop_during_a_replay_changes_no_published_step(
    continued: Continued, monkeypatch: pytest.MonkeyPatch
) -> None:
    with continued.session(max_steps=4, until=3) as killed:
        published = weights_of(killed)
    with ExitStack() as stack:
        trainer = continued.open(stack, max_steps=8)
        finish_step = trainer.policy.learner.finish_step

        def finish_then_stop(**options: Any) -> StepResult:
            trainer.session.stop.requested = True
            return finish_step(**options)

        monkeypatch.setattr(trainer.policy.learner, "finish_step", finish_then_stop)
        trainer.recover()
        trainer.finish()
        assert trainer.policy.learner.step == 1
    with continued.session(max_steps=8) as trainer:
        assert (trainer.policy.learner.step, weights_of(trainer)) == (3, published)
    assert steps_published(continued.folder) == [0, 1, 2, 3]
    assert load_config("bin/trainer", ["@", str(continued.folder / RESOLVED)]).train.max_steps == 8


def journaled_by(trainer: Trainer, step: int, *groups: RolloutGroup) -> None:
    """Journal groups for a step, whether or not they are within the limits."""
    for group in groups:
        trainer.collector.journal.append(step, wire.encode_group(group))
    trainer.collector.journal.commit()


def test_step_of_which_all_groups_are_refused_is_skipped(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    context = "--engine.max-model-len=512"
    with continued.session(context, max_steps=4, until=1) as trainer:
        huge = group_of([1, 0, 0, 0], num_prompt=510, generator_id="eve",
                        run_id=trainer.session.run_id)  # fmt: skip
        journaled_by(trainer, 2, huge)
        journaled_by(trainer, 3, *groups_for(trainer)[10:12])
    with continued.session(context, max_steps=4) as trainer:
        assert trainer.step == 3 and trainer.collector.accounting()["invalid"] == 1
        continued.feed(trainer, groups_for(trainer), until=4)
    (skip,) = (row for row in read_rows(continued.folder / EVENTS) if row["event"] == "skip")
    assert (skip["step"], skip["reason"]) == (2, "all groups are refused")
    assert "step 2 skipped: all groups are refused" in capsys.readouterr().out
    assert replay.main([str(continued.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("step=2  skipped: all groups are refused  weights=")
    assert [line.endswith("  as published") for line in lines] == [True, False, True, True]


def test_continued_run_waits_for_room_for_a_checkpoint(
    continued: Continued, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    continued.train(max_steps=4, until=3)
    resolved = continued.folder / RESOLVED
    before = resolved.read_bytes()
    with ExitStack() as stack, monkeypatch.context() as patched:
        trainer = continued.open(stack, max_steps=8)

        def make_room() -> None:
            assert resolved.read_bytes() == before
            patched.undo()

        patched.setattr(atomic_files, "write_folder", failing(errno.ENOSPC))
        on_pause(patched, make_room)
        trainer.recover()
    assert resolved.read_bytes() != before
    assert (continued.folder / "checkpoints" / "step_000003").exists()
    assert "No space left on device; make room for it. Waiting" in capsys.readouterr().out
