"""A run one can watch: a live table on a terminal, one plain line per step anywhere else.

Knows metric rows and a stream; knows nothing of where the rows come from.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections import deque
from types import TracebackType
from typing import TextIO

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peralta_zmq.observe.metrics import Row, number
from peralta_zmq.observe.progress import Progress, duration
from peralta_zmq.observe.run_state import WINDOW, seconds_left
from peralta_zmq.observe.verdict import Level, Verdict

NUM_SHOWN = 12
NUM_FRAME_LINES = 9  # title, rules, header, a verdict of up to three lines, one to spare
REPEAT_SECONDS = 60.0  # off a terminal, between two verdicts that come and go
COLORS: dict[Level, str] = {"ok": "green", "warn": "yellow", "bad": "bold red"}
logger = logging.getLogger(__name__)
COLUMNS = ("no signal", "staleness", "queue", "wait", "rollouts/s", "generators")


class Terminal:
    """Shows a run on `stream` (standard output by default) while the `with` block lasts."""

    def __init__(self, max_steps: int, stream: TextIO | None = None, *, run: str = "") -> None:
        self._max_steps = max_steps
        self._run = run
        self._stream = stream or sys.stdout
        self._rows: deque[Row] = deque(maxlen=WINDOW + 1)
        self._shown: RenderableType = Text("waiting for the first step")
        self._said: dict[str, float] = {}  # kind of verdict -> time of the row it was said at
        self._kind = ""  # of the newest verdict
        console = Console(file=self._stream, highlight=False)
        lively = self._stream.isatty() and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False) if lively else None

    def __enter__(self) -> Terminal:
        if self._live:
            self._live.start()
            self._live.update(self._shown, refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        """Print one line, above the table if there is one."""
        if self._live:
            self._live.console.print(text, markup=False, soft_wrap=True)
            self._live.refresh()
        else:
            self._say(text)

    def progress(self, what: str, total: int) -> Progress:
        """Show how far something is, below the table if there is one."""
        return Progress(what, total, show=self._show_progress, lively=self._live is not None)

    def _show_progress(self, text: str) -> None:
        if self._live:
            self._live.update(Group(self._shown, Text(text)) if text else self._shown, refresh=True)
        else:
            self._say(text)

    def end(self, text: str) -> None:
        """The last words, below the table, which stays as it is."""
        if self._live:
            self._live.stop()
        self._say(text)

    def step(self, row: Row, verdict: Verdict | None = None) -> None:
        """Show one row of metrics.jsonl (its `num_rollouts` and `step_time` give rollouts/s).

        The verdict stands under the table; off a terminal it is a line whenever another one holds.
        """
        self._rows.append(row)
        if self._live:
            self._show(self._live, verdict)
            return
        self._say(self._line())
        if verdict is not None and self._is_news(verdict, number(row, "time", 0.0)):
            self._say(f"verdict: {verdict.text}")

    def judge(self, verdict: Verdict, *, now: float) -> None:
        """Between two steps: the verdict at `now` (unix seconds); off a terminal a bad one only."""
        if self._live:
            self._show(self._live, verdict)
        elif verdict.level == "bad" and self._is_news(verdict, now):
            self._say(f"verdict: {verdict.text}")

    def _show(self, live: Live, verdict: Verdict | None) -> None:
        told = Text(verdict.text, COLORS[verdict.level]) if verdict else Text()
        self._shown = Group(self._table(), told) if self._rows else told
        live.update(self._shown, refresh=True)

    def _is_news(self, verdict: Verdict, now: float) -> bool:
        """Whether another thing holds than a step ago, numbers aside, unsaid for a minute."""
        kind, before = re.sub(r"([0-9.]+[hms]?)+", "", verdict.sentence), self._kind
        self._kind = kind
        if kind == before or now - self._said.get(kind, float("-inf")) < REPEAT_SECONDS:
            return False
        self._said[kind] = now
        return True

    def _say(self, text: str) -> None:
        """Print a line; a full disk behind the stream ends the talk, not the run."""
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except OSError as error:
            logger.warning("no more output here: %s", error.strerror)
            silenced = os.open(os.devnull, os.O_WRONLY)  # what is still buffered must go somewhere
            os.dup2(silenced, self._stream.fileno())
            os.close(silenced)

    def _line(self) -> str:
        row = self._rows[-1]
        names = ("no_signal", "staleness", "queue", "wait", "rollouts/s", "generators")
        fields = " ".join(f"{name}={text}" for name, text in zip(names, _cells(row), strict=True))
        reward = _text(number(row, "reward"), ".2f")
        progress = f"step={number(row, 'step'):.0f}/{self._max_steps}"
        return f"{progress} reward={reward} {fields} eta={self._eta()}"

    def _table(self) -> Table:
        assert self._live
        table = Table(title=self._title(), title_justify="left")
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("reward", justify="right", no_wrap=True)
        table.add_column("", width=10)
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        num_lines = max(1, min(NUM_SHOWN, self._live.console.height - NUM_FRAME_LINES))
        for row in list(self._rows)[-num_lines:]:
            reward = number(row, "reward")
            bar = Bar(1.0, 0.0, max(0.0, min(1.0, reward)), color="green")
            step, shown = f"{number(row, 'step'):.0f}", _text(reward, ".2f")
            table.add_row(step, shown, "" if math.isnan(reward) else bar, *_cells(row))
        return table

    def _title(self) -> str:
        done = number(self._rows[-1], "step")
        share = 100 * done / self._max_steps
        progress = f"step {done:.0f} of {self._max_steps} ({share:.0f}%)"
        return f"{self._run}  {progress}  {self._eta()} left".strip()

    def _eta(self) -> str:
        steps_left = self._max_steps - number(self._rows[-1], "step")
        return duration(seconds_left(self._rows, steps_left))


def _cells(row: Row) -> tuple[str, ...]:
    """One text for each of COLUMNS."""
    return (
        _text(100 * number(row, "frac_reward_zero_std"), ".0f", "%"),
        _text(number(row, "staleness/mean"), ".1f"),
        _text(number(row, "queue/depth"), ".0f"),
        _text(number(row, "time/wait_for_batch"), ".2f", "s"),
        _text(_rollouts_per_second(row), ".0f"),
        _text(number(row, "generators"), ".0f"),
    )


def _rollouts_per_second(row: Row) -> float:
    seconds = number(row, "step_time")
    return number(row, "num_rollouts") / seconds if seconds > 0 else math.nan


def _text(value: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}{unit}"
