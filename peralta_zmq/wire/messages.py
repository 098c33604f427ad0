"""A RolloutGroup as one frame: a msgpack map of little-endian buffers, ending with a checksum.

A prompt that all rollouts share is sent once. Values that are constant on context tokens (logprob
0, policy step -1) are not sent. A turn is a span of context tokens and a span of generated tokens.

    format                      version of this format
    run_id ... evaluation_step  the fields of RolloutGroup with these names (ENVELOPE)
    turns          u2 [K]       turns of each of the K rollouts
    spans          u4 [S, 2]    context tokens and generated tokens of each turn
    prompt         i4 [P]       first tokens of every rollout; empty when they differ
    tokens         i4           all other tokens
    logprobs       f4 [G]       of the generated tokens
    policy_steps   u4 [R, 2]    runs: policy step minus `policy_step`, number of generated tokens
    rewards        f8 [K]
    reward_names   each ended by NUL
    reward_values  f8 [K, names], NaN = the rollout has no reward of this name
    finish_reasons u1 [K]       index into FINISH_REASONS
    crc32          u4           last four bytes of the frame, over all bytes before them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from struct import Struct, pack
from struct import error as StructError
from typing import Any, cast, overload

import msgpack
import numpy as np
from isal.isal_zlib import crc32  # same values as zlib's; 0.5 us instead of 6 for 24 KiB
from numpy.typing import NDArray

from peralta_zmq.errors import WireError
from peralta_zmq.rollout import FinishReason, Rollout, RolloutGroup
from peralta_zmq.wire import message_fields

FORMAT = 3
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
FINISH_CODES = bytes(range(len(FINISH_REASONS)))
MAX_SAMPLE_INDEX = 2**53
CRC_RESIDUE = 0x2144DF1C  # the CRC-32 of any bytes followed by their own CRC-32
INT, FLOAT = np.dtype("<i4"), np.dtype("<f4")
NO_STEP = pack("<i", -1)
ENVELOPE = {
    "run_id": str, "generator_id": str, "incarnation": bytes, "sequence": int, "problem_id": str,
    "task": str, "policy_step": int, "weights_id": str,
    "min_sequence": int, "sample_index": int, "evaluation_step": int,
}  # fmt: skip
COLUMNS = {
    "turns": bytes, "spans": bytes, "prompt": bytes, "tokens": bytes, "logprobs": bytes,
    "policy_steps": bytes, "rewards": bytes, "reward_names": str, "reward_values": bytes,
    "finish_reasons": bytes,
}  # fmt: skip
SCHEMA = message_fields.Schema(
    {**ENVELOPE, **COLUMNS, "format": int, "crc32": bytes}, sample_index=-1, evaluation_step=-1
)
_envelope_of = attrgetter(*ENVELOPE)


# Encoding.


def encode_group(group: RolloutGroup) -> bytes:
    """One group as one frame.

    Raises WireError for a group that the receiver would refuse.
    """
    try:
        return _encode(group)
    except (ValueError, OverflowError, StructError) as error:
        raise WireError(f"a group of {group.problem_id!a:.40} cannot be sent: {error}") from None


def _encode(group: RolloutGroup) -> bytes:
    rollouts = group.rollouts
    if not rollouts:
        raise ValueError("it has no rollouts")
    envelope = _envelope_of(group)
    _check_envelope(envelope)
    message_fields.check_rewards(group.rewards)
    turns, spans, logprobs, policy_steps = _encode_turns(rollouts)
    tokens = [_bytes(rollout.token_ids, INT) for rollout in rollouts]
    prompt = tokens[0][: 4 * spans[0]]
    if not all([content.startswith(prompt) for content in tokens]):
        prompt = b""
    reward_names, reward_values = _encode_named_rewards(rollouts)
    message: dict[str, Any] = dict(zip(ENVELOPE, envelope, strict=True))
    message |= {
        "format": FORMAT,
        "turns": pack(f"<{len(turns)}H", *turns),
        "spans": pack(f"<{len(spans)}I", *spans),
        "prompt": prompt,
        "tokens": b"".join([content[len(prompt) :] for content in tokens]),
        "logprobs": logprobs,
        "policy_steps": _encode_runs(policy_steps, group.policy_step),
        "rewards": pack(f"<{len(rollouts)}d", *group.rewards),
        "reward_names": reward_names,
        "reward_values": reward_values,
        "finish_reasons": bytes([FINISH_REASONS.index(each.finish_reason) for each in rollouts]),
        "crc32": bytes(4),
    }
    frame = cast(bytes, msgpack.packb(message))[:-4]
    _check_size(message, num_bytes=len(frame) + 4, num_tokens=sum(spans))
    return frame + pack("<I", crc32(frame))


def _encode_turns(rollouts: Sequence[Rollout]) -> tuple[list[int], list[int], bytes, bytes]:
    """The columns `turns` and `spans`, and logprobs and policy steps of all generated tokens."""
    turns: list[int] = []
    spans: list[int] = []
    all_logprobs: list[bytes] = []
    all_policy_steps: list[bytes] = []
    for rollout in rollouts:
        mask, first_span = rollout.loss_mask.tobytes(), len(spans)
        logprobs = _bytes(rollout.logprobs, FLOAT)
        policy_steps = _bytes(rollout.policy_steps, INT)
        end, length = 0, len(mask)
        while end < length:
            start = mask.find(1, end) % (length + 1)  # -1 (not found) becomes the end
            stop = mask.find(0, start) % (length + 1)
            spans += (start - end, stop - start)
            all_logprobs.append(logprobs[4 * start : 4 * stop])
            all_policy_steps.append(policy_steps[4 * start : 4 * stop])
            end = stop
        if not (spans[first_span] and spans[first_span + 1]):
            raise ValueError("a rollout without prompt or completion")
        turns.append((len(spans) - first_span) // 2)
    return turns, spans, b"".join(all_logprobs), b"".join(all_policy_steps)


def _bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return (array if array.dtype == dtype else array.astype(dtype)).tobytes()


def _encode_runs(policy_steps: bytes, oldest: int) -> bytes:
    """Policy steps of all generated tokens, run-length encoded; usually a single run."""
    length = len(policy_steps) >> 2
    if policy_steps == policy_steps[:4] * length:
        return pack("<II", int.from_bytes(policy_steps[:4], "little") - oldest, length)
    steps = np.frombuffer(policy_steps, INT).astype(np.int64)
    starts = np.flatnonzero(np.diff(steps, prepend=-2))
    runs = np.stack([steps[starts] - oldest, np.diff(starts, append=length)], axis=1)
    return pack(f"<{runs.size}I", *runs.ravel().tolist())


def _encode_named_rewards(rollouts: Sequence[Rollout]) -> tuple[str, bytes]:
    """The columns `reward_names` and `reward_values`."""
    names = dict.fromkeys([name for rollout in rollouts for name in rollout.rewards])
    if not names:
        return "", b""
    if any("\0" in name for name in names):
        raise ValueError("the name of a reward contains NUL")
    for rollout in rollouts:
        message_fields.check_rewards(tuple(rollout.rewards.values()))
    values = [rollout.rewards.get(name, math.nan) for rollout in rollouts for name in names]
    return "".join([f"{name}\0" for name in names]), pack(f"<{len(values)}d", *values)


def _check_size(message: dict[str, Any], *, num_bytes: int, num_tokens: int) -> None:
    if num_bytes > message_fields.MAX_MESSAGE or num_tokens > message_fields.MAX_TOKENS:
        raise ValueError(
            f"{num_bytes} bytes and {num_tokens} tokens exceed the limits of "
            f"{message_fields.MAX_MESSAGE} and {message_fields.MAX_TOKENS}; "
            "lower sampling.max_completion_length or sampling.num_generations"
        )
    if max(len(message["spans"]), len(message["policy_steps"])) > 8 * message_fields.MAX_COUNT:
        raise ValueError(
            f"more than {message_fields.MAX_COUNT} rollouts, turns or changes of the policy step"
        )
    if len(message["reward_values"]) > 8 * message_fields.MAX_VALUES:
        raise ValueError(f"more than {message_fields.MAX_VALUES} named rewards")
    for name, value in message.items():
        if type(value) is str and len(value.encode()) > message_fields.MAX_TEXT:
            raise ValueError(f"{name} is longer than {message_fields.MAX_TEXT} bytes; shorten it")


def _check_envelope(envelope: tuple[Any, ...]) -> None:
    """Raise ValueError for a value of ENVELOPE out of bounds."""
    _, generator_id, incarnation, sequence, _, _, policy_step, _, *last = envelope
    min_sequence, sample_index, evaluation_step = last
    message_fields.check_identity(generator_id, incarnation)
    if not 0 <= min_sequence <= sequence:
        raise ValueError(f"min_sequence {min_sequence} is negative or above sequence {sequence}")
    if not 0 <= policy_step <= message_fields.MAX_STEP:
        raise ValueError("policy step out of bounds")
    if not (
        -1 <= sample_index <= MAX_SAMPLE_INDEX and -1 <= evaluation_step <= message_fields.MAX_STEP
    ):
        raise ValueError("sample_index or evaluation_step out of bounds")


# Decoding.


class InvalidGroupError(WireError):
    """A valid envelope with invalid rollouts; `group` is the group without rollouts."""

    def __init__(self, reason: str, group: RolloutGroup) -> None:
        super().__init__(reason)
        self.group = group


MALFORMED = (KeyError, TypeError, ValueError, IndexError, OverflowError, StructError)


def decode_group(frame: bytes, *, vocab_size: int) -> RolloutGroup:
    """The group in a frame; its Rollout objects are built when one is first accessed.

    Raises WireError with the broken rule; InvalidGroupError if only the rollouts are invalid, so
    that the receiver can account for the group.
    """
    message = message_fields.unpack(frame)
    try:
        envelope, columns = _read_fields(message, frame)
    except MALFORMED as error:
        raise WireError(_malformed(error)) from None
    *identity, min_sequence, sample_index, evaluation_step = envelope
    try:
        rollouts = _decode_rollouts(columns, policy_step=envelope[6], vocab_size=vocab_size)
    except MALFORMED as error:
        group = RolloutGroup(*identity, rollouts=(), min_sequence=min_sequence)
        raise InvalidGroupError(_malformed(error), group) from None
    return RolloutGroup(
        *identity,
        rollouts=rollouts,
        min_sequence=min_sequence,
        sample_index=sample_index,
        evaluation_step=evaluation_step,
        summary=rollouts.summary,
    )


def _malformed(error: Exception) -> str:
    return f"malformed group: {type(error).__name__}: {error}"


def _read_fields(message: dict[str, Any], frame: bytes) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The values of ENVELOPE and of COLUMNS."""
    if (number := message_fields.check_type(message["format"], int, "format")) != FORMAT:
        raise ValueError(f"format {number} is not {FORMAT}; use one version of the program")
    values = SCHEMA.read(message)
    if crc32(frame) != CRC_RESIDUE or values[-1] != frame[-4:]:
        raise ValueError("checksum does not match")
    envelope, columns = values[:11], values[11:-2]
    _check_envelope(envelope)
    return envelope, columns


@lru_cache(maxsize=1024)  # halves the cost of a count that was seen before
def _unpacker(count: int, letter: str) -> Callable[[bytes], tuple[Any, ...]]:
    """The function that unpacks exactly `count` numbers of a type of `struct`."""
    return Struct(f"<{count}{letter}").unpack


def _decode_rollouts(
    columns: tuple[Any, ...], *, policy_step: int, vocab_size: int
) -> LazyRollouts:
    turns, spans, prompt, tokens, logprobs, runs, rewards, names, values, finish_reasons = columns
    if max(len(turns) >> 1, len(spans) >> 3) > message_fields.MAX_COUNT:
        raise ValueError(f"more than {message_fields.MAX_COUNT} rollouts or turns")
    turns = _unpacker(len(turns) >> 1, "H")(turns)
    spans = _unpacker(len(spans) >> 2, "I")(spans)
    message_fields.check_lengths(turns, spans, prompt, tokens, logprobs)
    message_fields.check_tokens(prompt + tokens, vocab_size)
    message_fields.check_logprobs(logprobs)
    rewards = _unpacker(len(turns), "d")(rewards)
    message_fields.check_rewards(rewards)
    if len(finish_reasons) != len(rewards) or finish_reasons.strip(FINISH_CODES):
        raise ValueError("unknown finish reasons, or not one for each rollout")
    named = _decode_named_rewards(names, values, len(rewards)) if names or values else []
    runs = _decode_runs(runs, policy_step, len(logprobs))
    return LazyRollouts(
        turns, spans, prompt, tokens, logprobs, policy_step, runs, rewards, named, finish_reasons
    )


def _decode_runs(content: bytes, policy_step: int, num_bytes: int) -> tuple[int, ...]:
    """Policy steps above `policy_step`, each followed by its number of generated tokens."""
    if len(content) > 8 * message_fields.MAX_COUNT:
        raise ValueError(f"more than {message_fields.MAX_COUNT} changes of the policy step")
    runs = _unpacker(len(content) >> 2, "I")(content)
    if len(runs) % 2 or 4 * sum(runs[1::2]) != num_bytes:
        raise ValueError("policy steps and spans of unequal length")
    if policy_step + max(runs[::2]) > message_fields.MAX_STEP:
        raise ValueError("policy step out of bounds")
    return runs


def _decode_named_rewards(text: str, values: bytes, count: int) -> list[dict[str, float]]:
    """The named rewards of each rollout."""
    *names, rest = text.split("\0")
    if count * len(names) > message_fields.MAX_VALUES:
        raise ValueError(f"more than {message_fields.MAX_VALUES} named rewards")
    numbers = iter(_unpacker(count * len(names), "d")(values))
    if rest:
        raise ValueError("the last reward name does not end with NUL")
    named = [
        {name: value for name in names if not math.isnan(value := next(numbers))}
        for _ in range(count)
    ]
    for rewards in named:
        message_fields.check_rewards(tuple(rewards.values()))
    return named


@dataclass(slots=True, eq=False)
class LazyRollouts(Sequence[Rollout]):
    """The rollouts of a received group, built from its validated columns on first access.

    Admission needs only the rewards and policy steps, so the socket is emptied sooner and the
    rollouts of a dropped group are never built.
    """

    turns: tuple[int, ...]
    spans: tuple[int, ...]
    prompt: bytes
    tokens: bytes
    logprobs: bytes
    policy_step: int
    runs: tuple[int, ...]  # policy step minus `policy_step`, then the number of tokens
    rewards: tuple[float, ...]
    named_rewards: list[dict[str, float]]  # empty when no reward has a name
    finish_reasons: bytes
    _rollouts: tuple[Rollout, ...] | None = None

    @property
    def summary(self) -> tuple[tuple[float, ...], int]:
        """Rewards and newest policy step, the argument `summary` of RolloutGroup."""
        return self.rewards, self.policy_step + max(self.runs[::2])

    def __len__(self) -> int:
        return len(self.turns)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Rollout, ...]: ...
    def __getitem__(self, index: int | slice) -> Rollout | tuple[Rollout, ...]:
        if self._rollouts is None:
            self._rollouts = _build_rollouts(self)
        return self._rollouts[index]


def _build_rollouts(columns: LazyRollouts) -> tuple[Rollout, ...]:
    """The rollouts as slices of the concatenated arrays of all rollouts."""
    runs = zip(columns.runs[::2], columns.runs[1::2], strict=True)
    generated_steps = b"".join(
        [pack("<i", columns.policy_step + above) * count for above, count in runs]
    )
    token_pieces: list[bytes] = []
    mask_pieces: list[bytes] = []
    logprob_pieces: list[bytes] = []
    step_pieces: list[bytes] = []
    slices: list[slice] = []  # of each rollout in the concatenated arrays
    spans = zip(columns.spans[::2], columns.spans[1::2], strict=True)
    generated_at = tokens_at = end = 0  # positions: bytes of the columns, tokens of the result
    for num_turns in columns.turns:
        start = end
        for context, generated in islice(spans, num_turns):
            stop = generated_at + 4 * generated
            mask_pieces += (bytes(context), b"\1" * generated)
            logprob_pieces += (bytes(4 * context), columns.logprobs[generated_at:stop])
            step_pieces += (NO_STEP * context, generated_steps[generated_at:stop])
            generated_at, end = stop, end + context + generated
        stop = tokens_at + 4 * (end - start) - len(columns.prompt)
        token_pieces += (columns.prompt, columns.tokens[tokens_at:stop])
        tokens_at = stop
        slices.append(slice(start, end))
    tokens = np.frombuffer(b"".join(token_pieces), INT).astype(np.int32, copy=False)
    mask = np.frombuffer(b"".join(mask_pieces), np.bool_)
    logprobs = np.frombuffer(b"".join(logprob_pieces), FLOAT).astype(np.float32, copy=False)
    steps = np.frombuffer(b"".join(step_pieces), INT).astype(np.int32, copy=False)
    named = columns.named_rewards or [{} for _ in slices]
    reasons = [FINISH_REASONS[code] for code in columns.finish_reasons]
    arrays = [(tokens[part], mask[part], logprobs[part], steps[part]) for part in slices]
    return tuple(map(Rollout, *zip(*arrays, strict=True), columns.rewards, reasons, named))
