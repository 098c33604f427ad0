"""Trackers receive the metrics, and their failures do not affect the run."""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from peralta_zmq.config import load_config
from peralta_zmq.errors import ConfigError
from peralta_zmq.observe import trackers
from peralta_zmq.observe.metrics import Row
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.trackers import (
    LogStep,
    OpenTracker,
    TrackedStep,
    Tracker,
    check_trackers,
    open_trackers,
)

ROW: Row = {"step": 3, "time": 1000.0, "reward": 0.5, "loss": None, "note": "x", "kl": math.inf}


class RecordingTracker:
    """Records what is logged; fails at step `fails_at`, or blocks until `hangs` is set."""

    def __init__(self, *, fails_at: int = 0, hangs: threading.Event | None = None) -> None:
        self.logged: list[TrackedStep] = []
        self.closed = False
        self._fails_at, self._hangs = fails_at, hangs

    def log(self, row: TrackedStep) -> None:
        if row.step == self._fails_at:
            raise RuntimeError("connection lost")
        if self._hangs is not None:
            self._hangs.wait()
        self.logged.append(row)

    @contextmanager
    def open(self, first_step: int) -> Iterator[LogStep]:
        yield self.log
        self.closed = True


def track(open_tracker: OpenTracker, rows: Sequence[Row], **options: float) -> None:
    with Tracker("recording", open_tracker, **options) as tracker:
        for row in rows:
            tracker.log(int(str(row["step"])), row)


def test_tracker_logs_finite_numbers_without_axes() -> None:
    recording = RecordingTracker()
    track(recording.open, [ROW, ROW | {"step": 4, "reward": 1}])
    assert recording.logged == [
        TrackedStep(3, {"reward": 0.5}, 1000.0),
        TrackedStep(4, {"reward": 1.0}, 1000.0),
    ]
    assert recording.closed


SAMPLE = {
    "problem": "p", "prompt": "1 + 1 =", "texts": ["1 + 1 = 2", "1 + 1 =\n| 3"],
    "rewards": [1.0, 0.0], "advantages": [0.5, -0.5], "cut_off": [False, False],
}  # fmt: skip
SAMPLE_ROWS = [  # at step 2
    {"step": 2, "problem": "p", "reward": 1.0, "advantage": 0.5, "prompt": "1 + 1 =",
     "completion": " 2"},
    {"step": 2, "problem": "p", "reward": 0.0, "advantage": -0.5, "prompt": "1 + 1 =",
     "completion": "\n| 3"},
]  # fmt: skip


def test_samples_are_logged_every_nth_step() -> None:
    recording = RecordingTracker()
    with Tracker("recording", recording.open, interval=2) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, ROW, sample=SAMPLE)
        tracker.log(4, ROW, sample={**SAMPLE, "advantages": []})
    assert [bool(row.samples) for row in recording.logged] == [False, True, False, True]
    assert recording.logged[1].samples == SAMPLE_ROWS
    assert [row["advantage"] for row in recording.logged[3].samples] == [0.0, 0.0]


def test_completions_that_were_cut_off_are_marked() -> None:
    recording = RecordingTracker()
    with Tracker("recording", recording.open, interval=1) as tracker:
        tracker.log(1, ROW, sample={**SAMPLE, "cut_off": [False, True]})
    shown = [row["completion"] for row in recording.logged[0].samples]
    assert shown == [" 2", "\n| 3 [cut off]"]


def refuse(first_step: int) -> AbstractContextManager[LogStep]:
    raise OSError("no room")


def test_failing_tracker_logs_one_warning_and_stops(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"step": step, "reward": 0.5} for step in range(1, 100)]
    recording = RecordingTracker(fails_at=2)
    track(recording.open, rows)
    assert [row.step for row in recording.logged] == [1]
    track(refuse, rows)
    failed, refused = caplog.messages
    assert failed.startswith("no more metrics for recording: RuntimeError: connection lost")
    assert refused.startswith("no more metrics for recording: OSError: no room")


def test_hanging_tracker_blocks_neither_steps_nor_close(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    hanging = RecordingTracker(hangs=release).open
    track(hanging, [{"step": 1, "reward": 0.5}], close_seconds=0.1)
    assert caplog.messages == ["no more metrics for recording: not closed within 0 s"]
    caplog.clear()
    num_rows = 1005
    many = [{"step": step, "reward": 0.5} for step in range(1, num_rows)]
    track(hanging, many, close_seconds=0.1)
    release.set()
    assert caplog.messages == ["no more metrics for recording: 1000 rows are pending"]


@pytest.mark.parametrize("name", trackers.PACKAGES)
def test_missing_package_is_named_with_its_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, trackers.PACKAGES[name], None)
    with pytest.raises(ConfigError) as caught:
        check_trackers([name])
    assert str(caught.value) == (
        f"run.report_to {name} needs {trackers.PACKAGES[name]}; "
        f"pip install 'peralta_zmq[{name}]', or leave out {name}"
    )


def test_report_to_is_a_list_of_known_trackers() -> None:
    def parsed(*arguments: str) -> tuple[str, ...]:
        return load_config("bin/x", list(arguments)).run.report_to

    assert parsed() == parsed("--run.report-to", "") == ()
    assert parsed("--run.report-to", "wandb, trackio") == ("wandb", "trackio")
    with pytest.raises(ConfigError) as caught:
        parsed("--run.report-to", "tb")
    assert str(caught.value) == (
        "run.report_to.0 = 'tb' is wrong: should be 'tensorboard', 'trackio' or 'wandb'"
    )


def log_two_sessions(name: str, folder: Path) -> None:
    """Log steps and an evaluation in two sessions, with a roll-back in between."""
    for steps in ((1, 2, 3), (2,)):
        opened = open_trackers(
            [name], folder=folder, run_id="demo-1", project="math", interval=2,
            settings={"seed": 0},
        )  # fmt: skip
        if len(steps) == 1:  # as after a roll-back
            (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1}\n')
        with RunLog(folder, run="demo", max_steps=3, trackers=opened) as run_log:
            for step in steps:
                row = {"step": step, "time": 1e9 + step, "reward": step / 4 + len(steps)}
                run_log.step({**row, "rewards/right/mean": None}, [SAMPLE])
            run_log.evaluation(1, [], accuracy=0.25, figures={"avg@1": 0.5}, policy_steps=[1, 1])


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A proxy for every request to another machine; it must not get a connection."""
    monkeypatch.setenv("HF_TOKEN", "hf_token")  # as if logged in
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, address)
            monkeypatch.setenv(name.upper(), address)
        yield listening


def test_tensorboard_reads_curves_without_rolled_back_steps(tmp_path: Path) -> None:
    reason = "pip install 'peralta_zmq[tensorboard]' tensorboard"
    pytest.importorskip("tensorboardX", reason=reason)
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason=reason
    )
    log_two_sessions("tensorboard", tmp_path)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/accuracy", "eval/avg_1", "reward"]
    curve = [(point.step, point.value, point.wall_time) for point in events.Scalars("reward")]
    assert curve == [(1, 3.25, 1e9 + 1), (2, 1.5, 1e9 + 2)]
    assert events.Scalars("eval/accuracy")[-1].value == 0.25
    text = events.Tensors("samples/text_summary")[-1]  # the reader keeps rolled-back texts
    assert b"reward 0, advantage -0.5\n\n    \n    | 3" in text.tensor_proto.string_val[0]


class Package(ModuleType):
    """In place of trackio or wandb: records what is logged."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.logged: list[dict[str, Any]] = []
        self.opened: list[dict[str, Any]] = []
        self.Run = SimpleNamespace()
        self.Settings = dict
        self.Table = lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]

    def init(self, *project: str, **options: Any) -> Any:
        self.opened.append({"project": project[0] if project else "", **options})
        return self

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        self.logged.append({"step": step, **row})

    def define_metric(self, *_: object, **__: object) -> None: ...

    def finish(self) -> None: ...


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_run_continues_in_its_tracker_with_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package = Package(name)
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log_two_sessions(name, tmp_path)
    opened = [(each["project"], each["name"], each["resume"]) for each in package.opened]
    assert opened == [("math", "demo-1", "allow")] * 2
    rows = package.logged
    curve = [(row["step"], row["reward"]) for row in rows if "reward" in row]
    assert curve == [(1, 3.25), (2, 3.5), (3, 3.75), (2, 1.5)]
    assert [row["eval/accuracy"] for row in rows if "eval/accuracy" in row] == [0.25, 0.25]
    assert [row["samples"] for row in rows if "samples" in row] == [SAMPLE_ROWS] * 2
    assert name != "wandb" or os.environ["WANDB_MODE"] == "offline"


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_nothing_leaves_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    proxy: socket.socket, name: str,
) -> None:  # fmt: skip
    pytest.importorskip(name, reason=f"pip install 'peralta_zmq[{name}]'")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log_two_sessions(name, tmp_path)
    assert not select.select([proxy], [], [], 0.0)[0]
    assert "no more metrics" not in caplog.text
