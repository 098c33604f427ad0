"""A resumed run equals an uninterrupted one: weights, optimizer, pools, samples, schedules."""

from __future__ import annotations

import os
import re
import shutil
import signal
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import exit_code
from failing_losses import POISON
from sample_data import group_of
from trainer_sessions import (
    SETTINGS,
    STEPS,
    Continued,
    Session,
    groups_for,
    states_of,
    weights_of,
)

from peralta_zmq import atomic_files, models, wire
from peralta_zmq.compiler import INSTRUCTION_SET
from peralta_zmq.config import RESOLVED, load_config
from peralta_zmq.errors import JournalError, TrainingError
from peralta_zmq.models import layer_ops
from peralta_zmq.observe.metrics import CONFIG_HISTORY, EVENTS, METRICS, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.checkpoint import CHECKPOINTS
from peralta_zmq.trainer.journal import (
    BEGUN,
    JOURNAL,
    Journal,
    decode_update,
    encode_update,
    read_records,
)
from peralta_zmq.trainer.trainer import Trainer
from tools.link_proxy import free_ports

FAILPOINTS = sorted(re.findall(r'failpoint\("(\S+)"\)', Path(atomic_files.__file__).read_text()))


def recover(folder: Path, plan: str) -> None:
    """Open and recover a trainer that the failpoints of `plan` kill; runs in a child process."""
    failpoints = atomic_files.parse_failpoints(plan)
    atomic_files.failpoints = failpoints
    arguments = [*SETTINGS, "--run.dir", str(folder), "--wire.port", str(free_ports())]
    with ExitStack() as stack:
        Trainer(load_config("bin/trainer", arguments), stack).recover()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "atomic_files.opened" else pytest.mark.chaos)
     for name in FAILPOINTS],
)  # fmt: skip
@pytest.mark.parametrize(("first", "last"), [(2, 3), pytest.param(1, 6, marks=pytest.mark.slow)])
def test_first_start_killed_at_any_write_is_completed_by_the_next(
    name: str, first: int, last: int, tmp_path: Path
) -> None:
    count = 0
    for count in range(first, last + 1):  # 1 to 4 are files of the run, the rest of weights
        folder = tmp_path / str(count)
        code = exit_code(recover, folder, f"{name}:{count}")
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert exit_code(recover, folder, "") == 0
        assert (folder / "demo" / RESOLVED).exists(), f"killed at {name}:{count}"
        assert (folder / "demo" / "weights" / "step_00000000" / atomic_files.STABLE).exists()
    assert count > 1


ADAPTERS = ("--lora.rank=4", "--lora.base-dtype=nf4", "--loss.name=grpo_kl",
            "--loss.beta=0.1", "--train.ref-sync-steps=3")  # fmt: skip


@pytest.mark.parametrize("more", [(), ADAPTERS], ids=["all weights", "adapters"])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    if more:
        pytest.importorskip("peft", reason="the extra lora is not installed")
    expected = states_of(tmp_path / "uninterrupted", STEPS, *more)
    assert expected[-1]["pools"]["easy"] and expected[-1]["pools"]["hard"]
    assert expected[-1]["outcomes"]["filtered"] > 0
    states_of(tmp_path / "resumed", 3, *more)  # checkpoint of step 2; step 3 is in the journal
    resumed = states_of(tmp_path / "resumed", STEPS - 3, *more)
    for before, after in zip(expected[3:], resumed, strict=True):
        tensors, restored = before.pop("tensors"), after.pop("tensors")
        assert after == before
        assert restored.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(restored[name], tensor), f"{name} at step {before['step']}"


def test_resumed_step_is_not_evaluated_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = Session(stack, tmp_path)
        for _ in range(3):
            first.advance()
    with ExitStack() as stack:
        announcement = Session(stack, tmp_path).trainer.session.announcer.announcement
        assert announcement.evaluation_step is None


def test_steps_without_finite_gradient_end_the_run_which_can_continue(continued: Continued) -> None:
    steep = ("--loss.name=failing_losses.steep", "--checkpoint.interval=1")

    def groups(trainer: Trainer, name: str, *, poisoned: bool = False) -> list[RolloutGroup]:
        made = [group_of([1, 0, 0, 0], generator_id=name, group_number=number, seed=number,
                         run_id=trainer.session.run_id) for number in range(6)]  # fmt: skip
        for rollout in (each for group in made for each in group.rollouts if poisoned):
            rollout.logprobs[rollout.loss_mask] = POISON
        return made

    with continued.session(*steep, max_steps=8) as trainer:
        continued.feed(trainer, groups(trainer, "ann")[:2], until=1)
        with pytest.raises(TrainingError, match=r"^steps 2 to 4 had no") as caught:
            continued.feed(trainer, groups(trainer, "bob", poisoned=True), until=4)
    message = str(caught.value)
    assert "The same command continues with new groups" in message
    with continued.session(*steep, max_steps=8) as trainer:
        assert trainer.policy.learner.step == 4
        continued.feed(trainer, groups(trainer, "eve"), until=6)
        assert read_rows(trainer.session.folder / METRICS)[-1]["skipped"] == 0
    assert "go back with --run.fork and --run.from-step, and with other rewards" in message
    others = ("--run.name=other", "--run.fork=demo", "--run.from-step=5", "--loss.name=grpo")
    with continued.session(*others, max_steps=8) as trainer:
        continued.feed(trainer, groups(trainer, "dan", poisoned=True), until=3)
        assert read_rows(trainer.session.folder / METRICS)[-1]["skipped"] == 0


CHANGES = (
    *("--train.learning-rate=0.003", "--train.lr-scheduler-type=cosine", "--train.warmup-steps=2"),
    *("--train.weight-decay=0.1", "--train.max-grad-norm=0.05"),
)  # fmt: skip


def train_changed(folder: Path, plan: str) -> None:
    """Train with CHANGES until the failpoints of `plan` kill; runs in a child process."""
    atomic_files.failpoints = atomic_files.parse_failpoints(plan)
    continued = Continued(folder)
    continued.train(*CHANGES, max_steps=8, until=8)


@pytest.mark.parametrize("plan", ["checkpoint.written:1", "trainer.learned:4", "trainer.stepped:1"])
def test_steps_before_changed_settings_are_repeated_bit_for_bit(
    plan: str, continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    continued.train(max_steps=8, until=3)
    assert exit_code(train_changed, continued.folder.parent, plan) == -signal.SIGKILL
    with continued.session(*CHANGES, max_steps=8, until=6) as trainer:
        expected = weights_of(trainer)
    shutil.rmtree(continued.folder / CHECKPOINTS)  # all steps are repeated
    with continued.session(*CHANGES, max_steps=8) as trainer:
        assert trainer.step == 6
        repeated = weights_of(trainer)
        assert repeated == expected
    assert continued.replay(capsys) == ["as published"] * 6


def test_changed_settings_are_recorded(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    continued.train("--eval.interval=100", max_steps=8, until=2)
    for _ in range(2):  # the second start changes no further setting
        with continued.session(*CHANGES[:1], "--eval.interval=7", max_steps=8):
            pass
    events = [row for row in read_rows(continued.folder / EVENTS) if row["event"] == "settings"]
    changes: list[Any] = [[row["step"], row["changes"]] for row in events]
    expected = ["train.learning_rate 0.01 -> 0.003", "eval.interval 100 -> 7"]
    assert changes[0][0] == 3 and changes[0][1][:2] == expected
    assert [text.split()[0] for text in changes[1][1]] == ["wire.port"]  # of this test
    line = "settings changed from step 3 on: train.learning_rate 0.01 -> 0.003, eval.interval 100"
    assert line in capsys.readouterr().out
    row = read_rows(continued.folder / CONFIG_HISTORY)[0]
    settings: Any = row["settings"]
    assert row["until_step"] == 2 and settings["train"]["learning_rate"] == 0.01


def test_run_with_fewer_steps_than_taken_is_complete(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--train.learning-rate=0.00001",)  # publishes deltas
    with continued.session(*small, max_steps=8, until=4) as trainer:
        newest = trainer.publishing.store.newest()
        assert newest is not None and newest.kind == "delta"
    with continued.session(*small, max_steps=2) as trainer:
        assert not trainer.unfinished and trainer.step == 4
        trainer.finish()
        newest = trainer.publishing.store.newest()
        assert newest is not None and (newest.step, newest.kind) == (4, "keyframe")
    line = "run complete: step 4 is trained already, and train.max_steps is 2"
    assert line in capsys.readouterr().out
    assert read_rows(continued.folder / EVENTS)[-1]["event"] == "complete"
    continued.train(*small, max_steps=6, until=6)
    assert replay.main([str(continued.folder)]) == 0


@pytest.mark.timeout(60)  # a step on the huge group would take minutes
def test_huge_groups_are_refused_and_a_restart_continues(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    def huge(trainer: Trainer, number: int, **shape: Any) -> RolloutGroup:
        return group_of(
            **shape, generator_id="eve", group_number=number, run_id=trainer.session.run_id
        )

    settings = (
        "--eval.rollouts-per-example=8",  # allows 5 rollouts in evaluation groups only
        *("--sampling.max-completion-length=48", "--engine.max-model-len=512"),
    )
    with continued.session(*settings, max_steps=4) as trainer:
        over = [
            huge(trainer, 0, rewards=[1.0, 0.0] * 30, lengths=[17_000] * 60),
            huge(trainer, 1, rewards=[1.0] * 5),
            huge(trainer, 2, rewards=[1.0, 0.0] * 2, lengths=[49, 2, 2, 2]),
            huge(trainer, 3, rewards=[1.0, 0.0] * 2, num_prompt=510),
        ]
        continued.feed(trainer, [*over, *groups_for(trainer)], until=1)
        refused = " ".join(trainer.collector.receiver.refused)
        for reason in (
            "not 4 rollouts (sampling.num_gen", "more than 48 generated tok",
            "more than 512 tokens (engine.max",
        ):  # fmt: skip
            assert reason in refused
        # The first is larger than any group within the limits: libzmq closed the connection.
        assert trainer.session.announcer.announcement.max_group_bytes < 128 << 10
        for group in over[:2]:  # as in a journal that was written without these limits
            trainer.collector.journal.append(2, wire.encode_group(group))
        trainer.collector.commit()
    with continued.session(*settings, max_steps=4, until=3) as trainer:
        assert trainer.collector.accounting()["invalid"] == 2
        assert trainer.collector.admission.ledger.highest(over[0].sender) == 1
    assert continued.replay(capsys) == ["as published"] * 3
    # The limits are those of the run, not of the settings to try.
    replay.main([str(continued.folder), "--sampling.num-generations=2", "--train.batch-size=8",
                 "--eval.rollouts-per-example=1"])  # fmt: skip
    assert len(capsys.readouterr().out.splitlines()) == 3


def weights_after(folder: Path, environment: dict[str, str], until: int, digest: Path) -> None:
    """Recover, train until a step, and write the digest of the weights; in a child process."""
    os.environ.update(environment)
    models.use_threads(1)
    try:
        with Continued(folder).session(max_steps=9, until=until) as trainer:
            digest.write_text(weights_of(trainer))
    except JournalError as error:
        digest.write_text(str(error))


@pytest.mark.parametrize(
    "environments",
    [
        ({}, {INSTRUCTION_SET: "none"}),
        ({}, {"PATH": "no compiler"}),
        ({INSTRUCTION_SET: "none"}, {}),
    ],
)
def test_steps_are_repeated_with_the_operators_that_computed_them(
    tmp_path: Path, environments: tuple[dict[str, str], dict[str, str]]
) -> None:
    digests = [tmp_path / "first", tmp_path / "second"]
    for environment, digest in zip(environments, digests, strict=True):
        assert exit_code(weights_after, tmp_path, environment, 3, digest) == 0
    assert digests[0].read_text() == digests[1].read_text()
    (resume,) = [row for row in read_rows(tmp_path / "demo" / EVENTS) if row["event"] == "resume"]
    assert resume["replayed"] == 3


def test_steps_of_a_lost_library_are_refused_with_the_way_on(tmp_path: Path) -> None:
    if layer_ops.operators() == layer_ops.TORCH:
        pytest.skip("no C compiler here")
    assert exit_code(weights_after, tmp_path, {}, 3, tmp_path / "first") == 0
    lost = {"PATH": "no compiler", "XDG_CACHE_HOME": str(tmp_path / "empty")}
    assert exit_code(weights_after, tmp_path, lost, 3, tmp_path / "second") == 0
    reason = (tmp_path / "second").read_text()
    assert reason.startswith(f"step 1 of {tmp_path}/demo cannot be repeated with the same bits: ")
    assert reason.endswith("from its weights: --run.fork demo --run.name NEW")


def replayed(folder: Path, environment: dict[str, str], output: Path) -> None:
    """Write the lines of bin/replay, or its error; in a child process."""
    os.environ.update(environment)
    models.use_threads(1)
    with output.open("w") as stream, redirect_stdout(stream):
        try:
            replay.main([str(folder / "demo")])
        except JournalError as error:
            stream.write(str(error))


def test_replay_computes_with_recorded_operators_or_refuses(tmp_path: Path) -> None:
    if layer_ops.operators() == layer_ops.TORCH:
        pytest.skip("no C compiler here")
    assert exit_code(weights_after, tmp_path, {}, 3, tmp_path / "digest") == 0
    output = tmp_path / "output"
    assert exit_code(replayed, tmp_path, {INSTRUCTION_SET: "none"}, output) == 0
    lines = output.read_text().splitlines()
    assert [line.endswith("  as published") for line in lines] == [True] * 3
    lost = {"PATH": "no compiler", "XDG_CACHE_HOME": str(tmp_path / "empty")}
    assert exit_code(replayed, tmp_path, lost, output) == 0
    assert output.read_text().startswith("step 1 cannot be repeated with the same bits: layer_ops-")


def test_number_of_a_version_that_is_gone_is_not_published_again(continued: Continued) -> None:
    with continued.session(max_steps=9, until=3) as trainer:
        folder = trainer.publishing.store.folder
    for version in folder.glob("step_*"):
        shutil.rmtree(version)
    with continued.session(max_steps=9) as trainer:
        newest = trainer.publishing.store.newest()
        assert newest is not None and (newest.step, newest.number) == (3, 4)


def test_repeated_steps_that_may_have_other_bits_are_published_under_a_new_number(
    continued: Continued,
) -> None:
    continued.train(max_steps=9, until=2)
    old = continued.folder / JOURNAL
    records = {step: read_records(old, step)[0] for step in (1, 2)}
    shutil.rmtree(old)
    with closing(Journal(old)) as journal:
        for step, of_step in records.items():
            for record in of_step:
                content = record.content
                if record.kind == BEGUN:  # as on a GPU, or of an older version
                    content = encode_update(replace(decode_update(content), arithmetic={}))
                journal.append(step, content, record.kind)
            journal.commit()
    with continued.session(max_steps=9) as trainer:
        numbers = [(each.step, each.number) for each in trainer.publishing.store.versions()]
        assert numbers == [(0, 0), (1, 1), (2, 2), (2, 3)]
