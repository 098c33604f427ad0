"""Columns of a group message, and rules for limits, lengths and values.

The sender of a group may be hostile or have other settings. Therefore the receiver checks all sizes
before it allocates memory. GroupLimits has the limits that follow from the trainer's settings, so
that no valid group takes more memory and time than one made with these settings. Each check raises
ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from peralta_zmq.rollout import MAX_REWARD
from peralta_zmq.wire import message_fields

# Tokens of all rollouts together, and of one rollout. The size of a message does not limit them: a
# prompt that all rollouts share is sent once.
MAX_TOKENS = 1 << 20
MAX_COUNT = 1 << 12  # of rollouts, of turns of all rollouts, and of segments
MAX_VALUES = 1 << 16  # named rewards of all rollouts
MAX_OTHER_BYTES = 1 << 14  # of a message outside its columns: names, texts and unknown fields
MAX_STEP = 2**31 - 1
MAX_SAMPLE_INDEX = 2**53
LOGPROB_SLACK = float(np.float32(1e-3))  # rounding may lift log(1) a little above 0
MIN_LOGPROB = -1e4  # a sampled token never has less
UNSIGNED, FLOAT = np.dtype("<u4"), np.dtype("<f4")  # types of token ids and of logprobs


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """A receiver's limits of a group; the defaults are those of the message format."""

    vocab_size: int  # every token id must be smaller
    max_rollouts: int = MAX_COUNT
    max_tokens: int = MAX_TOKENS  # of a rollout: prompt and completion, all turns
    max_generated: int = MAX_TOKENS  # tokens of a turn
    max_turns: int = MAX_COUNT  # of a rollout
    num_rollouts: Mapping[str, int] | None = None
    """Of a group for training, by its task; None: up to max_rollouts."""

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


def check_envelope(envelope: Mapping[str, Any]) -> None:
    """Names, steps and sequences must be valid; `envelope` has fields of RolloutGroup."""
    message_fields.check_identity(envelope["generator_id"], envelope["incarnation"])
    sequence = envelope["sequence"]
    min_sequence = envelope["min_sequence"]
    if not 0 <= min_sequence <= sequence:
        raise ValueError(f"min_sequence {min_sequence} is negative or above sequence {sequence}")
    if not 0 <= envelope["policy_step"] <= MAX_STEP:
        raise ValueError("policy step out of bounds")
    # None: they are not set.
    sample_index = envelope["sample_index"] or 0
    evaluation_step = envelope["evaluation_step"] or 0
    if not (0 <= sample_index <= MAX_SAMPLE_INDEX and 0 <= evaluation_step <= MAX_STEP):
        raise ValueError("sample_index or evaluation_step out of bounds")


def check_num_rollouts(task: str, columns: Columns, limits: GroupLimits) -> None:
    """A group for training must have exactly the configured number of rollouts."""
    if limits.num_rollouts is None:
        return
    if (num_rollouts := limits.num_rollouts.get(task)) is None:
        raise ValueError(f"unknown environment '{task:.64}' (env.name)")
    if num_rollouts != len(columns.turns) >> 1:  # 2 bytes for each rollout
        raise ValueError(
            f"not {num_rollouts} rollouts (sampling.num_generations or env.num_generations)"
        )


def check_counts(columns: Columns, limits: GroupLimits) -> None:
    """The numbers of rollouts, turns, segments and rewards must not exceed the limits."""
    count = len(columns.turns) >> 1  # 2 bytes for each rollout
    if count > limits.max_rollouts:
        raise ValueError(
            f"more than {limits.max_rollouts} rollouts (sampling.num_generations or "
            "env.num_generations)"
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
    """Each rollout must have a completion, fit the limits and contain the prompt."""
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
    """Token ids must be in [0, vocab_size)."""
    tokens = np.frombuffer(content, UNSIGNED)  # unsigned: negative ids become large
    if tokens.item(tokens.argmax()) >= limits.vocab_size:  # argmax takes a third of the time of max
        raise ValueError("token outside the vocabulary")


def check_logprobs(content: bytes) -> None:
    """Logprobs must be in [MIN_LOGPROB, LOGPROB_SLACK]."""
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
    """Rewards must be finite, and at most MAX_REWARD in magnitude."""
    # No value is larger than the norm of all, so one call usually suffices. A NaN fails both tests.
    if not math.hypot(*values) < MAX_REWARD:
        for value in values:
            if not -MAX_REWARD <= value <= MAX_REWARD:
                raise ValueError(f"reward {value} is not finite, or out of bounds")
