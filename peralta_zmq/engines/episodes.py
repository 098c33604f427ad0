"""Episodes: rollouts of several turns, in which the task replies to the completions.

A turn is one request and its completion. When a turn ends, the reply of the task is computed in the
background while the engine samples on. The reply is inserted as tokens, in the form of the chat
template, after the sampled tokens; together they are the prompt of the next turn. Sampled tokens
are never tokenized again. An episode ends when the task has no reply, after `max_turns` turns, or
when the context of the engine is full.

A call of `Engine.generate` that is cancelled leaves turns unfinished. `resume` requests them again
in the next call, with the tokens sampled so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from peralta_zmq import models
from peralta_zmq.errors import TaskError
from peralta_zmq.registry import Engine
from peralta_zmq.rollout import Completion, Message, Problem, Request

# For a reply, while no episode is in the engine. Chats may be, and wait as well.
WAIT_SECONDS = 0.001
# Distance between the indices of two turns of an episode. The random numbers of a completion depend
# on its index, so that the turns need different ones.
TURN_STRIDE = 1 << 40


class Replies(Protocol):
    """Replies of the tasks to completions."""

    def has_turns(self, problem: Problem) -> bool:
        """Whether the task of the problem replies to completions."""
        ...

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Future[list[Message] | None]:
        """The messages that follow `messages`, which begin with the prompt; None ends the episode.

        The future has a TaskError if the reply cannot be computed.
        """
        ...


@dataclass(slots=True, eq=False)
class _Episode:
    """An episode in flight."""

    problem: Problem
    index: int  # Request.index of the first turn
    request: Request  # of the last turn
    turns: list[Completion] = field(default_factory=list[Completion])
    messages: list[Message] = field(default_factory=list[Message])  # after the prompt
    reply: Future[list[Message] | None] | None = None  # to the last turn


class Episodes:
    """The episodes in flight, over several calls of `Engine.generate`.

    `replies` None means that every episode has one turn.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: models.Tokenizer,
        replies: Replies | None,
        *,
        max_turns: int,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._replies, self._max_turns = replies, max_turns
        self._sampled: dict[int, _Episode] = {}  # whose turn is sampled, by index of its request
        self._answered: list[_Episode] = []  # whose reply is being computed
        self._requests: deque[Request] = deque()  # of turns, not read by the engine yet
        self.num_resumed = 0  # partial completions that were requested again

    def start(self, problem: Problem, request: Request) -> None:
        """Start an episode; `request` is that of its first turn."""
        episode = _Episode(problem, request.index, request)
        episode.request = replace(request, may_continue=self._has_turns(episode))
        self._sampled[request.index] = episode
        self._requests.append(episode.request)

    def interrupt_turn(self, completion: Completion) -> None:
        """Keep the partial completion of a turn, which `resume` requests again."""
        episode = self._sampled[completion.index]
        episode.request = replace(episode.request, resumes=completion)

    def resume(self) -> None:
        """Request all unfinished turns from an engine that has none of them."""
        self._requests = deque(episode.request for episode in self._sampled.values())

    def requests(self) -> Iterator[Request]:
        """The requests of turns that can be started.

        If the engine has no request, waits up to WAIT_SECONDS for a reply.
        """
        if not self._sampled and self._answered:
            replies = [episode.reply for episode in self._answered if episode.reply is not None]
            wait(replies, timeout=WAIT_SECONDS, return_when=FIRST_COMPLETED)
        while self._requests:
            request = self._requests.popleft()
            self.num_resumed += request.resumes is not None
            yield request

    def unfinished(self) -> Iterator[None]:
        """Yield None as long as an episode may have another turn."""
        while self._answered or any(map(self._has_turns, self._sampled.values())):
            yield None

    def end_turn(self, completion: Completion) -> Completion | None:
        """Add the completion of a turn; returns that of the episode if it had only this turn.

        Otherwise, `receive_replies` returns the completion of the episode.
        """
        episode = self._sampled.pop(completion.index)
        if self._replies is None or not self._has_turns(episode):
            return completion
        episode.turns.append(completion)
        episode.messages.append(Message("assistant", completion.text))
        messages = (*episode.problem.messages, *episode.messages)
        episode.reply = self._replies.reply(episode.problem, messages)
        self._answered.append(episode)
        return None

    def receive_replies(self) -> Iterator[Completion]:
        """Continue the episodes whose reply is there; yields the completions of ended episodes."""
        for episode in list(self._answered):
            assert episode.reply is not None
            if not episode.reply.done():
                continue
            self._answered.remove(episode)
            try:
                reply = episode.reply.result()
                if reply is None:
                    yield _joined(episode)
                elif not self._continue(episode, reply):
                    yield replace(_joined(episode), finish_reason="length")
            except TaskError as error:
                yield replace(_joined(episode), error=error)

    def completions(self) -> Iterator[Completion]:
        """The completions of all turns, also the partial ones."""
        for episode in (*self._sampled.values(), *self._answered):
            yield from episode.turns
            if episode.request.resumes is not None:
                yield episode.request.resumes

    def drop(self, indices: Container[int]) -> None:
        """Drop the episodes whose first turns have these indices; cancels their replies."""
        for episode in self._answered:
            if episode.reply is not None and episode.index in indices:
                episode.reply.cancel()
        self._answered = [each for each in self._answered if each.index not in indices]
        self._sampled = {
            index: each for index, each in self._sampled.items() if each.index not in indices
        }

    def _has_turns(self, episode: _Episode) -> bool:
        return self._replies is not None and self._replies.has_turns(episode.problem)

    def _continue(self, episode: _Episode, reply: Sequence[Message]) -> bool:
        """Request the next turn; False if the episode has reached a limit.

        Raises RewardError if the chat template cannot append the reply.
        """
        problem, last = episode.problem, episode.turns[-1]
        if len(episode.turns) == self._max_turns:
            return False
        inserted = models.continuation_ids(
            self._tokenizer,
            (*problem.messages, *episode.messages),
            reply,
            ended=last.has_end_token,
            chat_template_kwargs=problem.chat_template_kwargs,
        )
        prompt_ids = np.concatenate([last.prompt_ids, last.token_ids, np.array(inserted, np.int32)])
        room = self._engine.max_model_len - len(prompt_ids)
        if room < 1:
            return False
        episode.messages += reply
        index = last.index + TURN_STRIDE
        episode.request = Request(
            index,
            prompt_ids,
            room,
            continues=last.index,
            may_continue=True,
            sampling=episode.request.sampling,
        )
        self._sampled[index] = episode
        self._requests.appendleft(episode.request)  # before the rest of a group that was started
        return True


def _joined(episode: _Episode) -> Completion:
    """The completion of an ended episode, from those of its turns."""
    first, last = episode.turns[0], episode.turns[-1]
    num_prompt = len(first.prompt_ids)
    token_ids = np.concatenate([last.prompt_ids, last.token_ids])[num_prompt:]
    logprobs = np.zeros(len(token_ids), np.float32)
    policy_steps = np.full(len(token_ids), -1, np.int32)
    for turn in episode.turns:
        start = len(turn.prompt_ids) - num_prompt
        logprobs[start : start + len(turn.token_ids)] = turn.logprobs
        policy_steps[start : start + len(turn.token_ids)] = turn.policy_steps
    return replace(
        last,
        index=episode.index,
        prompt_ids=first.prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        policy_steps=policy_steps,
        messages=tuple(episode.messages),
    )
