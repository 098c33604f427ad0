"""Terminal output of a run: a live table, or plain lines in a file or pipe.

The module also has progress displays with an ETA, and the line that describes a generator.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from operator import length_hint
from typing import TextIO, TypeVar

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peralta_zmq.errors import printable
from peralta_zmq.observe.metrics import Row, format_number, number
from peralta_zmq.observe.run_state import WINDOW, format_duration, seconds_left
from peralta_zmq.observe.verdict import Level, Verdict

Item = TypeVar("Item")

MAX_TABLE_ROWS = 12
# Lines around the rows: title, rules, header, a verdict of up to three lines, and one spare line.
FRAME_LINES = 9
REPEAT_SECONDS = 60.0  # minimum time before a verdict of the same kind is printed again
PROGRESS_DELAY = 2.0  # seconds; shorter operations show no progress
# Seconds between two updates of a progress text: redrawn in place, or printed as a new line.
REDRAW_SECONDS, LINE_SECONDS = 0.2, 10.0
COLORS: dict[Level, str] = {"ok": "green", "warn": "yellow", "bad": "bold red"}
VERSIONS = ("package", "python", "torch", "transformers")  # fields of a generator's info
logger = logging.getLogger(__name__)


class Terminal:
    """Display of a run on `stream` (default: standard output). Use with `with`.

    If the stream is a terminal, a table is redrawn in place ("live"). Otherwise each step, each
    note and each new kind of verdict is printed as one line. The verdict is a sentence on the run's
    bottleneck or fault. Control characters are escaped: texts may come from other machines.
    """

    def __init__(self, max_steps: int, stream: TextIO | None = None, *, run: str = "") -> None:
        self._max_steps, self._run = max_steps, run
        self._stream = stream or sys.stdout
        # The ETA needs the time of WINDOW steps, hence one more row.
        self._rows: deque[Row] = deque(maxlen=WINDOW + 1)
        self._content: RenderableType = Text("waiting for the first step")
        self._printed: dict[str, float] = {}  # kind of verdict (see `_is_new`) -> unix seconds
        self._kind = ""  # kind of the verdict that was printed last
        console = Console(file=self._stream, highlight=False)
        is_live = self._stream.isatty() and not console.is_dumb_terminal
        self._live = Live(self._content, console=console, auto_refresh=False) if is_live else None

    def __enter__(self) -> Terminal:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        """Print one line; on a terminal it appears above the table."""
        text = printable(text)
        if self._live:
            self._live.console.print(text, markup=False, soft_wrap=True)
            self._live.refresh()
        else:
            self._print(text)

    def progress(self, description: str, total: int) -> Progress:
        """Return a progress display of an operation; on a terminal it is below the table."""
        return Progress(description, total, self._show_progress, in_place=bool(self._live))

    def step(self, row: Row, verdict: Verdict | None = None) -> None:
        """Show one row of metrics.jsonl, and the verdict; a repeated verdict gets no line."""
        self._rows.append(row)
        if not self._live:
            self._print(self._step_line(row))
        self._show_verdict(verdict, number(row, "time", 0.0))

    def stall(self, verdict: Verdict, *, now: float) -> None:
        """Show the verdict between two steps (as a line only if its level is "bad").

        `now` is in unix seconds.
        """
        if self._live or verdict.level == "bad":
            self._show_verdict(verdict, now)

    def close(self, text: str) -> None:
        """Print the closing report below the table, which stays visible."""
        if self._live:
            self._live.stop()
        self._print(text)

    def _show_verdict(self, verdict: Verdict | None, now: float) -> None:
        if self._live:
            text = Text(printable(verdict.text), COLORS[verdict.level]) if verdict else Text()
            self._content = Group(self._table(self._live), text) if self._rows else text
            self._live.update(self._content, refresh=True)
        elif verdict and self._is_new(verdict, now):
            self._print(f"verdict: {verdict.text}")

    def _show_progress(self, text: str) -> None:
        if self._live:
            content = Group(self._content, Text(text)) if text else self._content
            self._live.update(content, refresh=True)
        else:
            self._print(text)

    def _is_new(self, verdict: Verdict, now: float) -> bool:
        """False if the last printed verdict, or one in the last minute, was of the same kind.

        The kind of a verdict is its sentence without the numbers.
        """
        kind = re.sub(r"([0-9.]+[hms]?)+", "", verdict.sentence)
        recent = {key: at for key, at in self._printed.items() if 0 <= now - at < REPEAT_SECONDS}
        if kind == self._kind or kind in recent:
            return False
        self._kind, self._printed = kind, {**recent, kind: now}
        return True

    def _print(self, text: str) -> None:
        """Print lines; after a write error, discard further output and continue the run."""
        try:
            self._stream.write(printable(text, keep="\n") + "\n")
            self._stream.flush()
        except OSError as error:
            logger.warning("no more output on this terminal: %s", error.strerror)
            # Without this, closing the stream would flush its buffer and fail again.
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), self._stream.fileno())

    def _step_line(self, row: Row) -> str:
        cells = {
            "step": f"{number(row, 'step'):.0f}/{self._max_steps}",
            "reward": format_number(number(row, "reward"), ".2f"),
            **_cells(row),
            "eta": self._eta(),
        }
        return " ".join(f"{name.replace(' ', '_')}={cell}" for name, cell in cells.items())

    def _table(self, live: Live) -> Table:
        step = number(self._rows[-1], "step")
        share = f"{step / self._max_steps:.0%}"
        title = f"{self._run}  step {step:.0f} of {self._max_steps} ({share})  {self._eta()} left"
        table = Table(title=title.strip(), title_justify="left")
        for name in ("step", "reward", "", *_cells({})):  # "" = bar of the reward, 10 columns wide
            table.add_column(name, justify="right", no_wrap=True, width=None if name else 10)
        num_rows = max(1, min(MAX_TABLE_ROWS, live.console.height - FRAME_LINES))
        for row in list(self._rows)[-num_rows:]:
            reward = number(row, "reward")
            bar = Bar(1.0, 0.0, max(0.0, min(1.0, reward)), color="green")
            cells = f"{number(row, 'step'):.0f}", format_number(reward, ".2f")
            table.add_row(*cells, "" if math.isnan(reward) else bar, *_cells(row).values())
        return table

    def _eta(self) -> str:
        steps_left = self._max_steps - number(self._rows[-1], "step")
        return format_duration(seconds_left(self._rows, steps_left))


class Progress:
    """Progress with ETA for operations longer than two seconds. Use with `with`.

    `show` is called with each new text. If `in_place` is True, each text replaces the previous text
    and an empty text clears the display; otherwise each text is a new line.
    """

    def __init__(
        self, description: str, total: int, show: Callable[[str], None], *, in_place: bool
    ) -> None:
        self._description, self._total = description, total
        self._show, self._in_place = show, in_place
        self._start = time.monotonic()
        self._next_update = self._start + PROGRESS_DELAY

    def update(self, done: int) -> None:
        """Report that `done` of `total` items are finished."""
        now = time.monotonic()
        if now < self._next_update or done >= self._total:
            return
        self._next_update = now + (REDRAW_SECONDS if self._in_place else LINE_SECONDS)
        seconds = (now - self._start) / max(1, done) * (self._total - done)
        eta = f", {format_duration(seconds)} left" if done else ""
        share = 100 * done // self._total
        self._show(f"{self._description}: {done} of {self._total} ({share}%){eta}")

    def hide(self) -> None:
        """Remove a text drawn in place, so that something else can be printed."""
        if self._in_place:
            self._show("")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.hide()


def progress_on_stderr(description: str, total: int) -> Progress:
    """Return a progress display on standard error."""
    in_place = sys.stderr.isatty()

    def show(text: str) -> None:
        sys.stderr.write(f"\r{text}\x1b[K" if in_place else f"{text}\n")
        sys.stderr.flush()

    return Progress(description, total, show, in_place=in_place)


def track(description: str, items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items; show progress if their number is known (length hint)."""
    with progress_on_stderr(description, length_hint(items)) as progress:
        for count, item in enumerate(items):
            progress.update(count)
            yield item


def worker_info_text(generator: str, info: Mapping[str, str], *, trainer: Mapping[str, str]) -> str:
    """Describe a generator: device, threads, versions other than the trainer's.

    For example 'generator jetson: cuda:0 float16, threads: 6; torch 2.6.0 (trainer: 2.13.0)'.
    `trainer` has the same fields for the trainer. `info` comes from another machine and may lack
    fields.
    """
    device = " ".join(info[key] for key in ("device", "dtype") if key in info) or "device unknown"
    threads = f", threads: {info['threads']}" if "threads" in info else ""
    differences = [
        f"{'peralta_zmq' if key == 'package' else key} {info[key]} "
        f"(trainer: {trainer.get(key, 'unknown')})"
        for key in VERSIONS
        if key in info and info[key] != trainer.get(key)
    ]
    comparison = ", ".join(differences) or "same versions as the trainer"
    return f"generator {generator}: {device}{threads}; {comparison}"


def _cells(row: Row) -> dict[str, str]:
    """Return the formatted values of a row of metrics.jsonl, by column of the table."""
    seconds = number(row, "step_time")
    rollouts_per_s = number(row, "num_rollouts") / seconds if seconds > 0 else math.nan
    return {
        "no signal": format_number(number(row, "frac_reward_zero_std"), ".0%"),
        "staleness": format_number(number(row, "staleness/mean"), ".1f"),
        "queue": format_number(number(row, "queue/depth"), ".0f"),
        "wait": format_number(number(row, "time/wait_for_batch"), ".2f", "s"),
        "rollouts/s": format_number(rollouts_per_s, ".0f"),
        "generators": format_number(number(row, "generators"), ".0f"),
    }
