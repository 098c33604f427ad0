"""The tool `python`, without podman and, where it is installed, in a container."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from peralta_zmq.environments.code_tool import python, run_in_container
from peralta_zmq.environments.tool_calls import schema_of
from peralta_zmq.environments.tool_process import tool_messages
from peralta_zmq.rollout import ToolCall

needs_podman = pytest.mark.skipif(
    shutil.which("podman") is None or "PERALTA_PYTHON_IMAGE" not in os.environ,
    reason="needs podman, and an image in PERALTA_PYTHON_IMAGE",
)


def run(code: str, *, seconds: float = 20.0) -> str:
    call = ToolCall("python", {"code": code})
    (message,) = tool_messages([call], {"python": python}, timeout_seconds=seconds)
    return message.content


def in_container(code: str, *, seconds: float = 60.0) -> str:
    output = run_in_container(code, deadline=time.monotonic() + seconds)
    assert output is not None
    return output


@pytest.fixture
def without_podman(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


@pytest.mark.usefixtures("without_podman")
@pytest.mark.parametrize(("code", "result"), [
    ("print(6 * 7)\nprint('done')", "42\ndone\n"),
    ("import sys; print('no', file=sys.stderr)", "no\n"),
    ("", ""),
])  # fmt: skip
def test_result_is_what_the_code_prints(code: str, result: str) -> None:
    assert run(code) == result


@pytest.mark.usefixtures("without_podman")
@pytest.mark.parametrize(("code", "result"), [
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("a b", "SyntaxError"),
    ("raise SystemExit(3)", "error: python ended without a result (exit code 1)"),
    ("while True: pass", "error: the tools took longer than 1 s"),
    ("open('/var/tmp/elsewhere', 'w')", "PermissionError"),
])  # fmt: skip
def test_code_without_podman_has_the_limits_of_tools(code: str, result: str) -> None:
    assert result in run(code, seconds=1.0)


def test_schema_has_the_code() -> None:
    function = schema_of(python)["function"]
    assert function["name"] == "python"
    assert function["parameters"]["required"] == ["code"]


@needs_podman
def test_tool_runs_in_a_container() -> None:
    assert run("import os; print(os.getuid(), os.getcwd())") == "65534 /tmp\n"


@needs_podman
def test_container_has_no_network_and_no_files_of_the_user() -> None:
    connect = "import socket\nsocket.create_connection(('1.1.1.1', 53), 2)"
    assert "OSError" in in_container(connect)
    assert "OSError" in in_container("open('/usr/x', 'w')")
    code = f"import os; print(os.path.exists({__file__!r}), os.getuid())"
    assert in_container(code) == "False 65534\n"


@needs_podman
def test_container_ends_at_the_deadline_and_with_too_much_output() -> None:
    in_container("")  # the check is over
    with pytest.raises(TimeoutError):
        in_container("while True: pass", seconds=3.0)
    assert len(in_container("while True: print('x' * 1000)")) >= 1 << 20


@needs_podman
def test_container_has_little_memory() -> None:
    assert "42" not in in_container("x = bytearray(1 << 30); print(42)")


@needs_podman
def test_image_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from peralta_zmq.environments import code_tool

    code_tool.check_podman.cache_clear()
    monkeypatch.setenv("PERALTA_PYTHON_IMAGE", "localhost/no-such-image")
    with pytest.raises(OSError, match="podman cannot run Python"):
        in_container("")
    code_tool.check_podman.cache_clear()
