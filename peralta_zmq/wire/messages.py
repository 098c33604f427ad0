"""A group of rollouts as bytes: one msgpack map with flat little-endian buffers, and a checksum.

What siblings share is sent once, and what is known of context tokens (logprob 0, no policy step)
is not sent at all. Knows the rules of a sound group; knows nothing of sockets.

    v run gen incarnation seq min_sequence step weights_id problem task
    sample_index evaluation_step    -1 or missing = none
    turns     u2 [K]          spans of each rollout
    spans     u4 [S, 2]       context tokens, then generated tokens
    prompt    i4 [P]          the first tokens of every rollout; empty when they differ
    tokens    i4              all other tokens
    logprobs  f4 [G]          of the generated tokens
    versions  u4 [R, 2]       policy step above `step`, and how many generated tokens have it
    rewards   f8 [K]
    parts     names of the rewards' parts, each ended by NUL
    values    f8 [K, parts]   NaN = this rollout has no such part
    finish    u1 [K]          index into FINISH_REASONS
    crc32     u4              the last four bytes of the frame, over all before them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from struct import Struct, pack
from struct import error as StructError
from typing import Any, NamedTuple, cast, overload

import msgpack
import numpy as np
from isal.isal_zlib import crc32  # zlib's numbers; of 24 KiB in 0.5 us instead of 6
from numpy.typing import NDArray

from peralta_zmq.errors import WireError
from peralta_zmq.rollout import MAX_REWARD, FinishReason, Rollout, RolloutGroup
from peralta_zmq.wire import validation

VERSION = 3
LOGPROB_SLACK = float(np.float32(1e-3))  # rounding may lift log(1) a little above 0
MAX_TOKENS = 1 << 20  # of one group; a shared prompt could make a small message large
MAX_COUNT = 1 << 12  # of rollouts, of spans, of changes of the policy step
MAX_VALUES = 1 << 16  # parts of rewards, of all rollouts
MAX_STEP = 2**31 - 1
MAX_SAMPLE_INDEX = 2**53
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
KNOWN_REASONS = bytes(range(len(FINISH_REASONS)))
SEALED = 0x2144DF1C  # the CRC-32 of whatever ends with its own CRC-32
INT, UNSIGNED, FLOAT = np.dtype("<i4"), np.dtype("<u4"), np.dtype("<f4")
NO_STEP = pack("<i", -1)
NAMES = ("run", "gen", "weights_id", "problem", "task")
FIELDS = validation.Fields({
    "run": str, "gen": str, "incarnation": bytes, "seq": int, "problem": str,
    "task": str, "step": int,
    "weights_id": str, "min_sequence": int, "sample_index": int, "evaluation_step": int,
    "turns": bytes, "spans": bytes,
    "prompt": bytes, "tokens": bytes, "logprobs": bytes, "versions": bytes, "rewards": bytes,
    "parts": str, "values": bytes, "finish": bytes, "v": int, "crc32": bytes,
}, sample_index=-1, evaluation_step=-1)  # older generators do not send these two  # fmt: skip


# Encoding.


@dataclass(slots=True)
class _Columns:
    """The siblings' arrays as bytes."""

    turns: list[int] = field(default_factory=list[int])
    spans: list[int] = field(default_factory=list[int])
    tokens: list[bytes] = field(default_factory=list[bytes])  # one for each rollout
    logprobs: list[bytes] = field(default_factory=list[bytes])  # one for each span
    versions: list[bytes] = field(default_factory=list[bytes])  # one for each span


def encode_group(group: RolloutGroup) -> bytes:
    """One group as one frame.

    Raises WireError when the receiver would refuse it: for its size, a name, a reward.
    """
    try:
        return _frame_of(group)
    except (ValueError, OverflowError, StructError) as error:
        raise WireError(f"a group of {group.problem_id!a:.40} cannot be sent: {error}") from None


def _frame_of(group: RolloutGroup) -> bytes:
    rollouts = group.rollouts
    if not rollouts:
        raise ValueError("it has no rollouts")
    _check_envelope(
        group.generator_id, group.incarnation, group.sequence, group.policy_step,
        group.min_sequence, group.sample_index, group.evaluation_step,
    )  # fmt: skip
    columns = _columns_of(rollouts)
    prompt = _shared_prompt(columns)
    rewards = [each.reward for each in rollouts]
    parts = _part_names(rollouts)
    _check_values(rewards)
    fields = {
        "v": VERSION,
        "run": group.run_id,
        "gen": group.generator_id,
        "incarnation": group.incarnation,
        "seq": group.sequence,
        "min_sequence": group.min_sequence,
        "step": group.policy_step,
        "weights_id": group.weights_id,
        "problem": group.problem_id,
        "task": group.task,
        "turns": pack(f"<{len(rollouts)}H", *columns.turns),
        "spans": pack(f"<{len(columns.spans)}I", *columns.spans),
        "prompt": prompt,
        "tokens": b"".join([each[len(prompt) :] for each in columns.tokens]),
        "logprobs": b"".join(columns.logprobs),
        "versions": _runs(b"".join(columns.versions), group.policy_step),
        "rewards": pack(f"<{len(rewards)}d", *rewards),
        "parts": "".join([f"{name}\0" for name in parts]),
        "values": _values(rollouts, parts) if parts else b"",
        "finish": bytes([FINISH_REASONS.index(each.finish_reason) for each in rollouts]),
        "sample_index": group.sample_index,
        "evaluation_step": group.evaluation_step,
        "crc32": bytes(4),
    }
    frame = cast(bytes, msgpack.packb(fields))[:-4]
    _check_size(group, columns, fields, len(frame) + 4)
    return frame + pack("<I", crc32(frame))


def _columns_of(rollouts: Sequence[Rollout]) -> _Columns:
    columns = _Columns()
    for rollout in rollouts:
        mask, begun = rollout.loss_mask.tobytes(), len(columns.spans)
        logprobs = _bytes(rollout.logprobs, FLOAT)
        versions = _bytes(rollout.policy_steps, INT)
        end, length = 0, len(mask)
        while end < length:
            start = mask.find(1, end) % (length + 1)  # -1, not found: to the end
            stop = mask.find(0, start) % (length + 1)
            columns.spans += (start - end, stop - start)
            columns.logprobs.append(logprobs[4 * start : 4 * stop])
            columns.versions.append(versions[4 * start : 4 * stop])
            end = stop
        if not (columns.spans[begun] and columns.spans[begun + 1]):
            raise ValueError("a rollout without prompt or completion")
        columns.turns.append((len(columns.spans) - begun) // 2)
        columns.tokens.append(_bytes(rollout.token_ids, INT))
    return columns


def _bytes(array: NDArray[Any], kind: np.dtype[Any]) -> bytes:
    return (array if array.dtype == kind else array.astype(kind)).tobytes()


def _shared_prompt(columns: _Columns) -> bytes:
    """The context tokens that every rollout begins with, if all begin with the same ones."""
    prompt = columns.tokens[0][: 4 * columns.spans[0]]
    return prompt if all([each.startswith(prompt) for each in columns.tokens]) else b""


def _runs(versions: bytes, first: int) -> bytes:
    """Policy steps of all generated tokens, run-length encoded: mostly one run."""
    length = len(versions) >> 2
    if versions == versions[:4] * length:
        return pack("<II", int.from_bytes(versions[:4], "little") - first, length)
    steps = np.frombuffer(versions, INT).astype(np.int64)
    starts = np.flatnonzero(np.diff(steps, prepend=-2))
    pairs = np.stack([steps[starts] - first, np.diff(starts, append=length)], axis=1)
    return pack(f"<{pairs.size}I", *pairs.ravel().tolist())


def _part_names(rollouts: Sequence[Rollout]) -> list[str]:
    names = list(dict.fromkeys([name for each in rollouts for name in each.rewards]))
    if any("\0" in name for name in names):
        raise ValueError("the name of a reward's part holds NUL")
    return names


def _values(rollouts: Sequence[Rollout], parts: Sequence[str]) -> bytes:
    present = [each.rewards[name] for each in rollouts for name in parts if name in each.rewards]
    _check_values(present)
    values = [each.rewards.get(name, math.nan) for each in rollouts for name in parts]
    return pack(f"<{len(values)}d", *values)


def _check_size(group: RolloutGroup, columns: _Columns, fields: dict[str, Any], size: int) -> None:
    if size > validation.MAX_MESSAGE or sum(columns.spans) > MAX_TOKENS:
        raise ValueError(
            f"{size} bytes and {sum(columns.spans)} tokens exceed the limits of "
            f"{validation.MAX_MESSAGE} and {MAX_TOKENS}; "
            "lower sampling.max_completion_length or sampling.num_generations"
        )
    if max(len(columns.spans) // 2, len(fields["versions"]) // 8) > MAX_COUNT:
        raise ValueError(f"more than {MAX_COUNT} rollouts, spans or changes of the policy step")
    if len(fields["values"]) > 8 * MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} parts of rewards")
    for name in (*NAMES, "parts"):
        if (
            len(fields[name]) * 4 > validation.MAX_TEXT
            and len(fields[name].encode()) > validation.MAX_TEXT
        ):
            raise ValueError(f"{name} is longer than {validation.MAX_TEXT} bytes; shorten it")


# Decoding.


def _numbers(kind: str) -> Callable[[int], Callable[[bytes], tuple[Any, ...]]]:
    """What turns a buffer into a count of numbers; a count that came before costs half as much."""

    @lru_cache(maxsize=256)
    def counted(count: int) -> Callable[[bytes], tuple[Any, ...]]:
        return Struct(f"<{count}{kind}").unpack

    return counted


_shorts, _longs, _doubles = map(_numbers, "HId")


class InvalidGroupError(WireError):
    """A whole message whose rollouts break a rule; `group` is it without them."""

    def __init__(self, reason: str, group: RolloutGroup) -> None:
        super().__init__(reason)
        self.group = group


MALFORMED = (KeyError, TypeError, ValueError, IndexError, OverflowError, StructError)


def decode_group(frame: bytes, *, vocab_size: int) -> RolloutGroup:
    """The group in a frame.

    Raises WireError with the rule that it breaks: InvalidGroupError once it is known whose it is.
    """
    said = validation.unpack(frame)
    try:
        envelope, since, columns = _opened(said, frame)
    except MALFORMED as error:
        raise WireError(_malformed(error)) from None
    try:
        siblings = _siblings_of(said["step"], vocab_size, *columns)
    except MALFORMED as error:
        refused = RolloutGroup(*envelope, rollouts=(), min_sequence=said["min_sequence"])
        raise InvalidGroupError(_malformed(error), refused) from None
    min_sequence, sample_index, evaluation_step = since
    return RolloutGroup(
        *envelope,
        rollouts=siblings,
        min_sequence=min_sequence,
        sample_index=sample_index,
        evaluation_step=evaluation_step,
    )


def _malformed(error: Exception) -> str:
    return f"malformed group: {type(error).__name__}: {error}"


def _opened(
    said: dict[str, Any], frame: bytes
) -> tuple[tuple[Any, ...], tuple[int, int, int], tuple[Any, ...]]:
    """The fields of RolloutGroup before the rollouts and after them, and the rollouts' columns."""
    if (version := validation.typed(said["v"], int, "v")) != VERSION:
        raise ValueError(f"version {version} is not {VERSION}")
    values = FIELDS.of(said)
    (
        _,
        generator,
        incarnation,
        sequence,
        _,
        _,
        step,
        _,
        min_sequence,
        sample_index,
        evaluation_step,
    ) = values[:11]
    if crc32(frame) != SEALED or values[-1] != frame[-4:]:
        raise ValueError("checksum does not match")
    _check_envelope(
        generator, incarnation, sequence, step, min_sequence, sample_index, evaluation_step
    )
    return values[:8], (min_sequence, sample_index, evaluation_step), values[11:-2]


def _check_envelope(
    generator: str,
    incarnation: bytes,
    sequence: int,
    step: int,
    min_sequence: int,
    sample_index: int,
    evaluation_step: int,
) -> None:
    validation.check_name(generator)
    if len(incarnation) != 8:
        raise ValueError("boot is not 8 bytes")
    if not 0 <= min_sequence <= sequence:
        raise ValueError("min_sequence above the sequence, or a negative one")
    if not 0 <= step <= MAX_STEP:
        raise ValueError("policy step out of bounds")
    if not (-1 <= sample_index <= MAX_SAMPLE_INDEX and -1 <= evaluation_step <= MAX_STEP):
        raise ValueError("sample_index or evaluation out of bounds")


def _siblings_of(
    step: int, vocab_size: int, turns_: bytes, spans_: bytes, prompt: bytes, tokens: bytes,
    logprobs: bytes, versions: bytes, rewards_: bytes, parts: str, values: bytes, finish: bytes,
) -> LazyRollouts:  # fmt: skip
    if max(len(turns_) >> 1, len(spans_) >> 3) > MAX_COUNT:
        raise ValueError(f"more than {MAX_COUNT} rollouts or spans")
    turns, spans = _shorts(len(turns_) >> 1)(turns_), _longs(len(spans_) >> 2)(spans_)
    _check_lengths(turns, spans, prompt, tokens, logprobs)
    _check_tokens(prompt + tokens, vocab_size)
    _check_logprobs(logprobs)
    rewards = _doubles(len(turns))(rewards_)
    _check_values(rewards)
    if len(finish) != len(rewards) or finish.strip(KNOWN_REASONS):
        raise ValueError("unknown finish reason, or one too many")
    named = _named(parts, values, len(rewards)) if parts or values else []
    runs = _runs_of(versions, step, len(logprobs))
    return LazyRollouts(
        _Sound(turns, spans, prompt, tokens, logprobs, step, runs, rewards, named, finish)
    )


class _Sound(NamedTuple):
    """The checked columns of a group."""

    turns: tuple[int, ...]
    spans: tuple[int, ...]
    prompt: bytes
    tokens: bytes
    logprobs: bytes
    step: int
    runs: tuple[int, ...]  # policy step above that, then how many tokens have it
    rewards: tuple[float, ...]
    named: list[dict[str, float]]  # empty when rewards have no parts
    finish: bytes


class LazyRollouts(Sequence[Rollout]):
    """The rollouts of a received group, cut from its checked columns when one is first looked at.
    Admission asks for `rewards` alone: the socket is emptied sooner, and a group that is dropped
    is never cut.
    """

    __slots__ = ("_cut", "_sound")

    def __init__(self, sound: _Sound) -> None:
        self._sound = sound
        self._cut: tuple[Rollout, ...] | None = None

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of all of them, uncut."""
        return self._sound.rewards

    @property
    def newest_step(self) -> int:
        """Of the weights that sampled their tokens."""
        return self._sound.step + max(self._sound.runs[::2])

    def __len__(self) -> int:
        return len(self._sound.turns)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Rollout, ...]: ...
    def __getitem__(self, index: int | slice) -> Rollout | tuple[Rollout, ...]:
        if self._cut is None:
            self._cut = tuple(_cut(self._sound))
        return self._cut[index]


def _cut(sound: _Sound) -> Iterator[Rollout]:
    tokens, masks, logprobs, steps, cuts = _joined(sound)
    named = sound.named or [{} for _ in sound.turns]
    for start, end, reward, reason, parts in zip(
        cuts[:-1], cuts[1:], sound.rewards, sound.finish, named, strict=True
    ):
        yield Rollout(
            tokens[start:end], masks[start:end], logprobs[start:end], steps[start:end],
            reward, FINISH_REASONS[reason], parts,
        )  # fmt: skip


def _joined(
    sound: _Sound,
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], NDArray[np.int32], list[int]]:
    """The arrays of all rollouts one after the other, and where one ends and the next begins."""
    runs = zip(sound.runs[::2], sound.runs[1::2], strict=True)
    versions = b"".join([pack("<i", sound.step + above) * count for above, count in runs])
    tokens: list[bytes] = []
    masks: list[bytes] = []
    logprobs: list[bytes] = []
    steps: list[bytes] = []
    cuts = [0]
    pairs = zip(sound.spans[::2], sound.spans[1::2], strict=True)
    at = taken = end = 0
    for count in sound.turns:
        start = end
        for context, generated in islice(pairs, count):
            upto = at + 4 * generated
            masks += (bytes(context), b"\1" * generated)
            logprobs += (bytes(4 * context), sound.logprobs[at:upto])
            steps += (NO_STEP * context, versions[at:upto])
            at, end = upto, end + context + generated
        upto = taken + 4 * (end - start) - len(sound.prompt)
        tokens += (sound.prompt, sound.tokens[taken:upto])
        taken = upto
        cuts.append(end)
    return (
        np.frombuffer(b"".join(tokens), INT).astype(np.int32, copy=False),
        np.frombuffer(b"".join(masks), np.bool_),
        np.frombuffer(b"".join(logprobs), FLOAT).astype(np.float32, copy=False),
        np.frombuffer(b"".join(steps), INT).astype(np.int32, copy=False),
        cuts,
    )


def _check_lengths(
    turns: Sequence[int], spans: Sequence[int], prompt: bytes, tokens: bytes, logprobs: bytes
) -> None:
    contexts, completions = spans[::2], spans[1::2]
    generated = sum(completions)
    num_tokens = sum(contexts) + generated
    if len(prompt) % 4:  # siblings would be cut elsewhere than where the tokens were looked at
        raise ValueError("prompt is not whole tokens")
    if not turns or not all(turns) or not all(contexts):
        raise ValueError("a rollout without prompt or completion")
    if 2 * sum(turns) != len(spans):
        raise ValueError("turns and spans of unequal length")
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"more than {MAX_TOKENS} tokens")
    if len(prompt) * len(turns) + len(tokens) != 4 * num_tokens:
        raise ValueError("tokens and spans of unequal length")
    if len(logprobs) != 4 * generated:
        raise ValueError("logprobs and spans of unequal length")
    if not all(completions) or 4 * min(contexts) < len(prompt):
        _check_each(turns, spans, len(prompt))  # most groups need no closer look


def _check_each(turns: Sequence[int], spans: Sequence[int], prompt_bytes: int) -> None:
    """Every rollout has a completion, and is as long as the prompt at least."""
    at = 0
    for count in turns:
        end = at + 2 * count
        if not any(spans[at + 1 : end : 2]):
            raise ValueError("a rollout without prompt or completion")
        if 4 * sum(spans[at:end]) < prompt_bytes:
            raise ValueError("a prompt that is longer than a rollout")
        at = end


def _runs_of(versions: bytes, step: int, size: int) -> tuple[int, ...]:
    """Policy steps above `step`, each before the number of generated tokens that has it."""
    if len(versions) > 8 * MAX_COUNT:
        raise ValueError(f"more than {MAX_COUNT} changes of the policy step")
    runs = _longs(len(versions) >> 2)(versions)
    if len(runs) % 2 or 4 * sum(runs[1::2]) != size:
        raise ValueError("policy steps and spans of unequal length")
    if step + max(runs[::2]) > MAX_STEP:
        raise ValueError("policy step out of bounds")
    return runs


def _check_tokens(content: bytes, vocab_size: int) -> None:
    tokens = np.frombuffer(content, UNSIGNED)  # so that a negative one is a large one
    if tokens.item(tokens.argmax()) >= vocab_size:  # argmax costs a third of max
        raise ValueError("token outside the vocabulary")


def _check_logprobs(content: bytes) -> None:
    logprobs = np.frombuffer(content, FLOAT)
    highest, lowest = logprobs.item(logprobs.argmax()), logprobs.item(logprobs.argmin())
    if not (highest < math.inf and lowest > -math.inf):  # a NaN is both
        raise ValueError("logprob is not finite")
    if highest > LOGPROB_SLACK:
        raise ValueError("logprob above zero")


def _named(parts: str, values: bytes, count: int) -> list[dict[str, float]]:
    """The named parts of each rollout's reward."""
    *names, rest = parts.split("\0")
    if count * len(names) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} parts of rewards")
    numbers = iter(_doubles(count * len(names))(values))
    if rest:
        raise ValueError("the last name of a part does not end")
    rows = ([next(numbers) for _ in names] for _ in range(count))
    named = [
        {name: value for name, value in zip(names, row, strict=True) if not math.isnan(value)}
        for row in rows
    ]
    for each in named:
        _check_values(tuple(each.values()))
    return named


def _check_values(values: Sequence[float]) -> None:
    if math.hypot(*values) < MAX_REWARD:
        return  # so are all of them
    for value in values:
        if not -MAX_REWARD <= value <= MAX_REWARD:  # NaN too
            raise ValueError(f"reward {value} is not finite, or out of bounds")
