"""Sampler: groups of completions for problems, over one engine, with turns.

An episode is one completion of a group: one turn (a request and its completion), or several if the
task replies. Replies are computed in the background, and inserted as tokens in the form of the chat
template. Sampled tokens are never tokenized again. An episode ends when the task has no reply,
after `max_turns` turns, or when the context of the engine is full.

If the task has an agent, the episodes of a group are sessions (engines/sessions.py): the agents ask
for the turns, until they have ended with their scores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from peralta_zmq import models
from peralta_zmq.engines.sessions import (
    AgentRun,
    ChatCompletion,
    Session,
    Sessions,
    Turn,
    joined,
)
from peralta_zmq.errors import TaskError
from peralta_zmq.registry import Engine
from peralta_zmq.rollout import (
    Completion,
    Int32Array,
    Message,
    Problem,
    Request,
    SampledToken,
    Sampling,
    Score,
)

# Distance between the indices of two turns, so that they have different random numbers.
TURN_STRIDE = 1 << 40


class Replies(Protocol):
    def has_turns(self, problem: Problem) -> bool: ...

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Future[list[Message] | None]:
        """The messages that follow, or None; the future may have a TaskError."""
        ...

    def has_agent(self, problem: Problem) -> bool: ...

    def run_agent(self, problem: Problem, *, base_url: str, api_key: str) -> Future[Score]: ...


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The requests for a problem's completions, which are in their order when all have ended."""

    problem: Problem
    replies: Replies | None = None  # if the task has turns
    completions: list[Completion] = field(default_factory=list[Completion])  # that have ended
    episodes: list[Episode] = field(default_factory=list["Episode"])  # that have not
    is_interrupted: bool = False  # by Sampler.interrupt
    runs: list[AgentRun] = field(default_factory=list[AgentRun])  # if the task has an agent
    num_runs: int = 0  # the group ends when this number of agents have ended; 0 = no agents

    @property
    def has_ended_agents(self) -> bool:
        num_ended = sum(run.score.done() for run in self.runs)
        return num_ended == self.num_runs > 0

    @property
    def num_thinking(self) -> int:
        """Number of agents without a request in flight."""
        return max(0, sum(not run.score.done() for run in self.runs) - len(self.episodes))

    def has_older_token(self, step: int) -> bool:
        """Whether weights before policy step `step` sampled a token, as far as it was returned."""
        completions = [*self.completions]
        completions += [turn.completion for run in self.runs for turn in run.session.turns]
        for episode in self.episodes:
            completions += episode.turns
            if episode.request.resumes is not None:
                completions.append(episode.request.resumes)
        steps = (completion.policy_steps for completion in completions)  # -1: not sampled
        return any(bool(((each >= 0) & (each < step)).any()) for each in steps)


@dataclass(slots=True, eq=False)
class Episode:
    group: RequestGroup
    index: int  # Request.index of the first turn
    request: Request  # of the last turn
    turns: list[Completion] = field(default_factory=list[Completion])  # that have ended
    messages: list[Message] = field(default_factory=list[Message])  # after the prompt
    reply: Future[list[Message] | None] | None = None  # to the last turn, while it is computed
    asked: ChatCompletion | None = None  # the request of a session; the episode ends with its turn


class Sampler:
    """Samples groups with an engine that has no other user meanwhile."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: models.Tokenizer,
        *,
        max_turns: int = 1,
        sessions: Sessions | None = None,  # None: no task has an agent
    ) -> None:
        self._engine = engine
        self._sessions = sessions or Sessions()
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._num_started = 0  # episodes of groups
        self._num_alone = 0  # single completions, whose indices are negative
        self._groups: list[RequestGroup] = []  # groups in flight
        self._ended: list[RequestGroup] = []  # groups that `advance` has not returned yet
        self._queue: deque[Episode] = deque()  # episodes that wait for the engine
        self._sampled: dict[int, Episode] = {}  # episodes in the engine by index of the request
        self._answered: list[Episode] = []  # episodes whose reply is being computed
        self.num_resumed = 0  # completions that were resumed so far, after some tokens
        self.num_branched = 0  # further completions so far of sessions that had one

    @property
    def num_in_flight(self) -> int:
        """Number of groups whose completions have not all ended, without interrupted ones."""
        return sum(not group.is_interrupted for group in self._groups)

    @property
    def has_room(self) -> bool:
        num_thinking = sum(group.num_thinking for group in self._groups)
        return self._engine.num_free() > len(self._queue) + num_thinking

    def start(
        self,
        problem: Problem,
        num_generations: int,
        sampling: Sampling,
        *,
        replies: Replies | None = None,
    ) -> RequestGroup:
        if replies is not None and replies.has_agent(problem):
            sessions = [self._sessions.open(sampling) for _ in range(num_generations)]
            runs = [
                AgentRun(each, replies.run_agent(problem, base_url=each.url, api_key=each.api_key))
                for each in sessions
            ]
            return self.start_agents(problem, runs, num_runs=num_generations)
        tokens = problem.input_token_ids or models.chat_prompt(
            self._tokenizer, problem.messages, **problem.chat_template_kwargs
        )
        prompt_ids = np.array(tokens, np.int32)
        has_turns = replies is not None and replies.has_turns(problem)
        group = RequestGroup(problem, replies if has_turns else None)
        first = self._num_started
        self._num_started += num_generations
        for index in range(first, self._num_started):
            request = Request(index, prompt_ids, sampling, may_continue=has_turns)
            group.episodes.append(Episode(group, index, request))
        self._groups.append(group)
        self._queue.extend(group.episodes)
        return group

    def start_agents(
        self, problem: Problem, runs: list[AgentRun], *, num_runs: int
    ) -> RequestGroup:
        """A group whose completions are those of agents that run; further ones may be added."""
        group = RequestGroup(problem, runs=runs, num_runs=num_runs)
        for run in runs:
            run.score.add_done_callback(self._sessions.notify)
        self._groups.append(group)
        return group

    def start_alone(
        self, prompt_ids: Int32Array, sampling: Sampling, *, sampled: list[SampledToken]
    ) -> RequestGroup:
        """Start a single completion, before others that wait; `sampled` gets its tokens at once."""
        self._num_alone += 1
        request = Request(
            -self._num_alone, prompt_ids, sampling, is_standalone=True, sampled=sampled
        )
        group = RequestGroup(Problem("", "", (), "", tuple(prompt_ids.tolist())))
        group.episodes.append(Episode(group, request.index, request))
        self._groups.append(group)
        self._queue.extendleft(group.episodes)
        return group

    def advance(self) -> list[RequestGroup]:
        """Take a decode step of the engine; returns the groups that have ended.

        If only replies or requests of agents are missing, waits up to a millisecond for one. After
        an EngineError or EngineProcessError, the groups in flight must be dropped or interrupted.
        """
        self._receive_replies()
        self._receive_requests()
        self._submit()
        if self._sampled:
            for completion in self._engine.advance():
                self._end_turn(self._sampled.pop(completion.index), completion)
        elif self._answered and not self._ended:
            replies = [episode.reply for episode in self._answered if episode.reply is not None]
            wait(replies, timeout=0.001, return_when=FIRST_COMPLETED)
        elif any(group.num_runs for group in self._groups):
            self._sessions.wait(0.001)
        self._end_agents()
        ended = self._ended
        self._ended = []
        return ended

    def interrupt(self, groups: Collection[RequestGroup]) -> None:
        """Take groups out of the engine; they keep the tokens sampled so far."""
        for episode, completion in self._take_out(groups):
            episode.request = replace(episode.request, resumes=completion)

    def resume(self, groups: Collection[RequestGroup]) -> None:
        """Continue to sample interrupted groups, before those that wait."""
        resumed = [group for group in groups if group.is_interrupted]
        for group in resumed:
            group.is_interrupted = False
        episodes = [episode for group in resumed for episode in group.episodes]
        self._queue.extendleft(each for each in reversed(episodes) if each.reply is None)

    def drop(self, groups: Collection[RequestGroup]) -> None:
        """End groups without a result; cancels the replies that are being computed."""
        for group in groups:
            for episode in group.episodes:
                if episode.reply is not None:
                    episode.reply.cancel()
                if episode.asked is not None:
                    episode.asked.fail("the generator dropped the group of this session")
            self._sessions.seal(group.runs)
            for run in group.runs:
                run.score.cancel()
                self._sessions.close(run.session)
        self._take_out(groups)
        self._groups = [group for group in self._groups if group not in groups]
        self._ended = [group for group in self._ended if group not in groups]
        self._answered = [each for each in self._answered if each.group not in groups]

    def _take_out(self, groups: Collection[RequestGroup]) -> list[tuple[Episode, Completion]]:
        """Take groups out of the queue and the engine; returns what the engine has sampled."""
        for group in groups:
            group.is_interrupted = True
        self._queue = deque(each for each in self._queue if not each.group.is_interrupted)
        ended = [index for index, each in self._sampled.items() if each.group.is_interrupted]
        partial = self._engine.drop(ended) if ended else []
        sampled = [(self._sampled[completion.index], completion) for completion in partial]
        for index in ended:
            del self._sampled[index]
        return sampled

    def _submit(self) -> None:
        requests: list[Request] = []
        for _ in range(min(self._engine.num_free(), len(self._queue))):
            episode = self._queue.popleft()
            self._sampled[episode.request.index] = episode
            self.num_resumed += episode.request.resumes is not None
            requests.append(episode.request)
        if requests:
            self._engine.submit(requests)

    def _receive_requests(self) -> None:
        """Queue the requests of agents, and end those whose clients have gone."""
        for asked in self._sessions.take():
            assert asked.session is not None
            if asked.session.is_closed:
                asked.fail("the session has ended")
                continue
            group = next((each for each in self._groups if _has_session(each, asked.session)), None)
            if group is None:
                if not asked.is_cancelled:  # its group was not started yet
                    self._sessions.submit(asked)
                continue
            request = Request(
                self._num_started,
                asked.prompt_ids,
                asked.sampling,
                continues=asked.previous.completion.index if asked.previous else None,
                may_continue=True,
                sampled=asked.tokens,
            )
            self._num_started += 1
            episode = Episode(group, request.index, request, asked=asked)
            group.episodes.append(episode)
            if not group.is_interrupted:
                self._queue.appendleft(episode)
        self._cancel([
            each for group in self._groups for each in group.episodes
            if each.asked is not None and each.asked.is_cancelled
        ])  # fmt: skip

    def _cancel(self, episodes: Sequence[Episode]) -> None:
        """End requests of agents without a turn."""
        indices = [episode.request.index for episode in episodes]
        if sampled := [index for index in indices if index in self._sampled]:
            self._engine.drop(sampled)
        for episode in episodes:
            self._sampled.pop(episode.request.index, None)
            with suppress(ValueError):
                self._queue.remove(episode)
            episode.group.episodes.remove(episode)

    def _end_agents(self) -> None:
        """End the groups whose agents have ended."""
        for group in self._groups:
            if any([run.end_late() for run in group.runs]):
                self._sessions.seal(group.runs)
                group.num_runs = len(group.runs)
            if not group.has_ended_agents:
                continue
            for episode in group.episodes:
                assert episode.asked is not None
                episode.asked.fail("the session has ended")
            self._cancel(list(group.episodes))
            for run in group.runs:
                self._sessions.close(run.session)
                group.completions += (completions := run.completions(group.problem))
                self.num_branched += len(completions) - 1
            self._ended.append(group)
        self._groups = [group for group in self._groups if group not in self._ended]

    def _end_turn(self, episode: Episode, completion: Completion) -> None:
        if episode.asked is not None:
            episode.group.episodes.remove(episode)
            episode.asked.complete(completion)
            return
        replies = episode.group.replies
        if replies is None:
            self._end(episode, completion)
            return
        problem = episode.group.problem
        episode.turns.append(completion)
        episode.messages.append(Message("assistant", completion.text))
        episode.reply = replies.reply(problem, (*problem.messages, *episode.messages))
        self._answered.append(episode)

    def _receive_replies(self) -> None:
        for episode in list(self._answered):
            assert episode.reply is not None
            if not episode.reply.done():
                continue
            self._answered.remove(episode)
            try:
                reply = episode.reply.result()
                if reply is None:
                    self._end(episode, _joined(episode))
                elif not self._continue(episode, reply):
                    self._end(episode, replace(_joined(episode), finish_reason="length"))
            except TaskError as error:
                self._end(episode, replace(_joined(episode), error=error))

    def _continue(self, episode: Episode, reply: Sequence[Message]) -> bool:
        """Request the next turn; False at a limit. Raises RewardError for unusable messages."""
        problem = episode.group.problem
        last = episode.turns[-1]
        room = self._engine.max_model_len - len(last.prompt_ids) - len(last.token_ids)
        if len(episode.turns) == self._max_turns or len(reply) >= room:
            return False
        inserted = models.continuation_ids(
            self._tokenizer,
            (*problem.messages, *episode.messages),
            reply,
            ended=last.has_end_token,
            limit=room + 1,  # without the end token, which `last` may have
            chat_template_kwargs=problem.chat_template_kwargs,
        )
        if len(inserted) >= room:
            return False
        prompt_ids = np.concatenate([last.prompt_ids, last.token_ids, np.array(inserted, np.int32)])
        episode.messages += reply
        episode.reply = None
        episode.request = Request(
            last.index + TURN_STRIDE,
            prompt_ids,
            episode.request.sampling,
            continues=last.index,
            may_continue=True,
        )
        if not episode.group.is_interrupted:
            self._queue.appendleft(episode)  # before the rest of a group that was started
        return True

    def _end(self, episode: Episode, completion: Completion) -> None:
        group = episode.group
        group.episodes.remove(episode)
        group.completions.append(completion)
        if not group.episodes:
            group.completions.sort(key=lambda each: each.index)
            self._groups.remove(group)
            self._ended.append(group)


def _joined(episode: Episode) -> Completion:
    turns = list[Turn]()
    for completion in episode.turns:
        turns.append(Turn(completion, turns[-1] if turns else None))
    return replace(joined(turns), index=episode.index, messages=tuple(episode.messages))


def _has_session(group: RequestGroup, session: Session | None) -> bool:
    return any(run.session is session for run in group.runs)
