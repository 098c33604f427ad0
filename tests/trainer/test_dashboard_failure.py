"""A trainer whose dashboard fails prints one line and trains without it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from real_programs import REPO, RealRun

from peralta_zmq.config import Config, load_config
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.trainer.session import open_dashboard
from tools.link_proxy import free_ports

HIGH = 65_532  # the highest port allowed; three more follow it

# Python imports this file from PYTHONPATH at its start.
SITECUSTOMIZE = """
import peralta_zmq.observe.dashboard.view as view
def fails(*_, **__):
    raise RuntimeError("an error\\nof two lines")
view.update = fails
"""


def config_of(folder: Path, *settings: str) -> Config:
    return load_config("bin/trainer", ["--run.dir", str(folder), "--run.name", "r", *settings])


@pytest.fixture
def printed_by(
    tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Lines printed when the dashboard is opened with these settings."""

    def show(*settings: str) -> list[str]:
        config = config_of(tmp_path, *settings)
        config.run_folder.mkdir(parents=True, exist_ok=True)
        run_log = stack.enter_context(RunLog(config.run_folder, run="r", max_steps=1))
        capsys.readouterr()
        with ExitStack() as session:
            open_dashboard(config, session, run_log)
        return capsys.readouterr().out.splitlines()

    return show


@pytest.fixture
def full(stack: ExitStack) -> int:
    """A port in use; all higher ports are in use, too."""
    for port in range(HIGH, 65_536):
        holder = stack.enter_context(closing(socket.socket()))
        with contextlib.suppress(OSError):  # in use already
            holder.bind(("127.0.0.1", port))
            holder.listen()
    return HIGH


def test_open_dashboard_without_a_free_port_is_reported(
    printed_by: Callable[..., list[str]], full: int
) -> None:
    (line,) = printed_by("--dashboard.port", str(full))
    assert line == "no dashboard: dashboard.port 65532 to 65535 cannot be used; choose a free one"


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_open_dashboard_on_a_foreign_host_is_reported(
    printed_by: Callable[..., list[str]], tmp_path: Path, host: str
) -> None:
    (token := tmp_path / "token").write_text("0123456789abcdef")
    token.chmod(0o600)
    (line,) = printed_by("--dashboard.host", host, "--dashboard.token-file", str(token))
    assert line.startswith(f"no dashboard: dashboard.host {host}, port 8470 cannot be used (")


@pytest.mark.parametrize(
    ("setting", "value", "match"),
    [
        ("host", "0.0.0.0", r"is open to other machines without .*; set dashboard\.token_file"),
        ("token-file", "/gone", r"no dashboard: dashboard.token_file .*gone cannot be read"),
    ],
)
def test_open_dashboard_reports_a_refused_setting(
    printed_by: Callable[..., list[str]], setting: str, value: str, match: str
) -> None:
    (line,) = printed_by(f"--dashboard.{setting}", value)
    assert re.search(match, line)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_training_completes_with_a_broken_dashboard(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    port = free_ports()
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}
    settings = ("--train.max-steps", "2", "--dashboard.port", str(port))
    with closing(RealRun(tmp_path, *settings)) as run:
        trainer = run.trainer(environment=path)
        run.generator("ann", environment=path)
        while trainer.alive and status_of(f"http://127.0.0.1:{port}/api/runs/0") != 500:
            time.sleep(0.05)
        assert trainer.wait() == 0, trainer.printed
        printed = trainer.printed
    lines = printed.splitlines()
    (line,) = [text for text in lines if "dashboard request" in text]
    assert r"failed at /api/runs/0 (RuntimeError('an error\nof" in line
    assert any(text.startswith("step=2/2 ") for text in lines), printed
    assert (run.folder / "summary.json").exists()


def status_of(address: str) -> int | None:
    """HTTP status of a response; None without a response."""
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None
