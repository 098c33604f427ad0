"""The groups of the hostile sender reach a trainer's receiver as their names say."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from sample_data import RUN
from sockets import received, receiver_at

from peralta_zmq import wire
from peralta_zmq.observe.metrics import METRICS, JsonLines
from peralta_zmq.rollout import RolloutGroup
from tools import hostile_sender
from tools.hostile_sender import HostileSender
from tools.run_history import read_logs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "RUN.json").write_text(json.dumps({"run_id": RUN}))
    with JsonLines(tmp_path / METRICS) as metrics:
        metrics.append({"step": 7})
    return tmp_path


def sent(attack: str, folder: Path, receiver: wire.RolloutReceiver) -> RolloutGroup:
    """The group of this attack as the receiver returns it, after the valid one before it."""
    assert HostileSender(folder, receiver.address, seed=7).send(attack)
    known, group = received(receiver), received(receiver)
    assert known.rollouts and known.policy_step > 7 and known.sequence == 0
    assert group.policy_step == 7 and group.sequence == 1
    assert known.sender == group.sender and known.generator_id == hostile_sender.NAME
    logs = read_logs([folder / "logs" / "generator-hostile.log"])
    assert logs.hostile == {(known.sender, 0), (known.sender, 1)} and not logs.made
    return group


@pytest.mark.parametrize("attack", ["NaN logprobs", "infinite rewards", "NaN rewards"])
def test_hostile_group_with_impossible_values_is_refused(
    folder: Path, stack: ExitStack, attack: str
) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    assert not sent(attack, folder, receiver).rollouts
    assert receiver.refused.total() == 1


@pytest.mark.parametrize(
    ("attack", "num_rollouts", "num_tokens"),
    [("too many rollouts", 60, 16), ("too many tokens", 4, 17_008)],
)
def test_hostile_group_has_another_size(
    folder: Path, stack: ExitStack, attack: str, num_rollouts: int, num_tokens: int
) -> None:
    receiver = stack.enter_context(closing(receiver_at()))  # without the limits of a run
    rollouts = sent(attack, folder, receiver).rollouts
    assert len(rollouts) == num_rollouts and len(rollouts[0].token_ids) == num_tokens


def test_hostile_sender_waits_for_the_first_step(folder: Path) -> None:
    (folder / METRICS).unlink()
    assert not HostileSender(folder, "tcp://127.0.0.1:9", seed=7).send("NaN rewards")
    assert not (folder / "logs" / "generator-hostile.log").exists()
