"""A real run while workers are killed with SIGKILL: `make test-chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_end_to_end import REPO, two_free_ports

from peralta_zmq.observe.metrics import read_rows

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]


def test_two_generators_and_the_trainer_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "bin" / "lan"), "chaos", "--run.dir", str(tmp_path),
               "--wire.port", str(two_free_ports())]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "FAIL" not in ended.stdout
    run = tmp_path / "demo"
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(1, 81))
    events = read_rows(run / "events.jsonl")
    assert [row["worker"] for row in events if row["event"] == "restart"] == [
        "generator-0", "trainer", "generator-1",
    ]  # fmt: skip
    assert json.loads((run / "summary.json").read_text())["reward_last5"] >= 0.95
    ledger = json.loads((run / "checkpoints" / "step_000080" / "progress.json").read_text())
    assert all(above == [] for _, above in ledger["ledger"].values())
