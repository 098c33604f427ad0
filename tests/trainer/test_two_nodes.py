"""A trainer whose ranks are on two machines: two network namespaces, torchrun, gloo, FSDP2."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from network_namespaces import Net, network
from real_programs import REPO, SMALL, Program, until

from peralta_zmq.observe.metrics import EVENTS, METRICS, Row, read_rows
from tools.link_proxy import free_ports
from tools.promise_checker import check
from tools.run_history import read_history

pytestmark = [pytest.mark.lan, pytest.mark.timeout(400)]
NODES = {"peer": "10.79.1"}
MASTER = "10.79.1.1"  # the first node
STEPS = 10
SECONDS = 180.0  # deadline of a part: each starts up to six processes with torch


class Cluster:
    """One run; its programs are started on two nodes."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.folder, self._net, self._parent = folder / "run", net, folder
        self._settings = ("--run.dir", str(folder), "--run.name", "run", *SMALL,
                          "--wire.port", str(free_ports()), "--wire.bind", "0.0.0.0",
                          "--wire.host", MASTER, "--security.insecure",
                          "--weights.keep-last", "1000",
                          "--train.max-steps", str(STEPS))  # fmt: skip
        self._started: list[Program] = []

    def ranks(self, program: str, *arguments: str, per_node: int) -> list[Program]:
        """Start a program under torchrun on both nodes, first that of rank 0."""
        port, found = free_ports(), list[Program]()
        nodes = [(self._net.trainer, "to-peer"), (self._net.namespace("peer"), "eth0")]
        for number, (namespace, interface) in enumerate(nodes):
            torchrun = [
                *("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"),
                *(f"--nproc-per-node={per_node}", f"--master-addr={MASTER}"),
                *(f"--master-port={port}", str(REPO / "tests/support/sharded_program.py")),
            ]
            environment = {
                "GLOO_SOCKET_IFNAME": interface, "PYTHONPATH": f"{REPO}:{REPO / 'tests/support'}"
            }  # fmt: skip
            found.append(self._start(
                namespace, f"{program}-{number}", *torchrun, program, *arguments,
                environment=environment,
            ))  # fmt: skip
        return found

    def trainer(self, *, per_node: int) -> list[Program]:
        """Start the trainer on both nodes, or with `per_node` 0 without torchrun on the first."""
        if per_node > 0:
            return self.ranks("trainer", *self._settings, per_node=per_node)
        program = str(REPO / "bin/trainer")
        return [self._start(self._net.trainer, "trainer-0", program, *self._settings)]

    def generator(self) -> Program:
        """Start a generator on the second node."""
        words = (str(REPO / "bin/generator"), "--generator.name", "ann", *self._settings)
        return self._start(self._net.namespace("peer"), "generator-ann", *words)

    def _start(
        self, namespace: str, log: str, *words: str, environment: dict[str, str] | None = None
    ) -> Program:
        command = ["ip", "netns", "exec", namespace, sys.executable, *words]
        self._started.append(Program(command, self._parent / f"{log}.log", environment or {}))
        return self._started[-1]

    def stop(self, programs: list[Program]) -> str:
        """Stop a trainer with SIGTERM; returns what rank 0 printed."""
        programs[0].signal(signal.SIGTERM)
        for program in programs:
            program.wait(timeout=60)
        return programs[0].printed

    @property
    def step(self) -> int:
        rows = read_rows(self.folder / METRICS)
        return int(str(rows[-1]["step"])) if rows else 0

    @property
    def sessions(self) -> list[Row]:
        """The starts of the trainer, from events.jsonl."""
        rows = read_rows(self.folder / EVENTS)
        return [row for row in rows if row["event"] in ("start", "resume")]

    def broken(self) -> dict[str, tuple[str, ...]]:
        """Violations of the promises, by promise."""
        history = read_history(self.folder, [self._parent / "generator-ann.log"])
        return {each.promise: each.broken for each in check(history) if each.broken}

    def close(self) -> None:
        """Terminate all programs: a killed torchrun would leave its ranks running."""
        for program in self._started:
            program.process.terminate()
        for program in self._started:
            try:
                program.wait(timeout=40)
            except subprocess.TimeoutExpired:
                program.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        made = Cluster(stack.enter_context(network(NODES)), tmp_path)
        stack.callback(made.close)
        yield made


def train(cluster: Cluster, generator: Program, *, per_node: int, steps: int) -> tuple[int, str]:
    """Train at least `steps` more steps; returns the step of the checkpoint, and the output."""
    before, trainer = cluster.step, cluster.trainer(per_node=per_node)
    until(lambda: cluster.step >= before + steps, *trainer, generator, seconds=SECONDS)
    printed = cluster.stop(trainer)
    assert f"stopped after step {cluster.step}, saved" in printed
    return cluster.step, printed


def replayed(cluster: Cluster, *arguments: str, per_node: int) -> list[str]:
    """The lines of bin/replay on both nodes."""
    programs = cluster.ranks("replay", str(cluster.folder), *arguments, per_node=per_node)
    for program in programs:
        assert program.wait(timeout=SECONDS) == 0, program.printed
    return [line for line in programs[0].printed.splitlines() if line.startswith("step=")]


def test_two_nodes_train_and_resume_with_one_and_four_ranks(cluster: Cluster) -> None:
    generator = cluster.generator()
    on_two, _ = train(cluster, generator, per_node=1, steps=3)
    on_one, printed = train(cluster, generator, per_node=0, steps=2)
    assert f" checkpoint={on_two} replayed=" in printed
    assert on_one < STEPS
    trainer = cluster.trainer(per_node=2)
    for program in (*trainer, generator):
        assert program.wait(timeout=SECONDS) == 0, program.printed
    printed = trainer[0].printed
    assert f" checkpoint={on_one} replayed=" in printed
    assert f"steps              {STEPS} in" in printed
    assert [row["ranks"] for row in cluster.sessions] == [2, 1, 4]
    assert cluster.broken() == {}

    lines = replayed(cluster, "--to", str(on_two), per_node=1)
    assert len(lines) == on_two and all(line.endswith("  as published") for line in lines)
