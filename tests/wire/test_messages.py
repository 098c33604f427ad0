"""Groups as bytes: round trips, refused messages, bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import resource
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import ANY_VALUE
from group_frames import (
    FRAME,
    NAMED,
    REWARDED,
    TURNS,
    allocated_below,
    changed,
    decoded,
    equal,
    longs,
    msgpack,
    rollout_of_turns,
    sealed,
    shorts,
    wide_open_maps,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_data import group_of, rollout_with
from sockets import GROUP

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.learning import admission
from peralta_zmq.wire import message_fields, messages

EVALUATED = dataclasses.replace(GROUP, sample_index=5, evaluation_step=7)  # has all fields
FIELDS = list(msgpack.unpackb(wire.encode_group(EVALUATED)))
BUFFERS = [name for name, value in msgpack.unpackb(FRAME).items() if isinstance(value, bytes)]


# The message.

MIXED = rollout_of_turns([0, 0, 1, 1, 1, 1, 1], [-1, -1, 3, 3, 4, 70_003, 70_003])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"group_number": 2**64 - 1},
        {"problem_id": "π/7", "generator_id": "a" * 128},
        {"sample_index": 5, "evaluation_step": 7},
        {"rollouts": NAMED},
        {"rollouts": (TURNS, NAMED[2])},
        {"rollouts": (MIXED, NAMED[1])},
        {"rollouts": REWARDED},
    ],
    ids=[
        "plain",
        "group_number",
        "unicode",
        "evaluation",
        "named rewards",
        "turns",
        "mixed steps",
        "rewards of turns",
    ],
)
def test_round_trip_keeps_every_field(fields: dict[str, Any]) -> None:
    group = dataclasses.replace(GROUP, **fields)
    assert equal(decoded(wire.encode_group(group)), group)


def test_admission_builds_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    group = decoded(wire.encode_group(group_of([0.0, 0.25, 1.0])))
    monkeypatch.setattr(messages, "_build_rollouts", lambda _: pytest.fail("a rollout was built"))
    assert admission.Admission(8).admit(group, step=1) == "trained"
    assert (group.rewards, group.mean_reward) == ((0.0, 0.25, 1.0), 1.25 / 3)
    group = decoded(wire.encode_group(dataclasses.replace(GROUP, rollouts=REWARDED)))
    assert group.turn_rewards == ((0.5, -0.25, 1e6), (0.1,))
    assert group.has_signal  # by the returns of the first turn; the rewards are equal


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
        "group_number": st.integers(0, 2**64 - 1),
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
        ({"turn_rewards": (1.0, 2.0)}, r"\[2\] rewards of turns for \[1\] turns"),
        ({"turn_rewards": (float("nan"),)}, "reward nan"),
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
    "envelope", [{"incarnation": b"short"}, {"min_group_number": 10**6}, {"min_group_number": -1},
                 {"sample_index": -1}, {"evaluation_step": 2**31}, {"rollouts": ()},
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


@pytest.mark.parametrize("name", list(msgpack.unpackb(FRAME)))
def test_decode_refuses_a_missing_field(name: str) -> None:
    message = msgpack.unpackb(FRAME)
    del message[name]
    with pytest.raises(WireError, match=name):
        decoded(msgpack.packb(message) if name == "crc32" else sealed(message))


def test_fields_that_are_none_are_not_sent() -> None:
    sent = {*FIELDS} - msgpack.unpackb(FRAME).keys()
    assert sent == {"sample_index", "evaluation_step"}
    group = decoded(FRAME)
    assert (group.sample_index, group.evaluation_step) == (None, None)


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "x", b"x", [], {}, [None], {"x": 1}])
@pytest.mark.parametrize("name", FIELDS)
def test_decode_refuses_a_field_of_another_type(name: str, value: Any) -> None:
    names = ("run_id", "generator_id", "weights_id", "problem_id", "task")
    if not (name in names and value == "x"):
        with pytest.raises(WireError):
            decoded(changed(**{name: value}))


@pytest.mark.parametrize(("num_bytes", "is_valid"), [(15_000, True), (1 << 14, False)])
def test_unknown_fields_are_bounded(num_bytes: int, is_valid: bool) -> None:
    frame = sealed({"unknown": bytes(num_bytes), **msgpack.unpackb(FRAME)})
    if is_valid:
        assert equal(decoded(frame), GROUP)
        return
    with pytest.raises(wire.InvalidGroupError, match="bytes outside the columns"):
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
    "wide names in open maps": wide_open_maps,
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
