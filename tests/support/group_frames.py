"""Frames of groups with fields replaced, frames of nested maps, and a limit of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import msgpack as partly_annotated_msgpack
import numpy as np
from sample_data import VOCAB_SIZE, rollout_with
from sockets import GROUP

from peralta_zmq import wire
from peralta_zmq.rollout import Rollout, RolloutGroup

msgpack: Any = partly_annotated_msgpack
FRAME = wire.encode_group(GROUP)
LIMITS = wire.GroupLimits(VOCAB_SIZE)


def decoded(frame: bytes) -> RolloutGroup:
    return wire.decode_group(frame, LIMITS)


def sealed(fields: dict[Any, Any]) -> bytes:
    """A frame of these fields with a valid checksum if `crc32` is the last of them."""
    frame = msgpack.packb(fields)
    return frame[:-4] + zlib.crc32(frame[:-4]).to_bytes(4, "little")


def changed(group: RolloutGroup = GROUP, **fields: Any) -> bytes:
    """The frame of a group with some fields replaced and a valid checksum."""
    message = {**msgpack.unpackb(wire.encode_group(group)), **fields}
    if "crc32" in fields:
        return msgpack.packb(message)
    message["crc32"] = message.pop("crc32")  # the last field, also after new ones
    return sealed(message)


def equal(first: RolloutGroup, second: RolloutGroup) -> bool:
    """Equal in every field, every array bit and every dtype."""
    envelopes = dataclasses.replace(first, rollouts=()) == dataclasses.replace(second, rollouts=())
    return envelopes and all(
        (a.reward, a.rewards, a.turn_rewards, a.finish_reason)
        == (b.reward, b.rewards, b.turn_rewards, b.finish_reason)
        and all(
            x.dtype == y.dtype and x.tobytes() == y.tobytes()
            for x, y in ((a.token_ids, b.token_ids), (a.loss_mask, b.loss_mask),
                         (a.logprobs, b.logprobs), (a.policy_steps, b.policy_steps))
        )
        for a, b in zip(first.rollouts, second.rollouts, strict=True)
    )  # fmt: skip


def rollout_of_turns(
    mask: list[int], steps: list[int], turn_rewards: tuple[float, ...] = ()
) -> Rollout:
    """A rollout of two prompt tokens with this loss mask, sampled by weights of these steps."""
    is_generated = np.array(mask, bool)
    return dataclasses.replace(
        rollout_with(1.0, num_prompt=2, num_generated=len(mask) - 2),
        loss_mask=is_generated,
        logprobs=np.where(is_generated, -1.5, 0).astype(np.float32),
        policy_steps=np.array(steps, np.int32),
        turn_rewards=turn_rewards,
    )


NAMED = (
    rollout_with(1.5, policy_step=3, rewards={"right": 1.0, "short": 0.5}),
    rollout_with(0.5, policy_step=4, rewards={"short": 0.5}, finish_reason="length"),
    rollout_with(0.0, policy_step=3),
)
TURNS = rollout_of_turns([0, 0, 1, 1, 0, 0, 0, 1, 0], [-1, -1, 3, 3, -1, -1, -1, 3, -1])

REWARDED = (  # three turns and one
    rollout_of_turns([0, 0, 1, 1, 0, 1, 0, 1], [-1, -1, 3, 3, -1, 3, -1, 3], (0.5, -0.25, 1e6)),
    rollout_of_turns([0, 0, 1, 0], [-1, -1, 3, -1], (0.1,)),
)


def shorts(*numbers: int) -> bytes:
    return np.array(numbers, "<u2").tobytes()


def longs(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


@contextlib.contextmanager
def allocated_below(limit: float = 50e6) -> Iterator[None]:
    """Assert that Python allocates less than `limit` bytes."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < limit


def open_maps(key: str, count: int, size: int) -> bytes:
    """Nested maps without an end, each of `count` keys, up to `size` bytes or 1,000 maps."""
    content, number = bytearray(), 0
    for _ in range(1000):
        keys = [msgpack.packb(key.format(number + n)) for n in range(count)]
        one = b"\xde" + count.to_bytes(2, "big") + b"\1".join(keys)
        number += count
        if len(content) + len(one) > size:
            break
        content += one
    return bytes(content)


def wide_open_maps() -> bytes:
    """`open_maps` whose names have a character of four bytes, up to MAX_MESSAGE."""
    return open_maps("\U0001f600{:x>247}", 64, 16 << 20)
