"""Groups as bytes: round trips, refused messages, bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import resource
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack as partly_annotated_msgpack
import numpy as np
import pytest
from damage import ANY_VALUE
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_data import RUN, VOCAB_SIZE, group_of, rollout_with
from sockets import GROUP

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.learning import admission
from peralta_zmq.rollout import Rollout, RolloutGroup
from peralta_zmq.wire import message_fields, messages, probe
from peralta_zmq.wire.announcements import decode_announcement
from peralta_zmq.wire.generator_status import decode_generator_status

msgpack: Any = partly_annotated_msgpack
FRAME = wire.encode_group(GROUP)
LIMITS = wire.GroupLimits(VOCAB_SIZE)
FIELDS = list(msgpack.unpackb(FRAME))
BUFFERS = [name for name, value in msgpack.unpackb(FRAME).items() if isinstance(value, bytes)]
OPTIONAL = ("sample_index", "evaluation_step")  # may be missing


def decoded(frame: bytes) -> RolloutGroup:
    return wire.decode_group(frame, LIMITS)


def sealed(fields: dict[Any, Any]) -> bytes:
    """A frame of these fields with a valid checksum if `crc32` is the last of them."""
    frame = msgpack.packb(fields)
    return frame[:-4] + zlib.crc32(frame[:-4]).to_bytes(4, "little")


def changed(group: RolloutGroup = GROUP, **fields: Any) -> bytes:
    """The frame of a group with some fields replaced and a valid checksum."""
    message = {**msgpack.unpackb(wire.encode_group(group)), **fields}
    return msgpack.packb(message) if "crc32" in fields else sealed(message)


def equal(first: RolloutGroup, second: RolloutGroup) -> bool:
    """Equal in every field, every array bit and every dtype."""
    envelopes = dataclasses.replace(first, rollouts=()) == dataclasses.replace(second, rollouts=())
    return envelopes and all(
        (a.reward, a.rewards, a.finish_reason) == (b.reward, b.rewards, b.finish_reason)
        and all(
            x.dtype == y.dtype and x.tobytes() == y.tobytes()
            for x, y in ((a.token_ids, b.token_ids), (a.loss_mask, b.loss_mask),
                         (a.logprobs, b.logprobs), (a.policy_steps, b.policy_steps))
        )
        for a, b in zip(first.rollouts, second.rollouts, strict=True)
    )  # fmt: skip


# The message.


def rollout_of_turns(mask: list[int], steps: list[int]) -> Rollout:
    """A rollout of two prompt tokens with this loss mask, sampled by weights of these steps."""
    is_generated = np.array(mask, bool)
    return dataclasses.replace(
        rollout_with(1.0, num_prompt=2, num_generated=len(mask) - 2),
        loss_mask=is_generated,
        logprobs=np.where(is_generated, -1.5, 0).astype(np.float32),
        policy_steps=np.array(steps, np.int32),
    )


NAMED = (
    rollout_with(1.5, policy_step=3, rewards={"right": 1.0, "short": 0.5}),
    rollout_with(0.5, policy_step=4, rewards={"short": 0.5}, finish_reason="length"),
    rollout_with(0.0, policy_step=3),
)
TURNS = rollout_of_turns([0, 0, 1, 1, 0, 0, 0, 1, 0], [-1, -1, 3, 3, -1, -1, -1, 3, -1])
MIXED = rollout_of_turns([0, 0, 1, 1, 1, 1, 1], [-1, -1, 3, 3, 4, 70_003, 70_003])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sequence": 2**64 - 1},
        {"problem_id": "π/7", "generator_id": "a" * 128},
        {"sample_index": 5, "evaluation_step": 7},
        {"rollouts": NAMED},
        {"rollouts": (TURNS, NAMED[2])},
        {"rollouts": (MIXED, NAMED[1])},
    ],
    ids=["plain", "sequence", "unicode", "evaluation", "named rewards", "turns", "mixed steps"],
)
def test_round_trip_keeps_every_field(fields: dict[str, Any]) -> None:
    group = dataclasses.replace(GROUP, **fields)
    assert equal(decoded(wire.encode_group(group)), group)


def test_admission_builds_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    group = decoded(wire.encode_group(group_of([0.0, 0.25, 1.0])))
    monkeypatch.setattr(messages, "_build_rollouts", lambda _: pytest.fail("a rollout was built"))
    assert admission.Admission(8).admit(group, step=1) == "trained"
    assert (group.rewards, group.mean_reward) == ((0.0, 0.25, 1.0), 1.25 / 3)


def test_generator_name_has_one_limit_in_all_messages() -> None:
    longest = "x" * 128
    group = decoded(wire.encode_group(dataclasses.replace(GROUP, generator_id=longest)))
    announcement = wire.Announcement(RUN, received={group.sender: 5})
    assert decode_announcement(message_fields.encode_fields(announcement)) == announcement
    status = wire.GeneratorStatus(RUN, longest, GROUP.incarnation)
    assert decode_generator_status(message_fields.encode_fields(status)).sender == group.sender
    longer = longest + "x"
    with pytest.raises(WireError, match="name of more than 128 characters"):
        wire.encode_group(dataclasses.replace(GROUP, generator_id=longer))
    with pytest.raises(WireError, match="name of more than 128 characters"):
        decoded(changed(generator_id=longer))
    with pytest.raises(WireError, match="name of more than 128 characters"):
        decode_generator_status(
            message_fields.encode_fields(dataclasses.replace(status, generator_id=longer))
        )


@pytest.mark.parametrize("name", ["", "a b", "ann\x1b[2J", "a\x07", "a/b", "a\nb", ".a", "jürgen"])
def test_decode_refuses_other_than_plain_names(name: str) -> None:
    with pytest.raises(WireError, match="no plain name; use letters, digits, "):
        decoded(changed(generator_id=name))
    with pytest.raises(WireError, match="no plain name") as caught:
        wire.encode_group(dataclasses.replace(GROUP, generator_id=name))
    assert str(caught.value).isprintable()


def test_frame_is_little_endian_for_any_input() -> None:
    rollout = rollout_with(1.0, policy_step=3)
    foreign = dataclasses.replace(rollout, token_ids=rollout.token_ids.astype(">i4"))
    group = dataclasses.replace(GROUP, rollouts=(foreign,))
    native = dataclasses.replace(GROUP, rollouts=(rollout,))
    assert wire.encode_group(group) == wire.encode_group(native)


def test_shared_prompt_is_sent_once() -> None:
    separate = group_of([1.0, 0.0, 1.0], num_prompt=50)
    prompt = separate.rollouts[0].token_ids[:50]
    shared = tuple(
        dataclasses.replace(each, token_ids=np.concatenate([prompt, each.token_ids[50:]]))
        for each in separate.rollouts
    )
    group = dataclasses.replace(separate, rollouts=shared)
    frame = wire.encode_group(group)
    assert equal(decoded(frame), group)
    assert len(wire.encode_group(separate)) - len(frame) == pytest.approx(2 * 50 * 4, abs=4)


@given(
    rewards=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5),
    step=st.integers(0, 2**31 - 1),
    turns=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
    envelope=st.fixed_dictionaries({
        "sequence": st.integers(0, 2**64 - 1),
        "generator_id": st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,29}", fullmatch=True),
        "incarnation": st.binary(min_size=8, max_size=8),
    }),
)  # fmt: skip
@settings(max_examples=100, deadline=None, database=None)
def test_round_trip_keeps_any_group(
    rewards: list[float], step: int, turns: list[tuple[int, int]], envelope: dict[str, Any]
) -> None:
    mask = [0, *(bit for context, length in turns for bit in [0] * context + [1] * length)]
    rollout = rollout_of_turns(mask, [step if bit else -1 for bit in mask])
    rollouts = tuple(dataclasses.replace(rollout, reward=reward) for reward in rewards)
    group = dataclasses.replace(GROUP, policy_step=step, rollouts=rollouts, **envelope)
    assert equal(decoded(wire.encode_group(group)), group)


# Groups that the sender refuses.


def test_encode_refuses_a_group_above_the_size_limit() -> None:
    assert wire.encode_group(GROUP, max_bytes=len(FRAME)) == FRAME
    limit = len(FRAME) - 1
    with pytest.raises(WireError, match=rf"{limit}.*lower sampling\.max_completion_length"):
        wire.encode_group(GROUP, max_bytes=limit)


@pytest.mark.parametrize("field", ["run_id", "weights_id", "problem_id", "task"])
@pytest.mark.parametrize("letter", ["x", "\N{EURO SIGN}"])
def test_encode_limits_names_to_1024_bytes(field: str, letter: str) -> None:
    longest = letter * (1024 // len(letter.encode()))
    decoded(wire.encode_group(dataclasses.replace(GROUP, **{field: longest})))
    with pytest.raises(WireError, match="longer than 1024 bytes"):
        wire.encode_group(dataclasses.replace(GROUP, **{field: longest + letter}))


@pytest.mark.parametrize(
    ("rollout", "reason"),
    [
        ({"reward": float("nan")}, "reward nan"),
        ({"reward": -2e6}, "out of bounds"),
        ({"rewards": {"x": float("inf")}}, "reward inf"),
        ({"rewards": {"x\0y": 1.0}}, "NUL"),
        ({"rewards": {"x" * 1024: 1.0}}, "reward_names is longer"),
        ({"loss_mask": np.zeros(7, bool)}, "without prompt or completion"),
        ({"loss_mask": np.ones(7, bool)}, "without prompt or completion"),
        ({"policy_steps": np.full(7, 2, np.int32)}, "cannot be sent"),  # older than the group's
    ],
)
def test_encode_refuses_an_invalid_rollout(rollout: dict[str, Any], reason: str) -> None:
    wrong = dataclasses.replace(rollout_with(1.0, policy_step=3), **rollout)
    with pytest.raises(WireError, match=reason):
        wire.encode_group(dataclasses.replace(GROUP, rollouts=(wrong,)))


@pytest.mark.parametrize(
    "envelope", [{"incarnation": b"short"}, {"min_sequence": 10**6}, {"min_sequence": -1},
                 {"sample_index": -2}, {"evaluation_step": 2**31}, {"rollouts": ()},
                 {"problem_id": "surrogate: \ud800"}],
)  # fmt: skip
def test_encode_refuses_an_invalid_envelope(envelope: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        wire.encode_group(dataclasses.replace(GROUP, **envelope))


def test_encode_limits_the_number_of_named_rewards() -> None:
    rewards = {f"{number:x}": 0.0 for number in range(256)}
    one = dataclasses.replace(GROUP.rollouts[0], rewards=rewards)
    decoded(wire.encode_group(dataclasses.replace(GROUP, rollouts=(one,) * 256)))
    with pytest.raises(WireError, match="named rewards"):
        wire.encode_group(dataclasses.replace(GROUP, rollouts=(one,) * 257))


# Messages that the receiver refuses.


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in OPTIONAL])
def test_decode_refuses_a_missing_field(name: str) -> None:
    message = msgpack.unpackb(FRAME)
    del message[name]
    with pytest.raises(WireError, match=name):
        decoded(msgpack.packb(message) if name == "crc32" else sealed(message))


def test_optional_fields_may_be_missing() -> None:
    message = {n: v for n, v in msgpack.unpackb(FRAME).items() if n not in OPTIONAL}
    group = decoded(sealed(message))
    assert (group.sample_index, group.evaluation_step) == (-1, -1)


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "x", b"x", [], {}, [None], {"x": 1}])
@pytest.mark.parametrize("name", FIELDS)
def test_decode_refuses_a_field_of_another_type(name: str, value: Any) -> None:
    names = ("run_id", "generator_id", "weights_id", "problem_id", "task")
    if not ((name in names and value == "x") or (name in OPTIONAL and value == -1)):
        with pytest.raises(WireError):
            decoded(changed(**{name: value}))


def shorts(*numbers: int) -> bytes:
    return np.array(numbers, "<u2").tobytes()


def longs(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def doubles(*numbers: float) -> bytes:
    return np.array(numbers, "<f8").tobytes()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": 2}, "format 2 is not 3"),
        ({"format": 4}, "format 4 is not 3"),
        ({"format": 3.0}, "format: float is not int"),
        ({"crc32": b"1234"}, "checksum"),
        ({"incarnation": b"seven.."}, "incarnation"),
        ({"incarnation": b"nine byte"}, "incarnation"),
        ({"sequence": -1}, "negative"),
        ({"min_sequence": 99}, "above sequence"),
        ({"min_sequence": -1}, "above sequence"),
        ({"policy_step": -1}, "step out of bounds"),
        ({"policy_step": 2**31}, "step out of bounds"),
        ({"sample_index": -2}, "sample_index or evaluation_step"),
        ({"sample_index": 2**53 + 1}, "sample_index or evaluation_step"),
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
        ({"finish_reasons": b"\0\0\2"}, "finish"),
        ({"finish_reasons": b"\0\2\1"}, "finish"),
        ({"finish_reasons": b"\0\0"}, "finish"),
        ({"finish_reasons": b"\0\0\0\0"}, "finish"),
    ],
)
def test_decode_names_the_broken_rule(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decoded(changed(**fields))


@pytest.mark.parametrize(("num_bytes", "is_valid"), [(15_000, True), (1 << 14, False)])
def test_unknown_fields_are_bounded(num_bytes: int, is_valid: bool) -> None:
    frame = sealed({"unknown": bytes(num_bytes), **msgpack.unpackb(FRAME)})
    if is_valid:
        assert equal(decoded(frame), GROUP)
        return
    with pytest.raises(wire.InvalidGroupError, match="bytes outside the columns"):
        decoded(frame)


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
        (GROUP.rollouts, {"max_rollouts": 3}, r"more than 2 rollouts \(sampling.num_generations\)"),
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


@pytest.mark.parametrize(("evaluation_step", "num_rollouts"), [(-1, 3), (0, 2), (0, 4)])
def test_training_group_has_the_configured_number_of_rollouts(
    evaluation_step: int, num_rollouts: int
) -> None:
    group = dataclasses.replace(GROUP, evaluation_step=evaluation_step)
    limits = dataclasses.replace(LIMITS, num_rollouts=num_rollouts)
    assert equal(wire.decode_group(wire.encode_group(group), limits), group)


@pytest.mark.parametrize("num_rollouts", [2, 4])
def test_training_group_with_another_number_of_rollouts_is_refused(num_rollouts: int) -> None:
    limits = dataclasses.replace(LIMITS, num_rollouts=num_rollouts)
    reason = rf"not {num_rollouts} rollouts \(sampling\.num_generations\)"
    with pytest.raises(wire.InvalidGroupError, match=reason):
        wire.decode_group(FRAME, limits)


def test_largest_group_within_the_limits_has_at_most_max_bytes() -> None:
    names = [chr(letter) for letter in range(1, 384)]  # 1,022 bytes, each with NUL after it
    turns = rollout_of_turns([0, 0, *[1, 0] * 63, 1], [-1, -1, *range(3, 130)])
    rollout = dataclasses.replace(turns, rewards=dict.fromkeys(names, 1.0))
    texts = dict.fromkeys(("run_id", "problem_id", "task", "weights_id"), "x" * 1024)
    group = dataclasses.replace(GROUP, rollouts=(rollout,) * 64, **texts)
    frame = wire.encode_group(group)
    limits = dataclasses.replace(LIMITS, max_rollouts=64, max_tokens=129, max_turns=64)
    assert len(wire.decode_group(frame, limits).rollouts) == 64
    assert len(frame) <= limits.max_bytes < 1.4 * len(frame)


@contextlib.contextmanager
def allocated_below(limit: float = 50e6) -> Iterator[None]:
    """Assert that Python allocates less than `limit` bytes."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < limit


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


def test_checksum_must_be_at_the_end_of_the_frame() -> None:
    message = msgpack.unpackb(FRAME)
    assert equal(decoded(sealed(message)), GROUP)
    with pytest.raises(WireError, match="checksum"):
        decoded(sealed({**message, "added": bytes(4)}))


def test_decode_detects_any_damaged_byte() -> None:
    for position in range(len(FRAME)):
        damaged = bytearray(FRAME)
        damaged[position] ^= 1
        with pytest.raises(WireError):
            decoded(bytes(damaged))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",  # never used by msgpack
        msgpack.packb(None),
        msgpack.packb([1, 2]),
        msgpack.packb("text"),
        msgpack.packb({1: 2}),
        msgpack.packb({"v": msgpack.ExtType(5, b"payload")}),
        msgpack.packb({"v": msgpack.Timestamp(0, 1)}),
        msgpack.packb({str(n): n for n in range(65)}),
        msgpack.packb({"v": "s" * 1025}),
        msgpack.packb({"v": [0]}),
        msgpack.packb({"v": b"\xff"}).replace(b"\xc4", b"\xd9"),  # text that is not UTF-8
        b"\x91" * 2000,  # 2000 lists in each other
        FRAME + b"\0",
        FRAME[:-1],
    ],
    ids=lambda frame: f"{len(frame)}_bytes",
)
def test_decode_refuses_bytes_that_are_no_map(frame: bytes) -> None:
    with pytest.raises(WireError, match=r"^not a message: "):
        decoded(frame)


def only_wire_error(frame: bytes) -> None:
    try:
        group = decoded(frame)
    except WireError:
        return
    assert equal(decoded(wire.encode_group(group)), group)  # an accepted message is a valid group


def damaged_frame(fields: dict[str, Any], rng: random.Random) -> bytes:
    """A frame with some bytes replaced, half the time in one or two buffers; valid checksum."""
    if rng.random() < 0.5:
        names = rng.sample(BUFFERS, rng.randint(1, 2))
        return sealed({**fields, **{name: mutated(fields[name], rng) for name in names}})
    damaged = mutated(msgpack.packb(fields), rng)
    return damaged[:-4] + zlib.crc32(damaged[:-4]).to_bytes(4, "little")


def mutated(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        position, length = rng.randrange(len(damaged) + 1), rng.randint(0, 3)
        damaged[position : position + length] = rng.randbytes(rng.randint(0, 3))
    return bytes(damaged)


def peak_memory() -> int:
    """Peak resident memory of this process in KiB."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())
    return int(peak)


def reset_peak_memory() -> int:
    """Reset the peak where the system can, and return it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def test_100_000_mutated_messages_raise_only_wire_error() -> None:
    rng, fields = random.Random(0), msgpack.unpackb(FRAME)
    before = reset_peak_memory()
    for _ in range(80_000):
        only_wire_error(damaged_frame(fields, rng))
    for _ in range(20_000):
        only_wire_error(rng.randbytes(rng.randint(0, 60)))
    growth = peak_memory() - before
    assert growth * 1024 < 50e6


@given(fields=st.dictionaries(st.sampled_from(FIELDS), ANY_VALUE, min_size=1))
@settings(max_examples=200, deadline=None, database=None)
def test_any_field_value_raises_only_wire_error(fields: dict[str, Any]) -> None:
    only_wire_error(changed(**fields))


BOMBS = {
    "empty maps": lambda: b"\xdf\x00\x00\x00\x40" + b"\x80" * (message_fields.MAX_MESSAGE - 10),
    "maps of maps": lambda: maps_of(maps_of(maps_of(b"\x80"))),
    "deeply nested maps": lambda: b"\x81\xa1x" * 4_000_000,
    "empty lists": lambda: maps_of(b"\x90"),
    "a long list": lambda: b"\x81\xa1v\xdd\x00\xff\xff\xff" + b"\x01" * 0xFFFF,
    "one long version": lambda: changed(format=bytes(message_fields.MAX_MESSAGE - 2000)),
    "wide names in open maps": lambda: open_maps("\U0001f600{:x>247}", 64, 16 << 20),
    "one long name": lambda: changed(run_id=bytes(message_fields.MAX_MESSAGE - 2000)),
    "a long name": lambda: changed(run_id="x" * (message_fields.MAX_MESSAGE - 2000)),
    "a prompt of thousands of rollouts": lambda: thousands_of_rollouts(256),
    "a prompt of millions": lambda: changed(
        turns=shorts(*[1] * 16), spans=longs(*[2**21, 1] * 16), prompt=bytes(4 * 2**21),
        tokens=bytes(4 * 16), logprobs=bytes(4 * 16), policy_steps=longs(0, 16),
    ),
    "millions of rollouts": lambda: changed(turns=b"\1\0" * 8_000_000),
    "millions of spans": lambda: changed(spans=longs(1, 1) * 2_000_000),
    "millions of named rewards": lambda: changed(
        turns=shorts(*[1] * 4000), spans=longs(*[1, 1] * 4000), prompt=b"", tokens=bytes(8 * 4000),
        logprobs=bytes(4 * 4000), policy_steps=longs(0, 4000), rewards=bytes(8 * 4000),
        reward_names="a\0" * 500, reward_values=bytes(8 * 500 * 4000), finish_reasons=bytes(4000),
    ),
}  # fmt: skip


def thousands_of_rollouts(length: int) -> bytes:
    """4096 rollouts of `length` + 1 tokens."""
    return changed(
        turns=shorts(*[1] * 4096), spans=longs(*[length, 1] * 4096), prompt=bytes(4 * length),
        tokens=bytes(4 * 4096), logprobs=bytes(4 * 4096), policy_steps=longs(0, 4096),
        rewards=bytes(8 * 4096), finish_reasons=bytes(4096),
    )  # fmt: skip


def maps_of(element: bytes) -> bytes:
    """A map of 64 equal elements."""
    return b"\xde\x00\x40" + b"".join(b"\xa1%c" % (33 + n) + element for n in range(64))


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


OTHER_DECODERS = (
    decode_announcement, decode_generator_status,
    probe.decode_probe_reply, probe.decode_probe_request,
)  # fmt: skip
OPEN_MAPS = {
    "many maps": lambda: open_maps("{:x}", 700, message_fields.MAX_MESSAGE),
    "long maps": lambda: open_maps("{:x}", 10_950, message_fields.MAX_MESSAGE),
    "as large as an announcement": lambda: open_maps("{:x}", 1366, 4 << 20),
    "wide names": BOMBS["wide names in open maps"],
    "in a small message": lambda: open_maps("{:x}", 64, message_fields.LARGE),
    "texts": lambda: msgpack.packb(
        {"received": {f"{n:04}" + "x" * 997 + "\U0001f600": 1 for n in range(1 << 14)}}
    ),
}


@pytest.mark.parametrize("name", OPEN_MAPS)
def test_other_decoders_refuse_a_bomb_within_50_mb(name: str) -> None:
    frame = OPEN_MAPS[name]()
    for decode in OTHER_DECODERS:
        with allocated_below(), pytest.raises(WireError):
            decode(frame)


@pytest.mark.parametrize("name", list(BOMBS))
def test_decode_group_refuses_a_bomb_within_50_mb(name: str) -> None:
    frame = BOMBS[name]()
    assert len(frame) <= message_fields.MAX_MESSAGE
    with allocated_below(), pytest.raises(WireError):
        decoded(frame)


def test_largest_group_decodes_within_50_mb() -> None:
    frame = thousands_of_rollouts(255)
    with allocated_below():
        assert sum(len(each.token_ids) for each in decoded(frame).rollouts) == 1 << 20
