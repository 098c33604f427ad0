"""Machines of a test: network namespaces with virtual cables to a central one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import pytest


class Net:
    """The trainer's namespace, with a virtual cable to each other namespace.

    `prefixes`: name of the other namespace -> prefix of its network, such as 10.78.1; the trainer
    has address 1 there, the other end 2 on its interface eth0.
    """

    def __init__(self, prefixes: Mapping[str, str]) -> None:
        self._prefixes = prefixes
        self.trainer = f"t{os.getpid()}"

    def namespace(self, name: str) -> str:
        return f"{name}{os.getpid()}"

    def set_up(self) -> None:
        _ip("netns", "add", self.trainer)
        _ip("-n", self.trainer, "link", "set", "lo", "up")
        for name, prefix in self._prefixes.items():
            namespace = self.namespace(name)
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", self.trainer, "link", "add", f"to-{name}", "type", "veth",
                "peer", "name", "eth0", "netns", namespace)  # fmt: skip
            for where, end, address in ((self.trainer, f"to-{name}", 1), (namespace, "eth0", 2)):
                _ip("-n", where, "address", "add", f"{prefix}.{address}/24", "dev", end)
                _ip("-n", where, "link", "set", end, "up")

    def set_link(self, name: str, state: str) -> None:
        _ip("-n", self.trainer, "link", "set", f"to-{name}", state)

    def remove(self) -> None:
        for name in (self.trainer, *map(self.namespace, self._prefixes)):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def network(prefixes: Mapping[str, str]) -> Generator[Net]:
    """A network for one test; skips the test where there can be none."""
    if not shutil.which("ip"):
        pytest.skip("no ip on this machine (Debian: apt install iproute2)")
    net = Net(prefixes)
    try:
        net.set_up()
    except subprocess.CalledProcessError as error:
        net.remove()
        pytest.skip(f"network namespaces are not permitted: {error.stderr.decode().strip()}")
    try:
        yield net
    finally:
        net.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
