"""What every test gets: one torch thread, no hub, the same examples, and no socket left open."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import settings

from tools import link_proxy

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts us with & lets all ignore it
settings.load_profile("ci")  # the same examples every time, and no clock; tests/fuzz draws others
# Ports are free for a moment before who asked binds them: no two workers draw from the same ones.
worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
share = len(link_proxy.PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
link_proxy.PORTS = link_proxy.PORTS[worker * share : (worker + 1) * share - link_proxy.NUM_PORTS]


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    """Fail the test that leaves a ZeroMQ socket open, then close it for the next one."""
    yield
    if "zmq" not in sys.modules:
        return
    import zmq

    left = [each for each in zmq.Context.instance()._sockets if not each.closed]
    for each in left:
        each.close(linger=0)
    assert not left, f"sockets left open: {left}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is entered here is left at the end of the test."""
    with ExitStack() as opened:
        yield opened
