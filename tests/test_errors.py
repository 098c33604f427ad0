"""Error texts of a failed write and of a missing file descriptor."""

from __future__ import annotations

import errno
import os
import resource
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from peralta_zmq.errors import failure_text, limit_text

FILES = resource.RLIMIT_NOFILE


def test_failure_without_a_descriptor_names_ports_and_remedy(
    stack: ExitStack, open_file_limits: tuple[int, int]
) -> None:
    servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
    ports = [server.getsockname()[1] for server in servers]
    for server, count in zip(servers, (3, 1), strict=True):
        for _ in range(count):
            stack.enter_context(closing(socket.create_connection(server.getsockname(), 10)))
            stack.enter_context(server.accept()[0])
    resource.setrlimit(FILES, (max(map(int, os.listdir("/dev/fd"))) + 1, open_file_limits[1]))
    with pytest.raises(OSError, match="Too many open files") as raised:
        for _ in range(10_000):
            descriptor = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, descriptor)
    text = failure_text(raised.value)
    limit = resource.getrlimit(FILES)[0]
    assert text.startswith(f"Too many open files: the limit of this process is {limit}, and ")
    assert f"3 to port {ports[0]}" in text and f"1 to port {ports[1]}" in text
    assert text.endswith(
        "; close connections, or start the program with a higher limit (ulimit -n)"
    )


def test_failure_of_a_full_disk_asks_for_room() -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    assert failure_text(error) == "No space left on device; make room for it"
    assert failure_text(OSError(errno.EROFS, "Read-only file system")) == "Read-only file system"


def test_denied_access_names_owner_mode_and_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    user = os.geteuid()
    for path in (tmp_path, tmp_path / "missing"):  # the folder hides the file
        text = failure_text(PermissionError(errno.EACCES, "Permission denied", str(path)))
        assert text == (
            f"Permission denied; {tmp_path} belongs to user {user} (mode 750), and this program "
            f"runs as user {user}; give it access (chown, chmod)"
        )


def test_disk_without_inodes_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs(tmp_path)
    fields = [*status]
    fields[6], fields[7] = 0, 0  # f_ffree, f_favail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "new"))
    assert "no inode is left" in failure_text(error)


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (RuntimeError("can't start new thread"), "the limit of threads"),
        (OSError("Resource temporarily unavailable (os error 11)"), "the limit of threads"),
        (RuntimeError("invalid shape"), ""),
    ],
)
def test_limit_of_threads_is_named(error: Exception, limit: str) -> None:
    assert limit_text(error).startswith(limit) and bool(limit_text(error)) == bool(limit)
