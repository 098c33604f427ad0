"""Groups as messages: encode a group as one frame of bytes, decode and check frames.

The frame is a msgpack map with five parts: the fields of RolloutGroup in ENVELOPE, those in
OPTIONAL unless they are None, the Columns (little-endian buffers with the contents of all
rollouts), `format` (version of the format), and `crc32` (checksum of all bytes before). A prompt
that all rollouts share is sent once. The logprobs and policy steps of context tokens are not sent:
they are 0 and -1. A segment is consecutive generated tokens with equal policy step.

The sender may be hostile or have other settings: all sizes are checked before memory is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from operator import itemgetter
from struct import Struct, pack
from struct import error as StructError
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from peralta_zmq.errors import WireError
from peralta_zmq.rollout import MAX_REWARD, FinishReason, GroupSummary, Rollout, RolloutGroup
from peralta_zmq.wire import message_fields
from peralta_zmq.wire.message_fields import check_type

FORMAT = 5  # version of the message format
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
FINISH_CODES = bytes(range(len(FINISH_REASONS)))  # the valid bytes of column `finish_reasons`
INT = np.dtype("<i4")
# Fields of RolloutGroup in the message: name -> type. A missing one of OPTIONAL is None.
ENVELOPE = {
    "run_id": str, "generator_id": str, "incarnation": bytes, "group_number": int,
    "min_group_number": int, "problem_id": str, "task": str, "policy_step": int, "weights_id": str,
}  # fmt: skip
OPTIONAL = {"sample_index": int, "evaluation_step": int}
# The size of a message does not limit its tokens: a prompt that all rollouts share is sent once.
MAX_TOKENS = 1 << 20  # tokens of all rollouts together
MAX_COUNT = 1 << 12  # rollouts, turns of all rollouts, or segments
MAX_VALUES = 1 << 16  # named rewards of all rollouts
MAX_OTHER_BYTES = 1 << 14  # size of everything but the columns: names, texts and unknown fields
MAX_STEP = 2**31 - 1
LOGPROB_SLACK = float(np.float32(1e-3))  # rounding may lift log(1) a little above 0
MIN_LOGPROB = -1e4  # a sampled token never has less
UNSIGNED, FLOAT = np.dtype("<u4"), np.dtype("<f4")  # types of token ids and of logprobs


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """A receiver's limits of a group; the defaults are those of the message format."""

    vocab_size: int  # every token id must be smaller
    max_rollouts: int = MAX_COUNT
    max_tokens: int = MAX_TOKENS  # tokens of a rollout: prompt and completion, all turns
    max_generated: int = MAX_TOKENS  # tokens of a turn
    max_turns: int = MAX_COUNT  # turns of a rollout
    num_rollouts: Mapping[str, int] | None = None
    """Size of a group for training, by its task; None, or 0: up to max_rollouts."""

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest message with a group within the limits."""
        num_tokens = min(self.max_rollouts * self.max_tokens, MAX_TOKENS)
        num_turns = min(self.max_rollouts * self.max_turns, MAX_COUNT)
        # All names of rewards together have at most MAX_TEXT bytes; a name takes 2 bytes or more.
        num_values = min(self.max_rollouts * message_fields.MAX_TEXT // 2, MAX_VALUES)
        # 8 bytes each: token with logprob, span, reward of a turn, segment, named reward; 11: the
        # rest of a rollout.
        num_numbers = num_tokens + 2 * num_turns + MAX_COUNT + num_values
        columns = 8 * num_numbers + 11 * self.max_rollouts
        size = columns + message_fields.MAX_TEXT + MAX_OTHER_BYTES
        return min(size, message_fields.MAX_MESSAGE)


class Columns(NamedTuple):
    """A group: K rollouts, S turns, G generated tokens, in little-endian buffers.

    Types are u (unsigned integer), i (signed integer) or f (float) with the number of bytes.
    """

    turns: bytes  # u2 [K], number of turns of each rollout
    spans: bytes  # u4 [S, 2], number of context tokens and of generated tokens of each turn
    prompt: bytes  # i4, the prompt that all rollouts share; empty if the prompts differ
    tokens: bytes  # i4, all other tokens
    logprobs: bytes  # f4 [G]
    policy_steps: bytes  # u4 [R, 2], of R segments: policy step minus the group's, tokens
    rewards: bytes  # f8 [K]
    reward_names: str  # N names, each ended by NUL
    reward_values: bytes  # f8 [K, N], NaN = the rollout has no reward of this name
    finish_reasons: bytes  # u1 [K], index into FINISH_REASONS
    turn_rewards: bytes  # f8, of each turn with generated tokens; empty if the task gives none


REQUIRED = {**ENVELOPE, **get_type_hints(Columns), "format": int}  # name -> type
REQUIRED_TYPES = [*REQUIRED.values()]
_required_of = itemgetter(*REQUIRED)  # message -> values
FORMAT_LIMITS = GroupLimits(vocab_size=2**31)


def encode_group(group: RolloutGroup, *, max_bytes: int = message_fields.MAX_MESSAGE) -> bytes:
    """Encode a group as a frame. Raises WireError if `decode_group` would refuse it."""
    try:
        return _encode(group, max_bytes)
    except (ValueError, OverflowError, StructError) as error:
        raise WireError(f"a group of {group.problem_id!a:.40} cannot be sent: {error}") from None


def _encode(group: RolloutGroup, max_bytes: int) -> bytes:
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
    if len(frame) > max_bytes or sum(spans) > MAX_TOKENS:
        raise ValueError(
            f"{len(frame)} bytes and {sum(spans)} tokens exceed the limits of "
            f"{max_bytes} and {MAX_TOKENS}; use the trainer's settings, or lower "
            "sampling.max_completion_length or sampling.num_generations"
        )
    for name, value in message.items():
        if type(value) is str and len(value.encode()) > message_fields.MAX_TEXT:
            raise ValueError(f"{name} is longer than {message_fields.MAX_TEXT} bytes; shorten it")
    return frame


def _encode_turns(rollouts: Sequence[Rollout]) -> tuple[list[int], list[int], bytes, bytes]:
    """The columns `turns` and `spans`, and logprobs (f4) and steps (i4) of generated tokens."""
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
    position = content.find(byte, start)
    return len(content) if position < 0 else position


def _encode_segments(policy_steps: bytes, group_step: int) -> bytes:
    """The column `policy_steps`, from the step (i4) of each generated token."""
    length = len(policy_steps) // 4
    if policy_steps == policy_steps[:4] * length:  # the usual case: one segment
        return pack("<2I", int.from_bytes(policy_steps[:4], "little") - group_step, length)
    steps = np.frombuffer(policy_steps, INT).astype(np.int64)
    starts = np.flatnonzero(np.diff(steps, prepend=-2))  # token 0 starts one: its step is not -2
    segments = np.stack([steps[starts] - group_step, np.diff(starts, append=length)], axis=1)
    return pack(f"<{segments.size}I", *segments.ravel().tolist())


def _encode_named_rewards(rollouts: Sequence[Rollout]) -> tuple[str, bytes]:
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
    if not any(turn_rewards):
        return b""
    if [*map(len, turn_rewards)] != (counts := _turn_counts(turns, completions)):
        raise ValueError(f"{[*map(len, turn_rewards)]} rewards of turns for {counts} turns")
    values = [value for values in turn_rewards for value in values]
    check_rewards(values)
    return pack(f"<{len(values)}d", *values)


def _turn_counts(turns: Sequence[int], completions: Sequence[int]) -> list[int]:
    """Number of turns with generated tokens of each rollout; its last span may be empty."""
    lengths = iter(completions)
    return [sum(length > 0 for length in islice(lengths, count)) for count in turns]


class InvalidGroupError(WireError):
    """Only the rollouts are invalid; `group`, without them, is counted as dropped."""

    def __init__(self, reason: str, group: RolloutGroup) -> None:
        super().__init__(reason)
        self.group = group


def decode_group(frame: bytes, limits: GroupLimits) -> RolloutGroup:
    """Decode and check a group. Raises WireError; InvalidGroupError for invalid rollouts."""
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
    if (version := check_type(message["format"], int, "format")) != FORMAT:
        raise ValueError(f"format {version} is not {FORMAT}; use one version of the program")
    values = _required_of(message)
    if [*map(type, values)] != REQUIRED_TYPES:
        for name, expected in REQUIRED.items():
            check_type(message[name], expected, name)
    envelope = dict(zip(ENVELOPE, values, strict=False))  # the first values
    for name, expected in OPTIONAL.items():
        is_set = name in message
        envelope[name] = check_type(message[name], expected, name) if is_set else None
    message_fields.check_checksum(frame, message.get("crc32"))
    check_envelope(envelope)
    return envelope, Columns(*values[len(ENVELOPE) : -1])


@lru_cache(maxsize=1024)  # making a Struct takes as long as unpacking with the Struct
def _unpacker(count: int, letter: str) -> Callable[[bytes], tuple[Any, ...]]:
    """A function that unpacks `count` numbers; `letter` is their type in `struct`."""
    return Struct(f"<{count}{letter}").unpack


def _decode_rollouts(columns: Columns, policy_step: int, limits: GroupLimits) -> LazyRollouts:
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
    if not columns.turn_rewards:
        return ((),) * len(turns)
    counts = _turn_counts(turns, completions)
    values = _unpacker(sum(counts), "d")(columns.turn_rewards)
    check_rewards(values)
    remaining = iter(values)
    return tuple(tuple(islice(remaining, count)) for count in counts)


@dataclass(slots=True, eq=False)
class LazyRollouts(Sequence[Rollout]):
    """The rollouts of a received group, built from validated columns on first access."""

    columns: Columns
    turns: tuple[int, ...]
    spans: tuple[int, ...]
    segments: tuple[int, ...]  # values of the column `policy_steps`
    policy_step: int  # RolloutGroup.policy_step
    named_rewards: list[dict[str, float]]  # one dict per rollout
    summary: GroupSummary
    _rollouts: tuple[Rollout, ...] | None = None

    def __len__(self) -> int:
        return len(self.turns)

    def __getitem__(self, index: Any) -> Any:  # int -> Rollout, slice -> tuple of them
        if self._rollouts is None:
            self._rollouts = _build_rollouts(self)
        return self._rollouts[index]


def _build_rollouts(lazy: LazyRollouts) -> tuple[Rollout, ...]:
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


# Rules. Each check raises ValueError.


def check_envelope(envelope: Mapping[str, Any]) -> None:
    """Names, steps and group numbers must be valid; `envelope` has fields of RolloutGroup."""
    message_fields.check_identity(envelope["generator_id"], envelope["incarnation"])
    group_number = envelope["group_number"]
    min_group_number = envelope["min_group_number"]
    if not 0 <= min_group_number <= group_number:
        raise ValueError(
            f"min_group_number {min_group_number} is negative or above group_number {group_number}"
        )
    if not 0 <= envelope["policy_step"] <= MAX_STEP:
        raise ValueError("policy step out of bounds")
    # None: they are not set.
    sample_index = envelope["sample_index"] or 0
    evaluation_step = envelope["evaluation_step"] or 0
    if not (0 <= sample_index <= 2**53 and 0 <= evaluation_step <= MAX_STEP):
        raise ValueError("sample_index or evaluation_step out of bounds")


def check_num_rollouts(task: str, columns: Columns, limits: GroupLimits) -> None:
    if limits.num_rollouts is None:
        return
    if (num_rollouts := limits.num_rollouts.get(task)) is None:
        raise ValueError(f"unknown environment '{task:.64}' (env.name)")
    if num_rollouts and num_rollouts != len(columns.turns) >> 1:  # 2 bytes for each rollout
        raise ValueError(f"not {num_rollouts} rollouts (sampling.num_generations, of the env too)")


def check_counts(columns: Columns, limits: GroupLimits) -> None:
    count = len(columns.turns) >> 1  # 2 bytes for each rollout
    if count > limits.max_rollouts:
        raise ValueError(
            f"more than {limits.max_rollouts} rollouts (sampling.num_generations, of the env too)"
        )
    if len(columns.spans) > 8 * MAX_COUNT or len(columns.policy_steps) > 8 * MAX_COUNT:
        raise ValueError(f"more than {MAX_COUNT} turns or changes of the policy step")
    if len(columns.reward_values) > 8 * MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} named rewards")


def check_lengths(
    turns: Sequence[int], spans: Sequence[int], columns: Columns, limits: GroupLimits
) -> None:
    """Tokens and logprobs must have the lengths in `spans`, within the limits."""
    contexts = spans[::2]
    completions = spans[1::2]
    num_tokens = sum(spans)
    num_prompt_bytes = len(columns.prompt)
    # check_tokens reads prompt + tokens as one array: a partial token would shift the ids after it.
    if num_prompt_bytes % 4:
        raise ValueError("length of the prompt is not a multiple of 4 bytes")
    if not turns or not all(turns) or not all(contexts):
        raise ValueError("a rollout without prompt or completion")
    if 2 * sum(turns) != len(spans):
        raise ValueError("number of spans is not twice that of the turns")
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"more than {MAX_TOKENS} tokens")
    num_token_bytes = num_prompt_bytes * len(turns) + len(columns.tokens)
    if (num_token_bytes, len(columns.logprobs)) != (4 * num_tokens, 4 * sum(completions)):
        raise ValueError("tokens, logprobs and spans of unequal length")
    if (longest := max(completions)) > limits.max_generated:
        raise ValueError(
            f"more than {limits.max_generated} generated tokens (sampling.max_completion_length)"
        )
    # Usually no condition below holds: each rollout has one turn, and even the longest context with
    # the longest completion is within the limits.
    if (
        len(spans) > 2 * len(turns)
        or max(contexts) + longest > limits.max_tokens
        or not all(completions)
        or 4 * min(contexts) < num_prompt_bytes
    ):
        _check_each_rollout(turns, spans, num_prompt_bytes, limits)


def _check_each_rollout(
    turns: Sequence[int], spans: Sequence[int], num_prompt_bytes: int, limits: GroupLimits
) -> None:
    start = 0
    for num_turns in turns:
        end = start + 2 * num_turns
        if num_turns > limits.max_turns:
            raise ValueError(f"a rollout of more than {limits.max_turns} turns")
        if not any(spans[start + 1 : end : 2]):
            raise ValueError("a rollout without prompt or completion")
        length = sum(spans[start:end])
        if length > limits.max_tokens:
            raise ValueError(f"more than {limits.max_tokens} tokens (engine.max_model_len)")
        if 4 * length < num_prompt_bytes:
            raise ValueError("a prompt that is longer than a rollout")
        start = end


def check_tokens(content: bytes, limits: GroupLimits) -> None:
    tokens = np.frombuffer(content, UNSIGNED)  # unsigned: negative ids become large
    if tokens.item(tokens.argmax()) >= limits.vocab_size:  # argmax takes a third of the time of max
        raise ValueError("token outside the vocabulary")


def check_logprobs(content: bytes) -> None:
    logprobs = np.frombuffer(content, FLOAT)
    highest = logprobs.item(logprobs.argmax())
    lowest = logprobs.item(logprobs.argmin())
    if not (highest < math.inf and lowest > -math.inf):  # argmax and argmin both find a NaN
        raise ValueError("logprob is not finite")
    if highest > LOGPROB_SLACK:
        raise ValueError("logprob above zero")
    if lowest < MIN_LOGPROB:
        raise ValueError(f"logprob below {MIN_LOGPROB:g}")


def check_rewards(values: Sequence[float]) -> None:
    # No value is larger than the norm of all, so one call usually suffices. A NaN fails both tests.
    if not math.hypot(*values) < MAX_REWARD:
        for value in values:
            if not -MAX_REWARD <= value <= MAX_REWARD:
                raise ValueError(f"reward {value} is not finite, or out of bounds")
