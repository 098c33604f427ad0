"""A Slurm cluster on this machine: munged, slurmctld and several nodes (slurmd) in one folder.

All ports and files are private; needs Debian's slurm-wlm and munge, whose slurmd can run several
times on one machine, and root, because slurmd starts jobs for other users.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from real_programs import until

from tools.link_proxy import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
SBIN = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
needs_slurm = pytest.mark.skipif(
    any(not shutil.which(name, path=SBIN) for name in PROGRAMS) or os.getuid() != 0,
    reason="no Slurm on this machine, or not root (Debian: apt install slurm-wlm munge)",
)
NODES = ("node1", "node2", "node3")
CPUS = 2  # of each node, whatever this machine has
CONFIG = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=300
KillWait=20
MaxArraySize=20
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A running cluster. Its environment variable SLURM_CONF is for the commands of Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._config = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self._config), "PATH": SBIN}
        port = free_ports()
        lines = [
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
            f"Port={port + number} CPUs={CPUS} RealMemory=1000"
            for number, name in enumerate(NODES, 1)
        ]
        text = CONFIG.format(host=socket.gethostname(), port=port, folder=folder)
        self._config.write_text(text + "\n".join(lines) + "\n")
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o600)
        for name in ("state", *NODES):
            (folder / name).mkdir()

    def start(self) -> None:
        """Start all daemons; returns when all nodes are idle."""
        munge = self.folder / "munge"
        self._start("munged", "munged", "--foreground", "--force", f"--socket={munge}.sock",
                    f"--key-file={munge}.key", f"--pid-file={munge}.pid",
                    f"--log-file={munge}.log", f"--seed-file={munge}.seed")  # fmt: skip
        until(lambda: (self.folder / "munge.sock").exists())
        self._start("slurmctld", "slurmctld", "-D", "-i", "-c")
        for name in NODES:
            self.start_node(name)
        until(lambda: set(self.node_states().values()) == {"idle"})

    def start_node(self, name: str, *prefix: str) -> None:
        """Start the slurmd of a node; `prefix` may be a command that runs it."""
        self._start(name, *prefix, "slurmd", "-D", "-N", name)

    def run(self, *words: str) -> str:
        """Output of a command of Slurm."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True,
                              timeout=60, check=False)  # fmt: skip
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def node_states(self) -> dict[str, str]:
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return {name: state for name, state in map(str.split, lines)}

    def processes_of(self, node: str) -> list[psutil.Process]:
        """Processes of all jobs on a node: first the slurmstepd of each, which reports its end."""
        steps, jobs = list[psutil.Process](), list[psutil.Process]()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environment = process.environ()
                if (
                    environment.get("SLURM_CONF") == str(self._config)
                    and environment.get("SLURMD_NODENAME") == node
                ):
                    jobs.append(process)
                    parents = process.parents()
                    steps += [parent for parent in parents if parent.name() == "slurmstepd"]
        return [*dict.fromkeys(steps), *jobs]

    def requeue(self, job: str) -> None:
        """Queue a running job again, and start it without Slurm's delay."""
        self.run("scontrol", "requeue", job)
        self.start_requeued(job)

    def start_requeued(self, job: str) -> None:
        """Start a job at once that is being queued again."""
        words = ("squeue", "--noheader", "--states=PENDING", "--format=%i", f"--jobs={job}")
        until(lambda: self.run(*words).strip())
        self.run("scontrol", "update", f"jobid={job}", "starttime=now")

    def lose(self, node: str, *jobs: str) -> None:
        """Slurm loses a node and queues its `jobs` again, while their processes still run."""
        self._daemons[node].send_signal(signal.SIGSTOP)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
        for job in jobs:  # Slurm would wait for two minutes
            self.start_requeued(job)

    def cut_power(self, node: str) -> None:
        """Kill all processes of a node."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        for process in self.processes_of(node):
            with suppress(psutil.Error):
                process.kill()

    def boot(self, node: str) -> None:
        """Start a node after `cut_power`."""
        self.start_node(node)
        if self.node_states()[node].startswith("down"):
            self.run("scontrol", "update", f"nodename={node}", "state=resume")
        until(lambda: self.node_states()[node] in ("idle", "mix", "alloc"))

    def close(self) -> None:
        for node in NODES:
            if node in self._daemons:
                self.cut_power(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip


@contextmanager
def slurm_cluster() -> Generator[Cluster, None, None]:
    # The paths of Slurm's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
