"""Settings of all tests: number of torch threads, no hub, closed sockets; common fixtures."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from user_modules import UserModules

from tools import link_proxy

if TYPE_CHECKING:
    from trainer_sessions import Continued

    from peralta_zmq.weights.store import WeightStore
    from peralta_zmq.weights.subscriber import WeightSubscriber

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & makes children ignore it
settings.load_profile("ci")  # fixed examples without deadline; tests/fuzz uses random ones
# A free port is bound only after it was chosen, so workers choose from disjoint ranges.
worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
share = len(link_proxy.PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
link_proxy.PORTS = link_proxy.PORTS[worker * share : (worker + 1) * share - link_proxy.NUM_PORTS]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of whole programs first: at the end, they would leave the other cores idle."""

    def timeout_of(item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return marker.args[0] if marker else 0

    items.sort(key=lambda item: timeout_of(item) <= 60)


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    """Fail a test that leaves a ZeroMQ socket open, and close the socket."""
    yield
    if "zmq" not in sys.modules:
        return
    import zmq

    left = [socket for socket in zmq.Context.instance()._sockets if not socket.closed]
    for socket in left:
        socket.close(linger=0)
    assert not left, f"sockets left open: {left}"


@pytest.fixture(autouse=True)
def threads() -> None:
    """Give torch one thread again, or OMP_NUM_THREADS, after programs that chose another number."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restore the signal handlers that a trainer replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def open_file_limits() -> Iterator[tuple[int, int]]:
    """Limits of open files, soft and hard; restored at the end of the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def user_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UserModules]:
    """Modules in tmp_path that the test can import, forgotten at its end."""
    modules = UserModules(tmp_path, monkeypatch)
    yield modules
    modules.forget()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """An ExitStack that is closed at the end of the test."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    """A store in tmp_path/weights, claimed by a run of the name `run`."""
    from peralta_zmq.weights.store import WeightStore

    opened = WeightStore.open(tmp_path / "weights")
    opened.claim("run")
    return opened


@pytest.fixture
def subscriber(store: WeightStore, tmp_path: Path) -> Iterator[WeightSubscriber]:
    """A subscriber of the store, with its copy in tmp_path/copy."""
    from peralta_zmq.weights.subscriber import WeightSubscriber

    with closing(WeightSubscriber(store, tmp_path / "copy", poll_seconds=0.05)) as opened:
        yield opened


@pytest.fixture
def continued(tmp_path: Path) -> Continued:
    """A run in tmp_path of which each session can have more steps."""
    from trainer_sessions import Continued

    return Continued(tmp_path)
