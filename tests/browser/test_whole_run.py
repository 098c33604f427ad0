"""A local run with the dashboard open: training, and the death of a generator.

PERALTA_PICTURE=docs/dashboard.png stores the screenshot that the test takes (make picture).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tools.link_proxy import free_ports

ROOT = Path(__file__).parents[2]
TIMEOUT = 180.0  # seconds; a generator without a report for 30 s is gone


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a program in its own process group, which is terminated after the test."""
    with ExitStack() as stack:

        def start_program(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL,
                                       start_new_session=True)  # fmt: skip

            def end() -> None:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(30)

            stack.callback(end)
            return process

        yield start_program


def test_dashboard_shows_training_and_a_dead_generator(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]], tab: Callable
) -> None:
    port, page_port = free_ports(), free_ports()
    settings = ("@", str(ROOT / "configs" / "demo.toml"), "--run.dir", str(tmp_path),
                "--wire.port", str(port), "--train.max-steps", "400",
                "--train.learning-rate", "5e-5",
                "--dashboard.port", str(page_port))  # fmt: skip
    start(str(ROOT / "bin" / "lan"), "local", *settings, "--eval.num-examples", "50")
    ann = start(str(ROOT / "bin" / "generator"), *settings, "--generator.name", "ann")
    with socket.socket() as probe:  # the dashboard listens before the first step
        probe.settimeout(60)
        while probe.connect_ex(("127.0.0.1", page_port)):
            assert ann.poll() is None
    seen = tab(f"http://127.0.0.1:{page_port}/", viewport={"width": 1360, "height": 1180})
    until(seen, lambda: number(seen, "step") >= 2)
    first = number(seen, "card-reward")
    until(seen, lambda: seen.text("generator-ann").split("\t")[1] == "up")
    until(seen, lambda: number(seen, "card-reward") > first + 0.2)
    until(seen, lambda: number(seen, "step") >= 40)
    seen.page.get_by_test_id("rollout").first.wait_for()
    samples = seen.page.get_by_test_id("sample").bounding_box()
    whole = {"x": 0, "y": 0, "width": 1360, "height": samples["y"] + samples["height"] + 32}
    screenshot = seen.page.screenshot(full_page=True, clip=whole)
    assert not seen.text("verdict").startswith("ann is gone")
    ann.kill()
    until(seen, lambda: seen.text("generator-ann").split("\t")[1] == "gone")
    until(seen, lambda: seen.text("verdict").startswith("ann is gone"))
    assert seen.text("status") == "training"
    Path(os.environ.get("PERALTA_PICTURE", tmp_path / "dashboard.png")).write_bytes(screenshot)


def number(seen: Any, testid: str) -> float:
    """The number shown; 0 if there is none."""
    element = seen.page.get_by_test_id(testid)
    text = element.inner_text().replace(",", "") if element.count() else "-"
    return 0.0 if text == "-" else float(text)


def until(seen: Any, holds: Callable[[], bool]) -> None:
    """Poll from Python, because the content security policy forbids eval in the page."""
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline, seen.page.locator("body").inner_text()
        seen.page.wait_for_timeout(100)
