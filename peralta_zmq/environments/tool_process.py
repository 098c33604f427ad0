"""Execution of tool calls: each in a child process with limits of the operating system.

The child is a fork of the reward worker, so that it has the tool's module without importing it, in
the worker's process group, so that it ends with the worker, and in a temporary directory. The
limits are no sandbox for hostile code (docs/security.md). The tool `python` runs in a container
instead, where podman is installed (code_tool.py).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn

import psutil

from peralta_zmq.environments.code_tool import python, run_in_container
from peralta_zmq.rollout import Message, ToolCall
from peralta_zmq.signatures import call_error

MAX_RESULT_CHARACTERS = 4096
# For seccomp: architecture; shmget, semget, msgget, mq_open, memfd_create, memfd_secret
REFUSED_CALLS = {
    "x86_64": (0xC000003E, 29, 64, 68, 240, 319, 447),
    "aarch64": (0xC00000B7, 194, 190, 186, 180, 279, 447),
}
FOLDER = f"peralta-tool-{os.uname().nodename}-"  # machines may share the temporary folder


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent has ended, to kill them later.

    On Linux as root, where a tool can start processes.
    """
    if sys.platform == "linux" and os.getuid() == 0:
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def continue_after_parent() -> None:
    """Let a stop of this process end with its parent, so that it can end, too. On Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGCONT, 0, 0, 0)  # PR_SET_PDEATHSIG


def tool_messages(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Callable[..., Any]],
    *,
    timeout_seconds: float,
) -> list[Message]:
    """Execute calls one after the other; the results are messages of the role `tool`.

    All together may take `timeout_seconds`. A call that fails results in a message that begins with
    'error: '. Raises OSError if there is no folder or process for a call.
    """
    deadline = time.monotonic() + timeout_seconds
    messages: list[Message] = []
    for call in calls:
        try:
            text = _result(call, tools, deadline)
        except TimeoutError:
            text = f"error: the tools took longer than {timeout_seconds:g} s"
        messages.append(Message("tool", text, call.name))
    return messages


def _result(call: ToolCall, tools: Mapping[str, Callable[..., Any]], deadline: float) -> str:
    if call.error:
        return f"error: {call.error}"
    if call.name not in tools:
        return f"error: there is no tool {call.name!r:.80}; choose one of {', '.join(tools)}"
    if error := call_error(tools[call.name], **call.arguments):
        return f"error: {call.name}: {error}"
    code = call.arguments.get("code")
    if tools[call.name] is python and isinstance(code, str):
        text = run_in_container(code, deadline=deadline)
        if text is not None:
            return _shortened(text)
    return _execute(tools[call.name], call.arguments, deadline)


def _execute(tool: Callable[..., Any], arguments: Mapping[str, Any], deadline: float) -> str:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    earlier = _descendants()
    reader, writer = Pipe(duplex=False)
    folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-")
    try:
        with reader, writer:
            with warnings.catch_warnings():
                # The worker's other thread only waits for the end of stdin.
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if process == 0:
                _run_child(tool, arguments, folder, writer.fileno(), seconds)
            writer.close()
            try:
                result = _read(reader.fileno(), deadline)
            finally:
                status = _kill(process, earlier)
    finally:
        _delete(Path(folder))
    if result is None:
        code = os.waitstatus_to_exitcode(status)
        reason = signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"error: {tool.__name__} ended without a result ({reason})"
    return result


def delete_folders(worker: int) -> None:
    """Delete the folders of a reward worker that was killed during a call."""
    with suppress(OSError):  # a full disk has no folder for temporary files
        for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}{worker}-*"):
            _delete(folder)


def kill_descendants(process: int) -> None:
    """Kill the processes below a process, also those that have left its group.

    Then none of them can replace a folder that is deleted by a link to another one.
    """
    with suppress(psutil.Error):
        below = psutil.Process(process).children(recursive=True)
        for each in below:
            with suppress(psutil.Error):
                each.kill()
        deadline = time.monotonic() + 1.0
        while any(map(_runs, below)) and time.monotonic() < deadline:
            time.sleep(0.001)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _delete(folder: Path) -> None:
    """Delete a folder that no process changes, with subfolders of any depth and mode."""
    folders = [] if folder.is_symlink() else [folder]
    for path in folders:
        with suppress(OSError):
            os.chmod(path, 0o700)
            for entry in [*os.scandir(path)]:
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry, 0o700)
                    folders.append(folder / os.urandom(16).hex())  # shutil.rmtree would recurse
                    os.rename(entry, folders[-1])
    shutil.rmtree(folder, ignore_errors=True)


def _descendants() -> set[psutil.Process]:
    """The processes below this one; empty unless a tool can start some, which needs root."""
    return set(psutil.Process().children(recursive=True)) if os.getuid() == 0 else set()


def _kill(process: int, earlier: set[psutil.Process]) -> int:
    """Kill the process of a tool and those that it started; returns its wait status."""
    started = _descendants() - earlier
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    while started:
        for each in started:
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                each.kill()
                os.waitpid(each.pid, os.WNOHANG)  # this process may have adopted it
        started = _descendants() - earlier
    return status


def _read(reader: int, deadline: float) -> str | None:
    """The result in a pipe, None if there is none. Raises TimeoutError at the deadline.

    A result ends with a zero byte, because children of the tool may keep the pipe open.
    """
    content = b""
    max_bytes = 4 * MAX_RESULT_CHARACTERS + 100  # UTF-8, with the note that it was cut
    while not content.endswith(b"\0"):
        readable, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise TimeoutError
        if not (part := os.read(reader, 1 << 16)) or len(content) > max_bytes:
            return None
        content += part
    return content[:-1].decode(errors="replace")


# In the child process.


def _run_child(
    tool: Callable[..., Any], arguments: Mapping[str, Any], folder: str, writer: int, seconds: float
) -> NoReturn:
    process = os.getpid()
    try:
        _close_files(keep=writer)
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        tempfile.tempdir = None  # read TMPDIR again
        _limit_resources(seconds)
        if sys.platform == "linux":
            _forbid_other_memory()
            _forbid_writes_outside(folder)
        try:
            result = tool(**arguments)
            text = result if isinstance(result, str) else json.dumps(result, default=str)
        except Exception as error:  # noqa: BLE001  a tool may raise anything
            text = f"error: {type(error).__name__}: {error}"
        if os.getpid() == process:  # not a child of the tool
            encoded = memoryview(_shortened(text).encode(errors="replace") + b"\0")
            while encoded:
                encoded = encoded[os.write(writer, encoded) :]
            signal.pause()  # until the worker kills this process and its children
    finally:
        os._exit(1)  # without the exit handlers of the worker


def _shortened(text: str) -> str:
    if len(text) > MAX_RESULT_CHARACTERS:
        text = f"{text[:MAX_RESULT_CHARACTERS]}... (cut at {MAX_RESULT_CHARACTERS} characters)"
    return text.replace("\0", " ")


def _close_files(*, keep: int) -> None:
    """Close all files of the worker but one; standard streams become /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.closerange(3, keep)
    os.closerange(keep + 1, max(keep + 1, null + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _limit_resources(seconds: float) -> None:
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_FSIZE: 16 << 20,  # bytes of each file
        resource.RLIMIT_NPROC: 0,  # without effect on root
        resource.RLIMIT_CORE: 0,
        # 512 MiB more than the reward worker.
        resource.RLIMIT_AS: psutil.Process().memory_info().vms + (512 << 20),
    }
    for kind, limit in limits.items():
        with suppress(ValueError, OSError):  # macOS does not limit memory
            resource.setrlimit(kind, (limit, limit))


def _forbid_other_memory() -> None:
    """Refuse this process memory that has no limit or that outlives it, by a seccomp filter."""
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which filters and Landlock need
    architecture, *calls = REFUSED_CALLS.get(os.uname().machine, (0,))
    if not calls or sys.maxsize < 1 << 32:
        return
    lines = [
        (0x20, 0, 0, 4),  # load the architecture of the call
        (0x15, 0, len(calls) + 2, architecture),  # to the last line if it is another one
        (0x20, 0, 0, 0),  # load the number of the call
        *((0x15, len(calls) - index, 0, call) for index, call in enumerate(calls)),
        (0x06, 0, 0, 0x7FFF0000),  # allow
        (0x06, 0, 0, 0x00050001),  # refuse with error 1, EPERM
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    # PR_SET_SECCOMP with SECCOMP_MODE_FILTER
    libc.prctl(22, 2, struct.pack("HP", len(lines), ctypes.addressof(program)), 0, 0)


def _forbid_writes_outside(folder: str) -> None:
    """Leave this process no right to change files elsewhere, by Landlock (Linux 5.13)."""
    libc = ctypes.CDLL(None, use_errno=True)
    create_ruleset = 444
    add_rule = 445
    restrict_self = 446
    version = libc.syscall(create_ruleset, None, 0, 1)  # 1: return the version
    if version < 1:
        return
    # The first version has 13 rights: all but those to execute and read files, and to list folders.
    rights = 0x1FFF & ~(1 << 0 | 1 << 2 | 1 << 3)
    if version >= 3:
        rights |= 1 << 14  # truncate files
    handled = ctypes.c_uint64(rights)
    rules = libc.syscall(create_ruleset, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    rule = struct.pack("=Qi", rights, os.open(folder, os.O_RDONLY))
    libc.syscall(add_rule, rules, 1, rule, 0)  # 1: LANDLOCK_RULE_PATH_BENEATH
    libc.syscall(restrict_self, rules, 0)
