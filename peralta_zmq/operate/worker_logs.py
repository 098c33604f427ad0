"""Logs of workers: rotated, and read from their end or across a rotation."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from peralta_zmq.errors import printable

NUM_LOG_LINES = 20  # last lines of a log that are printed after a failure
MAX_LOG_BYTES = 8 << 20  # longer logs are rotated


class LogPrinter:
    """Prints the last `lines` lines of each log that exists, then new lines of all logs."""

    def __init__(self, logs: Mapping[str, Path], *, lines: int) -> None:
        self._logs = logs
        self.offsets = {  # position of the next byte, by name
            name: tail_offset(log, lines) for name, log in logs.items() if log.exists()
        }

    def print_new(self) -> bool:
        """Print the lines since the last call; True if there were any."""
        has_printed = False
        for name, log in self._logs.items():
            if log.exists():
                lines, self.offsets[name] = read_new_lines(log, self.offsets.get(name, 0))
                sys.stdout.writelines(f"{name} | {printable(line)}\n" for line in lines)
                has_printed |= bool(lines)
        sys.stdout.flush()
        return has_printed


def tail_of(log: Path) -> list[str]:
    """The last NUM_LOG_LINES lines of a log, and one for a message of the supervisor."""
    lines: list[str] = []
    for file in (log, _rotated(log)):
        with suppress(OSError):  # missing, or on a disk that is gone
            if len(lines) <= NUM_LOG_LINES:
                with file.open("rb") as opened:
                    opened.seek(max(0, file.stat().st_size - (64 << 10)))
                    lines = opened.read().decode("utf-8", "replace").splitlines() + lines
    return lines[-NUM_LOG_LINES - 1 :]


def rotate_log(log: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move the content of a log longer than `max_bytes` to NAME.log.1.

    Its writers keep it open in append mode, so it is truncated in place; a line that is written
    between the copy and the truncation is lost.
    """
    if not log.exists() or log.stat().st_size <= max_bytes:
        return
    problem = ""
    copy = log.with_name(f"{log.name}.tmp")
    try:
        shutil.copyfile(log, copy)
        os.replace(copy, _rotated(log))
    except OSError as error:  # usually a full disk; truncate the log anyway, to free space
        problem = f"{log} was truncated without a copy: {error}\n"
        copy.unlink(missing_ok=True)
    os.truncate(log, 0)
    write_output(sys.stderr, problem)


def tail_offset(log: Path, lines: int) -> int:
    """Byte offset at which the last `lines` lines of a log begin."""
    with log.open("rb") as file:
        all_lines = file.readlines()
    return sum(map(len, all_lines[: max(0, len(all_lines) - lines)]))


def read_new_lines(log: Path, offset: int) -> tuple[list[str], int]:
    """The complete lines after a byte offset, and the offset after them.

    If the log was rotated in between, lines of the rotated file come first.
    """
    if log.stat().st_size >= offset:
        return _read_lines(log, offset)
    rotated_lines, _ = _read_lines(_rotated(log), offset)
    new_lines, offset = _read_lines(log, 0)
    return rotated_lines + new_lines, offset


def _read_lines(log: Path, offset: int) -> tuple[list[str], int]:
    if not log.exists():
        return [], offset
    with log.open("rb") as file:
        file.seek(offset)
        complete, newline, _ = file.read().rpartition(b"\n")
    lines = complete.decode("utf-8", errors="replace").split("\n") if newline else []
    return lines, offset + len(complete) + len(newline)


def _rotated(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")


def write_output(stream: TextIO, text: str) -> None:
    """Write text; a full disk or a closed terminal must not end the supervisor."""
    with suppress(OSError):
        stream.write(text)
        stream.flush()
