"""Sessions: what an agent samples over HTTP, recorded as turns, and the completions they become.

An agent is a program of its own, which sends chats or token ids to the address of its session. A
turn is one request with its completion. A request whose prompt begins with the tokens of an earlier
turn continues that turn; any other one begins a new branch, and its prompt is context. Sampled
tokens are never tokenized again, and each is trained once.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from peralta_zmq.errors import RewardError, TaskError
from peralta_zmq.rollout import (
    Completion,
    Int32Array,
    Message,
    Problem,
    SampledToken,
    Sampling,
    Score,
)

MAX_BRANCHES = 16  # of a session: each is a rollout


class QueueFullError(Exception):
    """Too many requests wait already."""


class InterruptedChatError(Exception):
    """The completion was dropped."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One request of a session, with its completion."""

    completion: Completion
    previous: Turn | None  # the turn whose tokens the prompt begins with
    chat: tuple[Message, ...] = ()  # the messages of the request, and the reply; () = token ids
    tools: str = ""  # JSON, as in the request

    @cached_property
    def token_ids(self) -> Int32Array:
        return np.concatenate([self.completion.prompt_ids, self.completion.token_ids])

    @property
    def path(self) -> list[Turn]:
        """The turns of its branch up to this one."""
        return [*(self.previous.path if self.previous else ()), self]


class Session:
    """The turns of one agent. The server's thread adds them, until the session is closed."""

    def __init__(
        self, sampling: Sampling, *, server_url: str = "", token: str | None = None
    ) -> None:
        self.key = secrets.token_urlsafe(16)
        self.url = f"{server_url}/rl/sessions/{self.key}/v1"  # base URL of an OpenAI client
        self.api_key = token or self.key
        self.sampling = sampling  # a client can only shorten completions
        self.turns: list[Turn] = []
        self.num_open = 0  # completions that were requested and have not ended
        self.is_closed = False

    def close(self) -> None:
        """Refuse further requests, and drop the turns of those that have not ended."""
        self.is_closed = True

    def record(self, turn: Turn) -> None:
        """Add a turn, unless the session is closed: its agent has given its reward."""
        if not self.is_closed:
            self.turns.append(turn)

    @property
    def num_branches(self) -> int:
        """Number of turns that no other one continues."""
        return len(self.turns) - len({turn.previous for turn in self.turns if turn.previous})

    def find(self, prompt_ids: Int32Array) -> Turn | None:
        """The longest turn with whose tokens the prompt begins."""
        begins = [
            turn for turn in self.turns
            if len(turn.token_ids) < len(prompt_ids)
            and np.array_equal(turn.token_ids, prompt_ids[: len(turn.token_ids)])
        ]  # fmt: skip
        return max(begins, key=lambda turn: len(turn.token_ids), default=None)

    def find_chat(self, messages: Sequence[Message], tools: str) -> Turn | None:
        """The longest turn with whose chat the messages begin."""
        begins = [
            turn for turn in self.turns
            if turn.chat and turn.tools == tools and turn.chat == (*messages[: len(turn.chat)],)
        ]  # fmt: skip
        return max(begins, key=lambda turn: len(turn.chat), default=None)

    def completions(self) -> list[Completion]:
        """One completion for each branch, with its turns."""
        continued = {turn.previous for turn in self.turns}
        trained = set[Turn]()
        branches = list[Completion]()
        for turn in self.turns:
            if turn not in continued:
                branches.append(joined(turn.path, trained))
                trained.update(turn.path)
        return branches


def joined(path: Sequence[Turn], context: Collection[Turn] = ()) -> Completion:
    """The completion of a branch; the tokens of the turns in `context` are as those inserted."""
    first = path[0].completion
    last = path[-1].completion
    num_prompt = len(first.prompt_ids)
    token_ids = path[-1].token_ids[num_prompt:]
    logprobs = np.zeros(len(token_ids), np.float32)
    policy_steps = np.full(len(token_ids), -1, np.int32)
    for turn in path:
        if turn not in context:
            start = len(turn.completion.prompt_ids) - num_prompt
            part = slice(start, start + len(turn.completion.token_ids))
            logprobs[part] = turn.completion.logprobs
            policy_steps[part] = turn.completion.policy_steps
    return replace(
        last,
        index=first.index,
        prompt_ids=first.prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        policy_steps=policy_steps,
        messages=path[-1].chat[max(0, len(path[0].chat) - 1) :],
    )


class ChatCompletion:
    """A completion that a client of the server waits for."""

    def __init__(
        self,
        prompt_ids: Int32Array,
        sampling: Sampling,
        session: Session | None = None,
        previous: Turn | None = None,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.session = session
        self.previous = previous  # the turn of the session that the prompt continues
        self.tokens: list[SampledToken] = []  # so far; written by the engine's thread only
        self.is_cancelled = False
        self.result: Future[Completion] = Future()
        self.result.set_running_or_notify_cancel()  # so that no waiting task can cancel it

    def complete(self, completion: Completion) -> None:
        """Set the result, and the tokens for an engine that does not append them."""
        arrays = completion.token_ids, completion.logprobs, completion.policy_steps
        columns = [array.tolist() for array in arrays]
        self.tokens = [SampledToken(*token) for token in zip(*columns, strict=True)]
        self.result.set_result(completion)

    def fail(self, reason: str) -> None:
        if not self.result.done():
            self.result.set_exception(InterruptedChatError(reason))


@dataclass(slots=True, eq=False)
class AgentRun:
    """A session, and the future score of its agent."""

    session: Session
    score: Future[Score]
    deadline: float = math.inf  # monotonic seconds; the score is then missing
    given: Score | None = None  # by a client, until it ends the session

    def __post_init__(self) -> None:
        self.score.add_done_callback(lambda _: self.session.close())

    def end_late(self) -> bool:
        """Fail after the deadline; returns whether it has passed."""
        is_late = time.monotonic() > self.deadline
        if is_late:
            self.end("a session got no reward before its time limit")
        return is_late

    def end(self, reason: str) -> None:
        """Set the score that a client has given, or an error with the reason why there is none."""
        with suppress(InvalidStateError):  # it has ended before
            if self.given is None:
                self.score.set_exception(RewardError(reason))
            else:
                self.score.set_result(self.given)

    def completions(self, problem: Problem) -> list[Completion]:
        """The completions with their score, or one with an error."""
        completions = self.session.completions()
        try:
            score = self.score.result()
            if not completions:
                raise RewardError(f"the agent of problem {problem.id} sampled no token")
        except TaskError as error:
            empty = np.zeros(0, np.int32)
            logprobs = np.zeros(0, np.float32)
            return [Completion(0, empty, empty, logprobs, empty, "stop", "", error=error)]
        return [replace(completion, score=score) for completion in completions]


@dataclass(slots=True, eq=False)
class AgentGroup:
    """Sessions that clients opened for one problem; complete with `size` of them."""

    name: str
    size: int
    runs: list[AgentRun] = field(default_factory=list[AgentRun])


class Sessions:
    """The open sessions, and the requests of their agents. Thread-safe."""

    def __init__(self, *, max_client_sessions: int = 1024) -> None:
        self.local_url = ""  # set by the server, as the next two
        self.server_url = ""
        self.token: str | None = None
        self.max_turns = 64  # in a branch
        self.may_branch = True  # a session may have several branches
        self.max_client_sessions = max_client_sessions
        # If clients open sessions; None = they cannot open any now.
        self.sampling: Sampling | None = None
        self._sessions: dict[str, Session] = {}  # by key
        self._runs: dict[str, AgentRun] = {}  # opened by clients, by key
        self._groups: dict[str, AgentGroup] = {}  # by name, those that are not complete
        self._new_groups: deque[AgentGroup] = deque()
        self._requests: deque[ChatCompletion] = deque()
        self._lock = threading.Lock()  # protects the groups of clients
        self._has_news = threading.Event()  # a request, or an agent that has ended

    def open(self, sampling: Sampling, *, url: str | None = None) -> Session:
        """A session of an agent on this machine, or of a client of the server at `url`."""
        session = Session(sampling, server_url=url or self.local_url, token=self.token)
        self._sessions[session.key] = session
        return session

    def join(self, name: str, size: int, *, seconds: float) -> Session:
        """Open a session of a client, in the group with this name. Raises QueueFullError."""
        with self._lock:
            group = self._groups.get(name) or AgentGroup(name, size)
            is_full = len(self._runs) >= self.max_client_sessions
            if is_full or (self.sampling is None and not group.runs):
                raise QueueFullError
            sampling = group.runs[0].session.sampling if group.runs else self.sampling
            assert sampling is not None
            session = self.open(sampling, url=self.server_url)
            run = AgentRun(session, Future(), time.monotonic() + seconds)
            run.score.add_done_callback(self.notify)
            self._runs[session.key] = run
            group.runs.append(run)
            if len(group.runs) == 1:
                self._groups[name] = group
                self._new_groups.append(group)
            if len(group.runs) == group.size:
                del self._groups[name]
            return session

    def seal(self, runs: list[AgentRun]) -> None:
        """Let no further session join the group with these."""
        with self._lock:
            names = [name for name, group in self._groups.items() if group.runs is runs]
            for name in names:
                del self._groups[name]

    def take_groups(self) -> list[AgentGroup]:
        """The groups that clients began since the last call; sessions may still join them."""
        return [self._new_groups.popleft() for _ in range(len(self._new_groups))]

    def find(self, key: str) -> Session | None:
        return self._sessions.get(key)

    def find_run(self, key: str) -> AgentRun | None:
        return self._runs.get(key)

    def close(self, session: Session) -> None:
        """Refuse further requests of the session."""
        session.close()
        self._sessions.pop(session.key, None)
        self._runs.pop(session.key, None)

    def submit(self, request: ChatCompletion) -> None:
        self._requests.append(request)
        self._has_news.set()

    def notify(self, _: object = None) -> None:
        self._has_news.set()

    def take(self) -> list[ChatCompletion]:
        """The requests since the last call."""
        self._has_news.clear()
        return [self._requests.popleft() for _ in range(len(self._requests))]

    def wait(self, seconds: float) -> None:
        """Wait for a request, or for the end of an agent."""
        self._has_news.wait(seconds)
