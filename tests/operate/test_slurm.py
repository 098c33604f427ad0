"""Jobs for Slurm: scripts, commands, states and refusals, without Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from real_programs import REPO
from slurm_commands import SlurmCommands

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.config import load_config
from peralta_zmq.config.hosts import Slurm, SlurmGenerators, SlurmTrainer
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import lan
from peralta_zmq.operate.slurm import SlurmLauncher, worker_row
from peralta_zmq.operate.slurm_commands import (
    JobStatus,
    cluster_config,
    parse_squeue,
    plan_run,
)
from peralta_zmq.operate.slurm_job import main, read_state, trainer_command
from peralta_zmq.operate.supervisor import State

SETTINGS = Slurm(
    setup="module load cuda",
    trainer=SlurmTrainer(partition="gpu", nodes=2, gpus=4, cpus=8, time="1-00:00:00"),
    generators=SlurmGenerators(partition="spare", account="lab", count=3, options=("--mem=4G",)),
)
NODE: Any = {"job": "7", "node": "node1"}
HOSTS = """
config = "configs/demo.toml"
[slurm.trainer]
[slurm.generators]
count = 3
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    return SlurmCommands(tmp_path, monkeypatch)


def test_dry_run_prints_both_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "hosts.toml").write_text(HOSTS)
    options = ["--hosts", str(tmp_path / "hosts.toml"), "--dry-run", "--run.dir", str(tmp_path)]
    assert lan.main(["up", *options]) == 0
    out = capsys.readouterr().out
    assert (
        "# trainer\nsbatch --cpus-per-task=1 --requeue --open-mode=append --signal=B:USR1@120 "
        in out
    )
    assert f"--output={tmp_path}/demo/logs/generator-%a.log" in out
    assert (
        out.count(f"exec {sys.executable} -m peralta_zmq.operate.slurm_job {tmp_path}/demo ") == 2
    )
    assert os.listdir(tmp_path) == ["hosts.toml"]


def test_jobs_have_the_resources_of_the_hosts_file(tmp_path: Path) -> None:
    config = cluster_config(load_config("bin/lan", ["--run.dir", str(tmp_path)]))
    assert config.wire.bind == "0.0.0.0"
    assert config.wire.address_dir == f"{tmp_path}/demo/slurm/addresses"
    assert config.security.keys == f"{tmp_path}/demo/slurm/keys"
    run = plan_run(SETTINGS, config)
    assert {"--nodes=2", "--partition=gpu", "--cpus-per-task=32", "--gpus-per-node=4",
            "--time=1-00:00:00"} <= {*run.arguments["trainer"]}  # fmt: skip
    generators = run.arguments["generators"]
    assert {"--nodes=1", "--partition=spare", "--account=lab"} <= {*generators}
    assert generators[0] == "--mem=4G"  # an option of the user cannot replace those that follow
    setup, command = run.scripts["trainer"].splitlines()[-2:]
    assert setup == "module load cuda"
    assert command.startswith(
        'exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" ' + sys.executable
    )
    assert command.endswith(".toml trainer 4")
    assert run.scripts["generators"].endswith(".toml generator\n")
    assert "srun" not in run.scripts["generators"]


def test_files_of_the_start_folder_hide_no_module_from_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('hidden')")
    monkeypatch.chdir(tmp_path)
    config = cluster_config(load_config("bin/lan", ["--run.dir", str(tmp_path)]))
    (tmp_path / "demo" / "slurm").mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "SLURMD_NODENAME": "node7"}
    script = plan_run(Slurm(), config).scripts["trainer"]
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and " is missing on " in done.stderr, done.stderr


def test_trainer_of_several_processes_starts_with_torchrun() -> None:
    environment = {"PERALTA_ADDRESS": "node7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1",
                   "SLURM_JOB_ID": "30012"}  # fmt: skip
    command = trainer_command("c.toml", 4, environment)
    shown = " ".join(command)
    assert " -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 4 " in shown
    assert "--master-addr node7 --master-port 15012 " in shown
    assert command[-5:] == (command[-5], "@", "c.toml", "--wire.host", "node7")
    assert command[-5].endswith("trainer")
    alone = trainer_command("c.toml", 1, environment | {"SLURM_JOB_NUM_NODES": "1"})
    assert "torch.distributed.run" not in alone


@pytest.mark.parametrize("name", ["trainer", "generators"])
def test_script_writes_the_first_state_before_the_setup(tmp_path: Path, name: str) -> None:
    """The setup may be slow or fail, and the file shows that the run folder is shared."""
    folder = tmp_path / "a b"
    config = cluster_config(load_config("bin/lan", ["--run.dir", str(folder)]))
    settings = SETTINGS.model_copy(update={"setup": "exit 7"})
    (folder / "demo/slurm").mkdir(parents=True)
    environment = os.environ | {
        "SLURMD_NODENAME": "node1", "SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8",
        "SLURM_ARRAY_TASK_ID": "2",
    }  # fmt: skip
    script = plan_run(settings, config).scripts[name]
    done = subprocess.run(["bash", "-c", script], env=environment, check=False)
    worker, job = ("trainer", "9") if name == "trainer" else ("generator-2", "8_2")
    assert done.returncode == 7
    assert read_state(folder / "demo", worker, job) == State(job=job, node="node1")


WORKER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("SIGTERM", flush=True), signal.signal(15, 0)))
signal.signal(signal.SIGINT, lambda *_: (print("SIGINT", flush=True), time.sleep(0.5), sys.exit()))
print("started", flush=True)
while True: time.sleep(0.1)
"""
JOB = """
import os, signal, sys; from pathlib import Path; from peralta_zmq.operate import slurm_job
os.environ |= {"SLURM_JOB_ID": "9", "SLURMD_NODENAME": "node1"}
command = (sys.executable, *sys.argv[4:])
job = slurm_job.Job(Path(sys.argv[1]), sys.argv[2], command, os.environ,
                    retry_seconds=0.1, check_seconds=float(sys.argv[3]))
sys.exit(job.run())
"""


@pytest.fixture
def start_job(tmp_path: Path, stack: ExitStack) -> Callable[..., subprocess.Popen[str]]:
    def start(name: str, check: float = 30) -> subprocess.Popen[str]:
        (tmp_path / "slurm").mkdir(exist_ok=True)
        words = [sys.executable, "-c", JOB, str(tmp_path), name, str(check), "-c", WORKER]
        job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        stack.enter_context(job)
        stack.callback(job.kill)
        assert job.stdout and job.stdout.readline() == "started\n"
        return job

    return start


def test_worker_that_slurm_also_signals_ends_after_it_has_saved(
    start_job: Callable[..., subprocess.Popen[str]],
) -> None:
    """Slurm sends SIGTERM to all processes of a job; a second one would end a trainer at once."""
    job = start_job("trainer")
    (worker,) = [
        child for child in psutil.Process(job.pid).children() if child.cmdline()[-2:-1] == ["-c"]
    ]
    worker.send_signal(signal.SIGTERM)
    assert job.stdout and job.stdout.readline() == "SIGTERM\n"
    job.terminate()
    assert job.stdout.readline() == "SIGINT\n"
    job.terminate()  # another one while the worker saves
    assert job.stdout.read() == "" and job.wait(timeout=20) == 0


def test_job_near_its_time_limit_is_queued_again(
    tmp_path: Path, commands: SlurmCommands, start_job: Callable[..., subprocess.Popen[str]]
) -> None:
    calls = tmp_path / "calls"
    script = f'echo "$@" >> {calls}; [ $(wc -l < {calls}) -gt 1 ] || {{ echo busy >&2; exit 1; }}'
    commands.write("scontrol", script)
    job = start_job("trainer")
    job.send_signal(signal.SIGUSR1)
    assert (
        "\njob 9 could not be queued again yet (busy); if it ends, start it with bin/lan restart "
        "trainer\n"
    ) in job.communicate(timeout=20)[0]
    assert job.returncode == 0
    assert calls.read_text() == "requeue 9\n" * 2  # the first one failed


def test_generator_is_stopped_and_not_queued_again_after_the_end_of_the_trainer(
    tmp_path: Path, start_job: Callable[..., subprocess.Popen[str]]
) -> None:
    job = start_job("generator-0")
    replace_file(tmp_path / "slurm/trainer.json", b'{"job": "7", "node": "node1", "code": 2}')
    job.send_signal(signal.SIGUSR1)
    assert "queueing" not in job.communicate(timeout=20)[0]

    replace_file(tmp_path / "slurm/trainer.json", b'{"job": "7", "node": "node1"}')
    job = start_job("generator-0", check=0.1)
    replace_file(tmp_path / "slurm/trainer.json", b'{"job": "7", "node": "node1", "code": 2}')
    assert job.communicate(timeout=20)[0] == (
        "generator-0: the trainer has ended; nothing to do\nSIGINT\n"
    )
    state = read_state(tmp_path, "generator-0")
    assert state and state.stopped


def test_job_on_a_lost_node_keeps_the_state_of_its_successor(
    tmp_path: Path, start_job: Callable[..., subprocess.Popen[str]]
) -> None:
    job = start_job("trainer")
    state = read_state(tmp_path, "trainer")
    assert state and (state.job, state.node) == ("9", "node1")
    replace_file(tmp_path / "slurm/trainer.json", b'{"job": "9", "node": "node2"}')
    job.terminate()
    assert job.wait(timeout=20) == 0
    assert read_state(tmp_path, "trainer") == State(job="9", node="node2")


def test_generator_that_starts_after_the_end_of_the_run_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "config.toml").touch()
    replace_file(tmp_path / "slurm/trainer.json", b'{"job": "7", "node": "node1", "code": 0}')
    arguments = [str(tmp_path), str(tmp_path / "config.toml"), "generator"]
    assert main(arguments, {"SLURM_ARRAY_TASK_ID": "1"}) == 0
    assert "generator-1: the trainer has ended; nothing to do" in capsys.readouterr().out


def test_job_on_a_node_without_the_shared_folder_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), str(tmp_path / "config.toml"), "generator"], {}) == 2
    assert "/config.toml is missing on " in capsys.readouterr().err


def test_squeue_lines_are_parsed() -> None:
    start = datetime(2026, 11, 30, 9, 1, 2)
    text = (
        f"12|N/A|RUNNING|node[1-2]|None|{start.isoformat()}\n"
        "13|0|PENDING||Dependency|N/A\n13|7|NODE_FAIL|node9|None|yesterday\n"
    )
    assert parse_squeue(text) == {
        "12": JobStatus("RUNNING", "node[1-2]", "None", start.timestamp()),
        "13_0": JobStatus("PENDING", "", "Dependency"),
        "13_7": JobStatus("NODE_FAIL", "node9", "None"),
    }


@pytest.mark.parametrize(
    ("status", "state", "shown", "last"),
    [
        (("PENDING", "Priority", 0), None, "queued", "waiting: Priority"),
        (("RUNNING", "None", 9), State(**NODE, restarts=2), "running", ""),
        (("RUNNING", "None", 99), None, "unshared", "the job has written nothing to "),
        (("FAILED", "JobLaunchFailure", 0), None, "unshared", "the job has written nothing to "),
        (("CONFIGURING", "None", 99), None, "configuring", ""),
        (("COMPLETED", "None", 9), State(**NODE, code=0), "done", ""),
        (("COMPLETED", "None", 9), State(**NODE, code=0, stopped=True), "stopped", ""),
        (("FAILED", "None", 9), State(**NODE, code=2), "failed", ""),
        (("TIMEOUT", "None", 9), State(**NODE), "time limit", ""),
        (("CANCELLED", "None", 9), None, "stopped", ""),
        (None, State(**NODE, code=1), "gave up", ""),
        (None, None, "ended", ""),
    ],
)  # fmt: skip
def test_row_combines_queue_and_state_file(
    tmp_path: Path, status: tuple[str, str, int] | None, state: State | None,
    shown: str, last: str,
) -> None:  # fmt: skip
    is_queued = status is not None and status[0] == "PENDING"
    node = "" if is_queued else "node1"
    job = JobStatus(status[0], node, status[1], time.time() - status[2]) if status else None
    row = worker_row(tmp_path, "generator-0", job, state)
    assert row["state"] == shown
    assert row["host"] == ("-" if is_queued or not (status or state) else "node1")
    assert "".join(map(str, row["tail"])).startswith(last)  # type: ignore[call-overload]
    assert row["restarts"] == (state.restarts if state else 0)


def test_missing_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match="there is no sbatch on this machine; run bin/lan on a login node"
    ):
        SlurmLauncher(SETTINGS, tmp_path / "hosts.toml")


def test_launcher_follows_the_tables_of_the_hosts_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: SlurmCommands
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hosts.toml"
    path.write_text(HOSTS)
    with pytest.raises(ConfigError, match=r"no jobs were submitted with --hosts .*run bin/lan up"):
        lan.main(["status", "--hosts", str(path)])
    with pytest.raises(ConfigError, match=r"has no \[\[host\]\] for --launcher ssh; add the mach"):
        lan.main(["status", "--hosts", str(path), "--launcher", "ssh"])
    with pytest.raises(ConfigError, match="--partial is for hosts with ssh; leave it out"):
        lan.main(["up", "--hosts", str(path), "--partial"])
    path.write_text(HOSTS + '[[host]]\nname = "a"\nrole = "trainer"\ncount = 1\n')
    with pytest.raises(ConfigError, match="no jobs were submitted"):
        lan.main(["down", "--hosts", str(path), "--launcher", "slurm"])
