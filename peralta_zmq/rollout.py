"""Data types that all packages share: problems, completions, rollouts, groups.

A rollout is a completion with its prompt and reward; a group is all rollouts of one problem, sent
to the trainer as one message. An incarnation is the 8 random bytes that a generator draws at each
start and for each new run; a sender, NAME/INCARNATION, is one incarnation of one generator, and
numbers its groups 0, 1, ... (`group_number`). A turn is a span of context tokens followed by a span
of generated tokens. The trainer consumes one batch of groups in each training step, and publishes
new weights as a weight version: a keyframe (all weights) or a delta (the changes since the previous
version). The policy step of weights is the number of training steps that
produced them, 0 for the base model; that of a token is that of the weights that sampled it. Index t
of every array with the shape [T] belongs to token t.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate, zip_longest
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from peralta_zmq.errors import TaskError

FinishReason: TypeAlias = Literal["stop", "length"]
CUT_OFF = " [cut off]"  # shown after a completion that a limit has ended
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]

ROUNDING = 1e-12  # largest relative rounding error of a reward that is the sum of some terms
MAX_REWARD = 1e6  # largest absolute value, so that sums and squares of rewards do not overflow


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    error: str = ""  # why the text of the call cannot be parsed; empty if it can


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str
    name: str = ""  # the tool, if this is the result of a call
    # Calls in an assistant's message, and its reasoning; they are not part of its content.
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = field(default="", compare=False)  # agents may send messages back without it


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with a checkable answer."""

    id: str
    task: str  # label of the environment that the problem comes from
    messages: tuple[Message, ...]  # the prompt as a chat
    answer: str  # only for the reward function, never part of the prompt
    input_token_ids: tuple[int, ...] = ()  # the prompt as token ids; replaces `messages` if given
    sample_index: int | None = None  # see RolloutGroup.sample_index; None = not assigned yet
    # For messages: line in the data file, or number in the environment; 0 = not set.
    row: int = field(default=0, compare=False, repr=False)
    # The prompt is a text of a data set: functions with TRL's signature get texts, not messages.
    is_text: bool = False
    # JSON values for the reward functions, never part of the prompt.
    info: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    # Variables of the chat template, such as enable_thinking.
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    @property
    def question(self) -> str:
        """For display: the last message, or the token ids if there are no messages."""
        if self.messages:
            return self.messages[-1].content
        return " ".join(map(str, self.input_token_ids))


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # 1 = off
    min_tokens: int = 0  # no end token before this number of generated tokens
    max_completion_length: int = 48  # tokens
    fills_context: bool = False  # `max_completion_length` is what the prompt leaves of the context
    stop: tuple[str, ...] = ()  # a completion ends when its text contains one of these
    skip_special_tokens: bool = False  # remove them from the text, not from the tokens
    seed: int = 0


class GroupSampling(NamedTuple):
    num_generations: int
    sampling: Sampling


class SampledToken(NamedTuple):
    token_id: int
    logprob: float  # as defined on Rollout.logprobs
    step: int  # policy step of the weights


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one completion of a prompt."""

    index: int  # identifies the completion, and determines its random numbers with the seed
    prompt_ids: Int32Array  # [P]
    sampling: Sampling = Sampling()
    # The prompt may be the tokens of an earlier request and its completion, and inserted tokens. An
    # engine then needs to compute the keys and values of the inserted tokens only.
    continues: int | None = None  # index of the earlier request
    may_continue: bool = False  # whether another request may continue this one
    is_standalone: bool = False
    """Not one of a group: no other prompt begins like this one, and the random numbers depend on
    the seed of the sampling parameters only, and not on the index."""
    resumes: Completion | None = None
    """The partial completion to resume: its tokens are kept, with their logprobs and policy steps,
    and count towards all limits."""
    sampled: list[SampledToken] | None = None
    """The engine appends each token when it is sampled."""

    @property
    def prefix_ids(self) -> Int32Array:
        """The tokens before the first one to be sampled: prompt, and tokens of `resumes`."""
        if self.resumes is None:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, self.resumes.token_ids])


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one request, or of all turns of an episode.

    In an episode, the arrays of shape [T] also hold the tokens inserted between the turns.
    """

    index: int  # Request.index, of the first turn
    prompt_ids: Int32Array  # [P], of the first turn
    token_ids: Int32Array  # [T], including the end token if there is one
    logprobs: Float32Array  # [T], as defined on Rollout.logprobs
    policy_steps: Int32Array  # [T], policy step of the weights that sampled each token; -1 = none
    finish_reason: FinishReason
    text: str  # text of the last turn, without its end token
    has_end_token: bool = False  # whether the last token is an end token
    messages: tuple[Message, ...] = ()  # after the prompt, if the problem has turns
    error: TaskError | None = None  # the reason why an episode could not be continued
    score: Score | None = None  # given by the agent that asked for the completion

    @property
    def transcript(self) -> str:
        """For display: the texts of all messages after the prompt."""
        return "\n".join(message.content for message in self.messages) or self.text


class Score(NamedTuple):
    """The reward of a completion, and what it was computed from."""

    reward: float
    rewards: Mapping[str, float] = {}
    """By name: the unweighted rewards of several functions, or the terms of a single function that
    returns several; empty if it returns one number."""
    turn_rewards: tuple[float, ...] = ()
    """Of each turn, besides `reward`; empty if the task gives none."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt with one completion and its reward; with several turns, an episode.

    The tokens inserted between two turns have the values of prompt tokens.
    """

    token_ids: Int32Array  # [T], prompt and completion
    loss_mask: BoolArray  # [T], True on generated tokens
    logprobs: Float32Array  # [T], 0 on the prompt
    """Log-probability of the sampled token under the weights that sampled it, at the sampling
    temperature, over the full vocabulary, before top-k, top-p or min-p truncation. After a change
    of weights in the completion, keys and values of earlier tokens may be of older weights."""
    policy_steps: Int32Array  # [T], of the weights that sampled each token; -1 on the prompt
    reward: float
    finish_reason: FinishReason
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Score.rewards."""
    turn_rewards: tuple[float, ...] = ()
    """Score.turn_rewards."""

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.loss_mask) == len(self.logprobs)
        assert len(self.token_ids) == len(self.policy_steps)

    @property
    def is_cut_off(self) -> bool:
        return self.finish_reason == "length"

    @property
    def num_generated(self) -> int:
        """Number of generated tokens, including the end token."""
        return int(self.loss_mask.sum())

    @property
    def num_turns(self) -> int:
        """Number of completions: spans of generated tokens."""
        return int((self.loss_mask[1:] > self.loss_mask[:-1]).sum())

    @property
    def turn_indices(self) -> Int64Array:
        """[T], number of the turn of each generated token: 0, 1, ...; other tokens: any number."""
        return np.cumsum(np.diff(self.loss_mask.astype(np.int8), prepend=0) > 0) - 1


def equal_within_rounding(rewards: Sequence[float]) -> bool:
    """True if the rewards differ by at most ROUNDING times the largest absolute value."""
    if not rewards:
        return True
    return max(rewards) - min(rewards) <= ROUNDING * max(map(abs, rewards))


def returns_of(reward: float, turn_rewards: Sequence[float]) -> list[float]:
    """The return of each turn: the reward plus the rewards of this and later turns."""
    if not turn_rewards:
        return [reward]
    return [reward + total for total in accumulate(reversed(turn_rewards))][::-1]


class GroupSummary(NamedTuple):
    rewards: tuple[float, ...]
    turn_rewards: tuple[tuple[float, ...], ...]
    newest_step: int


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one problem, which a generator sends as one message.

    `policy_step` alone does not identify the oldest weights: after a roll-back the run repeats the
    later steps, with a different result. `weights_id` does.
    """

    run_id: str
    generator_id: str
    incarnation: bytes  # 8 random bytes; a generator draws new ones at its start, and for a new run
    group_number: int  # number of the group within an incarnation: 0, 1, 2, ...
    problem_id: str
    task: str  # Problem.task
    policy_step: int  # step of the oldest weights that sampled a token of the group
    weights_id: str  # the oldest weights: first 16 hex digits of their manifest's sha256
    rollouts: Sequence[Rollout]
    min_group_number: int = 0  # the generator will never send or resend a group with a lower number
    sample_index: int | None = None
    """Index of the sample in the run's shuffled sequence of samples, which all generators share
    and which continues over epochs: 0, 1, 2, ...; None = unknown."""
    evaluation_step: int | None = None
    """Policy step of the weights to evaluate; None = a group for training."""
    summary: InitVar[GroupSummary | None] = None
    """Values of the three fields below; None = compute them."""
    rewards: tuple[float, ...] = field(init=False, repr=False)  # Rollout.reward of each rollout
    turn_rewards: tuple[tuple[float, ...], ...] = field(init=False, repr=False)  # and turn_rewards
    newest_step: int = field(init=False, repr=False)  # policy step of the newest weights used

    def __post_init__(self, summary: GroupSummary | None) -> None:
        """The first access to the rollouts of a received group decodes them."""
        if summary is None:
            newest = [int(rollout.policy_steps.max()) for rollout in self.rollouts]
            rewards = tuple(rollout.reward for rollout in self.rollouts)
            turn_rewards = tuple(rollout.turn_rewards for rollout in self.rollouts)
            newest_step = max(newest, default=self.policy_step)
            summary = GroupSummary(rewards, turn_rewards, newest_step)
        object.__setattr__(self, "rewards", summary.rewards)
        object.__setattr__(self, "turn_rewards", summary.turn_rewards)
        object.__setattr__(self, "newest_step", summary.newest_step)

    @property
    def sender(self) -> str:
        """Generator and incarnation as text; a sender uses each group number once."""
        return sender_of(self.generator_id, self.incarnation)

    @property
    def name(self) -> str:
        """Sender and group number as text, which identifies the group in a run and its logs."""
        return f"{self.sender}/{self.group_number}"

    @property
    def mean_reward(self) -> float:
        """Mean reward, exactly 0 or 1 if every reward is; 0 without rollouts."""
        return math.fsum(self.rewards) / max(1, len(self.rewards))

    @property
    def has_signal(self) -> bool:
        """True unless all rewards, or all returns of each turn, are equal within rounding."""
        by_turn = zip_longest(*map(returns_of, self.rewards, self.turn_rewards))
        return not all(
            equal_within_rounding([each for each in turn if each is not None]) for turn in by_turn
        )


class TreeSpan(NamedTuple):
    """Consecutive tokens of a PrefixTree that continue after an earlier token."""

    parent: int  # position in the tree of the token before the span; -1 = no token before
    length: int  # tokens


class PrefixTree(NamedTuple):
    """Layout of token sequences with shared prefixes, each prefix stored once.

    For example: [prompt | completion 1 | ... | completion K]. A token attends only to itself and to
    the earlier tokens of its own sequence.
    """

    spans: tuple[TreeSpan, ...]
    after: int = 0
    """In a row of trees: number of tokens of the first tree, a single span, with which all
    sequences of this one begin."""

    @property
    def num_tokens(self) -> int:
        return sum(span.length for span in self.spans)


@dataclass(frozen=True, slots=True)
class Answer:
    """A scored completion of an evaluation, as shown in the run's summary."""

    problem: str  # Problem.question
    answer: str  # text of the completion, not Problem.answer
    reward: float
    cut_off: bool = False  # Rollout.is_cut_off


def sender_of(generator_id: str, incarnation: bytes) -> str:
    """The name of a sender, which is one incarnation of a generator: 'NAME/0123456789abcdef'."""
    return f"{generator_id}/{incarnation.hex()}"


def rollout_of(
    completion: Completion,
    reward: float,
    rewards: Mapping[str, float] | None = None,
    turn_rewards: tuple[float, ...] = (),
) -> Rollout:
    """Join prompt and completion to a rollout with the values of a Score."""
    num_prompt = len(completion.prompt_ids)
    no_logprobs = np.zeros(num_prompt, dtype=np.float32)
    no_steps = np.full(num_prompt, -1, dtype=np.int32)
    policy_steps = np.concatenate([no_steps, completion.policy_steps])
    return Rollout(
        token_ids=np.concatenate([completion.prompt_ids, completion.token_ids]),
        loss_mask=policy_steps >= 0,
        logprobs=np.concatenate([no_logprobs, completion.logprobs]),
        policy_steps=policy_steps,
        reward=reward,
        finish_reason=completion.finish_reason,
        rewards=dict(rewards or {}),
        turn_rewards=turn_rewards,
    )


def scored_group(
    completions: Sequence[Completion], rewards: Sequence[float], *, policy_step: int = 0
) -> RolloutGroup:
    """A group of the completions of one problem, for a Learner without trainer and generators."""
    pairs = zip(completions, rewards, strict=True)
    return RolloutGroup(
        run_id="",
        generator_id="python",
        incarnation=os.urandom(8),  # tells the group from others
        group_number=0,
        problem_id="",
        task="",
        policy_step=policy_step,
        weights_id="",
        rollouts=[rollout_of(completion, reward) for completion, reward in pairs],
    )
