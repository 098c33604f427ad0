"""RunLog: the log files, terminal output, trackers and report of a run.

A step that is already in the files, and that a resumed trainer replays, is not written again. A
roll-back returns to a checkpoint and repeats the later steps; the lineage is the number of
roll-backs so far.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from peralta_zmq.errors import program_name
from peralta_zmq.observe import report
from peralta_zmq.observe.dashboard.view import write_report
from peralta_zmq.observe.event_log import EventLog
from peralta_zmq.observe.metrics import (
    ANSWERS,
    CONFIG_HISTORY,
    EVALUATIONS,
    EVENTS,
    METRICS,
    SAMPLES,
    JsonLines,
    Row,
    number,
    read_rows,
)
from peralta_zmq.observe.run_state import COMPLETE, SESSION_ENDS, SESSION_STARTS, WINDOW
from peralta_zmq.observe.terminal import Progress, Terminal
from peralta_zmq.observe.trackers import Tracker
from peralta_zmq.observe.verdict import Verdict, verdict
from peralta_zmq.rollout import Answer, Problem

STALL_CHECK_SECONDS = 30.0  # between two verdicts shown while no step is taken


class RunLog:
    """Writer of all logs and terminal output in one session. Use with `with`.

    `resuming` is True if an earlier session trained, `was_complete` if the newest one completed the
    run. `final_statuses` maps each ended generator process (name/incarnation) to the number of
    groups it made; `made_before` is the number of all groups until an earlier session completed the
    run. `last_step` is the newest step in metrics.jsonl that no roll-back undid.
    """

    def __init__(
        self, folder: Path, *, run: str, max_steps: int, trackers: Sequence[Tracker] = ()
    ) -> None:
        rows = read_rows(folder / METRICS)
        events = read_rows(folder / EVENTS)
        self.resuming = any(row.get("event") == "start" for row in events)
        self.final_statuses = {
            f"{row.get('generator')}/{row.get('incarnation')}": int(number(row, "made"))
            for row in events
            if row.get("event") == "final_status"
        }
        self.made_before = report.made_before(folder)
        self.last_step = _last_written_step(rows, events)
        self.lineage = len(_roll_backs(events))
        self._folder = folder
        self._is_training = False  # True between the events that start and end this session
        limits = SESSION_STARTS + SESSION_ENDS
        sessions = [row["event"] for row in events if row.get("event") in limits]
        self.was_complete = sessions[-1:] == [COMPLETE]
        self._next_stall_check = 0.0  # monotonic seconds
        # The verdict is computed from WINDOW rows and skips replayed steps.
        self._newest_rows = deque(rows, maxlen=2 * WINDOW)
        with ExitStack() as stack:
            self._files = {
                name: stack.enter_context(JsonLines(folder / name))
                for name in (METRICS, SAMPLES, EVALUATIONS, ANSWERS, EVENTS)
            }
            self._events = stack.enter_context(EventLog(self._files[EVENTS], events))
            self._trackers = [stack.enter_context(tracker) for tracker in trackers]
            self._terminal = stack.enter_context(Terminal(max_steps, run=run))
            self._stack = stack.pop_all()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def event(self, name: str, **fields: object) -> bool:
        """Append an event to events.jsonl; False if a limit of EventLog prevents this."""
        if name in SESSION_STARTS:
            self._is_training = True
            self._next_stall_check = 0.0
        return self._events.append(name, **fields)

    def end(self, name: str, *, step: int) -> None:
        """Append the event that ends the session, if it has started and is not over."""
        if self._is_training:
            self._is_training = False
            self.event(name, step=step)

    def record_settings(
        self, changes: Sequence[str], *, first_step: int, previous: Mapping[str, object]
    ) -> None:
        """Record that settings change from training step `first_step` on.

        `changes` has a text for each; `previous` has all settings before the change.
        """
        self.event("settings", step=first_step, changes=list(changes))
        row = {"time": time.time(), "until_step": first_step - 1, "settings": previous}
        with JsonLines(self._folder / CONFIG_HISTORY) as history:
            history.append(row)
        self.note(f"settings changed from step {first_step} on: {', '.join(changes)}")

    def note(self, text: str) -> None:
        self._terminal.note(text)

    def wait(self, text: str) -> None:
        self._terminal.wait(text)

    def progress(self, description: str, total: int) -> Progress:
        """A progress display on the terminal for an operation between steps."""
        return self._terminal.progress(description, total)

    def step(
        self,
        row: Mapping[str, object],
        samples: Sequence[Mapping[str, object]] = (),
        *,
        tracked: int = 0,
    ) -> bool:
        """Write a step's metrics and sampled groups; False if an earlier session wrote the step.

        The trackers get the group at index `tracked`.
        """
        step = int(number(row, "step"))
        if step <= self.last_step:
            return False
        self.last_step = step
        self._files[METRICS].append(row)
        self._write_texts(SAMPLES, samples)
        sample = samples[tracked] if samples else None
        self._newest_rows.append(dict(row))
        for tracker in self._trackers:
            tracker.log(step, row, sample=sample)
        self._terminal.step(dict(row), self.verdict())
        self._next_stall_check = time.monotonic() + STALL_CHECK_SECONDS
        return True

    def _write_texts(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        for row in rows:
            self._files[name].append(row)
        self._files[name].trim(max_bytes=64 << 20)

    def check_stall(self) -> None:
        """Show the verdict if no step was taken for STALL_CHECK_SECONDS."""
        self._events.flush()
        if time.monotonic() >= self._next_stall_check:
            self._next_stall_check = time.monotonic() + STALL_CHECK_SECONDS
            now = time.time()
            self._terminal.stall(self.verdict(now=now), now=now)

    def verdict(self, *, now: float | None = None) -> Verdict:
        """The verdict on the newest rows and events; with `now`, it can be a stall."""
        return verdict(list(self._newest_rows), list(self._events.newest), now=now)

    def rewind(self, step: int) -> None:
        """Record a roll-back to `step`: later steps will be trained and written again."""
        self.event("roll_back", step=step, rows=len(read_rows(self._folder / METRICS)))
        self.lineage += 1
        self.last_step = min(self.last_step, step)

    def has_evaluation(self, step: int) -> bool:
        """Whether `step` was evaluated and no later roll-back undid that step."""
        targets = [number(row, "step") for row in _roll_backs(read_rows(self._folder / EVENTS))]
        rows = [row for row in read_rows(self._folder / EVALUATIONS) if row["step"] == step]
        lineages = [int(number(row, "lineage", 0)) for row in rows]
        # The roll-backs after an evaluation are those from its lineage on.
        return any(all(target >= step for target in targets[lineage:]) for lineage in lineages)

    def evaluation(
        self,
        step: int,
        results: Sequence[tuple[Problem, Sequence[Answer]]],
        *,
        accuracy: float,
        stderr: float | None = None,
        figures: Mapping[str, float],
        policy_steps: Sequence[int],
    ) -> None:
        """Write a held-out evaluation of `step`, and the answers to each of its problems.

        The first three values are those of `held_out.summarize`. `policy_steps` has the step of the
        oldest and of the newest weights that sampled the answers.
        """
        rows = [
            {
                "step": step,
                "task": problem.task,
                "question": problem.question,
                "expected": problem.answer,
                "completions": [answer.answer for answer in answers],
                "rewards": [answer.reward for answer in answers],
                "cut_off": [answer.cut_off for answer in answers],
            }
            for problem, answers in results
        ]
        self._write_texts(ANSWERS, rows)
        firsts = [answers[0] for _, answers in results[:6]]
        self._files[EVALUATIONS].append(
            {
                "step": step,
                "lineage": self.lineage,
                "accuracy": accuracy,
                "stderr": stderr,
                "num_examples": len(results),
                "answers": [asdict(answer) for answer in firsts],
                "figures": dict(figures),
                "policy_steps": list(policy_steps),
            }
        )
        metrics = {f"eval/{name}": value for name, value in figures.items()}
        for tracker in self._trackers:
            tracker.log(step, {"eval/accuracy": accuracy, **metrics})
        shown = figures if len(figures) > 2 else {}  # avg@1 and pass@1 equal the accuracy
        details = "".join(f"  {name} {value:.3f}" for name, value in shown.items())
        self.note(f"held-out accuracy at step {step}: {accuracy:.3f}{details}")

    def close_run(
        self, weights_folder: Path, accounting: Mapping[str, int], final_statuses: Mapping[str, int]
    ) -> None:
        """Write the summary (see `report.write_summary`) and the report; print the results."""
        summary = report.write_summary(
            self._folder,
            accounting=accounting,
            final_statuses=final_statuses,
            verdict=self.verdict(),
        )
        self.write_report()
        self._terminal.close(report.closing_text(self._folder, summary, weights_folder))

    def write_report(self) -> None:
        """Write report.html if there is a step; print a note if that fails."""
        if not self._newest_rows:
            return
        try:
            write_report([self._folder], self._folder / report.REPORT)
        except Exception as error:  # noqa: BLE001 - a saved run must end without an error
            self.note(
                f"{report.REPORT} not written ({error}); "
                f"try {program_name('dashboard')} {self._folder}"
            )


def recorded_versions(folder: Path) -> dict[str, int]:
    """The number of every version recorded as published in this run folder, by its weights_id."""
    rows = [row for row in read_rows(folder / EVENTS) if row["event"] == "publish"]
    return {str(row["weights_id"]): int(number(row, "number", 0)) for row in rows}


def abandoned_weights(folder: Path, step: int) -> set[str]:
    """The weights_id of all published weights whose step a later resume undid.

    `step` is the step from which the current resume continues, which events.jsonl does not have
    yet. A weights_id that was published again after the resume is not abandoned.
    """
    steps: dict[str, float] = {}  # weights_id -> step of the weights
    abandoned: set[str] = set()
    for row in [*read_rows(folder / EVENTS), {"event": "resume", "step": step}]:
        if row["event"] == "publish":
            weights_id = str(row["weights_id"])
            steps[weights_id] = number(row, "step")
            abandoned.discard(weights_id)
        elif row["event"] == "resume":
            resumed_step = number(row, "step")
            abandoned |= {key for key, published in steps.items() if published > resumed_step}
    return abandoned


def _roll_backs(events: Sequence[Row]) -> list[Row]:
    return [row for row in events if row.get("event") == "roll_back"]


def _last_written_step(rows: Sequence[Row], events: Sequence[Row]) -> int:
    """The newest step in the metrics that no roll-back undid; 0 if none."""
    last = int(number(rows[-1], "step")) if rows else 0
    roll_backs = _roll_backs(events)
    # The event has the number of rows at the roll-back. If no row was added since, the newest rows
    # are undone. Times are not compared, because the clock may be set back.
    if roll_backs and number(roll_backs[-1], "rows", 0) == len(rows):
        return min(last, int(number(roll_backs[-1], "step")))
    return last
