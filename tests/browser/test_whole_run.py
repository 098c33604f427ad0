"""What `make run` starts, with the page open: training, a death, and how the page tells of both.

PERALTA_PICTURE=docs/dashboard.png keeps the picture that the test takes (make picture).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from test_end_to_end import free_ports

ROOT = Path(__file__).parents[2]
PATIENCE = 180.0  # seconds; a generator that is not heard for 30 is gone


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a door in a process group of its own; whatever is left of it ends with the test."""
    with ExitStack() as stack:

        def begin(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL,
                                       start_new_session=True)  # fmt: skip

            def end() -> None:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(30)

            stack.callback(end)
            return process

        yield begin


def test_training_and_a_death_are_seen_on_the_page(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]], tab: Callable
) -> None:
    port, page_port = free_ports(), free_port()
    settings = ("@", str(ROOT / "configs" / "demo.toml"), "--run.dir", str(tmp_path),
                "--wire.port", str(port), "--train.max-steps", "400",
                "--train.learning-rate", "5e-5",
                "--dashboard.port", str(page_port))  # fmt: skip
    start(str(ROOT / "bin" / "lan"), "local", *settings, "--eval.num-examples", "50")
    third = start(str(ROOT / "bin" / "generator"), *settings, "--generator.name", "ann")
    with socket.socket() as probe:  # the trainer listens before it computes
        probe.settimeout(60)
        while probe.connect_ex(("127.0.0.1", page_port)):
            assert third.poll() is None
    seen = tab(f"http://127.0.0.1:{page_port}/", viewport={"width": 1360, "height": 1180})
    until(seen, lambda: number(seen, "step") >= 2)
    first = number(seen, "card-reward")
    until(seen, lambda: seen.text("generator-ann").split("\t")[1] == "up")
    until(seen, lambda: number(seen, "card-reward") > first + 0.2)
    until(seen, lambda: number(seen, "step") >= 40)
    seen.page.get_by_test_id("rollout").first.wait_for()
    samples = seen.page.get_by_test_id("sample").bounding_box()
    whole = {"x": 0, "y": 0, "width": 1360, "height": samples["y"] + samples["height"] + 32}
    picture = seen.page.screenshot(full_page=True, clip=whole)
    assert not seen.text("verdict").startswith("ann is gone")
    third.kill()
    until(seen, lambda: seen.text("generator-ann").split("\t")[1] == "gone")
    until(seen, lambda: seen.text("verdict").startswith("ann is gone"))
    assert seen.text("condition") == "training"
    Path(os.environ.get("PERALTA_PICTURE", tmp_path / "dashboard.png")).write_bytes(picture)


def number(seen: Any, testid: str) -> float:
    """What stands there; 0 while there is nothing."""
    told = seen.page.get_by_test_id(testid)
    text = told.inner_text().replace(",", "") if told.count() else "-"
    return 0.0 if text == "-" else float(text)


def until(seen: Any, holds: Callable[[], bool]) -> None:
    """Look again and again; the page allows no eval, so the looking is done from here."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, seen.page.locator("body").inner_text()
        seen.page.wait_for_timeout(100)
