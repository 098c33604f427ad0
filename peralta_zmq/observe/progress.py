"""How far something is that takes longer than two seconds, and how long it still takes.

Knows counts and a clock; knows nothing of what is counted. On a terminal the line is drawn again
and again in its place; anywhere else there is one line every ten seconds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

PATIENCE = 2.0  # seconds before the first word
LIVELY, CALM = 0.2, 10.0  # seconds between two lines, on a terminal and elsewhere


class Progress:
    """Counts up to `total` in front of a person. Use with `with`.

    `show` takes each text, and "" at the end of one that was drawn in place (`lively`).
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        show: Callable[[str], None],
        lively: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total = what, total
        self._show, self._lively, self._clock = show, lively, clock
        self._started = clock()
        self._due = self._started + PATIENCE
        self._shown = False

    def reach(self, done: int) -> None:
        """So many are done."""
        now = self._clock()
        if now < self._due or done >= self._total:
            return
        self._due = now + (LIVELY if self._lively else CALM)
        self._shown = True
        left = (now - self._started) / max(1, done) * (self._total - done)
        estimate = f", {duration(left)} left" if done else ""
        share = 100 * done // self._total
        self._show(f"{self._what}: {done} of {self._total} ({share}%){estimate}")

    def hide(self) -> None:
        """Make room for something else; what was drawn in place is taken away."""
        if self._shown and self._lively:
            self._shown = False
            self._show("")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hide()


def progress_on(what: str, total: int, stream: TextIO | None = None) -> Progress:
    """Progress on a stream, standard error by default."""
    out = stream or sys.stderr
    lively = out.isatty()

    def show(text: str) -> None:
        out.write(f"\r{text}\x1b[K" if lively else f"{text}\n")
        out.flush()

    return Progress(what, total, show=show, lively=lively)


def duration(seconds: float) -> str:
    """42s, 3m05s, 1h02m; a dash for NaN."""
    if math.isnan(seconds):
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
