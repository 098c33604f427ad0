"""`make run-lan` without a hosts file, in a copy of the project.

.venv/bin/python -m pytest -m lan tests/operate/test_run_lan_here.py
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from hosts import REPO, SMALL, make_machine, processes_in

from tools.link_proxy import free_ports

pytestmark = [pytest.mark.lan, pytest.mark.timeout(200)]
IGNORED = shutil.ignore_patterns(".*_cache", ".hypothesis", ".git", ".venv*", ".lan", "runs",
                                  "keys", "__pycache__", "hosts.toml")  # fmt: skip


@pytest.mark.skipif(not shutil.which("make"), reason="no make on this machine")
def test_run_lan_without_a_hosts_file_runs_the_example(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(REPO, project, ignore=IGNORED)
    make_machine(project)
    settings = [*SMALL, "--train.max-steps", "2", "--wire.port", str(free_ports())]
    try:
        done = subprocess.run(
            ["make", "--no-print-directory", "run-lan", f"ARGS={' '.join(settings)}"],
            cwd=project, capture_output=True, text=True, check=False, timeout=150,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "here: doctor: ok" in done.stdout and "here: start: ok" in done.stdout
        assert "here-trainer | step=2/2" in done.stdout
        assert (project / "runs/demo/summary.json").exists()
    finally:
        remaining = processes_in(tmp_path)
        for pid in remaining:
            os.kill(pid, signal.SIGKILL)
    assert remaining == {}
