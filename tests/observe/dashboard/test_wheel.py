"""The dashboard of an installed wheel. `make test-slow`."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from synthetic_runs import make_run

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_wheel_contains_the_dashboard(tmp_path: Path) -> None:
    """Only the dependencies of the dashboard are installed with it."""
    source, folder = tmp_path / "source", make_run(tmp_path / "hand", num_steps=3)
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "peralta_zmq", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")[:-1]  # fmt: skip
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run([sys.executable, *pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)],
                   check=True)  # fmt: skip
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    subprocess.run([str(python), *pip, "install", "--no-deps", str(wheel)], check=True)
    subprocess.run([str(python), *pip, "install", "-c", str(ROOT / ".ci" / "constraints.txt"),
                    "starlette", "uvicorn", "numpy", "rich"], check=True)  # fmt: skip
    server = subprocess.Popen(
        [str(python), "-I", "-m", "peralta_zmq.observe.dashboard", str(folder), "--port", "0"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    try:
        assert server.stdout
        address = server.stdout.readline().split()[1]
        for path in ("", "dashboard.js", "dashboard.css", "uPlot.iife.min.js", "icon.svg",
                     "api/runs/0"):  # fmt: skip
            with urllib.request.urlopen(f"{address}/{path}", timeout=20) as response:
                assert len(response.read()) > 100
    finally:
        server.kill()
        server.wait()
        if server.stdout:
            server.stdout.close()
