"""A worker's log: appended to by whoever has it open, bounded by us, read by place.

What became too much is kept once, in NAME.log.1. Knows files; knows nothing of who writes them.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

MOST = 8 << 20  # bytes of a log; with the one before it twice as many


def bound(log: Path, *, most: int = MOST) -> None:
    """Let a log begin anew once it is longer than `most` bytes; what it held replaces NAME.log.1.

    Emptied in place, as its writers hold it open (and append): a line that comes between the copy
    and that is lost.
    """
    try:
        if log.stat().st_size <= most:
            return
    except FileNotFoundError:  # we were started by hand, and write to a terminal
        return
    problem, copy = "", log.with_name(f"{log.name}.tmp")
    try:
        shutil.copyfile(log, copy)
        os.replace(copy, _before(log))
    except OSError as error:  # a full disk, mostly: that must not make it fuller
        problem = f"{log} begins anew, and what it held could not be kept: {error}\n"
        copy.unlink(missing_ok=True)
    os.truncate(log, 0)
    sys.stderr.write(problem)


def near_end(log: Path, lines: int) -> int:
    """The place, in bytes, from where on a log has so many lines."""
    with log.open("rb") as opened:
        every = opened.readlines()
    return sum(map(len, every[: max(0, len(every) - lines)]))


def lines_since(log: Path, place: int) -> tuple[list[str], int]:
    """Whole lines that came after a place, and the place after them.

    Of a log that has begun anew meanwhile, those that the one before it had are first.
    """
    if log.stat().st_size >= place:
        return _whole_lines(log, place)
    rest, _ = _whole_lines(_before(log), place)
    more, place = _whole_lines(log, 0)
    return rest + more, place


def tail(log: Path, lines: int) -> list[str]:
    """The last lines of a log and, if it has just begun anew, of the one before it."""
    last: list[str] = []
    for each in (log, _before(log)):
        if len(last) < lines and each.exists():
            last = each.read_text("utf-8", errors="replace").splitlines() + last
    return last[-lines:]


def _whole_lines(log: Path, place: int) -> tuple[list[str], int]:
    if not log.exists():
        return [], place
    with log.open("rb") as opened:
        opened.seek(place)
        whole, end, _ = opened.read().rpartition(b"\n")
    lines = whole.decode("utf-8", errors="replace").split("\n") if end else []
    return lines, place + len(whole) + len(end)


def _before(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")
