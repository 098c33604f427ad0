"""Chats that wait for the generator's engine, or are sampled beside its groups."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence

from peralta_zmq.engines import RequestGroup, Sampler
from peralta_zmq.engines.sessions import (
    ChatCompletion,
    InterruptedChatError,
    QueueFullError,
    Sessions,
)

MAX_WAITING = 32  # completions; together with those in flight below the limit of connections


class ChatQueue:
    """The chats of a generator; `submit` and `cancel` may be called in any thread.

    Chats take at most an eighth of the slots, and start at least `start_seconds` apart, because
    each start takes some milliseconds from training.
    """

    def __init__(self, *, slots: int, max_model_len: int, start_seconds: float = 0.025) -> None:
        self.sessions = Sessions()  # what agents ask for
        self.max_model_len = max_model_len  # maximum of prompt and completion together, in tokens
        self._max_in_flight = max(1, slots // 8)
        self._start_seconds = start_seconds
        self._next_start = 0.0  # monotonic seconds
        self._in_flight: dict[RequestGroup, ChatCompletion] = {}
        self._waiting: deque[ChatCompletion] = deque()
        self._lock = threading.Lock()  # protects `_waiting` and `_is_closed`
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, chats: Sequence[ChatCompletion]) -> None:
        """Queue all completions, or raise QueueFullError, or InterruptedChatError after `close`."""
        with self._lock:
            if self._is_closed:
                raise InterruptedChatError("the run has ended")
            if len(self._waiting) + len(chats) > MAX_WAITING:
                raise QueueFullError
            self._waiting.extend(chats)

    def cancel(self, chats: Sequence[ChatCompletion]) -> None:
        """Remove completions from the queue, or end them after the next token."""
        with self._lock:
            for chat in chats:
                chat.is_cancelled = True
                if chat in self._waiting:
                    self._waiting.remove(chat)

    # Called by the generator's loop.

    def submit_due(self, sampler: Sampler) -> None:
        """Start a chat if one may start, and end the cancelled ones."""
        cancelled = [group for group, chat in self._in_flight.items() if chat.is_cancelled]
        if cancelled:
            sampler.drop(cancelled)
            for group in cancelled:
                del self._in_flight[group]
        if len(self._in_flight) < self._max_in_flight and time.monotonic() >= self._next_start:
            with self._lock:
                chat = self._waiting.popleft() if self._waiting else None
            if chat is not None:
                self._next_start = time.monotonic() + self._start_seconds
                group = sampler.start_alone(chat.prompt_ids, chat.sampling, sampled=chat.tokens)
                self._in_flight[group] = chat

    def complete(self, ended: Collection[RequestGroup]) -> None:
        """Set the results of chats whose groups have ended."""
        for group in ended:
            if (chat := self._in_flight.pop(group, None)) is not None:
                chat.complete(group.completions[0])

    def interrupt(self, sampler: Sampler) -> None:
        sampler.drop(list(self._in_flight))
        reason = "the generator dropped its completions, as after a roll-back of the run; try again"
        self._fail(self._in_flight.values(), reason)
        self._in_flight.clear()

    def close(self) -> None:
        """Interrupt all chats, and refuse further ones; the loop has ended."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        self._fail([*self._in_flight.values(), *waiting], "the run has ended")

    @staticmethod
    def _fail(chats: Collection[ChatCompletion], reason: str) -> None:
        for chat in chats:
            chat.fail(reason)
