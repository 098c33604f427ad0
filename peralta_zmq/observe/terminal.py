"""Terminal output of a run: a live table, or plain lines in a file or pipe; progress displays."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from operator import length_hint
from typing import Any, TextIO, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peralta_zmq.errors import printable
from peralta_zmq.observe.metrics import Row, format_number, number
from peralta_zmq.observe.run_state import WINDOW, format_duration, seconds_left
from peralta_zmq.observe.verdict import Level, Verdict

Item = TypeVar("Item")

WAIT_LOG_SECONDS = 60.0  # between two log lines of one wait
BAR = ""  # column with the reward as a bar
# Columns that a narrow terminal lacks, the first one first.
DROPPED = (BAR, "generators", "queue", "staleness", "no signal", "wait", "rollouts/s")
COLORS: dict[Level, str] = {"ok": "green", "warn": "yellow", "bad": "bold red"}
logger = logging.getLogger(__name__)


class Terminal:
    """Display of a run on `stream` (default: standard output). Use with `with`.

    On a terminal, a table is redrawn in place. Otherwise each step, note and new kind of verdict is
    one line. Control characters are escaped: texts may come from other machines.
    """

    def __init__(
        self,
        max_steps: int,
        stream: TextIO | None = None,
        *,
        run: str = "",
        live: Live | CellDisplay | None = None,
    ) -> None:
        """`live` is where to draw the table; None: on `stream`, if it is a terminal."""
        self._max_steps = max_steps
        self._run = run
        self._stream = stream or sys.stdout
        # The ETA needs the time of WINDOW steps, hence one more row.
        self._rows: deque[Row] = deque(maxlen=WINDOW + 1)
        self._content: RenderableType = Text("starting")
        self._printed: dict[str, float] = {}  # kind of verdict (see `_is_new`) -> unix seconds
        self._kind = ""  # kind of the verdict that was printed last
        self._waited_at = -math.inf  # monotonic seconds of the latest line about a wait
        console = Console(file=self._stream, highlight=False)
        is_live = self._stream.isatty() and not console.is_dumb_terminal
        if live is None and is_live:
            live = Live(self._content, console=console, auto_refresh=False)
        self._live = live

    def __enter__(self) -> Terminal:
        if isinstance(self._live, Live):
            self._live.start(refresh=True)
            self._live.console.show_cursor(True)  # for the shell, if this process is stopped
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCONT, self._draw_below)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if isinstance(self._live, Live):
            self._live.stop()

    def _draw_below(self, number: int, frame: object) -> None:
        """After Ctrl-Z and `fg`, move down: the next drawing would erase lines of the shell."""
        if isinstance(self._live, Live) and self._live.is_started:
            height = len(self._live.console.render_lines(self._live.renderable))
            os.write(self._stream.fileno(), b"\n" * height)

    def note(self, text: str) -> None:
        text = printable(text)
        if self._live:
            self._live.console.print(text, markup=False, soft_wrap=True)
            self._live.refresh()
        else:
            self._print(text)

    def wait(self, text: str) -> None:
        """Show a wait: below the table until the next update, or off a terminal once a minute."""
        if self._live:
            self._show_progress(printable(text))
        elif (now := time.monotonic()) - self._waited_at >= WAIT_LOG_SECONDS:
            self._waited_at = now
            self._print(text)

    def progress(self, description: str, total: int) -> Progress:
        return Progress(description, total, self._show_progress, in_place=bool(self._live))

    def step(self, row: Row, verdict: Verdict | None = None) -> None:
        """Show one row of metrics.jsonl, and the verdict; a repeated verdict gets no line."""
        self._rows.append(row)
        if not self._live:
            cells = {**_cells(row), "eta": self._eta()}
            cells["step"] += f"/{self._max_steps}"
            self._print(" ".join(f"{name.replace(' ', '_')}={cells[name]}" for name in cells))
        self._show_verdict(verdict, number(row, "time", 0.0))

    def stall(self, verdict: Verdict, *, now: float) -> None:
        """Show the verdict between two steps (as a line only if its level is "bad")."""
        if self._live or verdict.level == "bad":
            self._show_verdict(verdict, now)

    def close(self, text: str) -> None:
        if isinstance(self._live, Live):
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
        """Whether no verdict of this kind was the last one or was printed in the last minute.

        The kind of a verdict is its sentence without the numbers.
        """
        kind = _without_numbers(verdict.sentence)
        recent = {key: at for key, at in self._printed.items() if 0 <= now - at < 60.0}
        if kind == self._kind or kind in recent:
            return False
        self._kind = kind
        self._printed = {**recent, kind: now}
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

    def _table(self, live: Live | CellDisplay) -> Table:
        step = number(self._rows[-1], "step")
        share = f"{step / self._max_steps:.0%}"
        title = f"{self._run}  step {step:.0f} of {self._max_steps} ({share})  {self._eta()} left"
        table = Table(title=title.strip(), title_justify="left")
        # 9 lines: title, rules, header, a verdict of up to three lines, and a spare one.
        num_rows = max(1, min(12, live.console.height - 9))
        bar = "\N{FULL BLOCK}" if live.console.encoding.startswith("utf") else "#"
        rows = list(self._rows)[-num_rows:]
        lines = list(map(_cells, rows))
        widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in lines[0]}
        widths = {"step": widths.pop("step"), "reward": widths.pop("reward"), BAR: 10, **widths}
        for name in DROPPED:  # a column has two spaces and a border
            if sum(widths.values()) + 3 * len(widths) >= live.console.width:
                del widths[name]
        for name, width in widths.items():
            justify = "left" if name == BAR else "right"
            style = "green" if name == BAR else None
            table.add_column(name, justify=justify, style=style, no_wrap=True, width=width)
        for row, line in zip(rows, lines, strict=True):
            line[BAR] = bar * round(10 * min(1.0, max(0.0, number(row, "reward"))))
            table.add_row(*(line[name] for name in widths))
        return table

    def _eta(self) -> str:
        steps_left = self._max_steps - number(self._rows[-1], "step")
        return format_duration(seconds_left(self._rows, steps_left))


def in_notebook() -> bool:
    return "ipykernel" in sys.modules


class CellDisplay:
    """In place of `Live`: text in the output of a notebook's cell, replaced by each `update`.

    rich itself redraws there only with ipywidgets, which not every front end shows.
    """

    def __init__(self) -> None:
        self.console = Console(width=100, force_jupyter=False)
        self._handle: Any = None  # IPython's, to replace the text

    def refresh(self) -> None:
        """Do nothing: `update` has drawn."""

    def update(self, content: RenderableType, refresh: bool = False) -> None:
        from IPython.display import display  # pyright: ignore[reportUnknownVariableType]

        with self.console.capture() as captured:
            self.console.print(content)
        bundle = {"text/plain": captured.get()}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class Progress:
    """Progress with ETA for operations longer than `delay` seconds. Use with `with`.

    `show` is called with each new text. With `in_place`, it replaces the previous text, and an
    empty text clears the display; else it is a line of its own, every `line_seconds`.
    """

    def __init__(
        self,
        description: str,
        total: int,
        show: Callable[[str], object],
        *,
        in_place: bool,
        delay: float = 2.0,
        line_seconds: float = 10.0,
    ) -> None:
        self._description = description
        self._total = total
        self._show = show
        self._in_place = in_place
        self._interval = 0.2 if in_place else line_seconds
        self._start = time.monotonic()
        self._next_update = self._start + delay

    def update(self, done: int) -> None:
        now = time.monotonic()
        if now < self._next_update or done >= self._total:
            return
        self._next_update = now + self._interval
        seconds = (now - self._start) / max(1, done) * (self._total - done)
        eta = f", {format_duration(seconds)} left" if done else ""
        share = 100 * done // self._total
        self._show(f"{self._description}: {done} of {self._total} ({share}%){eta}")

    def hide(self) -> None:
        """Clear the display, so that something else can be printed."""
        if self._in_place:
            self._show("")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.hide()


def progress_on_stderr(description: str, total: int) -> Progress:
    if sys.stderr.isatty():
        return Progress(description, total, _rewrite_line, in_place=True)
    return Progress(description, total, lambda text: sys.stderr.write(f"{text}\n"), in_place=False)


def _rewrite_line(text: str) -> None:
    """Replace the current line of a terminal by what fits; a log line replaces it in turn."""
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write(f"\r{printable(text[:width])}\x1b[K\r")
    sys.stderr.flush()


class WaitReport:
    """Reports of waits: one log line a minute; on a terminal one line that is rewritten.

    There, a new wait (at most once a minute) and a new reason are also logged at full length.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._in_place = sys.stderr.isatty()
        self._logged_at = -math.inf  # monotonic seconds
        self._kind = ""  # kind of the latest log line
        self._is_waiting = False
        self._shown = ""  # the latest text

    def show(self, text: str) -> None:
        """Report the wait; call this at any rate with its seconds as a whole number."""
        if self._is_waiting and text == self._shown:
            return
        self._shown = text
        now = time.monotonic()
        kind = _without_numbers(text)
        is_due = now - self._logged_at >= WAIT_LOG_SECONDS
        if self._in_place:
            is_due = kind != self._kind or (is_due and not self._is_waiting)
        if is_due:
            self.hide()
            self._log(text)
            self._logged_at = now
            self._kind = kind
        elif self._in_place:
            _rewrite_line(text)
        self._is_waiting = True

    def hide(self) -> None:
        """End the wait, so that something else can be printed."""
        if self._in_place and self._is_waiting:
            _rewrite_line("")
        self._is_waiting = False


def _without_numbers(text: str) -> str:
    return re.sub(r"([0-9.]+[hms]?)+", "", text)


def track(description: str, items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items; show progress if their number is known (length hint)."""
    with progress_on_stderr(description, length_hint(items)) as progress:
        for count, item in enumerate(items):
            progress.update(count)
            yield item


def worker_info_text(generator: str, info: Mapping[str, str], *, trainer: Mapping[str, str]) -> str:
    """For example 'generator jetson: cuda:0 float16, threads: 6; torch 2.6.0 (trainer: 2.13.0)'.

    `info` comes from another machine and may lack fields.
    """
    device = " ".join(info[key] for key in ("device", "dtype") if key in info) or "device unknown"
    threads = f", threads: {info['threads']}" if "threads" in info else ""
    differences = [
        f"{'peralta_zmq' if key == 'package' else key} {info[key]} "
        f"(trainer: {trainer.get(key, 'unknown')})"
        for key in ("package", "python", "torch", "transformers")
        if key in info and info[key] != trainer.get(key)
    ]
    comparison = ", ".join(differences) or "same versions as the trainer"
    return f"generator {generator}: {device}{threads}; {comparison}"


def _cells(row: Row) -> dict[str, str]:
    """The columns of a row, in their order."""
    seconds = number(row, "step_time")
    rollouts_per_s = number(row, "num_rollouts") / seconds if seconds > 0 else math.nan
    return {
        "step": f"{number(row, 'step'):.0f}",
        "reward": format_number(number(row, "reward"), ".2f"),
        "no signal": format_number(number(row, "frac_reward_zero_std"), ".0%"),
        "staleness": format_number(number(row, "staleness/mean"), ".1f"),
        "queue": format_number(number(row, "queue/depth"), ".0f"),
        "wait": format_number(number(row, "time/wait_for_batch"), ".2f", "s"),
        "rollouts/s": format_number(rollouts_per_s, ".0f"),
        "generators": format_number(number(row, "generators"), ".0f"),
    }
