"""A sender whose groups have the right format, and must never be trained on.

INVALID groups break a limit of the message, so the decoder must refuse them. POISONED groups are
within all limits: the trainer admits them to a batch, and must exclude them from the loss.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, cast

import msgpack
import numpy as np

from peralta_zmq import wire
from peralta_zmq.observe.metrics import EVENTS, number, read_rows
from peralta_zmq.rollout import Rollout, RolloutGroup
from peralta_zmq.wire.auth import GeneratorKeys
from peralta_zmq.wire.messages import MIN_LOGPROB

NAME = "hostile"  # name of the sender
NUM_PROMPT, NUM_GENERATED, NUM_ROLLOUTS = 8, 8, 4  # sizes of a group within all limits
FUTURE_STEPS = 1000
CLOSE_SECONDS = 10.0  # time for libzmq to connect and send a group in the background
SKEWED_LOGPROB = -60.0  # logprob of all tokens of a group


def group_within_limits(
    run_id: str,
    *,
    num_rollouts: int = NUM_ROLLOUTS,
    num_generated: int = NUM_GENERATED,
    policy_step: int = 0,
) -> RolloutGroup:
    """A group that a generator could send, with rewards 0 and 1 in turn."""
    length = NUM_PROMPT + num_generated
    mask = np.arange(length) >= NUM_PROMPT
    rollout = Rollout(
        token_ids=np.full(length, 3, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        policy_steps=np.where(mask, policy_step, -1).astype(np.int32),
        reward=0.0,
        finish_reason="stop",
    )
    return RolloutGroup(
        run_id=run_id,
        generator_id=NAME,
        incarnation=bytes(8),
        group_number=0,
        problem_id="0",
        task="calculator",
        policy_step=policy_step,
        weights_id="0" * 16,
        rollouts=tuple(replace(rollout, reward=float(n % 2)) for n in range(num_rollouts)),
    )


def forge(frame: bytes, **columns: bytes) -> bytes:
    """An encoded group with other columns (wire/messages.py) and a checksum that matches them."""
    fields = {**msgpack.unpackb(frame), **columns, "crc32": bytes(4)}
    content = cast(bytes, msgpack.packb(fields))[:-4]
    return content + zlib.crc32(content).to_bytes(4, "little")


def _with_logprobs(group: RolloutGroup, logprob: float, *, num_tokens: int | None = None) -> bytes:
    frame = wire.encode_group(group)
    logprobs = np.frombuffer(msgpack.unpackb(frame)["logprobs"], "<f4").copy()
    logprobs[:num_tokens] = logprob
    return forge(frame, logprobs=logprobs.tobytes())


def _with_rewards(group: RolloutGroup, reward: float) -> bytes:
    rewards = np.full(len(group.rollouts), reward, "<f8")
    return forge(wire.encode_group(group), rewards=rewards.tobytes())


def _with_size(group: RolloutGroup, **sizes: int) -> bytes:
    large = group_within_limits(group.run_id, policy_step=group.policy_step, **sizes)
    identity = {"incarnation": group.incarnation, "group_number": group.group_number}
    return wire.encode_group(replace(large, **identity))


Attack: TypeAlias = Callable[[RolloutGroup], bytes]
INVALID: dict[str, Attack] = {
    "absurd logprobs": lambda group: _with_logprobs(group, -1e30),
    "NaN logprobs": lambda group: _with_logprobs(group, float("nan")),
    "infinite rewards": lambda group: _with_rewards(group, float("inf")),
    "NaN rewards": lambda group: _with_rewards(group, float("nan")),
    "too many rollouts": lambda group: _with_size(group, num_rollouts=60),
    "too many tokens": lambda group: _with_size(group, num_generated=1_000),
}
# For any policy that gives their tokens at least -50, the mean ratio of these groups is 220 times
# MAX_MEAN_RATIO of learning/update.py or more, also with one of 32 tokens: e^20 / 32.
POISONED: dict[str, Attack] = {
    "skewed logprobs": lambda group: _with_logprobs(group, SKEWED_LOGPROB),
    "one token of the least logprob": lambda group: _with_logprobs(
        group, MIN_LOGPROB, num_tokens=1
    ),
}


class HostileSender:
    """Sends one INVALID or POISONED group at a time, each over a new connection, and logs it.

    A valid group of weights that do not exist yet comes before an invalid one: the trainer then
    knows the sender and records its invalid groups. It drops the valid one as abandoned.
    """

    def __init__(self, run_folder: Path, address: str, *, seed: int) -> None:
        self.keys: GeneratorKeys | None = None  # keys of NAME, while the trainer uses keys
        self._run_folder = run_folder
        # A name among those of the generators' logs, which the promise checker reads.
        self._log = run_folder / "logs" / f"generator-{NAME}.log"
        self._address = address
        self._incarnation = random.Random(seed).randbytes(8)
        self._group_number = 0

    def send(self, attack: str) -> bool:
        """Send a group of this attack; it is lost if the trainer is down for CLOSE_SECONDS.

        Returns False, without sending, before the first weights are published.
        """
        events = read_rows(self._run_folder / EVENTS)
        published = [row for row in events if row.get("event") == "publish"]
        if not published:
            return False
        step, weights_id = int(number(published[-1], "step")), str(published[-1]["weights_id"])
        if attack in POISONED:
            frames = [POISONED[attack](self._next(attack, "excluded", step, weights_id))]
        else:
            known = self._next("future weights", "abandoned", step + FUTURE_STEPS, weights_id)
            invalid = self._next(attack, "invalid", step, weights_id)
            frames = [wire.encode_group(known), INVALID[attack](invalid)]
        sender = wire.RolloutSender(self._address, hwm=2, keys=self.keys)
        for frame in frames:
            sender.send(frame, timeout=0.0)
        sender.close(CLOSE_SECONDS)
        return True

    def _next(self, attack: str, expected: str, policy_step: int, weights_id: str) -> RolloutGroup:
        """A valid group with the next group_number, which is logged with its expected outcome."""
        run_id = str(json.loads((self._run_folder / "RUN.json").read_bytes())["run_id"])
        group = replace(
            group_within_limits(run_id, policy_step=policy_step),
            incarnation=self._incarnation,
            group_number=self._group_number,
            weights_id=weights_id,
        )
        with self._log.open("a") as log:
            log.write(
                f"hostile group={group.sender}/{group.group_number} time={time.time():.3f} "
                f"expected={expected} attack={attack}\n"
            )
        self._group_number += 1
        return group
