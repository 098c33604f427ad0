"""Trackers: the same numbers elsewhere, and no fault of theirs reaches the run.

.venv/bin/python -m pytest tests/observe/test_trackers.py
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from peralta_zmq.config import load_config
from peralta_zmq.errors import ConfigError
from peralta_zmq.observe import trackers
from peralta_zmq.observe.metrics import Row
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.trackers import Numbers, Tracker, check_trackers, open_trackers

pytestmark = pytest.mark.timeout(60)
ROW: Row = {"step": 3, "time": 1000.0, "reward": 0.5, "loss": None, "note": "x", "kl": math.inf}


class Kept:
    """A sink that keeps what it is told; it fails or hangs at the step it is asked to."""

    def __init__(self, *, fails_at: int = 0, hangs: threading.Event | None = None) -> None:
        self.told: list[tuple[int, Numbers, float]] = []
        self.closed = False
        self._fails_at, self._hangs = fails_at, hangs

    def log(self, step: int, numbers: Numbers, *, time: float) -> None:
        if step == self._fails_at:
            raise RuntimeError("the far end is gone")
        if self._hangs is not None:
            self._hangs.wait()
        self.told.append((step, numbers, time))

    def close(self) -> None:
        self.closed = True


def track(sink: Kept, rows: Sequence[Row]) -> None:
    with Tracker("kept", lambda first: sink) as tracker:
        for row in rows:
            tracker.log(int(str(row["step"])), row)


def test_a_tracker_is_told_the_numbers_of_a_row_and_its_axes_apart() -> None:
    sink = Kept()
    track(sink, [ROW, ROW | {"step": 4, "reward": 1}])
    assert sink.told == [(3, {"reward": 0.5}, 1000.0), (4, {"reward": 1.0}, 1000.0)]
    assert sink.closed


def test_a_tracker_that_fails_costs_one_line_and_is_told_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Kept(fails_at=2)
    track(sink, [{"step": step, "reward": 0.5} for step in range(1, 100)])
    assert [step for step, _, _ in sink.told] == [1]
    (line,) = caplog.messages
    assert line.startswith("no more metrics for kept: RuntimeError: the far end is gone")


def test_a_tracker_that_cannot_be_opened_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(first: int) -> Kept:
        raise OSError("no room")

    with Tracker("kept", refuse) as tracker:
        for step in range(1, 100):
            tracker.log(step, {"reward": 0.5})
    assert len(caplog.messages) == 1 and "no room" in caplog.text


def test_a_tracker_that_hangs_holds_up_neither_the_steps_nor_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.1)
    release = threading.Event()
    track(Kept(hangs=release), [{"step": 1, "reward": 0.5}])
    assert caplog.messages == ["no more metrics for kept: it has not ended within 0 s"]
    caplog.clear()
    num_rows = trackers.MAX_WAITING + 5
    track(Kept(hangs=release), [{"step": step, "reward": 0.5} for step in range(1, num_rows)])
    release.set()
    assert caplog.messages == ["no more metrics for kept: it has not taken 1000 rows"]


@pytest.mark.parametrize("name", trackers.PACKAGES)
def test_a_missing_package_is_named_with_the_way_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, trackers.PACKAGES[name], None)
    with pytest.raises(ConfigError) as caught:
        check_trackers([name])
    assert str(caught.value) == (
        f"run.report_to {name} needs {trackers.PACKAGES[name]}; "
        f"pip install 'peralta_zmq[{name}]', or leave it out"
    )


def test_trackers_are_named_in_a_list_and_an_unknown_one_is_refused() -> None:
    def named(*arguments: str) -> tuple[str, ...]:
        return load_config("bin/x", list(arguments)).run.report_to

    assert named() == named("--run.report-to", "") == ()
    assert named("--run.report-to", "wandb, trackio") == ("wandb", "trackio")
    with pytest.raises(ConfigError) as caught:
        named("--run.report-to", "tb")
    assert str(caught.value) == (
        "run.report_to has 'tb'; choose from tensorboard, trackio, wandb, or leave it out"
    )


def tracked_by(name: str, folder: Path) -> None:
    """Two steps and an evaluation of a run, in two sessions, of which the first lost its tail."""
    for steps in ((1, 2, 3), (2,)):
        opened = open_trackers([name], folder=folder, run_id="demo-1", settings={"seed": 0})
        if len(steps) == 1:  # as after a roll-back
            (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1}\n')
        with RunLog(folder, run="demo", max_steps=3, trackers=opened) as books:
            for step in steps:
                row = {"step": step, "time": 1e9 + step, "reward": step / 4 + len(steps)}
                books.step({**row, "rewards/right/mean": None}, {})
            books.evaluation(1, [], accuracy=0.25, figures={"avg@1": 0.5}, policy_steps=[1, 1])


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What every request to another machine would go through; nobody may have knocked there."""
    monkeypatch.setenv("HF_TOKEN", "hf_ours")  # of one who is logged in
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # and loads models
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, address)
            monkeypatch.setenv(name.upper(), address)
        yield listening


def test_tensorboard_reads_back_the_curves_and_what_was_rolled_back_is_purged(
    tmp_path: Path,
) -> None:
    reason = "pip install 'peralta_zmq[tensorboard]' tensorboard"
    pytest.importorskip("tensorboardX", reason=reason)
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason=reason
    )
    tracked_by("tensorboard", tmp_path)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/accuracy", "eval/avg_1", "reward"]
    curve = [(each.step, each.value, each.wall_time) for each in events.Scalars("reward")]
    assert curve == [(1, 3.25, 1e9 + 1), (2, 1.5, 1e9 + 2)]
    assert events.Scalars("eval/accuracy")[-1].value == 0.25


def test_trackio_keeps_the_curves_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    proxy: socket.socket,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="pip install 'peralta_zmq[trackio]'")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    tracked_by("trackio", tmp_path)
    rows = storage.get_logs(trackers.PROJECT, "demo-1")
    curve = [(row["step"], row["reward"]) for row in rows if "reward" in row]
    assert curve == [(1, 3.25), (2, 3.5), (3, 3.75), (2, 1.5)]
    assert [row["eval/accuracy"] for row in rows if "eval/accuracy" in row] == [0.25, 0.25]
    assert "rackio" not in capsys.readouterr().out
    assert nobody_knocked(proxy)


def test_wandb_is_offline_and_has_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: socket.socket
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    pytest.importorskip("wandb", reason="pip install 'peralta_zmq[wandb]'")
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    tracked_by("wandb", tmp_path)
    told: list[Numbers] = []
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        for content in leveldb_records(file.read_bytes()):
            record = records.Record()
            record.ParseFromString(content)
            told.append({
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            })  # fmt: skip
    curve = [(row["step"], row["reward"]) for row in told if "reward" in row]
    assert curve in (
        [(1, 3.25), (2, 3.5), (3, 3.75), (2, 1.5)],
        [(2, 1.5)],  # both sessions in one second have one folder
    )
    assert {row["eval/accuracy"] for row in told if "eval/accuracy" in row} == {0.25}
    assert os.environ["WANDB_MODE"] == "offline"
    assert nobody_knocked(proxy)


def nobody_knocked(listening: socket.socket) -> bool:
    return not select.select([listening], [], [], 0.0)[0]


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: 7 bytes of its own, then LevelDB's log format."""
    block, whole, at = 32768, b"", 7
    while at + 7 <= len(content):
        if block - at % block < 7:  # no header begins so near to the end of a block
            at += block - at % block
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""
