"""Encode a group as one frame of bytes, and decode frames.

A segment is consecutive generated tokens with equal policy step.

The frame is a msgpack map with four parts: the fields of RolloutGroup in ENVELOPE, those in
OPTIONAL unless they are None, the Columns (little-endian buffers with the contents of all
rollouts), `format` (version of the format), and `crc32` (checksum of all bytes before). A prompt
that all rollouts share is sent once. The logprobs and policy steps of context tokens are not sent:
they are 0 and -1. group_rules.py has the Columns and the rules for their content.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from struct import Struct, pack
from struct import error as StructError
from typing import Any, get_type_hints

import numpy as np

from peralta_zmq.errors import WireError
from peralta_zmq.rollout import FinishReason, GroupSummary, Rollout, RolloutGroup
from peralta_zmq.wire import message_fields
from peralta_zmq.wire.group_rules import (
    FLOAT,
    MAX_OTHER_BYTES,
    MAX_STEP,
    MAX_TOKENS,
    Columns,
    GroupLimits,
    check_counts,
    check_envelope,
    check_lengths,
    check_logprobs,
    check_num_rollouts,
    check_rewards,
    check_tokens,
)
from peralta_zmq.wire.message_fields import check_type

FORMAT = 4  # version of the message format
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
FINISH_CODES = bytes(range(len(FINISH_REASONS)))  # the valid bytes of column `finish_reasons`
INT = np.dtype("<i4")
# Fields of RolloutGroup in the message: name -> type. A missing one of OPTIONAL is None.
ENVELOPE = {
    "run_id": str, "generator_id": str, "incarnation": bytes, "sequence": int, "problem_id": str,
    "task": str, "policy_step": int, "weights_id": str, "min_sequence": int,
}  # fmt: skip
OPTIONAL = {"sample_index": int, "evaluation_step": int}
REQUIRED = {**ENVELOPE, **get_type_hints(Columns), "format": int}  # name -> type
FORMAT_LIMITS = GroupLimits(vocab_size=2**31)  # of the format; a trainer's own can be lower


def encode_group(group: RolloutGroup, *, max_bytes: int = message_fields.MAX_MESSAGE) -> bytes:
    """Encode a group as a frame of at most `max_bytes`.

    Raises WireError if the frame is larger or `decode_group` would refuse the group.
    """
    try:
        return _encode(group, max_bytes)
    except (ValueError, OverflowError, StructError) as error:
        raise WireError(f"a group of {group.problem_id!a:.40} cannot be sent: {error}") from None


def _encode(group: RolloutGroup, max_bytes: int) -> bytes:
    """Encode a group; ValueError, OverflowError or struct.error for an invalid group."""
    rollouts = group.rollouts
    if not rollouts:
        raise ValueError("it has no rollouts")
    envelope = {name: getattr(group, name) for name in (*ENVELOPE, *OPTIONAL)}
    check_envelope(envelope)
    check_rewards(group.rewards)
    turns, spans, logprobs, policy_steps = _encode_turns(rollouts)
    tokens = [np.asarray(rollout.token_ids, INT).tobytes() for rollout in rollouts]
    prompt = tokens[0][: 4 * spans[0]]
    if not all([content.startswith(prompt) for content in tokens]):
        prompt = b""
    reward_names, reward_values = _encode_named_rewards(rollouts)
    finish_reasons = [FINISH_REASONS.index(rollout.finish_reason) for rollout in rollouts]
    columns = Columns(
        turns=pack(f"<{len(turns)}H", *turns),
        spans=pack(f"<{len(spans)}I", *spans),
        prompt=prompt,
        tokens=b"".join([content[len(prompt) :] for content in tokens]),
        logprobs=logprobs,
        policy_steps=_encode_segments(policy_steps, group.policy_step),
        rewards=pack(f"<{len(rollouts)}d", *group.rewards),
        reward_names=reward_names,
        reward_values=reward_values,
        finish_reasons=bytes(finish_reasons),
        turn_rewards=_encode_turn_rewards(group.turn_rewards, turns, spans[1::2]),
    )
    check_counts(columns, FORMAT_LIMITS)
    present = {name: value for name, value in envelope.items() if value is not None}
    message = {**present, **columns._asdict(), "format": FORMAT}
    frame = message_fields.pack_with_checksum(message)
    _check_size(message, max_bytes, num_bytes=len(frame), num_tokens=sum(spans))
    return frame


def _encode_turns(rollouts: Sequence[Rollout]) -> tuple[list[int], list[int], bytes, bytes]:
    """The values of the columns `turns` and `spans`; logprobs and policy steps as bytes.

    `turns` has the number of turns of each rollout, `spans` the lengths of context and generated
    tokens of each turn. The logprobs (f4) and policy steps (i4) are those of all generated tokens.
    """
    turns: list[int] = []
    spans: list[int] = []
    all_logprobs: list[bytes] = []
    all_policy_steps: list[bytes] = []
    for rollout in rollouts:
        mask = rollout.loss_mask.tobytes()
        first_span = len(spans)
        end = 0
        logprobs = np.asarray(rollout.logprobs, FLOAT).tobytes()
        policy_steps = np.asarray(rollout.policy_steps, INT).tobytes()
        while end < len(mask):
            start = _find(mask, 1, end)
            stop = _find(mask, 0, start)
            spans += (start - end, stop - start)
            all_logprobs.append(logprobs[4 * start : 4 * stop])
            all_policy_steps.append(policy_steps[4 * start : 4 * stop])
            end = stop
        if not (spans[first_span] and spans[first_span + 1]):
            raise ValueError("a rollout without prompt or completion")
        turns.append((len(spans) - first_span) // 2)
    return turns, spans, b"".join(all_logprobs), b"".join(all_policy_steps)


def _find(content: bytes, byte: int, start: int) -> int:
    """Position of the first such byte from `start` on; the length of the content if none is."""
    position = content.find(byte, start)
    return len(content) if position < 0 else position


def _encode_segments(policy_steps: bytes, group_step: int) -> bytes:
    """The column `policy_steps`: a pair (step - group_step, number of tokens) for each segment.

    `policy_steps` (i4) has the step of each generated token; `group_step` is the lowest of them.
    """
    length = len(policy_steps) // 4
    if policy_steps == policy_steps[:4] * length:  # the usual case: one segment
        return pack("<2I", int.from_bytes(policy_steps[:4], "little") - group_step, length)
    steps = np.frombuffer(policy_steps, INT).astype(np.int64)
    starts = np.flatnonzero(np.diff(steps, prepend=-2))  # token 0 starts one: its step is not -2
    segments = np.stack([steps[starts] - group_step, np.diff(starts, append=length)], axis=1)
    return pack(f"<{segments.size}I", *segments.ravel().tolist())


def _encode_named_rewards(rollouts: Sequence[Rollout]) -> tuple[str, bytes]:
    """The columns `reward_names` and `reward_values`."""
    names = dict.fromkeys([name for rollout in rollouts for name in rollout.rewards])
    if not names:
        return "", b""
    if any("\0" in name for name in names):
        raise ValueError("the name of a reward contains NUL")
    check_rewards([value for rollout in rollouts for value in rollout.rewards.values()])
    values = [rollout.rewards.get(name, math.nan) for rollout in rollouts for name in names]
    return "".join([f"{name}\0" for name in names]), pack(f"<{len(values)}d", *values)


def _encode_turn_rewards(
    turn_rewards: Sequence[Sequence[float]], turns: Sequence[int], completions: Sequence[int]
) -> bytes:
    """The column `turn_rewards`; the other arguments are as for `_turn_counts`."""
    if not any(turn_rewards):
        return b""
    if [*map(len, turn_rewards)] != (counts := _turn_counts(turns, completions)):
        raise ValueError(f"{[*map(len, turn_rewards)]} rewards of turns for {counts} turns")
    values = [value for values in turn_rewards for value in values]
    check_rewards(values)
    return pack(f"<{len(values)}d", *values)


def _turn_counts(turns: Sequence[int], completions: Sequence[int]) -> list[int]:
    """Number of turns with generated tokens of each rollout.

    `turns` has the number of turns of each rollout, `completions` the lengths of their generated
    spans; the last span of a rollout may be empty.
    """
    lengths = iter(completions)
    return [sum(length > 0 for length in islice(lengths, count)) for count in turns]


def _check_size(
    message: dict[str, Any], max_bytes: int, *, num_bytes: int, num_tokens: int
) -> None:
    """Raise ValueError if the receiver would refuse the message for its size."""
    if num_bytes > max_bytes or num_tokens > MAX_TOKENS:
        raise ValueError(
            f"{num_bytes} bytes and {num_tokens} tokens exceed the limits of "
            f"{max_bytes} and {MAX_TOKENS}; use the trainer's settings, or lower "
            "sampling.max_completion_length or sampling.num_generations"
        )
    for name, value in message.items():
        if type(value) is str and len(value.encode()) > message_fields.MAX_TEXT:
            raise ValueError(f"{name} is longer than {message_fields.MAX_TEXT} bytes; shorten it")


class InvalidGroupError(WireError):
    """Only the rollouts of a group are invalid.

    `group` is the group without rollouts; the trainer counts it as dropped.
    """

    def __init__(self, reason: str, group: RolloutGroup) -> None:
        super().__init__(reason)
        self.group = group


def decode_group(frame: bytes, limits: GroupLimits) -> RolloutGroup:
    """Decode and validate a group; builds the Rollout objects on first access only.

    Raises InvalidGroupError if only the rollouts are invalid, otherwise WireError.
    """
    message = message_fields.unpack(frame)
    envelope = dict[str, Any]()
    try:
        envelope, columns = _read_fields(message, frame)
        if len(frame) - sum(map(len, columns)) > MAX_OTHER_BYTES:  # the journal stores whole frames
            raise ValueError(f"more than {MAX_OTHER_BYTES} bytes outside the columns")
        if envelope["evaluation_step"] is None:  # a group for training
            check_num_rollouts(envelope["task"], columns, limits)
        rollouts = _decode_rollouts(columns, envelope["policy_step"], limits)
    except (LookupError, TypeError, ValueError, OverflowError, StructError) as error:
        reason = f"malformed group: {type(error).__name__}: {error}"
        if not envelope:
            raise WireError(reason) from None
        # The trainer does not use sample_index and evaluation_step of an invalid group.
        envelope |= dict.fromkeys(OPTIONAL)
        raise InvalidGroupError(reason, RolloutGroup(**envelope, rollouts=())) from None
    return RolloutGroup(**envelope, rollouts=rollouts, summary=rollouts.summary)


def _read_fields(message: dict[str, Any], frame: bytes) -> tuple[dict[str, Any], Columns]:
    """Check types and checksum; returns the fields of RolloutGroup by name and the columns."""
    if (version := check_type(message["format"], int, "format")) != FORMAT:
        raise ValueError(f"format {version} is not {FORMAT}; use one version of the program")
    for name, expected in REQUIRED.items():
        check_type(message[name], expected, name)
    for name in OPTIONAL.keys() & message.keys():
        check_type(message[name], OPTIONAL[name], name)
    message_fields.check_checksum(frame, message.get("crc32"))
    envelope = {name: message.get(name) for name in (*ENVELOPE, *OPTIONAL)}
    check_envelope(envelope)
    return envelope, Columns(**{name: message[name] for name in Columns._fields})


@lru_cache(maxsize=1024)  # making a Struct takes as long as unpacking with the Struct
def _unpacker(count: int, letter: str) -> Callable[[bytes], tuple[Any, ...]]:
    """A function that unpacks `count` numbers; `letter` is their type in `struct`."""
    return Struct(f"<{count}{letter}").unpack


def _decode_rollouts(columns: Columns, policy_step: int, limits: GroupLimits) -> LazyRollouts:
    """Check the columns; returns the rollouts. `policy_step` is the group's."""
    check_counts(columns, limits)
    turns = _unpacker(len(columns.turns) >> 1, "H")(columns.turns)
    spans = _unpacker(len(columns.spans) >> 2, "I")(columns.spans)
    check_lengths(turns, spans, columns, limits)
    check_tokens(columns.prompt + columns.tokens, limits)
    check_logprobs(columns.logprobs)
    segments = _unpacker(len(columns.policy_steps) >> 2, "I")(columns.policy_steps)
    if len(segments) % 2 or 4 * sum(segments[1::2]) != len(columns.logprobs):
        raise ValueError("policy steps and spans of unequal length")
    newest_step = policy_step + max(segments[::2])
    if newest_step > MAX_STEP:
        raise ValueError("policy step out of bounds")
    rewards = _unpacker(len(turns), "d")(columns.rewards)
    check_rewards(rewards)
    if len(columns.finish_reasons) != len(turns) or columns.finish_reasons.strip(FINISH_CODES):
        raise ValueError("unknown finish reasons, or not one for each rollout")
    turn_rewards = _decode_turn_rewards(columns, turns, spans[1::2])
    summary = GroupSummary(rewards, turn_rewards, newest_step)
    named_rewards = _decode_named_rewards(columns, len(turns))
    return LazyRollouts(columns, turns, spans, segments, policy_step, named_rewards, summary)


def _decode_named_rewards(columns: Columns, count: int) -> list[dict[str, float]]:
    """The named rewards of each of `count` rollouts."""
    if not columns.reward_names and not columns.reward_values:
        return [{} for _ in range(count)]
    *names, rest = columns.reward_names.split("\0")
    numbers = _unpacker(count * len(names), "d")(columns.reward_values)
    if rest:
        raise ValueError("the last reward name does not end with NUL")
    check_rewards([number for number in numbers if not math.isnan(number)])
    rows = [numbers[start : start + len(names)] for start in range(0, len(numbers), len(names))]
    return [
        {name: value for name, value in zip(names, row, strict=True) if not math.isnan(value)}
        for row in rows
    ]


def _decode_turn_rewards(
    columns: Columns, turns: Sequence[int], completions: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    """The rewards of the turns of each rollout; the arguments are as for `_turn_counts`."""
    if not columns.turn_rewards:
        return ((),) * len(turns)
    counts = _turn_counts(turns, completions)
    values = _unpacker(sum(counts), "d")(columns.turn_rewards)
    check_rewards(values)
    remaining = iter(values)
    return tuple(tuple(islice(remaining, count)) for count in counts)


@dataclass(slots=True, eq=False)
class LazyRollouts(Sequence[Rollout]):
    """The rollouts of a received group, built from validated columns on first access.

    The decision to train on a group or to drop it needs only the `summary`, not the rollouts.
    """

    columns: Columns
    turns: tuple[int, ...]
    spans: tuple[int, ...]
    segments: tuple[int, ...]  # values of the column `policy_steps`
    policy_step: int  # of the group
    named_rewards: list[dict[str, float]]  # of each rollout
    summary: GroupSummary
    _rollouts: tuple[Rollout, ...] | None = None

    def __len__(self) -> int:
        return len(self.turns)

    def __getitem__(self, index: Any) -> Any:  # int -> Rollout, slice -> tuple of them
        if self._rollouts is None:
            self._rollouts = _build_rollouts(self)
        return self._rollouts[index]


def _build_rollouts(lazy: LazyRollouts) -> tuple[Rollout, ...]:
    """Build the rollouts, as slices of arrays over all tokens of the group."""
    spans = zip(lazy.spans[::2], lazy.spans[1::2], strict=True)
    flags = b"".join([bytes(context) + b"\1" * generated for context, generated in spans])
    mask = np.frombuffer(flags, np.bool_)  # True on generated tokens
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = np.frombuffer(lazy.columns.logprobs, FLOAT)
    segments = zip(lazy.segments[::2], lazy.segments[1::2], strict=True)
    generated_steps = b"".join(
        [pack("<i", lazy.policy_step + offset) * length for offset, length in segments]
    )
    steps = np.full(len(mask), -1, np.int32)
    steps[mask] = np.frombuffer(generated_steps, INT)
    span_ends = [*accumulate(lazy.spans)]
    rollout_ends = [span_ends[2 * turns_so_far - 1] for turns_so_far in accumulate(lazy.turns)]
    rollouts: list[Rollout] = []
    start = 0  # position of the rollout's first token in the arrays
    start_byte = 0  # position of the rollout's first byte in the column `tokens`
    for index, end in enumerate(rollout_ends):
        end_byte = start_byte + 4 * (end - start) - len(lazy.columns.prompt)
        content = lazy.columns.prompt + lazy.columns.tokens[start_byte:end_byte]
        ids = np.frombuffer(content, INT).astype(np.int32, copy=False)
        part = slice(start, end)
        rollouts.append(
            Rollout(
                token_ids=ids,
                loss_mask=mask[part],
                logprobs=logprobs[part],
                policy_steps=steps[part],
                reward=lazy.summary.rewards[index],
                finish_reason=FINISH_REASONS[lazy.columns.finish_reasons[index]],
                rewards=lazy.named_rewards[index],
                turn_rewards=lazy.summary.turn_rewards[index],
            )
        )
        start = end
        start_byte = end_byte
    return tuple(rollouts)
