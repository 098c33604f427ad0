"""The two messages as bytes: a group of rollouts, and what the trainer announces.

Knows msgpack and the rules of a sound message; knows nothing of sockets.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import msgpack
import numpy as np

from peralta_zmq.errors import WireError
from peralta_zmq.rollout import MAX_REWARD, FinishReason, Rollout, RolloutGroup

VERSION = 1
MAX_MESSAGE = 16 << 20  # bytes; libzmq drops a larger one together with those behind it
LOGPROB_SLACK = 1e-3  # rounding may lift log(1) a little above 0
LIMITS = {
    "max_str_len": 1 << 10,
    "max_bin_len": MAX_MESSAGE,
    "max_array_len": 1 << 12,
    "max_ext_len": 0,
}
MAX_LISTS, MAX_MAPS = 4, LIMITS["max_array_len"] + 1  # of one group; nested ones would multiply
MAX_SENDERS = 1 << 14  # in one announcement
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the trainer says of itself, every second and on change."""

    run_id: str
    boot: bytes = b""  # 8 random bytes, new with each start of the trainer
    step: int = 0  # optimizer steps taken
    version: int = -1  # newest published version, -1 before the first
    wid: str = ""  # of the newest version
    min_step: int = 0  # groups of older weights are not accepted any more
    recv: dict[str, int] = field(default_factory=dict[str, int])
    """By sender heard from lately: all its groups up to this sequence have come."""
    durable: dict[str, int] = field(default_factory=dict[str, int])
    """By sender: all its groups up to this sequence are on the trainer's disk, or not needed."""
    seen: dict[str, int] = field(default_factory=dict[str, int])
    """By sender: the highest sequence that came. Above `recv`, something between is lost."""
    done: bool = False  # the run is complete


SAID = {
    "run_id": str, "boot": bytes, "step": int, "version": int,
    "wid": str, "min_step": int, "recv": dict, "durable": dict, "seen": dict, "done": bool,
}  # fmt: skip

BY_SENDER = ("recv", "durable", "seen")


def encode_group(group: RolloutGroup) -> bytes:
    """One group as one msgpack map with flat little-endian buffers.

    Raises WireError when it exceeds the message limit.
    """
    rollouts = group.rollouts
    buffers = {
        "tokens": b"".join(each.token_ids.astype("<i4").tobytes() for each in rollouts),
        "mask": b"".join(each.loss_mask.tobytes() for each in rollouts),
        "logprobs": b"".join(each.logprobs.astype("<f4").tobytes() for each in rollouts),
        "steps": b"".join(each.policy_steps.astype("<i4").tobytes() for each in rollouts),
    }
    fields = {
        "v": VERSION,
        "run": group.run_id,
        "gen": group.generator_id,
        "boot": group.boot,
        "seq": group.sequence,
        "floor": group.floor,
        "step": group.policy_step,
        "wid": group.wid,
        "problem": group.problem_id,
        "task": group.task,
        "n": [len(each.token_ids) for each in rollouts],
        "rewards": [each.reward for each in rollouts],
        "parts": [each.rewards for each in rollouts],
        "finish": [FINISH_REASONS.index(each.finish_reason) for each in rollouts],
        "crc32": _checksum(buffers),
        **buffers,
    }
    frame = cast(bytes, msgpack.packb(fields))
    if len(frame) > MAX_MESSAGE:
        raise WireError(
            f"a group of {len(frame)} bytes exceeds the limit of {MAX_MESSAGE}; "
            "lower sampling.max_completion_length or sampling.num_generations"
        )
    return frame


def decode_group(frame: bytes, *, vocab_size: int) -> RolloutGroup:
    """The group in a message. Raises WireError with the rule that it breaks."""
    fields = _unpack(frame, max_map_len=64, max_lists=MAX_LISTS, max_maps=MAX_MAPS)
    try:
        return _group_of(fields, vocab_size)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise WireError(f"malformed group: {type(error).__name__}: {error}") from None


def encode_announcement(announcement: Announcement) -> bytes:
    """One announcement as one msgpack map."""
    return cast(bytes, msgpack.packb(asdict(announcement)))


def decode_announcement(frame: bytes) -> Announcement:
    """The announcement in a message; fields of a later version are passed over.

    Raises WireError when a field is missing or of another type.
    """
    fields = _unpack(frame, max_map_len=MAX_SENDERS, max_lists=0, max_maps=1 + len(BY_SENDER))
    try:
        known = {name: _typed(fields[name], kind) for name, kind in SAID.items() if name in fields}
        for name in BY_SENDER:
            for sender, sequence in known.get(name, {}).items():
                _typed(sender, str)
                _typed(sequence, int)
        return Announcement(**known)
    except (TypeError, ValueError) as error:
        raise WireError(f"malformed announcement: {error}") from None


def _unpack(frame: bytes, *, max_map_len: int, max_lists: int, max_maps: int) -> Any:
    lists, maps = _at_most(max_lists, "lists"), _at_most(max_maps, "maps")
    try:
        return cast(Any, msgpack).unpackb(
            frame, list_hook=lists, object_hook=maps, max_map_len=max_map_len, **LIMITS
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a message: {error}") from None


def _at_most(count: int, kind: str) -> Callable[[Any], Any]:
    left = iter(range(count))

    def counted(container: Any) -> Any:
        _require(next(left, None) is not None, f"more than {count} {kind}")
        return container

    return counted


def _group_of(fields: dict[str, Any], vocab_size: int) -> RolloutGroup:
    version = _typed(fields["v"], int)
    _require(version == VERSION, f"version {version} is not {VERSION}")
    _require(fields["crc32"] == _checksum(fields), "checksum does not match")
    group = RolloutGroup(
        run_id=_typed(fields["run"], str),
        generator_id=_typed(fields["gen"], str),
        boot=_typed(fields["boot"], bytes),
        sequence=_typed(fields["seq"], int),
        floor=_typed(fields.get("floor", 0), int),
        policy_step=_typed(fields["step"], int),
        wid=_typed(fields["wid"], str),
        problem_id=_typed(fields["problem"], str),
        task=_typed(fields["task"], str),
        rollouts=_rollouts_of(fields, vocab_size),
    )
    _require(len(group.boot) == 8, "boot is not 8 bytes")
    _require(group.sequence >= 0 and group.policy_step >= 0, "negative sequence or step")
    _require(0 <= group.floor <= group.sequence, "floor above the sequence")
    return group


def _rollouts_of(fields: dict[str, Any], vocab_size: int) -> tuple[Rollout, ...]:
    lengths = [_typed(length, int) for length in fields["n"]]
    _require(bool(lengths) and min(lengths) > 0, "a rollout without tokens")
    total = sum(lengths)
    tokens = np.frombuffer(fields["tokens"], "<i4")
    mask = np.frombuffer(fields["mask"], np.uint8)
    logprobs = np.frombuffer(fields["logprobs"], "<f4")
    steps = np.frombuffer(fields["steps"], "<i4")
    arrays = (tokens, mask, logprobs, steps)
    _require({len(each) for each in arrays} == {total}, "arrays of unequal length")
    _require(bool((steps[mask == 1] >= fields["step"]).all()), "a token of older weights")
    _require(bool(((tokens >= 0) & (tokens < vocab_size)).all()), "token outside the vocabulary")
    _require(bool((mask <= 1).all()), "mask is not boolean")
    _require(bool(np.isfinite(logprobs).all()), "logprob is not finite")
    _require(bool((logprobs <= LOGPROB_SLACK).all()), "logprob above zero")
    per_rollout = (fields["rewards"], fields["parts"], fields["finish"])
    _require(all(len(each) == len(lengths) for each in per_rollout), "lists of unequal length")
    cuts = np.cumsum(lengths)[:-1]
    columns = zip(
        np.split(tokens.astype(np.int32), cuts), np.split(mask.astype(bool), cuts),
        np.split(logprobs.astype(np.float32), cuts), np.split(steps.astype(np.int32), cuts),
        *per_rollout, strict=True,
    )  # fmt: skip
    return tuple(_rollout_of(*column) for column in columns)


def _rollout_of(
    token_ids: Any,
    loss_mask: Any,
    logprobs: Any,
    policy_steps: Any,
    reward: Any,
    parts: Any,
    finish: Any,
) -> Rollout:
    values = {_typed(name, str): _finite(value) for name, value in _typed(parts, dict).items()}
    _require(bool(loss_mask.any()) and not loss_mask[0], "a rollout without prompt or completion")
    _require(_typed(finish, int) in (0, 1), "unknown finish reason")
    return Rollout(
        token_ids, loss_mask, logprobs, policy_steps,
        _finite(reward), FINISH_REASONS[finish], values,
    )  # fmt: skip


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _typed(value: Any, kind: type) -> Any:
    _require(type(value) is kind, f"{type(value).__name__} is not {kind.__name__}")
    return value


def _finite(value: Any) -> float:
    kind = type(value).__name__
    _require(kind in ("int", "float") and math.isfinite(value), f"{kind} is not finite")
    _require(abs(value) <= MAX_REWARD, "reward out of bounds")
    return float(value)


def _checksum(buffers: dict[str, Any]) -> int:
    checksum = 0
    for name in ("tokens", "mask", "logprobs", "steps"):
        checksum = zlib.crc32(buffers[name], checksum)
    return checksum
