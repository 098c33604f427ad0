"""A resumed run equals an uninterrupted one: weights, optimizer, pools, samples, schedules."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from child_processes import exit_code
from failing_losses import POISON
from sample_data import group_of
from trainer_sessions import SETTINGS, STEPS, Continued, Session, groups_for, states_of

from peralta_zmq import atomic_files, wire
from peralta_zmq.config import RESOLVED, load_config
from peralta_zmq.errors import TrainingError
from peralta_zmq.observe.metrics import METRICS, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.loop import Trainer
from tools.link_proxy import free_ports

FAILPOINTS = sorted(re.findall(r'failpoint\("(\S+)"\)', Path(atomic_files.__file__).read_text()))


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


ADAPTERS = ("--lora.rank=4", "--lora.dropout=0.1", "--lora.base-dtype=nf4", "--loss.name=grpo_kl",
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


@pytest.mark.parametrize(
    ("setting", "evaluated"),
    [("--eval.skip-eval-on-resume", -1), ("--no-eval.skip-eval-on-resume", 3)],
)
def test_resumed_step_is_evaluated_once_if_configured(
    setting: str, evaluated: int, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        first = Session(stack, tmp_path, setting)
        assert first.trainer.session.announcer.announcement.evaluation_step == -1  # not resumed
        for _ in range(3):
            first.advance()
    with ExitStack() as stack:
        second = Session(stack, tmp_path, setting)
        announcement = second.trainer.session.announcer.announcement
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
        assert third.session.announcer.announcement.evaluation_step == -1


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
        assert trainer.session.announcer.announcement.max_group_bytes < 128 << 10
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
