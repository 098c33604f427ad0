"""Ways in which a file can be damaged."""

from __future__ import annotations

import os
from pathlib import Path


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
