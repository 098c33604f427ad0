"""Copies of the run's metrics in TensorBoard, trackio or Weights & Biases.

Each tracker works in its own thread, so that a slow or failing tracker does not delay training. No
data leaves this machine unless the user sets an environment variable such as WANDB_MODE or
TRACKIO_SPACE_ID.
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
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from pathlib import Path
from time import time_ns
from typing import Any, TypeAlias

from peralta_zmq.errors import ConfigError, described
from peralta_zmq.observe.metrics import number

# tracker -> imported package
PACKAGES = {"tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
PROJECT = "peralta_zmq"
MAX_PENDING_ROWS = 1000  # in the queue of a tracker; more rows mean that the tracker hangs
CLOSE_SECONDS = 20.0  # maximum wait for a tracker at the end of a run
Numbers: TypeAlias = dict[str, float]
# Logs the numbers of a step: called with step, numbers by name, and unix seconds (NaN = now).
LogNumbers: TypeAlias = Callable[[int, Numbers, float], None]
# Opens a tracker's package: called with the first step to log; the end of the context closes it.
OpenTracker: TypeAlias = Callable[[int], AbstractContextManager[LogNumbers]]
logger = logging.getLogger(__name__)


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"run.report_to {name} needs {PACKAGES[name]}; "
                f"pip install 'peralta_zmq[{name}]', or leave out {name}"
            )


def open_trackers(
    names: Iterable[str], *, folder: Path, run_id: str, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Return a tracker for each name; entering its context starts it.

    `settings` are recorded with the run. Later sessions of a resumed run have the same `run_id`.
    """
    packages: dict[str, OpenTracker] = {
        "tensorboard": lambda first_step: _tensorboard(folder, first_step),
        "trackio": lambda first_step: _trackio(run_id, settings),
        "wandb": lambda first_step: _wandb(folder, run_id, settings),
    }
    return [Tracker(name, packages[name]) for name in dict.fromkeys(names)]


class Tracker:
    """Thread that logs rows with one package until the first failure. Use with `with`."""

    def __init__(self, name: str, open_tracker: OpenTracker) -> None:
        self._name, self._open = name, open_tracker
        self._rows: queue.Queue[tuple[int, Numbers, float] | None] = queue.Queue(MAX_PENDING_ROWS)
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)

    def log(self, step: int, row: Mapping[str, object]) -> None:
        """Queue the finite numbers of a row of metrics.jsonl; never waits, never raises."""
        # Step and time are the x axes of the curves.
        numbers = {key: number(row, key) for key in row if key not in ("step", "time")}
        numbers = {key: value for key, value in numbers.items() if math.isfinite(value)}
        self._put((step, numbers, number(row, "time")))

    def _put(self, row: tuple[int, Numbers, float] | None) -> None:
        """Queue a row (step, numbers, time); None ends the thread."""
        try:
            if not self._failed.is_set():
                self._rows.put_nowait(row)
        except queue.Full:
            self._fail(f"{MAX_PENDING_ROWS} rows are pending")

    def _run(self) -> None:
        try:
            if row := self._rows.get():
                with self._open(row[0]) as log:
                    while row:
                        log(*row)
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
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                self._fail(f"not closed within {CLOSE_SECONDS:.0f} s")


@contextmanager
def _tensorboard(folder: Path, first_step: int) -> Generator[LogNumbers]:
    """Write event files in RUN/tensorboard; replace older data from `first_step` on."""
    from tensorboardX import SummaryWriter

    # With the default suffix, two sessions started in the same second would share a file.
    writer = SummaryWriter(
        str(folder / "tensorboard"), purge_step=first_step, filename_suffix=f".{time_ns()}"
    )

    def log(step: int, numbers: Numbers, time: float) -> None:
        walltime = None if math.isnan(time) else time
        for name, value in numbers.items():
            writer.add_scalar(name, value, step, walltime=walltime)
        writer.flush()

    yield log
    writer.close()


@contextmanager
def _trackio(run_id: str, settings: Mapping[str, Any]) -> Generator[LogNumbers]:
    """Write to a local project, which `trackio show` displays; print to stderr only."""
    import trackio

    if not {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys():
        # trackio would query Hugging Face for the token's owner, even for a local run.
        trackio.Run._get_username = lambda run: None
    with redirect_stdout(sys.stderr):
        run = trackio.init(PROJECT, name=run_id, config=dict(settings), resume="allow")
    yield lambda step, numbers, time: run.log(dict(numbers), step=step)
    with redirect_stdout(sys.stderr):
        trackio.finish()


@contextmanager
def _wandb(folder: Path, run_id: str, settings: Mapping[str, Any]) -> Generator[LogNumbers]:
    """Write a run of Weights & Biases in RUN/wandb, offline unless WANDB_MODE is set."""
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # errors of wandb itself
    import wandb

    names = {"project": PROJECT, "id": run_id, "name": run_id, "dir": str(folder)}
    quiet = wandb.Settings(console="off", silent=True)
    run = wandb.init(**names, resume="allow", config=dict(settings), settings=quiet)
    # The result of an evaluation may arrive after later steps; wandb's own step must not decrease.
    run.define_metric("*", step_metric="step")
    yield lambda step, numbers, time: run.log({**numbers, "step": step})
    run.finish()
