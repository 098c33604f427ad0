"""A run on a real Slurm cluster of three nodes on this machine.

make test-slurm
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import REPO, SMALL
from real_programs import Program, until
from slurm_cluster import Cluster, needs_slurm, slurm_cluster

from peralta_zmq.observe.metrics import read_rows
from tools.link_proxy import free_ports
from tools.promise_checker import check
from tools.run_history import RECORDING_OPTIONS, read_history

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600), needs_slurm]
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
# A job that starts again has a clock of yesterday.
OLD_CLOCK = '[ -z "$SLURM_RESTART_COUNT" ] || export LD_PRELOAD={library} FAKETIME=-1d'


class Site:
    """A cluster, and a run on it with its own hosts file."""

    def __init__(self, cluster: Cluster, folder: Path, name: str) -> None:
        self.cluster = cluster
        self.hosts = folder / f"{name}.toml"
        self.folder = folder / name
        self._runs, self._name = folder, name

    @property
    def step(self) -> int:
        rows = read_rows(self.folder / "metrics.jsonl")
        return int(str(rows[-1]["step"])) if rows else 0

    def settings(self, *more: str) -> list[str]:
        return [*SMALL, "--run.dir", str(self._runs), "--run.name", self._name,
                "--wire.port", str(free_ports()), "--dashboard.port=None", *more]  # fmt: skip

    def lan(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, str(REPO / "bin/lan"), command, "--hosts", str(self.hosts)]
        return subprocess.run([*arguments, *words], env=self.cluster.environment, cwd=REPO,
                              capture_output=True, text=True, timeout=200, check=False)  # fmt: skip

    def states(self) -> dict[str, list[str]]:
        """Words of each worker's line in the output of bin/lan status."""
        lines = self.lan("status").stdout.splitlines()[1:]
        return {words[0]: words for words in map(str.split, lines) if words[0][0] in "gt"}

    def job(self, worker: str) -> str:
        return json.loads((REPO / f".lan/slurm-{self.hosts.stem}.json").read_text())["jobs"][worker]

    def log(self, worker: str) -> str:
        file = self.folder / f"logs/{worker}.log"
        return file.read_text("utf-8", "replace") if file.exists() else ""

    def broken(self) -> dict[str, tuple[str, ...]]:
        """Violations of the promises in a run that has ended."""
        results = check(read_history(self.folder))
        return {result.promise: result.broken for result in results if result.broken}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster() as started:
        yield started


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Iterator[Site]:
    name = f"slurm{os.getpid()}"
    site = Site(cluster, tmp_path, name)
    yield site
    subprocess.run(["scancel", "--user=root"], env=cluster.environment, check=False)
    until(lambda: not cluster.run("squeue", "--noheader"))
    (REPO / f".lan/slurm-{name}.json").unlink(missing_ok=True)


@pytest.mark.skipif(FAKETIME is None, reason="no faketime on this machine")
def test_run_survives_lost_nodes_requeues_and_an_old_clock(site: Site) -> None:
    cluster, setup = site.cluster, OLD_CLOCK.format(library=FAKETIME)
    site.hosts.write_text(
        f"config = \"{REPO}/configs/demo.toml\"\n[slurm]\nsetup = '{setup}'\n"
        "[slurm.generators]\ncount = 3\n"
    )
    settings = site.settings(*RECORDING_OPTIONS, "--train.max-steps", "400",
                             "--train.learning-rate", "1e-5")  # fmt: skip
    screen = site.folder.with_suffix(".screen")
    with screen.open("w") as out:
        viewer = subprocess.Popen(
            [sys.executable, str(REPO / "bin/lan"), "up", "--launcher", "slurm",
             "--hosts", str(site.hosts), *settings],
            env=cluster.environment, cwd=REPO, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def step_after(step: int, seconds: float = 90) -> None:
        until(lambda: site.step > step, seconds=seconds)

    try:
        until(lambda: "\ntrainer | step=2/" in screen.read_text() or viewer.poll() is not None)
        assert viewer.poll() is None, screen.read_text()
        states = site.states()
        assert [words[2] for words in states.values()] == ["running"] * 4, states
        other = site.lan("up", *settings, "--train.learning-rate", "2e-5")
        assert other.returncode == 2 and "was made with other settings" in other.stderr

        # A generator is queued again, and starts with an old clock.
        cluster.requeue(site.job("generator-1"))
        until(lambda: site.log("generator-1").count(" generator=generator-1 ") == 2, seconds=90)
        step_after(site.step)

        # Slurm loses the trainer's node and starts a second trainer while the first one runs.
        node = states["trainer"][1]
        lost = [site.job(name) for name, words in states.items() if words[1] == node]
        cluster.lose(node, *lost)
        until(lambda: "another trainer uses" in site.log("trainer"), seconds=90)
        step = site.step
        step_after(step)  # of the first trainer
        cluster.cut_power(node)
        step_after(site.step + 1)
        moved = [name for name in states if "the trainer has moved: from=" in site.log(name)]
        assert moved, site.log("generator-2")[-2000:]
        states = site.states()
        assert states["trainer"][1] != node and states["trainer"][2] == "running", states
        cluster.boot(node)

        # The trainer is queued again: it finishes its step and saves.
        cluster.requeue(site.job("trainer"))
        assert re.search(r"stopped after step \d+, saved", site.log("trainer"))
        step_after(site.step + 1)

        # The warning before the time limit: the trainer saves and its job is queued again.
        cluster.run("scancel", "--batch", "--signal=USR1", site.job("generator-2"))
        until(lambda: "the time limit is near; queueing job" in site.log("generator-2"), seconds=60)
        cluster.start_requeued(site.job("generator-2"))
        step_after(site.step)

        # A worker is restarted by name, in its job.
        restarts = int(site.states()["generator-0"][4])
        restarted = site.lan("restart", "generator-0")
        assert (restarted.returncode, restarted.stdout) == (0, "generator-0: restarting\n")
        until(lambda: int(site.states()["generator-0"][4]) == restarts + 1, seconds=60)
        assert viewer.wait(timeout=900) == 0, screen.read_text()[-3000:]
    finally:
        viewer.kill()
        down = site.lan("down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert site.broken() == {}
    assert site.states()["trainer"][2] == "done"


def test_trainer_on_two_nodes_takes_steps(site: Site) -> None:
    site.hosts.write_text(
        f'config = "{REPO}/configs/demo.toml"\n[slurm.trainer]\nnodes = 2\n'
        'options = ["--exclude=node3"]\n[slurm.generators]\noptions = ["--nodelist=node3"]\n'
    )
    done = site.lan("up", *site.settings("--train.max-steps", "3", "--model.device", "cpu"))
    assert done.returncode == 0, done.stdout + done.stderr + site.log("trainer")
    assert "trainer | step=3/3" in done.stdout
    assert site.states()["trainer"][1:3] == ["node[1-2]", "done"]
    assert site.step == 3 and "training on 2 ranks" in site.log("trainer")


def test_refused_jobs_are_not_submitted(site: Site, cluster: Cluster) -> None:
    config = f'config = "{REPO}/configs/demo.toml"\n'
    site.hosts.write_text(config + '[slurm.generators]\npartition = "gpu"\n')
    failed = site.lan("up", *site.settings())
    assert failed.returncode == 2
    assert "slurm.generators: allocation failure: Invalid partition name " in failed.stderr
    for table in (
        "[slurm.generators]\ncount = 21\n",
        "[slurm.trainer]\ngpus = 1\n",
        "[slurm.trainer]\ncpus = 99\n",
    ):
        site.hosts.write_text(config + table)
        failed = site.lan("up", *site.settings())
        assert re.search(r"slurm\.(trainer|generators): .*; correct its settings", failed.stderr)
    assert not cluster.run("squeue", "--noheader") and not site.folder.exists()


def test_folder_that_is_not_shared_is_reported(site: Site, cluster: Cluster) -> None:
    """The node of a generator has an empty folder at the path of the run."""
    cluster.cut_power("node3")
    mount = f'mount -t tmpfs none {site.folder.parent} && exec "$@"'
    cluster.start_node("node3", "unshare", "--mount", "sh", "-c", mount, "sh")
    site.hosts.write_text(
        f'config = "{REPO}/configs/demo.toml"\n[slurm.trainer]\n'
        'options = ["--exclude=node3"]\n[slurm.generators]\noptions = ["--nodelist=node3"]\n'
    )
    words = ("up", "--hosts", str(site.hosts), *site.settings())
    viewer = Program([sys.executable, str(REPO / "bin/lan"), *words],
                     site.folder.with_suffix(".log"), cluster.environment)  # fmt: skip
    try:
        until(lambda: "\ngenerator-0: the job has written nothing to" in viewer.printed, viewer)
        states = site.states()
        assert (states["generator-0"][2], states["trainer"][2]) == ("unshared", "running")
    finally:
        viewer.kill()
        assert site.lan("down").returncode == 0
        cluster.cut_power("node3")
        cluster.boot("node3")


def test_generator_queued_again_joins_a_newer_run(site: Site, cluster: Cluster) -> None:
    site.hosts.write_text(f'config = "{REPO}/configs/demo.toml"\n[slurm.generators]\ncount = 2\n')
    settings = site.settings(*RECORDING_OPTIONS, "--train.max-steps", "200")
    viewer = subprocess.Popen(
        [sys.executable, str(REPO / "bin/lan"), "up", "--hosts", str(site.hosts), *settings],
        env=cluster.environment, cwd=REPO, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: site.step >= 1, seconds=150)
        cluster.run("scontrol", "requeuehold", site.job("generator-1"))
        assert site.lan("stop", "trainer", "generator-0").returncode == 0
        until(lambda: site.states()["generator-1"][2] == "queued", seconds=60)
        # A new run in the same folder, with the same jobs.
        for name in ("RUN.json", "config.toml", "metrics.jsonl", "events.jsonl", "journal",
                     "weights", "checkpoints", "copies/generator-0"):  # fmt: skip
            path = site.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for log in site.folder.glob("logs/generator-*.log"):
            log.rename(log.with_suffix(".old"))
        assert site.lan("restart", "trainer", "generator-0").returncode == 0
        until(lambda: site.step >= 2, seconds=150)
        cluster.run("scontrol", "release", site.job("generator-1"))
        cluster.run("scontrol", "update", f"jobid={site.job('generator-1')}", "starttime=now")
        until(lambda: site.states()["trainer"][2] == "done", seconds=400)
        until(lambda: site.states()["generator-1"][2] == "done", seconds=100)
    finally:
        viewer.kill()
        viewer.wait()
        site.lan("down")
    assert site.broken() == {}
    versions = re.findall(r"loaded version=(\d+)", site.log("generator-1"))
    assert int(versions[0]) >= 2, site.log("generator-1")
