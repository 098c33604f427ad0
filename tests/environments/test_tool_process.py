"""Tool calls with faults: each results in a message that names the fault."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from real_programs import has_ended, until

from peralta_zmq.environments.tool_process import tool_messages
from peralta_zmq.rollout import Message, ToolCall

HAS_LANDLOCK = sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) >= 3


def add(a: int, b: int) -> int:
    return a + b


def fail() -> None:
    raise ValueError("no way")


def leave() -> None:
    os._exit(3)


def hang() -> None:
    time.sleep(60)


def flood() -> None:
    while True:  # not with `print`, which pytest connects with another file
        os.write(1, b"x" * 100_000)


def long_result() -> str:
    return "é" * 10_000_000


def allocate() -> int:
    # More than earlier tests can have left in the heap of this process, which a tool inherits.
    return len(b"x" * (32 << 30))


def limits() -> list[int]:
    kinds = resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC
    return [resource.getrlimit(kind)[1] for kind in kinds]


def start_process() -> str:
    """Its child keeps the pipe for the result open."""
    return str(os.fork() or time.sleep(60))


def large_file() -> str:
    with open("large", "wb") as file:
        for _ in range(100):
            file.write(bytes(1 << 20))
    return "written"


def write(path: str) -> str:
    Path(path).write_text("x")
    return os.getcwd()


def truncate(path: str) -> None:
    os.truncate(path, 0)


def nothing() -> str:
    return ""


def nest() -> str:
    folder = os.getcwd()
    for _ in range(1500):  # more than Python's recursion limit, and too long for a path
        os.mkdir("a" * 100)
        os.chdir("a" * 100)
    Path("file").touch()
    os.chmod(folder, 0)
    return folder


def system_v_memory() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if (segment := libc.shmget(0, 1 << 20, 0o1600)) == -1:
        raise OSError(ctypes.get_errno(), "shmget")
    libc.shmctl(segment, 0, None)


def anonymous_file() -> None:
    os.memfd_create("file")


TOOLS: dict[str, Any] = {
    tool.__name__: tool
    for tool in (
        add, fail, leave, hang, flood, long_result, allocate, limits, start_process,
        large_file, write, truncate, nothing, nest, system_v_memory, anonymous_file,
    )
}  # fmt: skip


def results(*calls: ToolCall, timeout_seconds: float = 20) -> list[str]:
    messages = tool_messages(calls, TOOLS, timeout_seconds=timeout_seconds)
    assert [message.role for message in messages] == ["tool"] * len(calls)
    assert [message.name for message in messages] == [call.name for call in calls]
    return [message.content for message in messages]


def result(name: str, *, timeout_seconds: float = 20, **arguments: object) -> str:
    (content,) = results(ToolCall(name, arguments), timeout_seconds=timeout_seconds)
    return content


def test_results_of_calls_are_messages_in_order() -> None:
    calls = ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": [1], "b": [2, 3]})
    assert results(*calls) == ["3", "[1, 2, 3]"]
    assert tool_messages(calls[:1], TOOLS, timeout_seconds=20) == [Message("tool", "3", "add")]


@pytest.mark.parametrize(("call", "message"), [
    (ToolCall("add", {"a": 1, "b": "2"}), "error: TypeError: unsupported operand"),
    (ToolCall("add", {"a": 1}), "error: add: missing a required argument: 'b'"),
    (ToolCall("remove"), "error: there is no tool 'remove'; choose one of add, fail"),
    (ToolCall("", error="no JSON"), "error: no JSON"),
    (ToolCall("fail"), "error: ValueError: no way"),
    (ToolCall("leave"), "error: leave ended without a result (exit code 3)"),
    (ToolCall("large_file"), "error: OSError: [Errno 27] File too large"),
])  # fmt: skip
def test_failed_call_results_in_an_error_message(call: ToolCall, message: str) -> None:
    assert results(call)[0].startswith(message)


def test_empty_result_is_a_result() -> None:
    assert result("nothing") == ""


@pytest.mark.parametrize("name", ["hang", "flood"])
def test_call_is_ended_at_the_deadline_which_all_share(name: str) -> None:
    late = "error: the tools took longer than 0.2 s"
    assert results(ToolCall(name), ToolCall("fail"), timeout_seconds=0.2) == [late, late]


def test_long_result_is_cut() -> None:
    text = result("long_result")
    assert text == "é" * 4096 + "... (cut at 4096 characters)"


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit memory")
def test_memory_is_limited() -> None:
    assert result("allocate").startswith("error: MemoryError")


def test_cpu_time_file_size_and_processes_are_limited() -> None:
    assert result("limits", timeout_seconds=9.5) == "[10, 16777216, 0]"


def test_processes_of_a_tool_end_with_the_call() -> None:
    text = result("start_process")
    if os.getuid() == 0:  # Linux does not limit the processes of root
        until(lambda: has_ended(int(text)))
    else:
        assert text.startswith("error: BlockingIOError")


def test_call_has_a_folder_that_is_deleted() -> None:
    folder = result("write", path="file")
    assert folder.startswith(tempfile.gettempdir()) and not Path(folder).exists()


def test_nested_folders_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        assert result("nest").startswith(str(tmp_path)) and not list(tmp_path.iterdir())
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path)])  # pytest could not delete them


@pytest.mark.skipif(sys.platform != "linux", reason="needs seccomp")
@pytest.mark.parametrize("name", ["system_v_memory", "anonymous_file"])
def test_memory_outside_of_the_limits_is_refused(name: str) -> None:
    assert result(name).startswith("error: PermissionError: [Errno 1]")


@pytest.mark.skipif(not HAS_LANDLOCK, reason="needs Linux 6.2 with Landlock")
def test_files_outside_the_folder_cannot_be_changed(tmp_path: Path) -> None:
    outside = tmp_path / "file"
    assert result("write", path=str(outside)).startswith("error: PermissionError")
    assert not outside.exists()
    outside.write_text("x")
    assert result("truncate", path=str(outside)).startswith("error: PermissionError")
    assert outside.read_text() == "x"
