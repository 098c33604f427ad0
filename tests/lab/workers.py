"""Processes in the guest that use the weight store, on the server or on a client.

Requests and replies are JSON lines in pipes; the functions that can be called are in `worker`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

from lab.network import enter

REPLY_SECONDS = 120


class Worker:
    """A process on a client, or on the server, that uses the weight store."""

    def __init__(self, client: str | None = None) -> None:
        from lab import worker  # torch: imported once, before the first fork

        commands, self._commands = os.pipe()
        self._replies, replies = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._commands)
            os.close(self._replies)
            if client:
                enter(client)
            with os.fdopen(commands) as read, os.fdopen(replies, "w") as write:
                with contextlib.suppress(KeyboardInterrupt):
                    worker.work(read, write)
                write.flush()
                os._exit(0)
        os.close(commands)
        os.close(replies)
        self._rest = b""
        self._status: int | None = None

    def send(self, do: str, **arguments: Any) -> None:
        """Start a function of `worker`."""
        with contextlib.suppress(BrokenPipeError):  # it died: `receive` reports this
            os.write(self._commands, json.dumps({"do": do, **arguments}).encode() + b"\n")

    def receive(self, seconds: float = REPLY_SECONDS) -> dict[str, Any]:
        """The result of the function; {"died": signal} if the process has ended."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                raise TimeoutError(f"worker {self.pid} did not reply within {seconds} s")
            read = os.read(self._replies, 65536)
            if not read:
                return {"died": self._signal()}
            self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Run a function and return its result."""
        self.send(do, **arguments)
        return self.receive()

    def kill(self) -> None:
        """SIGKILL; replies already sent can still be read."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _signal(self) -> int:
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]
        return os.WTERMSIG(self._status) if os.WIFSIGNALED(self._status) else 0

    def unread(self) -> list[dict[str, Any]]:
        """Wait for the end of the process; returns its unread complete replies."""
        self._signal()
        while read := os.read(self._replies, 65536):
            self._rest += read
        *lines, _ = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]
