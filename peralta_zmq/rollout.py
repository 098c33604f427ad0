"""Data types that all packages share: problems, completions, rollouts and groups of rollouts.

A generator samples several completions for one problem and scores them; each completion with its
prompt and reward is a rollout, and all rollouts of one problem are a group. A policy step is the
number of optimizer steps that the sampling weights had been trained for. Index t of every array
with the shape [T] belongs to token t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

FinishReason: TypeAlias = Literal["stop", "length"]
Role: TypeAlias = Literal["system", "user", "assistant"]
Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]

MAX_REWARD = 1e6  # absolute value; sums and squares of rewards stay far from overflow


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with a checkable answer; `answer` is only for the reward function."""

    id: str
    task: str
    messages: tuple[Message, ...]
    answer: str
    input_token_ids: tuple[int, ...] = ()  # the prompt as token ids; replaces `messages` if given
    sample_index: int = -1  # position in the run's shuffled order of problems; -1 = not set

    @property
    def question(self) -> str:
        """The last message, or the token ids if there is none, as text for a person."""
        if self.messages:
            return self.messages[-1].content
        return " ".join(map(str, self.input_token_ids))


@dataclass(frozen=True, slots=True)
class TemperatureSchedule:
    """A sampling temperature that moves from `start` to `end` during a run."""

    kind: Literal["linear", "cosine"]
    start: float  # at policy step 0
    end: float  # at policy step max_steps - 1, which the last optimizer step learns from
    max_steps: int

    def __call__(self, policy_step: int) -> float:
        """The temperature at which the weights of `policy_step` sample."""
        progress = min(max(policy_step / max(1, self.max_steps - 1), 0.0), 1.0)
        share = progress if self.kind == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; with a schedule, the temperature depends on the step of the weights."""

    temperature: float = 1.0  # 0 = greedy
    schedule: TemperatureSchedule | None = None  # replaces `temperature` if given
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0
    min_tokens: int = 0  # no end token before this number of generated tokens
    max_completion_length: int = 48  # tokens
    stop: tuple[str, ...] = ()  # a completion ends when its text contains one of these
    seed: int = 0

    def at(self, policy_step: int) -> Sampling:
        """These parameters with the schedule replaced by its temperature at `policy_step`."""
        if self.schedule is None:
            return self
        return replace(self, temperature=self.schedule(policy_step), schedule=None)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one completion of a prompt."""

    index: int  # copied to the completion, because an engine returns completions in any order
    prompt_ids: Int32Array  # [P]
    max_completion_length: int | None = None  # tokens; None = as in Sampling


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one request; arrays hold the generated tokens only."""

    index: int  # of the request
    prompt_ids: Int32Array  # [P]
    token_ids: Int32Array  # [T], including the end token if there is one
    logprobs: Float32Array  # [T], as defined on Rollout.logprobs
    policy_steps: Int32Array  # [T], step of the weights that sampled each token
    finish_reason: FinishReason
    text: str  # without special tokens


@dataclass(frozen=True, slots=True)
class Rollout:
    """One prompt and completion with its reward."""

    token_ids: Int32Array  # [T], prompt and completion
    loss_mask: BoolArray  # [T], True on generated tokens
    logprobs: Float32Array  # [T], 0 on the prompt
    """Log-probability of the sampled token under the weights that sampled it, at the sampling
    temperature, over the full vocabulary, before top-k, top-p or min-p truncation."""
    policy_steps: Int32Array  # [T], step of the weights that sampled each token; -1 on the prompt
    reward: float
    finish_reason: FinishReason
    rewards: dict[str, float] = field(default_factory=dict[str, float])  # terms of reward, by name

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.loss_mask) == len(self.logprobs)
        assert len(self.token_ids) == len(self.policy_steps)

    @property
    def num_generated(self) -> int:
        """Generated tokens, including the end token."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one problem: one message from a generator to the trainer."""

    run_id: str
    generator_id: str
    incarnation: bytes  # 8 random bytes, new with each start of the generator
    sequence: int  # number of the message, from 0 up within an incarnation
    problem_id: str
    task: str
    policy_step: int  # of the oldest weights used in the group
    weights_id: str  # of these weights: first 16 hexadecimal digits of their manifest's sha256
    rollouts: Sequence[Rollout]
    min_sequence: int = 0  # all messages with a lower sequence were acknowledged or given up
    sample_index: int = -1  # position in the run's shuffled order of problems; -1 = unknown
    evaluation_step: int = -1  # step that the group evaluates; -1 = the group is for training
    summary: InitVar[tuple[tuple[float, ...], int] | None] = None  # (rewards, newest_step)
    rewards: tuple[float, ...] = field(init=False, repr=False)  # one for each rollout
    newest_step: int = field(init=False, repr=False)  # policy step of the newest weights used

    def __post_init__(self, summary: tuple[tuple[float, ...], int] | None) -> None:
        """Set `rewards` and `newest_step` from the summary, or from the rollouts if it is None.

        With the summary, `rollouts` is not read, so that it may decode its items on first access.
        """
        if summary is None:
            newest = [int(rollout.policy_steps.max()) for rollout in self.rollouts]
            rewards = tuple(rollout.reward for rollout in self.rollouts)
            summary = rewards, max(newest, default=self.policy_step)
        object.__setattr__(self, "rewards", summary[0])
        object.__setattr__(self, "newest_step", summary[1])

    @property
    def sender(self) -> str:
        """Generator and incarnation in one string; `sequence` is unique for each sender."""
        return sender_of(self.generator_id, self.incarnation)

    @property
    def mean_reward(self) -> float:
        """Mean reward of the rollouts; exactly 0 or 1 if all rewards are."""
        return math.fsum(self.rewards) / max(1, len(self.rewards))

    @property
    def has_signal(self) -> bool:
        """False if all rewards are equal, which makes all advantages zero."""
        return len(set(self.rewards)) > 1


class TreeSpan(NamedTuple):
    """Consecutive tokens of a PrefixTree that continue after an earlier token."""

    parent: int  # position in the tree of the token that the span continues; -1 = none, it starts
    length: int  # tokens


class PrefixTree(NamedTuple):
    """Token sequences that share prefixes, each prefix once: [prompt | completion 1 | ... | K].

    A token attends only to itself and to the tokens on its path back to the start. `learning`
    builds trees and `models` computes their logprobs; neither imports the other.
    """

    spans: tuple[TreeSpan, ...]

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return sum(span.length for span in self.spans)


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion for a held-out problem with its reward, as shown in the run's summary."""

    problem: str
    answer: str
    reward: float


def sender_of(generator_id: str, incarnation: bytes) -> str:
    """The name of one incarnation of a generator: 'NAME/0123456789abcdef'."""
    return f"{generator_id}/{incarnation.hex()}"


def rollout_of(completion: Completion, reward: float | dict[str, float]) -> Rollout:
    """Join prompt and completion to one rollout; a dict of named reward terms is summed."""
    terms = reward if isinstance(reward, dict) else {}
    rewards = {name: float(value) for name, value in terms.items()}  # a task may return bools
    num_prompt = len(completion.prompt_ids)
    no_logprobs = np.zeros(num_prompt, dtype=np.float32)
    no_steps = np.full(num_prompt, -1, dtype=np.int32)
    return Rollout(
        token_ids=np.concatenate([completion.prompt_ids, completion.token_ids]),
        loss_mask=np.arange(num_prompt + len(completion.token_ids)) >= num_prompt,
        logprobs=np.concatenate([no_logprobs, completion.logprobs]),
        policy_steps=np.concatenate([no_steps, completion.policy_steps]),
        reward=float(sum(rewards.values()) if isinstance(reward, dict) else reward),
        finish_reason=completion.finish_reason,
        rewards=rewards,
    )
