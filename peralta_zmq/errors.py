"""Error classes of the package, each for one part of the system that can fail.

PeraltaError
 +-- ConfigError        settings, and the files that they name
 +-- WireError          ZeroMQ sockets, their keys, and the messages on them
 +-- StoreError         the weight store, where the trainer publishes weight versions
 |    +-- ChainError    a delta version (changes relative to an earlier version) lacks its base
 +-- JournalError       the trainer's journal of consumed rollouts, or a checkpoint
 +-- OutageError        a disk, folder or lease that may be usable later, so that a retry helps
 +-- TaskError          a task: its data files, and its reward function
 |    +-- RewardError   the reward of one completion
 +-- UserCodeError      a loss, advantage or filter function that the user wrote
 +-- EngineError        the sampling engine
 |    +-- EngineProcessError  a process of the engine that has died or hangs
 +-- TrainingError      the optimization of the model
 +-- OutOfMemoryError   memory of the machine or of its GPU
 +-- RankError          a rank: one process of a distributed trainer

The message of an error is one line with the invalid value and the remedy. If no caller handles the
error, the program prints that line and exits with code 2.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import resource
import socket
import stat
import sys
import traceback
from collections import Counter
from typing import Any

EXIT_ERROR = 2  # exit code of a program that ends with a PeraltaError; a crash has another code


class PeraltaError(Exception):
    """Base class of all errors of this package; `str(error)` is one line for the user."""


class ConfigError(PeraltaError):
    """A setting is unknown, invalid or contradictory, or what it names does not exist."""


class WireError(PeraltaError):
    """A socket cannot be bound, a key is unusable, or a message violates the protocol."""


class StoreError(PeraltaError):
    """The weight store cannot be used, or a version in it cannot be read or verified."""


class ChainError(StoreError):
    """An earlier version, which a delta version needs, is missing or damaged.

    The next keyframe (a version with all weights) and the deltas after the keyframe are readable.
    """


class JournalError(PeraltaError):
    """A journal or checkpoint cannot be read, or belongs to another run."""


class OutageError(PeraltaError):
    """A disk is full, a NAS is missing, or another trainer publishes weights: retry."""


class TaskError(PeraltaError):
    """A data file is invalid, or a reward function or verifier is unusable."""


class RewardError(TaskError):
    """A reward function raised, timed out, or returned no usable number."""


class RewardUnavailableError(RewardError):
    """No reward was computed, for a reason other than the completion: a later call may succeed."""


class UserCodeError(PeraltaError):
    """A user's loss, advantage or filter raised, timed out or returned a bad result."""


class EngineError(PeraltaError):
    """The model computed logits that are not finite; the engine aborts all requests."""


class EngineProcessError(EngineError):
    """The engine's own process has failed and holds no weights; `apply` starts it again."""


class TrainingError(PeraltaError):
    """Steps in a row had no finite gradient, or metrics beyond a limit of [early_stop]."""


class OutOfMemoryError(PeraltaError):
    """An allocation failed; the message names settings that need less memory."""


class RankError(PeraltaError):
    """A process of a distributed trainer (rank) cannot be reached or has exited."""


def import_extra(library: str, *, extra: str, needed_by: str) -> Any:
    """Import a library that `extra` of this package installs; ConfigError on failure."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"{needed_by} needs {library} ({error}); pip install 'peralta_zmq[{extra}]'"
        ) from None


def program_name(name: str) -> str:
    """Command of a program as the user has it: peralta-NAME if installed, else bin/NAME."""
    is_installed = os.path.basename(sys.argv[0]).startswith("peralta-")
    return f"peralta-{name}" if is_installed else f"bin/{name}"


def printable(text: str, *, keep: str = "") -> str:
    r"""Escape unprintable characters (ESC becomes \x1b), except those in `keep`.

    For text from other machines: a terminal executes control characters, and invisible characters
    change how the rest of a line is displayed.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def described(error: BaseException) -> str:
    """Type and message of an exception, and where it was raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{location}"


def failure_text(error: OSError) -> str:
    """Why a file was not written, with the remedy for a full disk or too many files."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}; make room for it"
    if error.errno != errno.EMFILE:
        return error.strerror or str(error)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    connections = _connections_by_port(limit)
    ports = ", ".join(f"{count} to port {port}" for port, count in connections.most_common())
    return (
        f"{error.strerror}: the limit of this process is {limit}, and {connections.total()} are "
        f"connections ({ports}); close connections, or start the program with a higher limit "
        "(ulimit -n)"
    )


def _connections_by_port(limit: int) -> Counter[int]:
    """Number of connections to each port that this process listens on.

    Opens no file, because the limit of open files is reached. All file descriptors are below
    `limit`.
    """
    listening, connected = set[int](), Counter[int]()
    for descriptor in range(limit):
        with contextlib.suppress(OSError):  # the descriptor is not open, or is being closed
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            opened = socket.socket(fileno=descriptor)
            try:
                if opened.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                port = int(opened.getsockname()[1])
                if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(port)
                else:
                    connected[port] += 1
            finally:
                opened.detach()  # another part of the process owns and closes the descriptor
    return Counter({port: count for port, count in connected.items() if port in listening})
