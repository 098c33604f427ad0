"""Commands of bin/lan for the jobs of a Slurm cluster, with scripts in place of Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_commands import SlurmCommands

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.config import Config, load_config
from peralta_zmq.config.hosts import Slurm, SlurmGenerators
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate.slurm import SlurmLauncher

SETTINGS = Slurm(generators=SlurmGenerators(count=3))


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    monkeypatch.chdir(tmp_path)  # .lan is there
    return SlurmCommands(tmp_path, monkeypatch)


def launcher(settings: Slurm = SETTINGS) -> SlurmLauncher:
    return SlurmLauncher(settings, Path("hosts.toml"), stop_seconds=0.0, poll_seconds=0.0)


def config_in(folder: Path, *options: str) -> Config:
    return load_config("bin/lan", ["--run.dir", str(folder), *options])


def start(commands: SlurmCommands, folder: Path) -> None:
    """Submit all jobs: job 1 and array 2."""
    commands.set_queue("1|N/A|PENDING||Priority")
    assert launcher().up(config_in(folder)) == 0
    commands.take_calls()


def write_state(folder: Path, name: str, **state: object) -> None:
    """Write the state of a worker as its job does."""
    replace_file(folder / f"demo/slurm/{name}.json", json.dumps(state).encode())


def test_up_submits_the_jobs_that_are_missing(
    tmp_path: Path, commands: SlurmCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.set_queue("1|N/A|PENDING||Priority")
    assert launcher().up(config_in(tmp_path)) == 0
    *tested, trainer, generators = commands.take_calls()
    # The last one of two equal options counts: those of bin/lan follow those of the user.
    assert tested[0].startswith("sbatch --cpus-per-task=1 ")
    assert [call.split()[-1] for call in tested] == ["--test-only", "--array=0,1,2"]
    assert trainer.endswith(" --parsable")
    assert generators.endswith(" --parsable --array=0,1,2 --dependency=after:1")
    assert capsys.readouterr().out.endswith(
        "\ntrainer: submitted as job 1\ngenerator-0: submitted as job 2_0\n"
        "generator-1: submitted as job 2_1\ngenerator-2: submitted as job 2_2\n"
    )

    waiting = "1|N/A|PENDING||Priority", "2|0|PENDING||Dependency"
    commands.set_queue(*waiting, "2|2|RUNNING|node1|None", "2|1|FAILED|node1|None")
    assert launcher().up(config_in(tmp_path)) == 0
    tested, submitted = commands.take_calls()
    assert tested.endswith(" --test-only --array=1")
    assert submitted.endswith(" --parsable --array=1")
    assert "generator-1: submitted as job 3_1\n" in capsys.readouterr().out


def test_up_with_other_settings_than_those_of_running_jobs_is_refused(
    tmp_path: Path, commands: SlurmCommands
) -> None:
    start(commands, tmp_path)
    refused = pytest.raises(ConfigError, match=r"trainer is already queued or running with other "
                            r"settings; bin/lan down --hosts hosts\.toml first")  # fmt: skip
    with refused:
        launcher().up(config_in(tmp_path, "--train.learning-rate", "0.5"))
    with refused:
        launcher(SETTINGS.model_copy(update={"setup": "module load cuda"})).up(config_in(tmp_path))
    commands.set_queue("3|N/A|PENDING||Priority")  # the jobs 1 and 2 have ended
    assert launcher().up(config_in(tmp_path, "--train.learning-rate", "0.5")) == 0


def test_array_that_slurm_refuses_leaves_no_trainer_behind(
    tmp_path: Path, commands: SlurmCommands
) -> None:
    """A limit of the user may permit one generator, but not the whole array."""
    commands.write("sbatch", 'case "$*" in *--array*) echo "QOS policy" >&2; exit 1 ;; '
                   f"*--test-only*) ;; *) touch {tmp_path}/submitted ;; esac")  # fmt: skip
    with pytest.raises(ConfigError, match=r"slurm\.generators: QOS policy; correct its settings"):
        launcher().up(config_in(tmp_path))
    assert not (tmp_path / "submitted").exists() and not (tmp_path / "demo").exists()


def test_down_cancels_waiting_jobs_and_those_that_ignore_a_signal(
    tmp_path: Path, commands: SlurmCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    start(commands, tmp_path)
    commands.set_queue("1|N/A|RUNNING|node1|None", "2|0|RUNNING|node2|None",
                       "2|1|PENDING||Resources", "2|2|FAILED|node1|None")  # fmt: skip
    assert launcher().control("stop", ["generator-0"]) == 0
    assert commands.take_calls() == ["scancel --batch --signal=TERM 2_0", "scancel 2_0"]
    assert capsys.readouterr().out.endswith("\ngenerator-0: cancelled\n")
    assert launcher().control("down", ()) == 0
    assert commands.take_calls() == [
        "scancel 2_1", "scancel --batch --signal=TERM 1", "scancel 1"
    ]  # fmt: skip
    assert capsys.readouterr().out == (
        "trainer: cancelled\ngenerator-0: stopped\ngenerator-1: stopped\ngenerator-2: stopped\n"
    )


def test_restart_signals_running_workers_and_submits_ended_ones(
    tmp_path: Path, commands: SlurmCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    start(commands, tmp_path)
    commands.set_queue("2|0|RUNNING|node1|None", "2|1|RUNNING|node1|None",
                       "2|2|PENDING||Resources")  # fmt: skip
    write_state(tmp_path, "trainer", job="1", node="node1", code=0)
    capsys.readouterr()
    assert launcher().control("restart", ["trainer", "generator-2"]) == 0
    assert [call.split()[-1] for call in commands.take_calls()] == ["--parsable"]
    assert capsys.readouterr().out == "generator-2: queued\ntrainer: submitted as job 3\n"
    # Generators that start before the new job would otherwise end.
    assert not (tmp_path / "demo/slurm/trainer.json").exists()
    assert launcher().control("restart", ["generator-0"]) == 0
    assert commands.take_calls() == ["scancel --batch --signal=USR2 2_0"]
    assert capsys.readouterr().out == "generator-0: restarting\n"


def test_logs_of_all_jobs_are_printed_until_they_end(
    tmp_path: Path, commands: SlurmCommands, capsys: pytest.CaptureFixture[str]
) -> None:
    start(commands, tmp_path)
    (tmp_path / "demo/logs/trainer.log").write_text("step=1\nstep=2\n")
    commands.set_queue("1|N/A|RUNNING|node1|None", "2|0|RUNNING|node2|None")
    write_state(tmp_path, "trainer", job="1", node="node1", code=3)
    queue = tmp_path / "queue"
    commands.write("squeue", f"cat {queue}; : > {queue}")  # the jobs have ended at the second call
    capsys.readouterr()
    assert launcher().follow_logs((), lines=1)
    unshared, logs = capsys.readouterr().out.splitlines()
    assert unshared.startswith(f"generator-0: the job has written nothing to {tmp_path}/demo; ")
    assert logs == "trainer | step=2"
    assert launcher().exit_code() == 3


def test_commands_for_other_workers_or_without_a_controller_are_refused(
    tmp_path: Path, commands: SlurmCommands
) -> None:
    start(commands, tmp_path)
    with pytest.raises(ConfigError, match="enable is for hosts with ssh; Slurm starts its jobs"):
        launcher().control("enable", ["trainer"])
    with pytest.raises(ConfigError, match="sync copies code to hosts with ssh, but jobs of Slurm"):
        launcher().sync(config_in(tmp_path))
    with pytest.raises(ConfigError, match="no worker 'generator-3'; there are generators, trainer"):
        launcher().control("stop", ["generator-3"])
    commands.write("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"squeue: Unable .*; is the Slurm controller running\?"):
        launcher().rows()
