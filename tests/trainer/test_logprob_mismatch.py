"""Generators with skewed logprobs are reported, and their groups dropped if configured."""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_data import group_of, token_logprobs
from trainer_sessions import ONE_THREAD, weights_of

from peralta_zmq import wire
from peralta_zmq.config import load_config
from peralta_zmq.observe.metrics import read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.trainer import Trainer
from tools.link_proxy import free_ports

SKEW = 1.0  # nats; its k3 is e - 2 = .718
STEPS = 4
SETTINGS = (
    *("--sampling.num-generations=4", "--train.batch-size=16", f"--train.max-steps={STEPS}"),
    *("--train.learning-rate=1e-9", "--train.dtype=float32", "--eval.num-examples=1"),
    *("--no-eval.eval-base-model", ONE_THREAD, "--dashboard.port=None"),
)


def sampled(trainer: Trainer, name: str, number: int, *, skew: float) -> RolloutGroup:
    """A group with the trainer's own logprobs, all lower by `skew`."""
    group = group_of([1, 0, 0, 1], seed=number, group_number=number, generator_id=name,
                     run_id=trainer.session.run_id, lengths=[5, 4, 6, 3])  # fmt: skip
    rollouts = []
    for each in group.rollouts:
        ids = torch.from_numpy(each.token_ids).long().unsqueeze(0)
        with torch.no_grad():
            logprobs = token_logprobs(trainer.policy.model, ids)[0]
        masked = torch.from_numpy(each.loss_mask) * (logprobs - skew)
        rollouts.append(replace(each, logprobs=masked.numpy()))
    return replace(group, rollouts=tuple(rollouts))


def trained(
    stack: ExitStack,
    folder: Path,
    *settings: str,
    skew: float = SKEW,
    count: int = 3 * STEPS,
    steps: int = STEPS,
) -> Trainer:
    """A trainer after some steps on groups of ann, and of bob with skewed logprobs."""
    port = free_ports()
    arguments = [*SETTINGS, *settings, "--run.dir", str(folder), "--wire.port", str(port)]
    trainer = Trainer(load_config("bin/trainer", arguments), stack)
    trainer.recover()
    sender = wire.RolloutSender(f"tcp://127.0.0.1:{port}", hwm=1000)
    stack.enter_context(closing(sender))
    for group_number in range(count):
        for name, by in (("ann", 0.0), ("bob", skew)):
            group = sampled(trainer, name, group_number, skew=by)
            assert sender.send(wire.encode_group(group), timeout=5)
    for _ in range(steps):
        trainer.advance()
    return trainer


def events(folder: Path, name: str = "mismatch") -> list[dict[str, Any]]:
    rows = read_rows(folder / "demo" / "events.jsonl")
    return [row for row in rows if row["event"] == name]


def test_skewed_generator_is_reported_and_trained_by_default(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trained(stack, tmp_path)
    (event,) = events(tmp_path)
    assert (event["generator"], event["step"]) == ("bob", 2)
    for name in ("mismatch_kl", "initial_kl"):
        assert event[name] == pytest.approx(0.718, abs=0.01)
    for row in read_rows(tmp_path / "demo" / "metrics.jsonl"):
        assert row["gen/bob/mismatch_kl"] == pytest.approx(0.718, abs=0.01)
        assert 0 <= row["gen/ann/mismatch_kl"] < 1e-4
    assert (
        "the logprobs of generator bob differ from the trainer's: mismatch_kl 0.718 over its last "
        "4 steps, bound 0.1. Start it with another model.dtype or device\n"
    ) in capsys.readouterr().out
    assert trainer.collector.accounting()["trained"] == 4 * STEPS


def test_mismatch_that_grows_with_the_updates_names_the_learning_rate(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The groups of all steps are sampled with the first weights."""
    trained(stack, tmp_path, "--train.learning-rate=0.03", skew=0.0)
    printed = capsys.readouterr().out
    assert "Start it with another model.dtype" not in printed
    assert re.search(
        r"the logprobs of generator ann differ from the trainer's: mismatch_kl \S+ over its last 4 "
        r"steps, bound 0\.1\. It was \S+ in its first step: lower "
        "train.learning_rate\n", printed
    )  # fmt: skip
    event = next(event for event in events(tmp_path) if event["generator"] == "ann")
    assert abs(event["initial_kl"]) < 1e-4 and event["mismatch_kl"] > 0.1


@pytest.mark.parametrize("loss", ["dppo", "decoupled_ppo", "reinforce"])
def test_groups_with_absurd_logprobs_are_left_out_and_named(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    trainer = trained(stack, tmp_path, f"--loss.name={loss}", skew=5000.0)
    rows = read_rows(tmp_path / "demo" / "metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0] * STEPS
    excluded = events(tmp_path, "exclude")
    assert [row["step"] for row in excluded] == [1, 2, 3, 4]
    assert [len(row["groups"]) for row in excluded] == [row["num_excluded"] for row in rows]
    assert all(name.startswith("bob/") for row in excluded for name in row["groups"])
    assert {why for row in excluded for why in row["groups"].values()} == {"logprob mismatch"}
    printed = capsys.readouterr().out
    assert "step 1 left out 2 groups: bob/" in printed
    assert "the logprobs of generator bob differ from the trainer's" in printed
    assert trainer.collector.accounting()["made"] >= 4 * STEPS


def test_logprobs_that_make_a_loss_infinite_are_refused(stack: ExitStack, tmp_path: Path) -> None:
    trainer = trained(stack, tmp_path, "--loss.name=dppo", skew=1e30, count=4 * STEPS)
    rows = read_rows(tmp_path / "demo" / "metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0] * STEPS
    assert trainer.collector.accounting()["trained"] == 4 * STEPS
    assert trainer.collector.metrics()["dropped/invalid"] > 0
    assert any("logprob below" in reason for reason in trainer.collector.receiver.refused)


def test_groups_left_out_are_left_out_again_after_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--loss.name=dppo", "--train.learning-rate=0.001", "--checkpoint.keep-journal")
    with ExitStack() as stack:
        before = trained(stack, tmp_path, *settings, skew=5000.0)
        weights = weights_of(before)
    arguments = [*SETTINGS, *settings, "--run.dir", str(tmp_path), f"--wire.port={free_ports()}"]
    with ExitStack() as stack:
        again = Trainer(load_config("bin/trainer", arguments), stack)
        again.recover()
        assert again.policy.learner.step == STEPS
        assert weights_of(again) == weights
    groups = [row["groups"] for row in events(tmp_path, "exclude")]
    assert len(groups) == 2 * STEPS and groups[:STEPS] == groups[STEPS:]
    capsys.readouterr()
    assert replay.main([str(tmp_path / "demo")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("  as published")
