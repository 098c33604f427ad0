"""Copies of the run's metrics and samples in TensorBoard, trackio or Weights & Biases.

Each tracker has a thread, so that it cannot delay training. No data leaves this machine unless the
user sets an environment variable such as WANDB_MODE or TRACKIO_SPACE_ID.
"""

# The packages annotate their functions only in part.
# pyright: reportMissingImports=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import importlib.util
import logging
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from time import time_ns
from typing import Any, TypeAlias

from peralta_zmq.errors import ConfigError, described
from peralta_zmq.observe.metrics import number
from peralta_zmq.rollout import CUT_OFF

# tracker -> imported package
PACKAGES = {"tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
SAMPLES = "samples"  # name of the texts in each tracker
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrackedStep:
    step: int
    numbers: Mapping[str, float]  # by name
    time: float  # unix seconds; NaN = now
    samples: Sequence[Mapping[str, object]] = ()  # of a group, one for each rollout


LogStep: TypeAlias = Callable[[TrackedStep], None]
# Opens a tracker's package: called with the first step to log; the end of the context closes it.
OpenTracker: TypeAlias = Callable[[int], AbstractContextManager[LogStep]]


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"run.report_to {name} needs {PACKAGES[name]}; "
                f"pip install 'peralta_zmq[{name}]', or leave out {name}"
            )


def open_trackers(
    names: Iterable[str],
    *,
    folder: Path,
    run_id: str,
    project: str,
    interval: int = 10,
    settings: Mapping[str, Any],
) -> list[Tracker]:
    """A tracker for each name; entering its context starts it.

    Later sessions of a run have the same `run_id`, which is also its name in the trackers. Samples
    are logged every `interval` steps.
    """
    packages: dict[str, OpenTracker] = {
        "tensorboard": lambda first_step: _tensorboard(folder, first_step),
        "trackio": lambda first_step: _trackio(project, run_id, settings),
        "wandb": lambda first_step: _wandb(folder, project, run_id, settings),
    }
    return [Tracker(name, packages[name], interval=interval) for name in dict.fromkeys(names)]


class Tracker:
    """Thread that logs rows with one package until the first failure. Use with `with`.

    More than `max_pending_rows`, or more than `close_seconds` at the end, mean that it hangs.
    """

    def __init__(
        self,
        name: str,
        open_tracker: OpenTracker,
        *,
        interval: int = 1,
        close_seconds: float = 20.0,
        max_pending_rows: int = 1000,
    ) -> None:
        self._name = name
        self._close_seconds = close_seconds
        self._open = open_tracker
        self._interval = interval
        self._rows: queue.Queue[TrackedStep | None] = queue.Queue(max_pending_rows)
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)

    def log(
        self,
        step: int,
        row: Mapping[str, object],
        *,
        sample: Mapping[str, Any] | None = None,
    ) -> None:
        """Queue the finite numbers of a row of metrics.jsonl and perhaps one of samples.jsonl.

        Never waits, never raises.
        """
        # Step and time are the x axes of the curves.
        numbers = {key: number(row, key) for key in row if key not in ("step", "time")}
        numbers = {key: value for key, value in numbers.items() if math.isfinite(value)}
        samples = _samples_of(step, sample) if sample and step % self._interval == 0 else ()
        self._put(TrackedStep(step, numbers, number(row, "time"), samples))

    def _put(self, row: TrackedStep | None) -> None:
        """Queue a step; None ends the thread."""
        try:
            if not self._failed.is_set():
                self._rows.put_nowait(row)
        except queue.Full:
            self._fail(f"{self._rows.maxsize} rows are pending")

    def _run(self) -> None:
        try:
            if row := self._rows.get():
                with self._open(row.step) as log:
                    while row:
                        log(row)
                        row = self._rows.get()
        except Exception as error:  # noqa: BLE001 - a third-party package may raise anything
            self._fail(described(error))

    def _fail(self, reason: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            logger.warning("no more metrics for %s: %s", self._name, reason)

    def __enter__(self) -> Tracker:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._put(None)
        if not self._failed.is_set():
            self._thread.join(self._close_seconds)
            if self._thread.is_alive():
                self._fail(f"not closed within {self._close_seconds:.0f} s")


def _samples_of(step: int, sample: Mapping[str, Any]) -> list[dict[str, object]]:
    prompt = sample["prompt"]
    rewards = sample["rewards"]
    advantages = sample["advantages"] or [0.0] * len(rewards)  # none for a group without signal
    columns = (sample["texts"], sample["cut_off"], rewards, advantages)
    return [
        {
            "step": step,
            "problem": sample["problem"],
            "reward": reward,
            "advantage": advantage,
            "prompt": prompt,
            "completion": text.removeprefix(prompt) + CUT_OFF * cut_off,
        }
        for text, cut_off, reward, advantage in zip(*columns, strict=True)
    ]


def _markdown_of(samples: Sequence[Mapping[str, object]]) -> str:
    """Samples as Markdown, with each text as a code block: a text may contain Markdown itself."""

    def code(text: object) -> str:
        return "\n".join(f"    {line}" for line in str(text).splitlines() or [""])

    parts = [f"problem {samples[0]['problem']}", code(samples[0]["prompt"])]
    for sample in samples:
        parts.append("reward {reward:g}, advantage {advantage:g}".format(**sample))
        parts.append(code(sample["completion"]))
    return "\n\n".join(parts)


@contextmanager
def _tensorboard(folder: Path, first_step: int) -> Generator[LogStep]:
    """Write event files in RUN/tensorboard; replace older data from `first_step` on."""
    from tensorboardX import SummaryWriter

    # With the default suffix, two sessions started in the same second would share a file.
    writer = SummaryWriter(
        str(folder / "tensorboard"), purge_step=first_step, filename_suffix=f".{time_ns()}"
    )

    def log(row: TrackedStep) -> None:
        walltime = None if math.isnan(row.time) else row.time
        for name, value in row.numbers.items():
            writer.add_scalar(name, value, row.step, walltime=walltime)
        if row.samples:
            writer.add_text(SAMPLES, _markdown_of(row.samples), row.step, walltime=walltime)
        writer.flush()

    yield log
    writer.close()


@contextmanager
def _trackio(project: str, title: str, settings: Mapping[str, Any]) -> Generator[LogStep]:
    """Write to a local project, which `trackio show` displays; print to stderr only."""
    import trackio

    if not {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys():
        # trackio would query Hugging Face for the token's owner, even for a local run.
        trackio.Run._get_username = lambda run: None
    with redirect_stdout(sys.stderr):
        run = trackio.init(project, name=title, config=dict(settings), resume="allow")
    yield lambda row: run.log(_with_table(row, trackio), step=row.step)
    with redirect_stdout(sys.stderr):
        trackio.finish()


@contextmanager
def _wandb(
    folder: Path, project: str, run_id: str, settings: Mapping[str, Any]
) -> Generator[LogStep]:
    """Write a run of Weights & Biases in RUN/wandb, offline unless WANDB_MODE is set."""
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # errors of wandb itself
    import wandb

    names = {"project": project, "id": run_id, "name": run_id, "dir": str(folder)}
    quiet = wandb.Settings(console="off", silent=True)
    run = wandb.init(**names, resume="allow", config=dict(settings), settings=quiet)
    # The result of an evaluation may arrive after later steps; wandb's own step must not decrease.
    run.define_metric("*", step_metric="step")
    yield lambda row: run.log({**_with_table(row, wandb), "step": row.step})
    run.finish()


def _with_table(row: TrackedStep, package: Any) -> dict[str, Any]:
    if not row.samples:
        return dict(row.numbers)
    rows = [list(sample.values()) for sample in row.samples]
    table = package.Table(columns=list(row.samples[0]), data=rows)
    return {**row.numbers, SAMPLES: table}
