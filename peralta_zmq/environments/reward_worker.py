"""Main function of a reward worker: a process that imports and calls reward functions.

RewardPool starts it with one end of a socket pair. A frame is the length of its content (8 bytes,
big endian) and a pickled pair: the number of a request, and its content: the name of a function to
import, or a WorkerCall of imported functions. The reply has the same number.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeAlias

from peralta_zmq.environments.agent_calls import AgentCall
from peralta_zmq.environments.reward_functions import RewardCall, async_outcome, outcome
from peralta_zmq.environments.tool_process import (
    adopt_orphans,
    continue_after_parent,
    delete_folders,
    kill_descendants,
)
from peralta_zmq.environments.turns import ReplyCall
from peralta_zmq.errors import described, prepare_streams
from peralta_zmq.imports import import_object

WorkerCall: TypeAlias = "RewardCall | ReplyCall | AgentCall"

READY = "ready"  # reply to the name of a function that was imported
TOOK_LONGER = "took longer than"  # start of the reply to a call that exceeds its time


def frame_of(number: int, content: object) -> bytes:
    pickled = pickle.dumps((number, content), pickle.HIGHEST_PROTOCOL)
    return len(pickled).to_bytes(8, "big") + pickled


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Number and content of the next frame. Raises EOFError or OSError at the end."""
    length = int.from_bytes(await reader.readexactly(8), "big")
    return pickle.loads(await reader.readexactly(length))


_functions: dict[str, Callable[..., Any]] = {}  # those that were imported, by name


def _load(name: str) -> str:
    try:
        _functions[name] = import_object(name)
    except Exception as error:  # noqa: BLE001  a user's module may raise anything
        return f"cannot import it: {described(error)}"
    return READY


def _serve(connection: socket.socket) -> None:
    stream = connection.makefile("rwb")
    with suppress(EOFError, OSError, pickle.UnpicklingError):
        while header := stream.read(8):
            number, content = pickle.loads(stream.read(int.from_bytes(header, "big")))
            if isinstance(content, str):
                result: object = _load(content)
            else:
                result = outcome(content, *(_functions[name] for name in content.names))
            stream.write(frame_of(number, result))
            stream.flush()
    os.killpg(0, signal.SIGKILL)


async def _serve_async(connection: socket.socket, timeout_seconds: float) -> None:
    tasks = set[asyncio.Task[None]]()
    # Agents that are ordinary functions run in threads.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1024))
    reader, writer = await asyncio.open_connection(sock=connection)

    async def answer(number: int, content: str | WorkerCall) -> None:
        if isinstance(content, str):
            result: object = _load(content)
        else:
            call = async_outcome(content, *(_functions[name] for name in content.names))
            try:
                result = await asyncio.wait_for(call, timeout_seconds)
            except TimeoutError:
                result = f"{TOOK_LONGER} {timeout_seconds:g} s"
        writer.write(frame_of(number, result))

    with suppress(EOFError, OSError):
        while True:
            task = asyncio.create_task(answer(*await read_frame(reader)))
            tasks.add(task)  # the event loop keeps only weak references
            task.add_done_callback(tasks.discard)
    os.killpg(0, signal.SIGKILL)  # cancelled tasks would report their end


def _exit_with_parent() -> None:
    """Kill this process and its children when stdin ends, as it does when the parent ends."""
    os.read(0, 1)  # not sys.stdin, whose lock would be held when this process ends
    kill_descendants(os.getpid())
    delete_folders(os.getpid())
    os.killpg(0, signal.SIGKILL)


def main(descriptor: str, timeout_seconds: str = "") -> None:
    """Serve calls. `timeout_seconds` is given for coroutine functions only."""
    prepare_streams()  # a reward function may print any text
    continue_after_parent()
    os.nice(10)  # rewards are computed in the CPU time that the sampling engine leaves
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    connection = socket.socket(fileno=int(descriptor))
    if not timeout_seconds:
        adopt_orphans()
        _serve(connection)
    else:
        asyncio.run(_serve_async(connection, float(timeout_seconds)))
