"""Processes in the guest that use the weight store, on the server or on a client.

The functions that can be called are in `worker`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from typing import Any

REPLY_SECONDS = 120
FORKS = multiprocessing.get_context("fork")  # torch is imported once


class Worker:
    """A process on a client, or on the server, that uses the weight store."""

    def __init__(self, client: str | None = None) -> None:
        from lab import worker

        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=worker.work, args=(theirs, client), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, do: str, **arguments: Any) -> None:
        """Start a function of `worker`."""
        with contextlib.suppress(OSError):  # it died: `receive` reports this
            self._pipe.send((do, arguments))

    def receive(self, seconds: float = REPLY_SECONDS) -> dict[str, Any]:
        """The result of the function; {"died": signal} if the process has ended."""
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"worker {self._process.pid} did not reply within {seconds} s")
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            assert code <= 0, "the worker has raised an error, which it has printed"
            return {"died": -code}

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Run a function and return its result."""
        self.send(do, **arguments)
        return self.receive()

    def kill(self) -> None:
        """SIGKILL; replies already sent can still be read."""
        self._process.kill()

    def unread(self) -> list[dict[str, Any]]:
        """Wait for the end of the process; returns its unread complete replies."""
        self._process.join()
        replies: list[dict[str, Any]] = []
        with contextlib.suppress(EOFError, OSError):
            while True:
                replies.append(self._pipe.recv())
        return replies
