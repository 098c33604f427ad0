"""Starts workers as forks of this process, which has imported their libraries.

A new Python process needs seconds to import torch and transformers, and memory for them. A fork
needs neither: it shares the memory until one side writes to it. Only on Linux, because system
libraries of macOS do not support forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
from typing import Any, BinaryIO

# What the trainer and a generator import; some of it they import only when they load a model.
LIBRARIES = (
    "peralta_zmq.trainer.loop",
    "peralta_zmq.generator.start",
    "peralta_zmq.engines.native",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",  # the embedded models
)
# Kills its process group when its input is closed, see GUARD in process_group.py.
GUARD = "read -r line; kill -KILL 0"


def import_libraries() -> bool:
    """Import what workers need; returns whether this process can be forked safely.

    Only the thread that forks exists in the fork, so a process with several threads cannot.
    """
    if sys.platform != "linux":
        return False
    # Libraries that ask for CUDA would otherwise initialize its driver, which no fork can use then.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # huggingface_hub reads this once, when transformers imports it: model_folders.py is too late.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    name = "OPENBLAS_NUM_THREADS"  # of numpy's library, which would start threads when imported
    previous = os.environ.get(name)
    os.environ.setdefault(name, "1")
    gc.disable()  # the many new objects would be scanned again and again
    try:
        _import_transformers()
        for library in LIBRARIES:
            importlib.import_module(library)
    finally:
        gc.freeze()
        gc.enable()
        if previous is None:
            del os.environ[name]
    return len(os.listdir("/proc/self/task")) == 1


def _import_transformers() -> None:
    """Import transformers faster, and prepare it for the first model that a fork loads.

    When it is imported, transformers lists its 550 model folders twice. It caches the lists, but
    only the newest 128 (the default of `lru_cache`), so that the second pass finds none of them.
    When it loads the first model of a process, it compiles 900 regular expressions; forks inherit
    those that are compiled here.
    """
    limited = functools.lru_cache

    def unlimited(maxsize: Any = 128, typed: bool = False) -> Any:
        """`lru_cache`, except that `@lru_cache` without arguments has no limit."""
        return limited(None)(maxsize) if callable(maxsize) else limited(maxsize, typed)

    importlib.import_module("torch")  # now, so that the caches of torch keep their limits
    functools.lru_cache = unlimited
    try:
        importlib.import_module("transformers.models")
    finally:
        functools.lru_cache = limited
    with contextlib.suppress(Exception):  # of another version of transformers: it is only slower
        mapping = importlib.import_module("transformers.conversion_mapping")
        mapping.get_checkpoint_conversion_mapping("")


class ForkedProcess:
    """A function in a fork with its own session; has three methods of `subprocess.Popen`."""

    def __init__(
        self,
        main: str,
        command: Sequence[str],
        *,
        guard_pipe: tuple[int, int],
        output: BinaryIO | None,
    ) -> None:
        """Start a fork that calls `main` (module:function), whose result is its exit code.

        `command` would start the same program in a new process; the fork takes sys.argv from it,
        and is listed with it. A guard process kills the fork and its children when the writing end
        of `guard_pipe` is closed. The output goes to `output`; None = the output of this process.
        """
        is_ready, ready = os.pipe()
        try:
            process = multiprocessing.get_context("fork").Process(
                target=_run, args=(main, command, guard_pipe, output, ready)
            )
            process.start()
        finally:
            os.close(ready)
        os.read(is_ready, 1)  # returns when the fork has its own session and guard
        os.close(is_ready)
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
    """In the fork: become independent of the parent process, and call `main`."""
    import numpy  # not before `import_libraries`

    os.setsid()
    os.close(guard_pipe[1])
    signal.set_wakeup_fd(-1)  # the parent's
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGCHLD):
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
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    logging.root.handlers.clear()  # `main` sets up its own
    numpy.random.seed()  # otherwise all forks would draw the same numbers
    sys.argv = list(command[1:] if command[0] == sys.executable else command)
    _list_as(command)
    os.close(ready)
    sys.exit(pkgutil.resolve_name(main)())


def _list_as(command: Sequence[str]) -> None:
    """Overwrite this process's arguments, so that `ps` lists it as `command`.

    The command is cut off at the length of the old one.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    text = os.fsencode("\0".join(command))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
