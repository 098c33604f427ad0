"""Error classes of the package, each for one part of the system that can fail.

PeraltaError
 +-- ConfigError        settings, and the files that they name
 +-- WireError          ZeroMQ sockets, their keys, and the messages on them
 +-- StoreError         the weight store, where the trainer publishes weight versions
 |    +-- ChainError    a delta version (changes relative to an earlier version) lacks its base
 +-- JournalError       the trainer's journal of received groups, or a checkpoint
 +-- OutageError        a disk, folder or lock that may be usable later, so that a retry helps
 +-- TaskError          a task: its data files, and its reward function
 |    +-- RewardError   the reward of one completion
 |         +-- RewardUnavailableError  the same, if a later call may succeed
 +-- UserCodeError      a loss, advantage or filter function that the user wrote
 +-- EngineError        the sampling engine
 |    +-- EngineProcessError  the engine or its process has failed
 +-- TrainingError      the optimization of the model
 +-- OutOfMemoryError   memory of the machine or of its GPU
 +-- RankError          a rank: one process of a distributed trainer
 +-- RunError           a run that was started from Python

The message of an error is one line with the invalid value and the remedy. If no caller handles the
error, the program prints that line and exits with code 2.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import os
import resource
import socket
import stat
import sys
import traceback
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Continues the remedy "chmod 600 FILE".
NO_MODES = "or where that changes nothing (FAT, SMB), copy it to a local disk and set its new path"
EXIT_ERROR = 2  # exit code of a program that ends with a PeraltaError; a crash has another code
DENIED = (errno.EACCES, errno.EPERM)
OTHER_DISK = "its file system cannot do that; choose a folder on another one"
OTHER_NAME = "something else has that name; move it away"
# Errors of a file that waiting does not end, with the remedy; `failure_text` has that of DENIED.
REMEDIES = {
    **dict.fromkeys((errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP), OTHER_DISK),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY), OTHER_NAME),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "choose a shorter name or folder"),
}


class PeraltaError(Exception):
    """Base class of all errors of this package; `str(error)` is one line for the user."""


class ConfigError(PeraltaError): ...


class WireError(PeraltaError): ...


class StoreError(PeraltaError): ...


class ChainError(StoreError):
    """A version, or one that it builds on, is incomplete; a later keyframe may be readable."""


class JournalError(PeraltaError): ...


class OutageError(PeraltaError): ...


class TaskError(PeraltaError): ...


class RewardError(TaskError): ...


class RewardUnavailableError(RewardError):
    """No reward was computed, for a reason other than the completion: a later call may succeed."""


class UserCodeError(PeraltaError): ...


class EngineError(PeraltaError):
    """The model computed logits that are not finite; the engine aborts all requests."""


class EngineProcessError(EngineError):
    """The engine or its process has failed and holds no valid weights; `apply` restores it."""


class TrainingError(PeraltaError):
    """Steps in a row had no finite gradient, or metrics beyond a limit of [early_stop]."""


class RunError(PeraltaError):
    """A run that was started from Python has ended with an error, or cannot be stopped there."""


class OutOfMemoryError(PeraltaError):
    """An allocation failed; the message names settings that need less memory."""


class RankError(PeraltaError): ...


def import_extra(library: str, *, extra: str, needed_by: str) -> Any:
    """Import a library that `extra` of this package installs; ConfigError on failure."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"{needed_by} needs {library} ({error}); pip install 'peralta_zmq[{extra}]'"
        ) from None


def nearest(word: str, choices: Iterable[str]) -> str:
    """The choice that is most similar to a misspelt word; '' if none is."""
    return next(iter(difflib.get_close_matches(word, [*choices], n=1)), "")


def did_you_mean(word: str, choices: Iterable[str], form: str = "{}") -> str:
    """'did you mean X?' for the nearest choice, written as `form`; '' if none is similar."""
    choice = nearest(word, choices)
    return f"did you mean {form.replace('{}', choice)}?" if choice else ""


def choices_text(start: str, word: str, choices: Iterable[str], form: str = "{}") -> str:
    """'START a, b', after 'did you mean a?' if one of the choices is similar to the word."""
    names = [*choices]
    hint = did_you_mean(word, names, form)
    listed = f"{start} {', '.join(names)}"
    return f"{hint} {listed[0].upper()}{listed[1:]}" if hint else listed


def program_name(name: str) -> str:
    """Command of a program as the user has it: peralta-NAME if installed, else bin/NAME."""
    is_installed = os.path.basename(sys.argv[0]).startswith("peralta-")
    return f"peralta-{name}" if is_installed else f"bin/{name}"


def printable(text: str, *, keep: str = "") -> str:
    """Escape unprintable characters, except those in `keep`, in text from other machines."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def prepare_streams() -> None:
    """Open standard streams that are missing; escape what the output's encoding lacks."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # the program was started with a closed descriptor
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard_unwritten_output() -> None:
    """Discard output that cannot be written; at exit it would change the exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def described(error: BaseException) -> str:
    """Type and message of an exception, and where it was raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    try:
        text = printable(" ".join(str(error).split())[:300])
    except Exception:  # noqa: BLE001  a user's exception may raise another one
        text = "without text"
    return f"{type(error).__name__}: {text}{location}"


def is_permanent(error: BaseException | None) -> bool:
    """Whether waiting does not end the error of a file, unlike that of a disk or NAS."""
    return isinstance(error, OSError) and error.errno in (*DENIED, *REMEDIES)


def limit_text(error: BaseException) -> str:
    """The limit of threads or open files that caused an error of a library; '' if none did."""
    if os.strerror(errno.EAGAIN) in str(error) or "can't start new thread" in str(error):
        remedy = "end some, or raise it (ulimit -u, pids.max of the container)"
        return f"the limit of threads and processes is reached; {remedy}"
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))  # Rust reports a missing file instead
    except OSError as reached:
        return failure_text(reached)
    return ""


def failure_text(error: OSError, folder: Path | str = "") -> str:
    """Why a file was not read or written, with the remedy; `folder` if the error names no file."""
    name = folder if isinstance(error.filename, int | None) else os.fsdecode(error.filename)
    path = Path(name)
    reason = error.strerror or str(error)
    if "://" in str(name):  # a server, not a file
        return reason
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            disk = os.statvfs(path if path.exists() else path.parent)
            if disk.f_favail == 0 and disk.f_files:
                return f"{reason}: no inode is left for another file; delete files, also small ones"
        return f"{reason}; make room for it"
    if error.errno in DENIED:  # the file denies it, or the nearest folder that can be seen
        known = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
        owner = os.stat(known).st_uid
        mode = f"mode {stat.S_IMODE(os.stat(known).st_mode):o}"
        reason += f"; {known} belongs to user {owner} ({mode}), and this program runs as user "
        return f"{reason}{os.geteuid()}; give it access (chown, chmod)"
    if error.errno != errno.EMFILE:
        return "; ".join(filter(None, (reason, REMEDIES.get(error.errno or 0))))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    connections = _connections_by_port(limit)
    ports = ", ".join(f"{count} to port {port}" for port, count in connections.most_common())
    return (
        f"{reason}: the limit of this process is {limit}, and {connections.total()} are "
        f"connections ({ports}); close connections, or start the program with a higher limit "
        "(ulimit -n)"
    )


def _connections_by_port(limit: int) -> Counter[int]:
    """Number of connections to each port that this process listens on.

    Opens no file, because the limit of open files is reached. All descriptors are below `limit`.
    """
    listening = set[int]()
    connected = Counter[int]()
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
