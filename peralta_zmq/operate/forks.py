"""Workers as forks of this process, which imports their libraries once.

A new Python process needs seconds to import torch and transformers, and its own memory for them. A
fork has them at once, and shares the memory. Linux only: elsewhere system libraries do not work in
a fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

# What the trainer and a generator import, some of it only while they load a model.
LIBRARIES = (
    "peralta_zmq.trainer.loop",
    "peralta_zmq.generator.loop",
    "peralta_zmq.engines.native",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
GUARD = "read -r line; kill -KILL 0"  # see GUARD in process_group.py


def import_libraries() -> bool:
    """Import what workers need; returns whether this process can be forked.

    Only the thread that forks exists in the fork, so a process with several threads cannot be
    forked safely.
    """
    if sys.platform != "linux":
        return False
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts threads when imported
    gc.disable()  # as in config/programs.py
    try:
        for library in LIBRARIES:
            importlib.import_module(library)
    finally:
        gc.freeze()
        gc.enable()
    return len(os.listdir("/proc/self/task")) == 1


class ForkedProcess:
    """A function in a fork, in a session of its own; has the methods of `subprocess.Popen`."""

    def __init__(
        self,
        main: str,
        command: Sequence[str],
        *,
        guard_pipe: tuple[int, int],
        output: BinaryIO | None,
    ) -> None:
        """Call `main` (module:function), the program of `command`; it returns the exit code.

        A guard process kills the fork and its children when the writing end of `guard_pipe` is
        closed. The output goes to `output`; None = that of this process.
        """
        ready, writing = os.pipe()
        try:
            process = multiprocessing.get_context("fork").Process(
                target=_run, args=(main, command, guard_pipe, output, writing)
            )
            process.start()
        finally:
            os.close(writing)
        os.read(ready, 1)  # returns when the fork has closed its end
        os.close(ready)
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self) -> None:
        """Wait until the process ends."""
        self._process.join()

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(
    main: str,
    command: Sequence[str],
    guard_pipe: tuple[int, int],
    output: BinaryIO | None,
    ready: int,
) -> None:
    """Prepare the fork as a process of its own, and call `main`."""
    os.setsid()
    os.close(guard_pipe[1])
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if output is not None:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    subprocess.Popen(
        ["/bin/sh", "-c", GUARD],
        stdin=guard_pipe[0],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(ready)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
    logging.root.handlers.clear()  # `main` sets up its own
    sys.argv = list(command[1:] if command[0] == sys.executable else command)
    _show(command)
    sys.exit(pkgutil.resolve_name(main)())


def _show(command: Sequence[str]) -> None:
    """Show `command` in lists of processes, as far as it fits into the memory of ours."""
    fields = Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    text = "\0".join(command).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
