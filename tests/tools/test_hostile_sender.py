"""The groups of the hostile sender reach a trainer's receiver as their names say."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from sample_data import RUN
from sockets import received, receiver_at

from peralta_zmq import wire
from peralta_zmq.learning.update import MAX_MEAN_RATIO
from peralta_zmq.observe.metrics import EVENTS, JsonLines
from peralta_zmq.rollout import RolloutGroup
from tools import hostile_sender
from tools.hostile_sender import HostileSender
from tools.run_history import read_logs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "RUN.json").write_text(json.dumps({"run_id": RUN}))
    with JsonLines(tmp_path / EVENTS) as events:
        events.append_event("publish", step=6, weights_id="w6")
        events.append_event("publish", step=7, weights_id="w7")
    return tmp_path


def sent(attack: str, folder: Path, receiver: wire.RolloutReceiver) -> RolloutGroup:
    """The group of this attack as the receiver returns it, after the valid one before it."""
    assert HostileSender(folder, receiver.address, seed=7).send(attack)
    known, group = received(receiver), received(receiver)
    assert known.rollouts and known.policy_step > 7 and known.group_number == 0
    assert group.policy_step == 7 and group.group_number == 1
    assert known.sender == group.sender and known.generator_id == hostile_sender.NAME
    logs = read_logs([folder / "logs" / "generator-hostile.log"])
    outcomes = {key: group.expected for key, group in logs.hostile.items()}
    assert outcomes == {(known.sender, 0): "abandoned", (known.sender, 1): "invalid"}
    assert not logs.made
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
    [("too many rollouts", 60, 16), ("too many tokens", 4, 1_008)],
)
def test_hostile_group_has_another_size(
    folder: Path, stack: ExitStack, attack: str, num_rollouts: int, num_tokens: int
) -> None:
    receiver = stack.enter_context(closing(receiver_at()))  # without the limits of a run
    rollouts = sent(attack, folder, receiver).rollouts
    assert len(rollouts) == num_rollouts and len(rollouts[0].token_ids) == num_tokens


@pytest.mark.parametrize("attack", hostile_sender.POISONED)
def test_poisoned_group_is_within_all_limits_and_of_published_weights(
    folder: Path, stack: ExitStack, attack: str
) -> None:
    limits = wire.GroupLimits(vocab_size=4, max_rollouts=4, max_tokens=16, max_generated=8)
    receiver = stack.enter_context(closing(receiver_at(limits=limits)))
    before = time.time()
    assert HostileSender(folder, receiver.address, seed=7).send(attack)
    group = received(receiver)
    assert (group.policy_step, group.weights_id, group.group_number) == (7, "w7", 0)
    assert group.has_signal and not receiver.refused
    reported = np.concatenate([rollout.logprobs[rollout.loss_mask] for rollout in group.rollouts])
    for logprob in (0.0, -2.0, -50.0):  # of the policy
        assert np.exp(np.clip(logprob - reported, -20, 20)).mean() > 200 * MAX_MEAN_RATIO
    logs = read_logs([folder / "logs" / "generator-hostile.log"])
    ((key, logged),) = logs.hostile.items()
    assert key == (group.sender, 0) and logged.expected == "excluded"
    assert before - 0.001 <= logged.time <= time.time()


def test_hostile_sender_waits_for_the_first_weights(folder: Path) -> None:
    (folder / EVENTS).unlink()
    assert not HostileSender(folder, "tcp://127.0.0.1:9", seed=7).send("NaN rewards")
    assert not (folder / "logs" / "generator-hostile.log").exists()
