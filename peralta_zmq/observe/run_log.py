"""Everything a run writes for people: metrics, samples, events, evaluations, table, last words.

Knows rows and texts; knows nothing of training. A step that an earlier session has written is not
written again, so that a replay leaves no trace.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from peralta_zmq.observe import report
from peralta_zmq.observe.dashboard.export import write_report
from peralta_zmq.observe.metrics import (  # fmt: skip
    EVENTS,
    METRICS,
    SAMPLES,
    Events,
    JsonLines,
    Row,
    number,
    read_rows,
)
from peralta_zmq.observe.progress import Progress
from peralta_zmq.observe.run_state import BEGINS, WINDOW
from peralta_zmq.observe.terminal import Terminal
from peralta_zmq.observe.trackers import Tracker
from peralta_zmq.observe.verdict import Verdict, verdict
from peralta_zmq.rollout import Answer

EVALUATIONS = "eval.jsonl"
CLOSING_SAMPLES = 6
NUM_EVENTS = 1000  # the newest, which the verdict looks at
LOOK_SECONDS = 30.0  # between two verdicts while no step comes


class RunLog:
    """The run's files and its table, open for one session. Use with `with`.

    `resuming` says that there were sessions before; `last_reports` are the groups made by each
    generator that told these that it makes no more, `made_before` those of all that they knew of;
    `last_step` is the newest step that is written.
    """

    def __init__(
        self, folder: Path, *, run: str, max_steps: int, trackers: Sequence[Tracker] = ()
    ) -> None:
        events = read_rows(folder / EVENTS)
        self.resuming = any(row.get("event") == "start" for row in events)
        self.last_reports = _last_reports(events)
        self.made_before = report.made_before(folder)
        self._folder = folder
        self.last_step = _last_written(folder)
        backs = [row for row in events if row.get("event") == "roll_back"]
        self._went_back = [number(row, "step") for row in backs]  # to these, in their order
        self._is_open = False  # this session has begun to train
        self._next_look = 0.0  # monotonic seconds
        self._newest_rows = deque(read_rows(folder / METRICS), maxlen=2 * WINDOW)
        self._newest_events = deque(events, maxlen=NUM_EVENTS)
        with ExitStack() as stack:
            self._metrics = stack.enter_context(JsonLines(folder / METRICS))
            self._samples = stack.enter_context(JsonLines(folder / SAMPLES))
            self._evaluations = stack.enter_context(JsonLines(folder / EVALUATIONS))
            self._events = stack.enter_context(Events(folder / EVENTS))
            self._trackers = [stack.enter_context(each) for each in trackers]
            self._terminal = stack.enter_context(Terminal(max_steps, run=run))
            self._stack = stack.pop_all()

    def published_weights(self) -> set[str]:
        """Ids of all weights whose publication is recorded."""
        rows = read_rows(self._folder / EVENTS)
        return {str(row.get("weights_id")) for row in rows if row.get("event") == "publish"}

    def abandoned_weights(self, step: int) -> set[str]:
        """Ids of published weights that a roll-back has left behind, now that we are at `step`."""
        published: dict[str, float] = {}  # id -> step, of the line that leads to now
        abandoned: set[str] = set()
        now: Row = {"event": "resume", "step": step}
        for row in [*read_rows(self._folder / EVENTS), now]:
            if row.get("event") == "publish":
                published[str(row.get("weights_id"))] = number(row, "step")
            elif row.get("event") == "resume":
                later = {
                    weights_id for weights_id, at in published.items() if at > number(row, "step")
                }
                abandoned |= later
                published = {
                    weights_id: at
                    for weights_id, at in published.items()
                    if weights_id not in later
                }
        return abandoned - published.keys()

    def rewind(self, step: int) -> None:
        """Record that the steps after `step` are trained anew, and write them again."""
        self.event("roll_back", step=step, rows=len(read_rows(self._folder / METRICS)))
        self._went_back.append(step)
        self.last_step = min(self.last_step, step)

    def event(self, name: str, **fields: object) -> None:
        """Something happened beside the steps."""
        self._newest_events.append(self._events.record(name, **fields))
        self._is_open = self._is_open or name in BEGINS

    def end(self, name: str, *, step: int) -> None:
        """The session is over; one that had nothing to train is not told."""
        if self._is_open:
            self._is_open = False
            self.event(name, step=step)

    def note(self, text: str) -> None:
        """A line for the person who watches."""
        self._terminal.note(text)

    def progress(self, what: str, total: int) -> Progress:
        """How far something beside the steps is, for the person who watches."""
        return self._terminal.progress(what, total)

    def step(self, row: Mapping[str, object], sample: Mapping[str, object]) -> bool:
        """Write a step's metrics and one whole group; False when it is already written."""
        step = int(number(row, "step"))
        if step <= self.last_step:
            return False
        self.last_step = step
        self._metrics.append(row)
        self._samples.append(sample)
        self._newest_rows.append(dict(row))
        self._track(step, row)
        self._terminal.step(dict(row), self.verdict())
        self._next_look = time.monotonic() + LOOK_SECONDS
        return True

    def look(self) -> None:
        """Between two groups: now and then the verdict of a run that takes no step."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            now = time.time()
            self._terminal.judge(self.verdict(now=now), now=now)

    def verdict(self, *, now: float | None = None) -> Verdict:
        """Who waits for whom, by the newest rows and events; and who is silent at `now`."""
        return verdict(list(self._newest_rows), list(self._newest_events), now=now)

    def has_evaluation(self, step: int) -> bool:
        """Whether the held-out problems were answered at this step, and no roll-back undid it."""
        rows = [row for row in read_rows(self._folder / EVALUATIONS) if row.get("step") == step]
        lines = [int(number(row, "line", 0)) for row in rows]  # earlier versions wrote none
        return any(all(back >= step for back in self._went_back[line:]) for line in lines)

    @property
    def line(self) -> int:
        """Roll-backs of this run so far: each begins another line of steps."""
        return len(self._went_back)

    def evaluation(
        self,
        step: int,
        answers: Sequence[Answer],
        *,
        accuracy: float,
        figures: Mapping[str, float],
        policy_steps: Sequence[int],
    ) -> None:
        """Write the held-out accuracy (mean reward of all answers), a few answers, and figures.

        `policy_steps` are those of the oldest and the newest weights that answered.
        """
        shown = [asdict(answer) for answer in answers[:CLOSING_SAMPLES]]
        row = {"step": step, "line": self.line, "accuracy": accuracy, "answers": shown}
        self._evaluations.append(
            row | {"figures": dict(figures), "policy_steps": list(policy_steps)}
        )
        told = {f"eval/{name}": figure for name, figure in figures.items()}
        self._track(step, {"eval/accuracy": accuracy, **told})
        several = figures if len(figures) > 2 else {}  # avg@1 and pass@1 say nothing new
        more = "".join(f"  {name} {value:.3f}" for name, value in several.items())
        self.note(f"held-out accuracy at step {step}: {accuracy:.3f}{more}")

    def _track(self, step: int, row: Mapping[str, object]) -> None:
        for tracker in self._trackers:
            tracker.log(step, row)

    def close_run(
        self,
        weights_folder: Path,
        accounting: Mapping[str, int],
        last_reports: Mapping[str, int],
    ) -> None:
        """Summary, plot and last words, all from the run's files."""
        rows = read_rows(self._folder / EVALUATIONS)
        base = next((row for row in rows if row["step"] == 0), None)
        summary = report.write_summary(
            self._folder,
            eval_before=number(base, "accuracy") if base else None,
            eval_after=number(rows[-1], "accuracy"),
            accounting=accounting,
            last_reports=last_reports,
            verdict=self.verdict(),
        )
        self.draw()
        before, after = _answers(base or rows[-1]), _answers(rows[-1])
        words = report.closing_text(self._folder, summary, before, after, weights_folder)
        self._terminal.end(words)

    def draw(self) -> None:
        """Write reward.png and report.html of the steps so far; nothing before the first one."""
        if not self._newest_rows:
            return
        try:
            if report.write_reward_plot(self._folder) is None:
                self.note("no reward plot: pip install 'peralta_zmq[plot]'")
            write_report([self._folder], self._folder / report.PAGE)
        except Exception as error:  # noqa: BLE001 - what is saved ends well without pictures
            self.note(
                f"no reward.png or report.html ({error}); "
                f"bin/dashboard {self._folder} may show more"
            )

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _last_written(folder: Path) -> int:
    """The newest step in the metrics that no later roll-back has undone; 0 when there is none."""
    rows = [row for row in read_rows(folder / METRICS) if "step" in row]
    last = int(number(rows[-1], "step")) if rows else 0
    backs = [row for row in read_rows(folder / EVENTS) if row.get("event") == "roll_back"]
    if backs and number(backs[-1], "rows", 0) == len(rows):  # not by the clock, which may jump
        return min(last, int(number(backs[-1], "step")))
    return last


def _last_reports(events: Sequence[Row]) -> dict[str, int]:
    return {
        f"{row.get('generator')}/{row.get('incarnation')}": int(number(row, "made"))
        for row in events if row.get("event") == "last_report"
    }  # fmt: skip


def _answers(row: Mapping[str, object]) -> list[Answer]:
    return [Answer(**answer) for answer in cast("list[dict[str, Any]]", row["answers"])]
