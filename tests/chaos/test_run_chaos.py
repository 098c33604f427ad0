"""The whole chaos run of `make run-chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_programs import REPO

from peralta_zmq.observe.metrics import read_rows
from tools.link_proxy import free_ports

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def test_chaos_run_kills_every_worker_and_completes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.chaos", "@", "configs/demo.toml",
               "--run.dir", str(tmp_path), "--wire.port", str(free_ports()),
               "--run.num-local-generators", "2"]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "demo"
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(1, 81))
    killed = [row["worker"] for row in read_rows(run / "events.jsonl") if row["event"] == "killed"]
    assert len(killed) == 5
    assert set(killed) == {"trainer", "generator-0", "generator-1"}
    assert json.loads((run / "summary.json").read_text())["reward_last5"] >= 0.95
