"""The nouns. Everything else makes, moves or consumes these.

Knows field names and invariants; knows nothing of models, sockets or files.
Index t of every per-token array speaks about token t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

FinishReason: TypeAlias = Literal["stop", "length"]
Role: TypeAlias = Literal["system", "user", "assistant"]
Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]


MAX_REWARD = 1e6  # in size; sums and squares of rewards stay far from overflow


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with a checkable answer; `answer` never reaches the model."""

    id: str
    task: str
    messages: tuple[Message, ...]
    answer: str
    input_token_ids: tuple[int, ...] = ()
    """The prompt as it is, in the place of the messages, when there are any."""
    sample_index: int = -1  # position in the sampling order; -1 = not sampled

    @property
    def question(self) -> str:
        """What is asked, for a person."""
        if self.messages:
            return self.messages[-1].content
        return " ".join(map(str, self.input_token_ids))


@dataclass(frozen=True, slots=True)
class TemperatureSchedule:
    """A temperature that moves from `start` to `end` in the course of a run."""

    kind: Literal["linear", "cosine"]
    start: float  # of the weights of step 0
    end: float  # of the weights of step max_steps - 1, which the last optimizer step learns from
    max_steps: int

    def __call__(self, policy_step: int) -> float:
        """The temperature at which the weights of `policy_step` sample."""
        progress = min(max(policy_step / max(1, self.max_steps - 1), 0.0), 1.0)
        share = progress if self.kind == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. An engine draws each token as `at` the step of its weights says."""

    temperature: float = 1.0  # 0 takes the likeliest token
    schedule: TemperatureSchedule | None = None  # in the place of the temperature
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0  # 0 keeps all
    repetition_penalty: float = 1.0
    min_tokens: int = 0  # no end before so many
    max_completion_length: int = 48  # tokens
    stop: tuple[str, ...] = ()  # a completion ends when its text has one of these
    seed: int = 0

    def at(self, policy_step: int) -> Sampling:
        """The same with the temperature of the weights of `policy_step`, and no schedule."""
        if self.schedule is None:
            return self
        return replace(self, temperature=self.schedule(policy_step), schedule=None)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion wanted; the siblings of a group are equal requests."""

    index: int  # returned with the completion, which may come in any order
    prompt_ids: Int32Array  # [P]
    max_completion_length: int | None = None  # below the sampling's; None = that one


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one request; arrays hold the generated tokens only."""

    index: int  # the request's
    prompt_ids: Int32Array  # [P]
    token_ids: Int32Array  # [T], with the end token if there was one
    logprobs: Float32Array  # [T], as defined on Rollout.logprobs
    policy_steps: Int32Array  # [T], the weights that sampled each token
    finish_reason: FinishReason
    text: str  # without special tokens


@dataclass(frozen=True, slots=True)
class Rollout:
    """One scored completion with its prompt, as the trainer sees it."""

    token_ids: Int32Array  # [T], prompt and completion
    loss_mask: BoolArray  # [T], True on generated tokens
    logprobs: Float32Array  # [T], 0 on the prompt
    """Log-probability of the sampled token under the weights that sampled it, at the sampling
    temperature, over the full vocabulary, before top-k, top-p or min-p truncation."""
    policy_steps: (
        Int32Array  # [T], the step of the weights that sampled each token; -1 on the prompt
    )
    reward: float
    finish_reason: FinishReason
    rewards: dict[str, float] = field(default_factory=dict[str, float])  # parts by name

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.loss_mask) == len(self.logprobs)
        assert len(self.token_ids) == len(self.policy_steps)

    @property
    def num_generated(self) -> int:
        """Generated tokens, the end token included."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The siblings of one problem: one wire message, never split."""

    run_id: str
    generator_id: str
    incarnation: bytes  # 8 random bytes, new with each start of the generator
    sequence: int  # counts up from 0 within a boot
    problem_id: str
    task: str
    policy_step: int  # the oldest weights used in the group
    weights_id: str  # of these weights: the first 16 hexadecimal digits of their manifest's sha256
    rollouts: Sequence[Rollout]
    min_sequence: int = 0  # the sender will send nothing below this sequence any more
    sample_index: int = -1  # of the problem; -1 = unknown
    evaluation_step: int = -1  # the step whose evaluation asked for it; -1 = it is to be trained

    @property
    def sender(self) -> str:
        """One start of one generator; `sequence` counts within it."""
        return sender_of(self.generator_id, self.incarnation)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the siblings, in order; those of a received group are known by themselves."""
        known: tuple[float, ...] | None = getattr(self.rollouts, "rewards", None)
        return [each.reward for each in self.rollouts] if known is None else list(known)

    @property
    def newest_step(self) -> int:
        """Of the weights that sampled it; a received group knows it by itself."""
        known: int | None = getattr(self.rollouts, "newest_step", None)
        return max(int(e.policy_steps.max()) for e in self.rollouts) if known is None else known

    @property
    def mean_reward(self) -> float:
        """Of the siblings; exact for rewards of 0 and 1."""
        return math.fsum(self.rewards) / max(1, len(self.rollouts))

    @property
    def has_signal(self) -> bool:
        """False when all rewards are equal, so that every advantage would be zero."""
        return len(set(self.rewards)) > 1


class PrefixSpan(NamedTuple):
    """Tokens one after another; the first comes after a token of an earlier branch."""

    after: int  # place of that token in the segment; -1 = the branch begins a sequence
    length: int  # tokens


class PackedSequence(NamedTuple):
    """Sequences in a row, what they have in common once: [prompt | c1 | .. | cK] and finer.

    A token sees its own sequence only: itself, and what it comes after.
    """

    branches: tuple[PrefixSpan, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the row that it takes."""
        return sum(each.length for each in self.branches)


@dataclass(frozen=True, slots=True)
class Answer:
    """A held-out problem, what the policy said to it, and what that was worth."""

    problem: str
    answer: str
    reward: float


def sender_of(generator_id: str, incarnation: bytes) -> str:
    """The name of one start of a generator: 'NAME/0123456789abcdef'."""
    return f"{generator_id}/{incarnation.hex()}"


def rollout_of(completion: Completion, reward: float | dict[str, float]) -> Rollout:
    """Join prompt and completion into one sequence; named parts of a reward add up to it."""
    named = reward if isinstance(reward, dict) else {}
    parts = {name: float(value) for name, value in named.items()}  # a task may return a bool
    num_prompt = len(completion.prompt_ids)
    no_logprobs = np.zeros(num_prompt, dtype=np.float32)
    no_steps = np.full(num_prompt, -1, dtype=np.int32)
    return Rollout(
        token_ids=np.concatenate([completion.prompt_ids, completion.token_ids]),
        loss_mask=np.arange(num_prompt + len(completion.token_ids)) >= num_prompt,
        logprobs=np.concatenate([no_logprobs, completion.logprobs]),
        policy_steps=np.concatenate([no_steps, completion.policy_steps]),
        reward=float(sum(parts.values()) if isinstance(reward, dict) else reward),
        finish_reason=completion.finish_reason,
        rewards=parts,
    )
