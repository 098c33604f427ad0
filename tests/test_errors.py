"""Error texts of a failed write and of a missing file descriptor."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from peralta_zmq.errors import failure_text, limit_text


def test_failure_without_a_descriptor_names_limit_and_remedy() -> None:
    text = failure_text(OSError(errno.EMFILE, "Too many open files"))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert text == (
        f"Too many open files: the limit of this process is {limit}; close connections, or start "
        "the program with a higher limit (ulimit -n)"
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
