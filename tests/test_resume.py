"""A resumed run equals an uninterrupted one: weights, optimizer, pools, samples, schedules."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import exit_code
from damage import flip_bit, remove
from failing_losses import POISON
from sample_data import group_of

from peralta_zmq import atomic_files, wire
from peralta_zmq.config import RESOLVED, load_config
from peralta_zmq.errors import JournalError, TrainingError
from peralta_zmq.learning.learner import StepResult
from peralta_zmq.models import lora
from peralta_zmq.observe.metrics import EVENTS, METRICS, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.loop import Trainer
from peralta_zmq.trainer.policy import PolicyPublisher
from peralta_zmq.trainer.session import StopSignal
from tools.link_proxy import free_ports

FAILPOINTS = sorted(re.findall(r'failpoint\("(\S+)"\)', Path(atomic_files.__file__).read_text()))
STEPS = 8
SETTINGS = (
    *("--sampling.num-generations=4", "--train.batch-size=16", f"--train.max-steps={STEPS}"),
    *("--train.learning-rate=0.01", "--train.lr-scheduler-type=cosine", "--train.warmup-steps=3"),
    *("--sampling.temp-scheduler=linear", "--sampling.temp-start=1.2", "--sampling.temp-end=0.6"),
    *("--curriculum.easy-threshold=0.75", "--curriculum.hard-threshold=0.25"),
    *("--curriculum.online-difficulty-filtering", "--no-eval.eval-base-model"),
    *("--eval.num-examples=2", "--checkpoint.interval=2", "--train.num-workers=2"),
    "--no-dashboard.enabled",
)


CONTINUED_SETTINGS = (
    *("--sampling.num-generations=4", "--train.batch-size=8", "--train.learning-rate=0.01"),
    *("--no-eval.eval-base-model", "--eval.num-examples=1", "--train.num-workers=1"),
    *("--checkpoint.keep-journal", "--no-dashboard.enabled"),
)  # fmt: skip


def groups_for(trainer: Trainer) -> list[RolloutGroup]:
    """More groups than all steps need; some are filtered, some exclude their problem."""
    rng = random.Random(7)
    ids = list(trainer.collector.curriculum.pools._positions)
    return [
        group_of(
            [float(rng.random() < 0.5) for _ in range(4)],
            lengths=[rng.randint(2, 9) for _ in range(4)],
            seed=number, sequence=number, sample_index=3 * number,
            problem_id=ids[rng.randrange(12)], run_id=trainer.session.run_id,
        )
        for number in range(STEPS * 6)
    ]  # fmt: skip


def recover(folder: Path, plan: str) -> None:
    """Open and recover a trainer that the failpoints of `plan` kill; runs in a child process."""
    failpoints = atomic_files.parse_failpoints(plan)
    atomic_files._failpoints = failpoints
    arguments = [*SETTINGS, "--run.dir", str(folder), "--wire.port", str(free_ports())]
    with ExitStack() as stack:
        Trainer(load_config("bin/trainer", arguments), stack).recover()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "atomic_files.opened" else pytest.mark.chaos)
     for name in FAILPOINTS],
)  # fmt: skip
def test_first_start_killed_at_any_write_is_completed_by_the_next(
    name: str, tmp_path: Path
) -> None:
    count = 0
    for count in range(1, 7):  # the first four are files of the run, the rest of weights
        folder = tmp_path / str(count)
        code = exit_code(recover, folder, f"{name}:{count}")
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert exit_code(recover, folder, "") == 0
        assert (folder / "demo" / RESOLVED).exists(), f"killed at {name}:{count}"
        assert (folder / "demo" / "weights" / "step_00000000" / atomic_files.STABLE).exists()
    assert count > 1


class Session:
    """A trainer that receives all groups again from the first one, like resends of a generator."""

    def __init__(self, stack: ExitStack, folder: Path, *more: str) -> None:
        port = free_ports()
        arguments = [*SETTINGS, "--run.dir", str(folder), "--wire.port", str(port), *more]
        self.trainer = Trainer(load_config("bin/trainer", arguments), stack)
        self.trainer.recover()
        sender = wire.RolloutSender(f"tcp://127.0.0.1:{port}", hwm=1000)
        stack.enter_context(closing(sender))
        for group in groups_for(self.trainer):
            assert sender.send(wire.encode_group(group), timeout=5)

    def advance(self) -> dict[str, Any]:
        """Take one step; returns the state after it."""
        self.trainer.advance()
        learner = self.trainer.policy.learner
        return {
            "step": learner.step,
            "tensors": {name: each.clone() for name, each in learner.state().items()},
            "rate": read_rows(self.trainer.session.folder / METRICS)[-1]["learning_rate"],
            "pools": self.trainer.collector.curriculum.pools.saved(),
            "excluded": self.trainer.session.status.announcement.excluded,
            "next_sample_index": self.trainer.collector.state()["next_sample_index"],
            "outcomes": dict(self.trainer.collector.admission.ledger.outcomes),
        }


def states_of(folder: Path, num_steps: int, *more: str) -> list[dict[str, Any]]:
    """The state after each step of a session of `num_steps` steps."""
    with ExitStack() as stack:
        session = Session(stack, folder, *more)
        return [session.advance() for _ in range(num_steps)]


ADAPTERS = ("--lora.rank=4", "--lora.dropout=0.1", "--loss.name=grpo_kl", "--loss.beta=0.1",
            "--train.ref-sync-steps=3")  # fmt: skip


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


@pytest.mark.parametrize(
    ("setting", "evaluated"),
    [("--eval.skip-eval-on-resume", -1), ("--no-eval.skip-eval-on-resume", 3)],
)
def test_resumed_step_is_evaluated_once_if_configured(
    setting: str, evaluated: int, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        first = Session(stack, tmp_path, setting)
        assert first.trainer.session.status.announcement.evaluation_step == -1  # not resumed
        for _ in range(3):
            first.advance()
    with ExitStack() as stack:
        second = Session(stack, tmp_path, setting)
        announcement = second.trainer.session.status.announcement
        assert announcement.evaluation_step == evaluated
        problems = second.trainer.evaluations._held_out.problems
        assert len(problems) == 2
        if evaluated < 0:
            return
        for number, problem in enumerate(problems):
            answer = group_of([1.0], seed=number, problem_id=problem.id, policy_step=3,
                              evaluation_step=3, run_id=second.trainer.session.run_id)  # fmt: skip
            second.trainer.evaluations.receive(answer)
        assert second.trainer.session.run_log.has_evaluation(3)
    with ExitStack() as stack:  # not again at the third start
        third = Session(stack, tmp_path, setting).trainer
        assert third.session.status.announcement.evaluation_step == -1


def lose_step_3(folder: Path) -> str:
    """Train three steps and truncate the journal of the last; returns its weights_id."""
    with ExitStack() as stack:
        first = Session(stack, folder)
        for _ in range(3):  # the checkpoint is of step 2
            first.advance()
        first.trainer.publishing.wait()
        lost = first.trainer.publishing.store.newest()
        file = first.trainer.collector.journal.file_of(3)
    assert lost is not None and lost.step == 3
    os.truncate(file, file.stat().st_size - 5)
    return lost.weights_id


def test_step_lost_by_the_journal_is_trained_again(tmp_path: Path) -> None:
    lost = lose_step_3(tmp_path)
    with ExitStack() as stack:
        second = Session(stack, tmp_path)
        second.trainer.publishing.wait()
        config = second.trainer.session.config
        published, problems = replay._published(second.trainer.session.folder, config)
        assert 3 not in published and not problems
        assert [version.lineage for version in second.trainer.publishing.store.versions()][-1] == 1
        assert [second.advance()["step"] for _ in range(2)] == [3, 4]
        late = group_of([1, 0], sequence=1000, policy_step=3, weights_id=lost)
        assert second.trainer.collector.admission.admit(late, step=5) == "abandoned"
    with ExitStack() as stack:  # not again at the third start
        assert Session(stack, tmp_path).trainer.session.run_log.last_step == 4
    run = tmp_path / "demo"
    assert [row["step"] for row in read_rows(run / METRICS)] == [1, 2, 3, 3, 4]
    roll_backs = [row["step"] for row in read_rows(run / EVENTS) if row["event"] == "roll_back"]
    assert roll_backs == [2]


def test_roll_back_to_the_published_step_publishes_the_new_lineage(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = Session(stack, tmp_path)
        for _ in range(2):
            first.advance()
        first.trainer.checkpoints.try_write()
    for more in (("--checkpoint.resume-step=2",), ()):  # the second start rolls nothing back
        with ExitStack() as stack:
            versions = list(Session(stack, tmp_path, *more).trainer.publishing.store.versions())
            steps = [(version.step, version.lineage) for version in versions]
            assert steps[-2:] == [(2, 0), (2, 1)]
            assert versions[-1].field("result") == versions[-2].field("result")


def test_roll_back_waits_for_the_end_of_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        first = Session(stack, tmp_path)
        for _ in range(4):
            first.advance()
    run, rename, failures = tmp_path / "demo", os.rename, [1, 3, 4]  # calls of os.rename
    calls: list[Path] = []

    def rename_or_fail(source: Path, target: Path) -> None:
        if str(run / "rolled_back") in str(target) or ".tmp-rolled_back" in str(target):
            calls.append(source)
            if len(calls) in failures:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_or_fail)
    monkeypatch.setattr(StopSignal, "pause", lambda stop, seconds: None)
    with ExitStack() as stack:
        again = Session(stack, tmp_path, "--checkpoint.resume-step=2")
        assert again.trainer.session.run_log.lineage == 1
        assert [again.advance()["step"] for _ in range(2)] == [3, 4]
    assert len(calls) > max(failures)
    moved = {file.name for file in (run / "rolled_back_to_000002").glob("*/*")}
    assert moved == {"step_000004", "step_000003.msgpack", "step_000004.msgpack"}
    assert "demo/checkpoints/step_000004 cannot be used: Read-only" in capsys.readouterr().out


def not_published(publisher: PolicyPublisher, step: int, *, keyframe: bool = False) -> float:
    return 0.0


def test_abandoned_weights_of_a_step_are_not_announced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_step_3(tmp_path)
    with ExitStack() as stack, monkeypatch.context() as patched:
        patched.setattr(PolicyPublisher, "publish", not_published)  # the folder is unavailable
        assert Session(stack, tmp_path).advance()["step"] == 3
    with ExitStack() as stack:
        third = Session(stack, tmp_path).trainer
        newest = third.publishing.store.newest()
        assert newest is not None and newest.step == 3 and newest.weights_id != lost
        assert third.session.status.announcement.weights_id == newest.weights_id


def test_run_without_its_checkpoints_is_refused(tmp_path: Path) -> None:
    states_of(tmp_path, 2, "--checkpoint.keep-last=1")
    assert not any((tmp_path / "demo" / "journal").iterdir())
    shutil.rmtree(tmp_path / "demo" / "checkpoints")
    with ExitStack() as stack, pytest.raises(JournalError, match=r"put .*/checkpoints back"):
        Session(stack, tmp_path, "--checkpoint.keep-last=1")


class Continued:
    """Sessions of one run with growing `train.max_steps` and a falling learning rate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "demo"
        self._arguments = [*CONTINUED_SETTINGS, "--run.dir", str(folder)]

    def open(self, stack: ExitStack, *more: str, max_steps: int) -> Trainer:
        """Open a trainer that has not recovered yet."""
        port = free_ports()
        session_settings = ["--train.max-steps", str(max_steps), "--wire.port", str(port)]
        trainer = Trainer(
            load_config("bin/trainer", [*self._arguments, *session_settings, *more]), stack
        )
        self._sender = wire.RolloutSender(f"tcp://127.0.0.1:{port}", hwm=1000)
        stack.enter_context(closing(self._sender))
        return trainer

    def train(self, trainer: Trainer, *, until: int) -> None:
        """Recover and take steps until `until`."""
        trainer.recover()
        self.feed(trainer, groups_for(trainer), until=until)

    def feed(self, trainer: Trainer, groups: Sequence[RolloutGroup], *, until: int) -> None:
        """Send groups and take steps until `until`; publish each step."""
        for group in groups:
            assert self._sender.send(wire.encode_group(group), timeout=5)
        while trainer.policy.learner.step < until:
            trainer.advance()
            trainer.publishing.wait()  # a newer version would replace a waiting one


@pytest.fixture
def continued(tmp_path: Path) -> Continued:
    return Continued(tmp_path)


def steps_published(folder: Path) -> list[object]:
    return [row["step"] for row in read_rows(folder / EVENTS) if row["event"] == "publish"]


def weights_of(trainer: Trainer) -> str:
    return replay.weights_sha256(lora.published_weights(trainer.policy.model))


def test_stop_during_a_replay_changes_no_published_step(
    continued: Continued, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        killed = continued.open(stack, max_steps=4)
        continued.train(killed, until=3)
        published = weights_of(killed)
    with ExitStack() as stack:
        trainer = continued.open(stack, max_steps=8)
        learn = trainer.policy.learner.learn

        def learn_then_stop(groups: Sequence[RolloutGroup], **options: float) -> StepResult:
            trainer.session.stop.requested = True
            return learn(groups, **options)

        monkeypatch.setattr(trainer.policy.learner, "learn", learn_then_stop)
        trainer.recover()
        trainer.finish()
        assert trainer.policy.learner.step == 1
    with ExitStack() as stack:
        trainer = continued.open(stack, max_steps=8)
        trainer.recover()
        assert (trainer.policy.learner.step, weights_of(trainer)) == (3, published)
    assert steps_published(continued.folder) == [0, 1, 2, 3]
    assert load_config("bin/trainer", ["@", str(continued.folder / RESOLVED)]).train.max_steps == 8


def test_replay_of_a_continued_run_uses_each_steps_learning_rate(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    for max_steps in (2, 4):
        with ExitStack() as stack:
            continued.train(continued.open(stack, max_steps=max_steps), until=max_steps)
    capsys.readouterr()
    assert replay.main([str(continued.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("  as published") for line in lines] == [True] * 4
    replay.main([str(continued.folder), "--train.learning-rate=0.02"])
    assert "learning_rate=0.02 " in capsys.readouterr().out.splitlines()[0]
    metrics = continued.folder / METRICS
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(rows[:1] + rows[2:]))
    assert replay.main([str(continued.folder)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("  not compared: metrics.jsonl lacks the learning rate of step 2")


@pytest.mark.timeout(180)
def test_replay_names_damaged_versions_and_compares_the_rest(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = (
        "--weights.keyframe-interval=2",
        "--weights.keep-last=10",
        "--train.learning-rate=0.00001",
    )  # fmt: skip -- small deltas
    with ExitStack() as stack:
        continued.train(continued.open(stack, *kept, max_steps=4), until=4)
    weights = continued.folder / "weights"
    assert sorted(file.parent.name[-1] for file in weights.glob("*/delta.bin")) == ["1", "3"]
    whole = shutil.copytree(weights, continued.folder / "whole")

    def check(expected: dict[int, str]) -> None:
        capsys.readouterr()
        assert replay.main([str(continued.folder)]) == replay.DAMAGED
        out, err = capsys.readouterr()
        compared = [line.endswith("  as published") for line in out.splitlines()]
        assert compared == [step not in expected for step in (1, 2, 3, 4)]
        problems = [line for line in err.splitlines() if "is not compared" in line]
        for line, (number, reason) in zip(problems, expected.items(), strict=True):
            assert re.match(rf"version {number} (\(step {number}\) )?is not compared: ", line)
            assert reason in line

    flip_bit(weights / "step_00000001" / "delta.bin")
    remove(weights / "step_00000002" / "model.safetensors")
    missing = "version 2 has no file model.safetensors"
    check({1: "version 1 does not verify: ", 2: missing, 3: missing})
    shutil.rmtree(weights)
    whole.rename(weights)
    flip_bit(weights / "step_00000002" / "manifest.json")
    check({2: "no valid manifest.json", 3: "version 3 needs version 2, which is missing"})
    remove(weights / "RUN.json")
    assert replay.main([str(continued.folder)]) == replay.DAMAGED
    problem = f"no version is compared: RUN.json in {weights} cannot be read\n"
    assert problem in capsys.readouterr().err


def test_steps_without_finite_gradient_end_the_run_which_can_continue(continued: Continued) -> None:
    steep = ("--loss.name=failing_losses.steep", "--checkpoint.interval=1")

    def groups(trainer: Trainer, name: str, *, poisoned: bool = False) -> list[RolloutGroup]:
        made = [group_of([1, 0, 0, 0], generator_id=name, sequence=number, seed=number,
                         run_id=trainer.session.run_id) for number in range(6)]  # fmt: skip
        for rollout in (each for group in made for each in group.rollouts if poisoned):
            rollout.logprobs[rollout.loss_mask] = POISON
        return made

    with ExitStack() as stack:
        trainer = continued.open(stack, *steep, max_steps=8)
        trainer.recover()
        continued.feed(trainer, groups(trainer, "ann")[:2], until=1)
        with pytest.raises(TrainingError, match=r"^steps 2 to 4 had no") as caught:
            continued.feed(trainer, groups(trainer, "bob", poisoned=True), until=4)
    message = str(caught.value)
    with ExitStack() as stack:
        assert "The same command continues with new groups" in message
        trainer = continued.open(stack, *steep, max_steps=8)
        trainer.recover()
        assert trainer.policy.learner.step == 4
        continued.feed(trainer, groups(trainer, "eve"), until=6)
        assert read_rows(trainer.session.folder / METRICS)[-1]["skipped"] == 0
    with ExitStack() as stack:
        assert "fix the rewards and resume a checkpoint with --checkpoint.resume-step" in message
        trainer = continued.open(stack, *steep, "--checkpoint.resume-step=5", max_steps=8)
        trainer.recover()
        continued.feed(trainer, groups(trainer, "cid"), until=6)
        assert read_rows(trainer.session.folder / METRICS)[-1]["skipped"] == 0
    with ExitStack() as stack:
        assert "another --run.name with a lower train.learning_rate or another [loss]" in message
        others = ("--run.name=other", "--train.learning-rate=0.001", "--loss.name=grpo")
        trainer = continued.open(stack, *others, max_steps=8)
        trainer.recover()
        continued.feed(trainer, groups(trainer, "dan", poisoned=True), until=3)
        assert read_rows(trainer.session.folder / METRICS)[-1]["skipped"] == 0


@pytest.mark.timeout(60)  # a step on the huge group would take minutes
def test_huge_groups_are_refused_and_a_restart_continues(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    def huge(trainer: Trainer, number: int, **shape: Any) -> RolloutGroup:
        return group_of(**shape, generator_id="eve", sequence=number, run_id=trainer.session.run_id)

    evaluation = ("--eval.rollouts-per-example=8",)  # allows 5 rollouts in evaluation groups only

    with ExitStack() as stack:
        trainer = continued.open(stack, *evaluation, max_steps=4)
        trainer.recover()
        over = [
            huge(trainer, 0, rewards=[1.0, 0.0] * 30, lengths=[17_000] * 60),
            huge(trainer, 1, rewards=[1.0] * 5),
            huge(trainer, 2, rewards=[1.0, 0.0] * 2, lengths=[49, 2, 2, 2]),
            huge(trainer, 3, rewards=[1.0, 0.0] * 2, num_prompt=510),
        ]
        continued.feed(trainer, [*over, *groups_for(trainer)], until=1)
        refused = " ".join(trainer.collector._receiver.refused)
        for reason in (
            "not 4 rollouts (sampling.num_gen", "more than 48 generated tok",
            "more than 512 tokens (engine.max",
        ):  # fmt: skip
            assert reason in refused
        # The first is larger than any group within the limits: libzmq closed the connection.
        assert trainer.session.status.announcement.max_group_bytes < 128 << 10
        # As in a journal that was written without these limits.
        trainer.collector.journal.append(2, wire.encode_group(over[0]))
        trainer.collector.commit()
    with ExitStack() as stack:
        trainer = continued.open(stack, *evaluation, max_steps=4)
        continued.train(trainer, until=3)
        assert trainer.collector.accounting()["invalid"] == 1
        assert trainer.collector.admission.ledger.highest(over[0].sender) == 0
    capsys.readouterr()
    assert replay.main([str(continued.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("  as published") for line in lines] == [True] * 3


def journaled_by(trainer: Trainer, step: int, *groups: RolloutGroup) -> None:
    """Journal groups for a step, whether or not they are within the limits."""
    for group in groups:
        trainer.collector.journal.append(step, wire.encode_group(group))
    trainer.collector.journal.commit()


def test_step_of_which_all_groups_are_refused_is_skipped(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        trainer = continued.open(stack, max_steps=4)
        continued.train(trainer, until=1)
        huge = group_of([1, 0, 0, 0], num_prompt=510, generator_id="eve",
                        run_id=trainer.session.run_id)  # fmt: skip
        journaled_by(trainer, 2, huge)
        journaled_by(trainer, 3, *groups_for(trainer)[10:12])
    with ExitStack() as stack:
        trainer = continued.open(stack, max_steps=4)
        trainer.recover()
        assert trainer.step == 3 and trainer.collector.accounting()["invalid"] == 1
        continued.feed(trainer, groups_for(trainer), until=4)
    (skip,) = (row for row in read_rows(continued.folder / EVENTS) if row["event"] == "skip")
    assert (skip["step"], skip["reason"]) == (2, "all groups are refused")
    assert "step 2 skipped: all groups are refused" in capsys.readouterr().out
    assert replay.main([str(continued.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("step=2  skipped: all groups are refused  weights=")
    assert [line.endswith("  as published") for line in lines] == [True, False, True, True]


def test_journaled_group_with_another_number_of_rollouts_is_refused(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = ("--eval.rollouts-per-example=8",)  # allows 5 rollouts in evaluation groups only
    with ExitStack() as stack:
        trainer = continued.open(stack, *evaluation, max_steps=2)
        continued.train(trainer, until=1)
        other = group_of([1, 0, 0, 0, 0], generator_id="eve", run_id=trainer.session.run_id)
        journaled_by(trainer, 2, other)
    with ExitStack() as stack:
        trainer = continued.open(stack, *evaluation, max_steps=2)
        trainer.recover()
        assert not trainer.collector.batch and trainer.collector.accounting()["invalid"] == 1
        continued.feed(trainer, groups_for(trainer), until=2)
    capsys.readouterr()
    assert replay.main([str(continued.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("  as published") for line in lines] == [True] * 2
    # The limits are those of the run, not of the settings to try.
    replay.main([str(continued.folder), "--sampling.num-generations=2", "--train.batch-size=8",
                 "--eval.rollouts-per-example=1"])  # fmt: skip
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.timeout(180)
def test_replay_does_not_compare_versions_that_a_roll_back_has_undone(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ("--weights.keep-last=10", "--checkpoint.interval=1", "--checkpoint.keep-last=10")
    with ExitStack() as stack:
        continued.train(continued.open(stack, *kept, max_steps=3), until=3)
    with ExitStack() as stack:
        trainer = continued.open(stack, *kept, "--checkpoint.resume-step=1", max_steps=3)
        trainer.recover()
        others = [replace(group, generator_id="bob") for group in groups_for(trainer)[20:]]
        continued.feed(trainer, others, until=3)
        numbers = {each.number: each.step for each in trainer.publishing.store.versions()}
    assert numbers == {0: 0, 1: 1, 2: 2, 3: 3, 4: 1, 5: 2, 6: 3}

    def compared() -> list[str]:
        capsys.readouterr()
        assert replay.main([str(continued.folder)]) == replay.DAMAGED
        return [line.partition("weights=")[2][16:] for line in capsys.readouterr().out.splitlines()]

    for number in (4, 5):
        flip_bit(continued.folder / "weights" / f"step_{number:08d}" / "manifest.json")
    assert compared() == ["  as published", "", "  as published"]
    flip_bit(continued.folder / "weights" / "step_00000006" / "manifest.json")
    assert compared() == ["  as published", "", ""]


def test_continued_run_waits_for_room_for_a_checkpoint(
    continued: Continued, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with ExitStack() as stack:
        continued.train(continued.open(stack, max_steps=4), until=3)
    resolved = continued.folder / RESOLVED
    before = resolved.read_bytes()
    with ExitStack() as stack, monkeypatch.context() as patched:
        trainer = continued.open(stack, max_steps=8)

        def make_room(stop: StopSignal, seconds: float) -> None:
            assert resolved.read_bytes() == before
            patched.undo()

        patched.setattr(atomic_files, "write_folder", full)
        patched.setattr(StopSignal, "pause", make_room)
        trainer.recover()
    assert resolved.read_bytes() != before
    assert (continued.folder / "checkpoints" / "step_000003").exists()
    assert "full; make room for it. Waiting" in capsys.readouterr().out


def test_resume_returns_the_configured_fraction_of_excluded_problems(tmp_path: Path) -> None:
    pools = states_of(tmp_path, 4)[-1]["pools"]
    assert pools["easy"] and pools["hard"]
    with ExitStack() as stack:
        again = Session(stack, tmp_path, "--curriculum.easy-fraction=1").trainer
        assert again.collector.curriculum.pools.saved() == {"easy": [], "hard": pools["hard"]}
