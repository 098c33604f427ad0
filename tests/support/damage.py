"""Damaged files, failing system calls, and arbitrary values for the fields of a message."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def zero_tail(file: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, size - 1)
    os.truncate(file, size)


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


CHANGES = (truncate, zero_tail, flip_bit, append)

# Any value that msgpack can encode, for the fields of a message.
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5) | st.binary(max_size=60),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=3) | st.binary(max_size=3), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip

CALLS = ["open", "write", "read", "fsync", "close", "rename", "replace", "mkdir", "listdir",
         "statvfs", "lseek", "unlink", "rmdir", "utime", "scandir"]  # fmt: skip


class FailingCall:
    """Lets the nth call of these functions of `os` fail once, counted together."""

    def __init__(
        self, patched: pytest.MonkeyPatch, nth: int, code: int, *, names: Sequence[str] = CALLS
    ) -> None:
        self.num_calls, self._nth, self._code = 0, nth, code
        for name in names:
            patched.setattr(os, name, self._wrap(name))

    def _wrap(self, name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self._nth:
                if name == "close":  # a failed close has closed the descriptor
                    function(*args, **kwargs)
                raise OSError(self._code, os.strerror(self._code))
            return function(*args, **kwargs)

        return call
