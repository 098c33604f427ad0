"""Engine of a generator that also serves chats.

Chat completions are requests of the generator's own calls of `generate`: they take slots beside
training groups and evaluations, at most every SLOTS_PER_CHAT-th slot at the same time, and start at
least START_SECONDS apart. A slot is one completion that an engine samples concurrently.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from peralta_zmq.registry import Engine, WeightUpdate
from peralta_zmq.rollout import Completion, Int32Array, Request, Sampling

# Both bound what chats take from training, with a large model and with a small one.
SLOTS_PER_CHAT = 8  # of these slots, one may be a chat's
START_SECONDS = 0.025  # between two starts, each of which takes some milliseconds
DROPPED = "the generator dropped its completions, as after a roll-back of the run; try again"
MAX_WAITING = 32  # completions; together with those in flight below the limit of connections


class SampledToken(NamedTuple):
    """One token of a completion."""

    token_id: int
    logprob: float
    step: int  # policy step of the weights


class QueueFullError(Exception):
    """MAX_WAITING completions wait already."""


class InterruptedChatError(Exception):
    """The completion was dropped."""


class ChatCompletion:
    """A completion that a client waits for."""

    def __init__(self, prompt_ids: Int32Array, sampling: Sampling) -> None:
        self.prompt_ids, self.sampling = prompt_ids, sampling
        self.partial: Completion | None = None  # to be resumed
        self.tokens: list[SampledToken] = []  # so far; written by the engine's thread only
        self.is_cancelled = False
        self.result: Future[Completion] = Future()
        self.result.set_running_or_notify_cancel()  # so that no waiting task can cancel it

    def add_token(self, token: int, logprob: float, step: int) -> bool:
        """Request.on_token: False ends the completion."""
        self.tokens.append(SampledToken(token, logprob, step))
        return not self.is_cancelled

    def complete(self, completion: Completion) -> None:
        """Set the result, and the tokens for an engine that does not call `add_token`."""
        arrays = completion.token_ids, completion.logprobs, completion.policy_steps
        columns = [array.tolist() for array in arrays]
        self.tokens = [SampledToken(*token) for token in zip(*columns, strict=True)]
        self.result.set_result(completion)


class ServingEngine:
    """An engine (registry.Engine) that also samples the completions that `submit` queues.

    `submit`, `cancel_chats` and `close` may be called in any thread.
    """

    def __init__(self, engine: Engine, *, slots: int, start_seconds: float = START_SECONDS) -> None:
        self._engine = engine
        self._max_in_flight = max(1, slots // SLOTS_PER_CHAT)
        self._start_seconds, self._next_start = start_seconds, 0.0  # monotonic seconds
        self._waiting: deque[ChatCompletion] = deque()
        self._lock = threading.Lock()  # of `_waiting` and `_is_closed`
        self._is_closed = False

    @property
    def step(self) -> int:
        """Policy step of the current weights."""
        return self._engine.step

    @property
    def max_model_len(self) -> int:
        """Maximum of prompt and completion together, in tokens."""
        return self._engine.max_model_len

    def apply(self, update: WeightUpdate) -> None:
        """Replace the weights; see registry.Engine."""
        self._engine.apply(update)

    def cancel(self) -> None:
        """End the running `generate`; the next one resumes the chats in flight."""
        self._engine.cancel()

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """Yield one completion per request, and complete chats meanwhile; see registry.Engine.

        The `index` of a request must not be negative. Chats in flight are interrupted if the call
        raises.
        """
        in_flight: dict[int, ChatCompletion] = {}
        merged = self._with_chats(requests, in_flight)
        try:
            for completion in self._engine.generate(merged, sampling, between_steps):
                if completion.index >= 0:
                    yield completion
                elif completion.is_partial:
                    in_flight[completion.index].partial = completion
                else:
                    in_flight.pop(completion.index).complete(completion)
            with self._lock:  # after `cancel`
                if not self._is_closed:
                    self._waiting.extendleft(reversed(in_flight.values()))
                    in_flight.clear()
        finally:
            for chat in in_flight.values():
                chat.result.set_exception(InterruptedChatError(DROPPED))

    def _with_chats(
        self, requests: Iterable[Request | None], in_flight: dict[int, ChatCompletion]
    ) -> Iterator[Request | None]:
        """Yield waiting chats as requests with negative indices, as many as may start, first."""
        indices = itertools.count(-1, -1)
        for request in requests:
            if len(in_flight) < self._max_in_flight and (chat := self._next()) is not None:
                index = next(indices)
                in_flight[index] = chat
                yield Request(
                    index,
                    chat.prompt_ids,
                    sampling=chat.sampling,
                    is_standalone=True,
                    resumes=chat.partial,
                    on_token=chat.add_token,
                )
            yield request

    def _next(self) -> ChatCompletion | None:
        """The chat that may start, if there is one."""
        now = time.monotonic()
        with self._lock:
            if not self._waiting or now < self._next_start:
                return None
            self._next_start = now + self._start_seconds
            return self._waiting.popleft()

    def submit(self, chats: Sequence[ChatCompletion]) -> None:
        """Queue completions, all or none.

        A prompt and its longest completion must fit into `max_model_len`. Raises QueueFullError,
        and InterruptedChatError after `close`.
        """
        with self._lock:
            if self._is_closed:
                raise InterruptedChatError("the run has ended")
            if len(self._waiting) + len(chats) > MAX_WAITING:
                raise QueueFullError
            self._waiting.extend(chats)

    def cancel_chats(self, chats: Sequence[ChatCompletion]) -> None:
        """Remove completions from the queue, or end them after the next token."""
        with self._lock:
            for chat in chats:
                chat.is_cancelled = True
                if chat in self._waiting:
                    self._waiting.remove(chat)

    def close(self) -> None:
        """Interrupt the waiting completions, and refuse further ones."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for chat in waiting:
            chat.result.set_exception(InterruptedChatError("the run has ended"))
