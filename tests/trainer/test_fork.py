"""Forks: a new run continues from a step of another one, which may be running or be deleted."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from child_processes import exit_code
from trainer_sessions import Continued, groups_for

from peralta_zmq import atomic_files
from peralta_zmq.errors import ConfigError, JournalError
from peralta_zmq.learning.master_weights import join_masters
from peralta_zmq.observe.metrics import EVENTS, METRICS, read_rows
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.checkpoint import CHECKPOINTS
from peralta_zmq.trainer.trainer import Trainer

FORK = ("--run.fork=demo", "--run.name=second")
OTHER = ("--train.learning-rate=0.001", "--loss.name=grpo", "--sampling.temperature=0.8")
FROM_3 = (*FORK, "--run.from-step=3")  # which has no checkpoint
LORA = ("--lora.rank=4", "--lora.base-dtype=nf4")
Tensors: TypeAlias = Mapping[str, torch.Tensor]


def train_source(continued: Continued, *more: str) -> dict[str, torch.Tensor]:
    """Train 4 steps with checkpoints of steps 2 and 4; returns the state of the learner."""
    with continued.session("--checkpoint.interval=2", *more, max_steps=8, until=4) as trainer:
        return state_of(trainer)


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.policy.learner.state().items()}


def different(state: Tensors, expected: Tensors, *prefixes: str) -> list[str]:
    """Paths of tensors that differ, of those with one of the prefixes."""
    paths = {path for path in {*state, *expected} if path.startswith(prefixes)}
    assert paths
    return [
        path
        for path in paths
        if path not in state or path not in expected or not torch.equal(state[path], expected[path])
    ]


def published(folder: Path) -> dict[int, object]:
    """Step -> digest of its published weights."""
    store = replay.WeightStore.open(folder / "weights")
    return {version.step: version.field("result") for version in store.versions()}


def test_fork_continues_weights_and_optimizer_without_its_source(
    continued: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train_source(continued)
    second = continued.folder.with_name("second")
    with continued.session(*FORK, *OTHER, max_steps=4) as trainer:
        trainer.publishing.wait()
        assert trainer.step == 0
        assert not different(state_of(trainer), expected, "model/", "remainder/", "adamw/")
        assert published(second)[0] == published(continued.folder)[4]
        continued.feed(trainer, groups_for(trainer), until=2)
    assert "weights and optimizer of step 4 of run demo-" in capsys.readouterr().out
    shutil.rmtree(continued.folder)
    for options in (FORK, ("--run.name=second",)):
        with continued.session(*options, *OTHER, max_steps=4) as trainer:
            assert trainer.step == 2
    assert [row["step"] for row in read_rows(second / METRICS)] == [1, 2]
    (event,) = [row for row in read_rows(second / EVENTS) if row["event"] == "fork"]
    assert str(event["source"]).startswith("weights and optimizer of step 4 of run demo-")
    assert "step" not in event  # a step of the source is none of this run
    assert continued.replay(capsys, "second") == ["as published"] * 2
    shutil.rmtree(second / CHECKPOINTS)  # the weights of step 0 are lost
    with pytest.raises(JournalError, match="no checkpoint before it"):
        replay.main([str(second)])
    with ExitStack() as stack, pytest.raises(JournalError, match=r"put .*/checkpoints back"):
        continued.open(stack, "--run.name=second", *OTHER, max_steps=4).recover()


@pytest.mark.parametrize("options", [
    ("--no-run.fork-optimizer",), ("--train.optim=adamw_bf16",),
])  # fmt: skip
def test_fork_begins_with_a_new_optimizer(options: tuple[str, ...], continued: Continued) -> None:
    expected = train_source(continued)
    with continued.session(*FORK, *options, "--run.from-step=2", max_steps=4) as trainer:
        state = state_of(trainer)
        assert different(state, expected, "model/")
        assert not [path for path in state if path.startswith("adamw")]
    assert published(continued.folder.with_name("second"))[0] == published(continued.folder)[2]


@pytest.mark.parametrize(("source", "fork"), [
    ("--train.master-noise", "--no-train.master-noise"),
    ("--no-train.master-noise", "--train.master-noise"),
])  # fmt: skip
def test_fork_keeps_masters_with_and_without_remainders(
    source: str, fork: str, continued: Continued
) -> None:
    def masters(state: Tensors) -> dict[str, torch.Tensor]:
        found = {path[6:]: each for path, each in state.items() if path.startswith("model/")}
        for path, remainders in state.items():
            if path.startswith("remainder/"):
                found[path[10:]] = join_masters(found[path[10:]], remainders)
        return found

    expected = masters(train_source(continued, source))
    with continued.session(*FORK, fork, max_steps=4) as trainer:
        state = state_of(trainer)
    has_remainders = any(path.startswith("remainder/") for path in state)
    assert has_remainders == (fork == "--train.master-noise")
    for name, tensor in masters(state).items():
        # A master in the middle between two published numbers moves by one unit in the last place.
        torch.testing.assert_close(tensor, expected[name], rtol=2**-22, atol=0)
    assert published(continued.folder.with_name("second"))[0] == published(continued.folder)[4]


def test_fork_of_published_weights_of_a_running_run(continued: Continued) -> None:
    with continued.session(max_steps=8, until=4):
        assert exit_code(recover_fork, continued.folder.parent, FROM_3, "") == 0
    with continued.session(*FROM_3, max_steps=4) as trainer:
        state = state_of(trainer)
        assert not [path for path in state if path.startswith("adamw")]
        noise = [each for path, each in state.items() if path.startswith("remainder/")]
        assert noise and all(each.any() for each in noise)
        continued.feed(trainer, groups_for(trainer), until=1)
    second = published(continued.folder.with_name("second"))
    assert second[0] == published(continued.folder)[3]
    assert second[1] != second[0]


@pytest.mark.parametrize("options", [FORK, FROM_3])
def test_fork_continues_adapters_with_another_alpha(
    options: tuple[str, ...], continued: Continued
) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    train_source(continued, *LORA, "--lora.alpha=16")
    with continued.session(*options, *LORA, "--lora.alpha=8", max_steps=4) as trainer:
        trainer.publishing.wait()
    step = 4 if options == FORK else 3
    second = published(continued.folder.with_name("second"))
    assert second[0] == published(continued.folder)[step]


def test_fork_refuses_what_it_cannot_continue_in_one_line(continued: Continued) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    train_source(continued)
    for options, message in (
        (("--run.fork=other",), "run.fork other is neither a run in .* runs there: demo$"),
        (("--run.from-step=7",), r"demo does not have a checkpoint or published weights of step 7; "
         r"set run.from_step to one of its checkpoints \(2, 4\) or published steps \(0, 1, 2, 3, "),
        (("--model.name=embedded_turns", "--task.name=guess_number"),
         r"run.fork demo has another tokenizer than model.name embedded_turns: vocab_size=468 -> "
         r"vocab_size=429, .*; use its model, --model.name embedded$"),
        (LORA, r"run.fork demo trains all weights, but with these settings the run trains adapters "
         r"for embedded \(\w+, nf4, \w+\); write the weights as a model with bin/replay export "),
    ):  # fmt: skip
        with ExitStack() as stack, pytest.raises(ConfigError, match=message) as caught:
            continued.open(stack, *FORK, *options, max_steps=4)
        assert "\n" not in str(caught.value)
        assert not continued.folder.with_name("second").exists()  # nothing was written
    with (
        ExitStack() as stack,
        pytest.raises(ConfigError, match=r"choose another name: --run\.name"),
    ):
        continued.open(stack, "--run.fork=demo", max_steps=8)
    # The command that the refusal of other settings names.
    changed = ("--run.name=demo", "--loss.name=grpo")
    with ExitStack() as stack, pytest.raises(ConfigError) as caught:
        continued.open(stack, *changed, max_steps=8)
    options = str(caught.value).partition("add to the command: ")[2].partition(";")[0].split()
    assert options == ["--run.fork", "demo", "--run.name", "demo-2"]
    with continued.session(*changed, *options, max_steps=8) as trainer:
        assert trainer.session.folder == continued.folder.with_name("demo-2")


def recover_fork(folder: Path, options: Sequence[str], plan: str) -> None:
    """Start a fork that the failpoints of `plan` may kill; runs in a child process."""
    atomic_files.failpoints = atomic_files.parse_failpoints(plan)
    with ExitStack() as stack:
        Continued(folder).open(stack, *options, max_steps=4).recover()


@pytest.mark.parametrize("name", ["checkpoint.write", "checkpoint.written"])
@pytest.mark.parametrize("options", [FORK, ("--run.name=second",)])
def test_fork_killed_at_its_first_start_is_completed_by_the_next(
    name: str, options: tuple[str, ...], continued: Continued
) -> None:
    expected = train_source(continued)
    assert exit_code(recover_fork, continued.folder.parent, FORK, f"{name}:1") == -signal.SIGKILL
    with continued.session(*options, max_steps=4) as trainer:
        assert trainer.step == 0
        assert not different(state_of(trainer), expected, "model/", "remainder/", "adamw/")
