"""A trainer whose page is broken: one line says so, and the run ends as it would without.

.venv/bin/python -m pytest tests/test_trainer_page.py
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from test_end_to_end import SMALL, free_ports

from peralta_zmq.config import Config, load_config
from peralta_zmq.observe.dashboard import server
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.trainer.loop import open_dashboard

ROOT = Path(__file__).parents[2]
HIGH = 65_532  # the highest port of the settings; three more are left after it

# What makes Python run `sitecustomize` and find `uvicorn` in a folder of the test.
BROKEN = {"uvicorn.py": "raise ImportError('one of its libraries is gone')"}
MISSING = {"sitecustomize.py": """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "uvicorn" else found(name, *more)
"""}  # fmt: skip
FAULTY = {"sitecustomize.py": """
import peralta_zmq.observe.dashboard.view as view
def fails(*_, **__):
    raise RuntimeError("a fault\\nof two lines")
view.answer = fails
"""}  # fmt: skip


def config_of(folder: Path, *settings: str) -> Config:
    return load_config("bin/trainer", ["--run.dir", str(folder), "--run.name", "r", *settings])


@pytest.fixture
def told(
    tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """What a person is told when the page of these settings is shown."""

    def show(*settings: str) -> list[str]:
        config = config_of(tmp_path, *settings)
        config.run_folder.mkdir(parents=True, exist_ok=True)
        books = stack.enter_context(RunLog(config.run_folder, run="r", max_steps=1))
        capsys.readouterr()
        with ExitStack() as session:
            open_dashboard(config, session, books)
        return capsys.readouterr().out.splitlines()

    return show


@pytest.fixture
def full(stack: ExitStack) -> int:
    """A port that is taken, with all that are left after it."""
    for port in range(HIGH, 65_536):
        holder = stack.enter_context(closing(socket.socket()))
        with contextlib.suppress(OSError):  # taken by somebody else: as good
            holder.bind(("127.0.0.1", port))
            holder.listen()
    return HIGH


def test_no_port_is_left(told: Callable[..., list[str]], full: int) -> None:
    (line,) = told("--dashboard.port", str(full))
    assert line == "no dashboard: dashboard.port 65532 to 65535 are all taken; choose another"


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "a..b", "x" * 300])
def test_a_host_that_is_not_this_machine(
    told: Callable[..., list[str]], tmp_path: Path, host: str
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    (line,) = told("--dashboard.host", host, "--dashboard.token-file", str(token))
    assert line.startswith(f"no dashboard: dashboard.host {host}, port 8470 cannot be used (")


def test_other_machines_without_a_token(told: Callable[..., list[str]]) -> None:
    (line,) = told("--dashboard.host", "0.0.0.0")
    assert "would show this run to whoever reaches it; set dashboard.token_file" in line


def test_a_token_file_that_went_away(told: Callable[..., list[str]], tmp_path: Path) -> None:
    (line,) = told("--dashboard.token-file", str(tmp_path / "gone"))
    assert re.match(r"no dashboard: dashboard.token_file .*gone cannot be read", line)


def test_uvicorn_is_not_installed(
    told: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    assert told() == [
        "no dashboard: the page needs starlette and uvicorn; pip install 'peralta_zmq[dashboard]'"
    ]


def test_no_thread_can_be_started(
    told: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    assert told() == ["""no dashboard: RuntimeError("can't start new thread")"""]


def test_a_page_that_is_switched_off_is_not_spoken_of(told: Callable[..., list[str]]) -> None:
    assert told("--dashboard.enabled", "false") == []


FAULTS: dict[str, tuple[dict[str, str], tuple[str, ...], str]] = {
    "no port": ({}, ("--dashboard.port", str(HIGH)), "dashboard: dashboard.port 65532 to 65535"),
    "no token": ({}, ("--dashboard.host", "0.0.0.0"), "no dashboard: dashboard.host 0.0.0.0 would"),
    "uvicorn missing": (MISSING, (), "dashboard: the page needs starlette and uvicorn; pip"),
    "uvicorn broken": (BROKEN, (), "the page is gone (ImportError('one of its libraries is gone'"),
    "a request raises": (FAULTY, (), r"the page fails at /api/runs/0 (RuntimeError('a fault\nof"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_training_ends_well_beside_a_broken_page(tmp_path: Path, fault: str, full: int) -> None:
    files, settings, line = FAULTS[fault]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    shown = free_ports()
    given = ("--run.dir", str(tmp_path), "--run.name", "r", "--wire.port", str(free_ports()),
             *SMALL, "--train.max-steps", "2", "--dashboard.port", str(shown),
             *settings)  # fmt: skip
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    with (tmp_path / "out").open("w") as out, ExitStack() as stack:
        started = [
            subprocess.Popen([sys.executable, str(ROOT / "bin" / door), *given], cwd=ROOT,
                             stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": path})
            for door in ("trainer", "generator")
        ]  # fmt: skip
        for process in started:
            stack.callback(process.wait)
            stack.callback(process.kill)
        while fault == "a request raises" and started[0].poll() is None:
            time.sleep(0.05)
            if asked(f"http://127.0.0.1:{shown}/api/runs/0") == 500:
                break
        assert started[0].wait() == 0, (tmp_path / "out").read_text()
    printed = (tmp_path / "out").read_text().splitlines()
    assert sum("page" in each for each in printed if "page: http" not in each) == 1, printed
    assert any(line in each for each in printed), printed
    assert any(each.startswith("step=2/2 ") for each in printed)
    assert (tmp_path / "r" / "summary.json").exists()


def asked(address: str) -> int | None:
    """The status of an answer; None when there is none."""
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None
