"""Pool of worker processes that call reward functions, replies and tools while the engine samples.

Any idle worker takes the next call. A call that takes too long ends its worker. Coroutine functions
share one worker, which awaits many calls at the same time; a call that blocks its event loop ends
all of them. An event loop in a background thread exchanges messages with the workers. It never
blocks: a worker that does not read is a call that takes too long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar, cast

from peralta_zmq.environments import reward_worker
from peralta_zmq.environments.reward_functions import (
    Reward,
    RewardFunction,
    outcome,
    score_of,
)
from peralta_zmq.environments.reward_worker import WorkerCall
from peralta_zmq.environments.tool_process import delete_folders, kill_descendants
from peralta_zmq.environments.turns import Reply, Turns
from peralta_zmq.errors import RewardUnavailableError, TaskError, described
from peralta_zmq.imports import FOLDER_LAST
from peralta_zmq.rollout import Message, Problem, Score

PROGRAM = f"{FOLDER_LAST}; from {reward_worker.__name__} import main; main(*sys.argv[1:])"
ENDED = "was ended"  # start of the reply to the other calls of a process that is killed

Result = TypeVar("Result")


class RewardPool:
    """Calls reward functions in worker processes. Use with `closing`.

    `num_workers` processes call ordinary functions; `num_awaiting` call coroutine functions, each
    of which awaits `concurrency` calls at the same time. If `queue_limit` completions wait for one
    of the two kinds, it has no room. A process starts with its first call.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        num_awaiting: int = 1,
        concurrency: int = 16,
        timeout_seconds: float,
        queue_limit: int,
        grace_seconds: float = 5.0,  # for a worker that awaits calls, to report a timeout itself
    ) -> None:
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        self._queue_limit = queue_limit

        def workers(count: int, *, awaits: bool) -> list[_Worker]:
            return [_Worker(timeout_seconds, grace_seconds, awaits=awaits) for _ in range(count)]

        self._ordinary = _Workers(workers(num_workers, awaits=False))
        self._awaiting = _Workers(workers(num_awaiting, awaits=True) * concurrency)
        self._lock = threading.Lock()
        self._loop = None

    def submit(
        self, calls: Sequence[WorkerCall], combine: Callable[[list[Any]], Result]
    ) -> Future[Result]:
        """Make calls; the future has what `combine` returns for their results, in order.

        If a call or `combine` fails, the future has a RewardError; a TaskError if a function cannot
        be imported. Cancelling the future removes its waiting calls.
        """
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
                self._thread.start()
        self._count(calls, 1)
        results = self._call_all(calls, combine)
        future = asyncio.run_coroutine_threadsafe(results, self._loop)
        # Unlike the coroutine, which may be cancelled before it starts, this always runs.
        future.add_done_callback(lambda _: self._count(calls, -1))
        return future

    def has_room(self, *, is_async: bool) -> bool:
        return self._workers(is_async).num_waiting < self._queue_limit

    @property
    def num_waiting(self) -> int:
        return self._ordinary.num_waiting + self._awaiting.num_waiting

    def close(self) -> None:
        """End all workers; the futures of unfinished calls are cancelled."""
        with self._lock:
            loop = self._loop
            self._loop = None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()

    def _workers(self, is_async: bool) -> _Workers:
        return self._awaiting if is_async else self._ordinary

    def _count(self, calls: Sequence[WorkerCall], sign: int) -> None:
        with self._lock:
            for call in calls:
                self._workers(call.is_async).num_unfinished += sign * call.num_completions

    async def _call_all(
        self, calls: Sequence[WorkerCall], combine: Callable[[list[Any]], Result]
    ) -> Result:
        tasks = [asyncio.ensure_future(self._workers(call.is_async).call(call)) for call in calls]
        try:
            return combine(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()  # without effect on a finished task

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        for worker in (*self._ordinary.workers, *self._awaiting.workers):
            worker.stop("was stopped")
        await asyncio.gather(*tasks, return_exceptions=True)


class _Workers:
    """Workers for one kind of function; a worker that is listed n times takes n calls at a time."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self.workers = workers
        self.num_unfinished = 0  # completions
        self._num_running = 0
        # Last in, first out: no more processes are started than there are calls at a time.
        self._idle = asyncio.LifoQueue[_Worker]()
        for worker in workers:
            self._idle.put_nowait(worker)

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_unfinished - self._num_running)

    async def call(self, call: WorkerCall) -> Any:
        worker = await self._idle.get()
        # A cancelled call still occupies its worker until it ends, and nobody reads its error.
        running = asyncio.ensure_future(self._call(worker, call))
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(running)

    async def _call(self, worker: _Worker, call: WorkerCall) -> Any:
        self._num_running += call.num_completions
        try:
            return await worker.call(call)
        finally:
            self._num_running -= call.num_completions
            self._idle.put_nowait(worker)


class _Worker:
    """A worker process, which starts with its next call if it has ended."""

    def __init__(self, timeout_seconds: float, grace_seconds: float, *, awaits: bool) -> None:
        self._grace = grace_seconds
        self._timeout = timeout_seconds
        self._awaits = awaits
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = count()  # of requests
        self._starting = asyncio.Lock()  # held while the process or a function is loaded

    async def call(self, call: WorkerCall) -> Any:
        """The result of a call. Raises RewardError if it fails, TaskError if it cannot start."""
        async with self._starting:
            if self._process is None:
                await self._start()
            for name in set(call.names) - self._loaded:
                reply = await self._exchange(name, timeout_seconds=120.0)
                _check_ended(name, reply)
                if reply != reward_worker.READY:
                    raise TaskError(f"reward function {name} did not start: its worker {reply}")
                self._loaded.add(name)
        reports_timeout = self._awaits or call.reports_timeout
        seconds = self._timeout + self._grace if reports_timeout else self._timeout
        result = await self._exchange(call, seconds)
        if isinstance(result, str) and result.startswith(reward_worker.TOOK_LONGER):
            self._has_hung = True  # perhaps in a thread, which nothing can end
        if self._has_hung and not self._replies:
            self.stop()
        _check_ended(" or ".join(call.names), result)
        return call.result_of(cast(Any, result))

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        timeout = [str(self._timeout)] if self._awaits else []
        with theirs:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *timeout],
                stdin=subprocess.PIPE,  # ends when this process dies
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
        self._loaded = set[str]()
        self._has_hung = False  # whether a call took too long
        self._replies = dict[int, asyncio.Future[object]]()
        self._reading = asyncio.ensure_future(self._read_replies(reader, self._process))

    async def _exchange(self, content: object, timeout_seconds: float) -> object:
        """Send a request and return the reply; a failure of the process is text."""
        number = next(self._numbers)
        try:
            frame = reward_worker.frame_of(number, content)
        except Exception as error:  # noqa: BLE001  a user's object may raise anything
            return f"cannot get its arguments: {described(error)}"
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._writer.write(frame)
        try:
            return await asyncio.wait_for(reply, timeout_seconds)
        except TimeoutError:
            reason = f"{reward_worker.TOOK_LONGER} {timeout_seconds:g} s"
            self.stop(f"{ENDED}, because another call {reason}")
            return reason

    async def _read_replies(
        self, reader: asyncio.StreamReader, process: subprocess.Popen[bytes]
    ) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, content = await reward_worker.read_frame(reader)
                reply = self._replies.pop(number)
                if not reply.done():
                    reply.set_result(content)
        if process is self._process:
            self.stop()

    def stop(self, reason: str = "") -> None:
        """Kill the process, if any, and its child processes.

        Open requests get `reason` as reply; by default, the exit code of the process.
        """
        if (process := self._process) is None:
            return
        self._process = None
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGSTOP)  # it can start no further process
            kill_descendants(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        delete_folders(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        self._writer.close()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(reason or f"exited with code {process.returncode}")


def _check_ended(name: str, reply: object) -> None:
    """Raise RewardUnavailableError if another call was the reason for the end of the process."""
    if isinstance(reply, str) and reply.startswith(ENDED):
        raise RewardUnavailableError(f"the worker of reward function {name} {reply}")


class LocalFunctions:
    """The reward functions of an environment, and with several turns the functions of a task for
    them; implements dataset.Functions. Environments share the pool.
    """

    def __init__(
        self, rewards: Sequence[RewardFunction], pool: RewardPool, turns: Turns | None = None
    ) -> None:
        self.rewards = tuple(rewards)
        self._turns = turns
        self._pool = pool

    @property
    def identity(self) -> str:
        rewards = [(each.name, each.weight, dict(each.options)) for each in self.rewards]
        return repr((rewards, self._turns))

    @property
    def has_turns(self) -> bool:
        return self._turns is not None

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._turns.schemas if self._turns else ()

    @property
    def has_room(self) -> bool:
        kinds = {each.is_async for each in self.rewards if not each.is_bounded}
        if self._turns:
            kinds.add(self._turns.is_async)
        return all(self._pool.has_room(is_async=is_async) for is_async in kinds)

    def score(
        self,
        problem: Problem,
        texts: Sequence[str],
        token_ids: Sequence[Sequence[int]],
        messages: Sequence[Sequence[Message]] = (),
    ) -> Future[list[Score]]:
        calls = [
            (function, call)
            for function in self.rewards
            for call in function.calls(problem, texts, token_ids, messages)
        ]
        pooled = [call for function, call in calls if not function.is_bounded]

        def combine(results: Sequence[list[Reward]]) -> list[Score]:
            remaining = iter(results)
            columns: dict[str, list[Reward]] = {}  # rewards of all completions by function
            for (function, _), rewards in zip(calls, bounded, strict=True):
                column = columns.setdefault(function.label, [])
                column += next(remaining) if rewards is None else rewards
            rows = zip(*columns.values(), strict=True)
            return [score_of(problem, self.rewards, row) for row in rows]

        try:
            bounded = [
                call.result_of(outcome(call, function.function)) if function.is_bounded else None
                for function, call in calls
            ]
            if pooled:
                return self._pool.submit(pooled, combine)
            return _finished(combine([]))
        except TaskError as error:
            return _finished(error)

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Future[Reply]:
        assert self._turns is not None
        call = self._turns.call(problem, messages, tool_seconds=self._pool.timeout_seconds)
        if call is None:
            return _finished(None)
        return self._pool.submit([call], lambda results: results[0])

    def close(self) -> None:
        self._pool.close()


def _finished(result: Result | TaskError) -> Future[Result]:
    future: Future[Result] = Future()
    if isinstance(result, TaskError):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future
