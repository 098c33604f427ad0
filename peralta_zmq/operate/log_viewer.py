"""The logs of all workers on one screen, each line with its worker's name in front.

Knows the keepers' `follow`; a connection that drops is taken up again. Nothing here can end a
worker.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peralta_zmq.operate import host_setup
from peralta_zmq.operate.ssh import SSH_FAILED, on

if TYPE_CHECKING:
    from peralta_zmq.config.hosts import Host

FROM_NOW, SOME = 0, 20  # lines of the past that are shown
RETRY_SECONDS = 5.0


def follow(chosen: Sequence[tuple[Host, list[str]]], again: str, *, lines: int) -> bool:
    """Show the logs until all these workers have ended; False when Ctrl-C came first.

    `again` are the options with which bin/lan finds the same hosts.
    """
    over = threading.Event()
    viewers = [Viewer(host, names, over) for host, names in chosen]
    threads = [
        threading.Thread(target=viewer.watch, args=(lines,), daemon=True) for viewer in viewers
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        over.set()
        sys.stdout.write(
            f"\nthe run goes on; its logs: bin/lan logs {again}, its end: bin/lan down {again}\n"
        )
    finally:
        for viewer in viewers:
            viewer.leave()
    return not over.is_set()


class Viewer:
    """One connection to one host."""

    def __init__(self, host: Host, names: Sequence[str], over: threading.Event) -> None:
        self._host, self._names, self._over = host, names, over
        self._process: subprocess.Popen[str] | None = None

    def watch(self, lines: int) -> None:
        """Print what comes, and connect again when the connection is lost."""
        code = self._read(lines)
        while code == SSH_FAILED and self._host.ssh and not self._over.is_set():
            self._say(
                f"{self._host.name}: the connection is lost, its workers go on; "
                f"again in {RETRY_SECONDS:.0f} s"
            )
            if not self._over.wait(RETRY_SECONDS):
                code = self._read(FROM_NOW)

    def leave(self) -> None:
        """End the connection; workers do not hang on it."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def _read(self, lines: int) -> int:
        words = [host_setup.KEEPER, "follow", str(lines), *self._names]
        command = on(self._host, host_setup.inside(self._host, " ".join(words)))
        with subprocess.Popen(  # a session of its own: Ctrl-C is ours
            command.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            self._process = process
            assert process.stdout
            for line in process.stdout:
                self._say(line.rstrip("\n"))
            return process.wait()

    def _say(self, line: str) -> None:
        if not self._over.is_set():
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
