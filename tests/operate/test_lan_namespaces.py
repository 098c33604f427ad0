"""A trainer and two generators in three network namespaces.

.venv/bin/python -m pytest -m lan tests/operate/test_lan_namespaces.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_programs import RealRun, ended_within, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(200)]
CUT_SECONDS = 20.0
GENERATORS = {"ann": "10.78.1", "bob": "10.78.2"}  # name, and prefix of its network


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Net:
    """The trainer's namespace, with a virtual cable to that of each generator."""

    def __init__(self) -> None:
        self.trainer = f"t{os.getpid()}"

    def namespace(self, name: str) -> str:
        return f"{name}{os.getpid()}"

    def set_up(self) -> None:
        ip("netns", "add", self.trainer)
        ip("-n", self.trainer, "link", "set", "lo", "up")
        for name, net in GENERATORS.items():
            namespace = self.namespace(name)
            ip("netns", "add", namespace)
            ip("-n", self.trainer, "link", "add", f"to-{name}", "type", "veth",
               "peer", "name", "eth0", "netns", namespace)  # fmt: skip
            for where, end, address in ((self.trainer, f"to-{name}", 1), (namespace, "eth0", 2)):
                ip("-n", where, "address", "add", f"{net}.{address}/24", "dev", end)
                ip("-n", where, "link", "set", end, "up")

    def set_link(self, name: str, state: str) -> None:
        ip("-n", self.trainer, "link", "set", f"to-{name}", state)

    def remove(self) -> None:
        for name in (self.trainer, *map(self.namespace, GENERATORS)):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def net() -> Iterator[Net]:
    if not shutil.which("ip"):
        pytest.skip("no ip on this machine (Debian: apt install iproute2)")
    made = Net()
    try:
        made.set_up()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces are not permitted: {error.stderr.decode().strip()}")
    yield made
    made.remove()


def groups_after(run: RealRun, name: str, step: int) -> bool:
    """True if the trainer received groups of this generator after the step."""
    return any(
        float(str(row.get(f"gen/{name}/groups", 0))) > 0
        for row in run.rows if int(str(row["step"])) > step
    )  # fmt: skip


def test_generator_rejoins_after_its_link_was_cut_for_20_s(net: Net, tmp_path: Path) -> None:
    run = RealRun(tmp_path, "--wire.bind", "0.0.0.0", "--security.insecure",
                  "--train.max-steps", "100000", "--train.learning-rate", "1e-6")  # fmt: skip
    try:
        trainer = run.trainer(shell=f'exec ip netns exec {net.trainer} "$@"')
        ann, bob = (
            run.generator(name, "--wire.host", f"{there}.1",
                            shell=f'exec ip netns exec {net.namespace(name)} "$@"')
            for name, there in GENERATORS.items()
        )  # fmt: skip
        until(lambda: groups_after(run, "ann", 0) and groups_after(run, "bob", 0),
              trainer, ann, bob)  # fmt: skip
        net.set_link("bob", "down")
        cut = run.step
        assert not ended_within(trainer, CUT_SECONDS)
        alone = run.step
        assert alone > cut + 3  # the run goes on
        assert not groups_after(run, "bob", alone - 1)
        assert ann.alive and bob.alive
        net.set_link("bob", "up")
        until(lambda: groups_after(run, "bob", alone), trainer, ann, bob, seconds=40)
    finally:
        run.close()
