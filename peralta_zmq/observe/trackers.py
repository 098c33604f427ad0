"""The run's metrics for TensorBoard, trackio and Weights & Biases: the one door to each of them.

Knows rows and three packages; knows nothing of training. A tracker lives in a thread of its own,
from its opening to its end: whatever it does there, it costs training nothing but one line.
Nothing leaves this machine unless the user says so (WANDB_MODE, TRACKIO_SPACE_ID and the like).
"""

# the packages annotate themselves only in part
# pyright: reportMissingImports=false, reportUnknownParameterType=false

from __future__ import annotations

import importlib.util
import logging
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from time import time_ns
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from peralta_zmq.errors import ConfigError, described

PACKAGES = {"tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
PROJECT = "peralta_zmq"
MAX_WAITING = 1000  # rows that a tracker may be behind
CLOSE_SECONDS = 20.0  # that the end of a run waits for one
AXES = ("step", "time")  # of the curves, not curves themselves
Numbers: TypeAlias = dict[str, float]
logger = logging.getLogger(__name__)


class Sink(Protocol):
    """An open tracker."""

    def log(self, step: int, numbers: Numbers, *, time: float) -> None:
        """Take the numbers of a step; `time` in unix seconds, NaN for now."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


Open: TypeAlias = Callable[[int], Sink]  # with the first step that it will be told


def check_trackers(names: Iterable[str]) -> None:
    """Raises ConfigError when the package of one of them is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"run.report_to {name} needs {PACKAGES[name]}; "
                f"pip install 'peralta_zmq[{name}]', or leave it out"
            )


def open_trackers(
    names: Iterable[str], *, folder: Path, run_id: str, settings: Mapping[str, Any]
) -> list[Tracker]:
    """A tracker for each name; `settings` are shown beside the curves."""
    opens: dict[str, Open] = {
        "tensorboard": lambda first: TensorBoard(folder, first_step=first),
        "trackio": lambda first: Trackio(run_id, settings),
        "wandb": lambda first: Wandb(folder, run_id, settings),
    }
    return [Tracker(name, opens[name]) for name in dict.fromkeys(names)]


class Tracker:
    """Hands rows to a thread; after a failure it is silent. Use with `with`."""

    def __init__(self, name: str, opens: Open) -> None:
        self._name, self._opens = name, opens
        self._rows: queue.Queue[tuple[int, Numbers, float] | None] = queue.Queue(MAX_WAITING)
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)

    def log(self, step: int, row: Mapping[str, object]) -> None:
        """Take the numbers of a row; never waits, never fails."""
        numbers = {
            key: float(value)
            for key, value in row.items()
            if isinstance(value, (int, float)) and math.isfinite(value) and key not in AXES
        }
        moment = row.get("time")
        moment = float(moment) if isinstance(moment, (int, float)) else math.nan
        if not self._failed.is_set():
            try:
                self._rows.put_nowait((step, numbers, moment))
            except queue.Full:
                self._give_up(f"it has not taken {MAX_WAITING} rows")

    def _work(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  the code of others may raise anything
            self._give_up(described(error))

    def _serve(self) -> None:
        row = self._rows.get()
        if row is None:
            return
        sink = self._opens(row[0])
        while row is not None:
            step, numbers, moment = row
            sink.log(step, numbers, time=moment)
            row = self._rows.get()
        sink.close()

    def _give_up(self, reason: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            logger.warning("no more metrics for %s: %s", self._name, reason)

    def __enter__(self) -> Tracker:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._failed.is_set():
            try:
                self._rows.put_nowait(None)
            except queue.Full:
                self._give_up(f"it has not taken {MAX_WAITING} rows")
                return
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                self._give_up(f"it has not ended within {CLOSE_SECONDS:.0f} s")


class TensorBoard:
    """Event files in RUN/tensorboard; steps that are trained anew replace the earlier ones."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from tensorboardX import SummaryWriter

        # By its own name, two sessions begun in one second would share a file.
        self._writer = SummaryWriter(
            str(folder / "tensorboard"), purge_step=first_step, filename_suffix=f".{time_ns()}"
        )

    def log(self, step: int, numbers: Numbers, *, time: float) -> None:
        """One point of each curve."""
        moment = None if math.isnan(time) else time
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step, walltime=moment)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Trackio:
    """A local project, shown by `trackio show`; its words go to standard error."""

    def __init__(self, run_id: str, settings: Mapping[str, Any]) -> None:
        import trackio

        if not {"TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"} & os.environ.keys():
            # It asks Hugging Face whose token lies on this machine, for a local run too.
            trackio.Run._get_username = _nobody
        self._trackio = trackio
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(PROJECT, name=run_id, config=dict(settings), resume="allow")

    def log(self, step: int, numbers: Numbers, *, time: float) -> None:
        """One point of each curve."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Write what is left."""
        with redirect_stdout(sys.stderr):
            self._trackio.finish()


def _nobody(run: object) -> None:
    """The name of a local run's owner."""


class Wandb:
    """A run of Weights & Biases in RUN/wandb, offline unless WANDB_MODE says otherwise."""

    def __init__(self, folder: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # of its own faults, to its makers
        import wandb

        self._run = wandb.init(
            project=PROJECT, id=run_id, name=run_id, dir=str(folder), resume="allow",
            config=dict(settings), settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        # Evaluations come late, and its own step never goes back.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Numbers, *, time: float) -> None:
        """One point of each curve."""
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()
