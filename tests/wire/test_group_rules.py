"""Rules and limits of the columns of a group: each refused group names the broken one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from group_frames import (
    LIMITS,
    NAMED,
    TURNS,
    allocated_below,
    changed,
    decoded,
    equal,
    longs,
    rollout_of_turns,
    shorts,
)
from sample_data import VOCAB_SIZE, group_of
from sockets import GROUP

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.rollout import Rollout


def doubles(*numbers: float) -> bytes:
    return np.array(numbers, "<f8").tobytes()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": 4}, "format 4 is not 5"),
        ({"format": 6}, "format 6 is not 5"),
        ({"format": 5.0}, "format: float is not int"),
        ({"crc32": b"1234"}, "checksum"),
        ({"incarnation": b"seven.."}, "incarnation"),
        ({"incarnation": b"nine byte"}, "incarnation"),
        ({"group_number": -1}, "negative"),
        ({"min_group_number": 99}, "above group_number"),
        ({"min_group_number": -1}, "above group_number"),
        ({"policy_step": -1}, "step out of bounds"),
        ({"policy_step": 2**31}, "step out of bounds"),
        ({"sample_index": -1}, "sample_index or evaluation_step"),
        ({"sample_index": 2**53 + 1}, "sample_index or evaluation_step"),
        ({"evaluation_step": -1}, "sample_index or evaluation_step"),
        ({"evaluation_step": 2**31}, "sample_index or evaluation_step"),
        ({"turns": b""}, "without prompt"),
        ({"turns": shorts(1, 0, 2)}, "without prompt"),
        ({"turns": shorts(1, 1)}, "number of spans"),
        ({"turns": shorts(1, 1, 2)}, "number of spans"),
        ({"turns": b"odd"}, "malformed"),
        ({"spans": longs(3, 4, 3, 1, 3, 8)}, "unequal"),
        ({"spans": longs(3, 4, 3, 1, 4, 7)}, "unequal"),
        ({"spans": longs(3, 4, 3, 1, 3)}, "number of spans"),
        ({"spans": longs(0, 7, 3, 1, 3, 7)}, "without prompt"),
        ({"spans": longs(7, 0, 3, 1, 3, 11)}, "without prompt|unequal"),
        ({"spans": longs(3, 0, 3, 5, 3, 7)}, "without prompt"),
        ({"spans": longs(3, 2**32 - 1, 3, 1, 3, 7)}, "tokens"),
        ({"prompt": longs(*range(5)), "tokens": longs(*range(6))}, "longer than a rollout"),
        ({"prompt": b"\0" * 4}, "unequal"),
        ({"prompt": b"\0" * 2, "tokens": bytes(4 * 21 - 3 * 2)}, "not a multiple of 4 bytes"),
        ({"policy_steps": longs(0, 11)}, "unequal"),
        ({"policy_steps": longs(0, 11), "logprobs": bytes(4 * 11)}, "logprobs and spans"),
        ({"policy_steps": longs(0, 12, 1)}, "unequal|malformed"),
        ({"policy_steps": longs(2**31, 12)}, "malformed"),
        ({"policy_steps": longs(0, 12) + longs(0, 0) * 4096}, "changes of the policy step"),
        ({"rewards": doubles(1, 0)}, "malformed"),
        ({"rewards": doubles(1, 0, np.nan)}, "reward nan is not finite"),
        ({"rewards": doubles(1, 0, -np.inf)}, "not finite"),
        ({"rewards": doubles(1, 0, 1e308)}, "out of bounds"),
        ({"rewards": doubles(0, 0, -np.nextafter(1e6, 2e6))}, "out of bounds"),
        ({"reward_names": "x\0"}, "malformed"),
        ({"reward_names": "x", "reward_values": b""}, "does not end with NUL"),
        ({"reward_names": "x\0", "reward_values": doubles(1, 0, np.inf)}, "not finite"),
        ({"reward_values": doubles(1, 0, 1)}, "malformed"),
        ({"turn_rewards": doubles(1, 0)}, "malformed"),
        ({"turn_rewards": doubles(1, 0, np.nan)}, "reward nan is not finite"),
        ({"finish_reasons": b"\0\0\2"}, "finish"),
        ({"finish_reasons": b"\0\2\1"}, "finish"),
        ({"finish_reasons": b"\0\0"}, "finish"),
        ({"finish_reasons": b"\0\0\0\0"}, "finish"),
    ],
)
def test_decode_names_the_broken_rule(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decoded(changed(**fields))


@pytest.mark.parametrize(("prompt", "num"), [(1, 5), (2, 3), (3, 5)])
def test_prompt_of_partial_tokens_hides_no_token_id(prompt: int, num: int) -> None:
    """In prompt + tokens every id is at most 5; cut into rollouts some would be 5 << 8."""
    tokens = bytearray(8 * num - prompt * num)  # a context token and a generated one in each
    tokens[4 - prompt :: 4] = b"\5" * len(tokens[4 - prompt :: 4])
    with pytest.raises(WireError, match="not a multiple of 4 bytes"):
        decoded(changed(
            turns=shorts(*[1] * num), spans=longs(*[1, 1] * num), prompt=bytes(prompt),
            tokens=bytes(tokens), logprobs=bytes(4 * num), policy_steps=longs(0, num),
            rewards=bytes(8 * num), finish_reasons=bytes(num),
        ))  # fmt: skip


def with_arrays(**arrays: Any) -> bytes:
    """One rollout of 7 tokens, 3 of them prompt, with some of its buffers replaced."""
    buffers = {name: array.tobytes() for name, array in arrays.items()}
    return changed(group_of([1.0]), **buffers, prompt=b"")


LOGPROBS = np.array([-1, -2, -3, -4], "<f4")
TOKENS = np.array([3, 4, 5, 6, 7, 8, 9], "<i4")


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"tokens": np.where(TOKENS == 6, VOCAB_SIZE, TOKENS).astype("<i4")}, "vocabulary"),
        ({"tokens": np.where(TOKENS == 6, -1, TOKENS).astype("<i4")}, "vocabulary"),
        ({"tokens": TOKENS[:6]}, "unequal"),
        ({"tokens": TOKENS.astype("<i2")}, "unequal"),
        ({"logprobs": np.where(LOGPROBS == -2, np.nan, LOGPROBS).astype("<f4")}, "finite"),
        ({"logprobs": np.where(LOGPROBS == -2, -np.nan, LOGPROBS).astype("<f4")}, "finite"),
        ({"logprobs": np.where(LOGPROBS == -2, -np.inf, LOGPROBS).astype("<f4")}, "finite"),
        ({"logprobs": np.where(LOGPROBS == -2, np.inf, LOGPROBS).astype("<f4")}, "finite"),
        ({"logprobs": -LOGPROBS}, "above zero"),
        ({"logprobs": np.where(LOGPROBS == -2, -10001, LOGPROBS).astype("<f4")}, "below -10000"),
        ({"logprobs": np.where(LOGPROBS == -2, -3.4e38, LOGPROBS).astype("<f4")}, "below -10000"),
        ({"logprobs": LOGPROBS[:3]}, "unequal"),
    ],
)
def test_decode_refuses_an_invalid_array(arrays: dict[str, Any], reason: str) -> None:
    decoded(with_arrays(tokens=TOKENS, logprobs=LOGPROBS))
    with pytest.raises(WireError, match=reason):
        decoded(with_arrays(**{"tokens": TOKENS, "logprobs": LOGPROBS, **arrays}))


def test_logprob_may_exceed_zero_by_rounding() -> None:
    slack = np.float32(1e-3)
    logprobs = np.array([slack, -0.0, -1e4, -1], "<f4")
    group = decoded(with_arrays(tokens=TOKENS, logprobs=logprobs))
    assert group.rollouts[0].logprobs[3:].tolist() == logprobs.tolist()
    logprobs[0] = np.nextafter(slack, np.float32(1))
    with pytest.raises(WireError, match="above zero"):
        decoded(with_arrays(tokens=TOKENS, logprobs=logprobs))


# Limits of the receiver: GROUP has 3 rollouts, of 3 prompt tokens and 4, 1 and 7 generated ones.


@pytest.mark.parametrize(
    ("rollouts", "limits", "reason"),
    [
        (GROUP.rollouts, {"max_rollouts": 3}, r"more than 2 .*num_generations, of the env"),
        (GROUP.rollouts, {"max_tokens": 10}, r"more than 9 tokens \(engine.max_model_len\)"),
        (GROUP.rollouts, {"max_generated": 7}, r"6 generated .*\(sampling.max_completion_length\)"),
        ((TURNS, NAMED[2]), {"max_turns": 3}, "more than 2 turns"),
        ((TURNS, NAMED[2]), {"max_tokens": 9}, r"more than 8 tokens \(engine"),
        ((TURNS, NAMED[2]), {"max_generated": 4}, "more than 3 generated"),
    ],
)
def test_decode_refuses_a_group_above_a_limit_of_the_receiver(
    rollouts: tuple[Rollout, ...], limits: dict[str, int], reason: str
) -> None:
    group = dataclasses.replace(GROUP, rollouts=rollouts)
    frame = wire.encode_group(group)
    assert equal(wire.decode_group(frame, dataclasses.replace(LIMITS, **limits)), group)
    lower = {name: limit - 1 for name, limit in limits.items()}
    with pytest.raises(wire.InvalidGroupError, match=reason) as caught:
        wire.decode_group(frame, dataclasses.replace(LIMITS, **lower))
    assert (caught.value.group.name, len(caught.value.group.rollouts)) == (group.name, 0)


@pytest.mark.parametrize(("evaluation_step", "num_rollouts", "reason"), [
    (None, 3, ""), (0, 2, ""), (0, 4, ""), (0, None, ""),
    (None, 2, r"not 2 rollouts \(sampling\.num_generations, of the env too\)"),
    (None, 4, r"not 4 rollouts \(sampling\.num_generations, of the env too\)"),
    (None, None, r"unknown environment '.+' \(env\.name\)"),
])  # fmt: skip
def test_training_group_has_the_configured_number_of_rollouts(
    evaluation_step: int | None, num_rollouts: int | None, reason: str
) -> None:
    group = dataclasses.replace(GROUP, evaluation_step=evaluation_step)
    sizes = {"other": 9} if num_rollouts is None else {"other": 9, GROUP.task: num_rollouts}
    limits = dataclasses.replace(LIMITS, num_rollouts=sizes)
    if not reason:
        assert equal(wire.decode_group(wire.encode_group(group), limits), group)
        return
    with pytest.raises(wire.InvalidGroupError, match=reason):
        wire.decode_group(wire.encode_group(group), limits)


def test_largest_group_within_the_limits_has_at_most_max_bytes() -> None:
    names = [chr(letter) for letter in range(1, 384)]  # 1,022 bytes, each with NUL after it
    mask, steps = [0, 0, *[1, 0] * 63, 1], [-1, -1, *range(3, 130)]
    turns = rollout_of_turns(mask, steps, (0.5,) * 64)
    rollout = dataclasses.replace(turns, rewards=dict.fromkeys(names, 1.0))
    texts = dict.fromkeys(("run_id", "problem_id", "task", "weights_id"), "x" * 1024)
    group = dataclasses.replace(GROUP, rollouts=(rollout,) * 64, **texts)
    frame = wire.encode_group(group)
    limits = dataclasses.replace(LIMITS, max_rollouts=64, max_tokens=129, max_turns=64)
    assert len(wire.decode_group(frame, limits).rollouts) == 64
    assert len(frame) <= limits.max_bytes < 1.4 * len(frame)


@pytest.mark.parametrize("num_rollouts", [8, 60])
def test_huge_group_is_refused_before_memory_is_allocated(num_rollouts: int) -> None:
    frame = changed(
        turns=shorts(*[1] * num_rollouts), spans=longs(*[1000, 16_000] * num_rollouts),
        prompt=bytes(4000), tokens=bytes(4 * 16_000 * num_rollouts),
        logprobs=bytes(4 * 16_000 * num_rollouts),
        policy_steps=longs(0, 16_000 * num_rollouts), rewards=bytes(8 * num_rollouts),
        finish_reasons=bytes(num_rollouts),
    )  # fmt: skip
    limits = wire.GroupLimits(VOCAB_SIZE, max_rollouts=8, max_tokens=512, max_generated=48)
    with (
        allocated_below(1.3 * len(frame)),  # msgpack copies the frame's content once
        pytest.raises(wire.InvalidGroupError, match="more than"),
    ):
        wire.decode_group(frame, limits)
