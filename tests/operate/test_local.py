"""A whole local run with small stand-ins for bin/trainer and bin/generator."""

import errno
import os
from pathlib import Path

import pytest

from peralta_zmq.config import Config, programs, write_resolved
from peralta_zmq.config.sections import EngineSection, RunSection
from peralta_zmq.config.training_sections import TrainSection
from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.metrics import read_rows
from peralta_zmq.operate.local import local_workers, run_local
from peralta_zmq.operate.process_group import RestartPolicy

SHORT = RestartPolicy(retry_seconds=0.05)
PAUSE = "import signal; signal.pause()"
# A generator that fails, and a trainer that ends when one of two generators was started again.
FAILS = "open('starts', 'a').write('x'); raise SystemExit(2)"
WAITS_FOR_RESTART = """
import os, time
while not os.path.exists('starts') or os.path.getsize('starts') < 3: time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(programs, "CHECKOUT_BIN", tmp_path)


def write_programs(*, trainer: str, generator: str) -> None:
    Path("trainer").write_text(trainer)
    Path("generator").write_text(generator)


def config() -> Config:
    run = RunSection(name="test", num_local_generators=2)
    return Config(run=run, train=TrainSection(max_steps=20))


def test_local_workers_get_index_count_and_share_of_cores() -> None:
    arguments = ["@", "lan.toml", "--loss.name", "grpo"]
    write_programs(trainer="", generator="")
    trainer, first, second = local_workers(config(), arguments)
    assert trainer.command[1] == str(Path.cwd() / "trainer")
    assert trainer.command[2:] == (*arguments, "--run.num-workers", "3")
    assert trainer.log is None
    assert first.command[2:6] == second.command[2:6] == tuple(arguments)
    assert second.command[6:] == ("--generator.name", "local-1", "--run.num-workers", "3")
    assert second.log == Path("runs/test/logs/generator-1.log")


def test_num_workers_of_the_user_lowers_the_share_of_cores() -> None:
    for number, expected in ((8, "8"), (2, "3")):
        run = RunSection(name="test", num_local_generators=2, num_workers=number)
        for worker in local_workers(Config(run=run), []):
            assert worker.command[-2:] == ("--run.num-workers", expected)


def test_fractions_above_one_start_no_worker() -> None:
    train, engine = TrainSection(memory_fraction=0.5), EngineSection(gpu_memory_utilization=0.3)
    shared = config().model_copy(update={"train": train, "engine": engine})
    with pytest.raises(ConfigError, match=r"are 1\.1 of the memory of this machine; lower them"):
        run_local(shared, [])
    assert not Path("runs").exists()


def test_rejected_settings_leave_no_folder_behind() -> None:
    write_programs(trainer=PAUSE, generator="print('loss.name = x'); raise SystemExit(2)")
    assert run_local(config(), []) == 2
    assert not Path("runs/test").exists()


def test_generator_that_cannot_run_ends_no_run_and_keeps_its_log() -> None:
    writes = "import sys\nif 'local-0' in sys.argv: print('no key'); raise SystemExit(2)\n"
    waits = "import os, time\nwhile not os.path.exists('runs/test/events.jsonl'): time.sleep(0.01)"
    write_programs(trainer=waits, generator=writes + PAUSE)
    assert run_local(config(), []) == 0
    (event,) = read_rows(Path("runs/test/events.jsonl"))
    assert (event["event"], event["worker"]) == ("failed", "generator-0")
    assert Path("runs/test/logs/generator-0.log").read_text() == "no key\n"


def test_generators_that_fail_after_the_first_step_are_started_again() -> None:
    steps = "print('{}', file=open('runs/test/metrics.jsonl', 'w'), flush=True)\n"
    waits = (
        "import os, time\n"
        "while not os.path.exists('runs/test/metrics.jsonl'): time.sleep(0.01)\n"
        "while not os.path.getsize('runs/test/metrics.jsonl'): time.sleep(0.01)\n"
    )
    write_programs(trainer=steps + WAITS_FOR_RESTART, generator=waits + FAILS)
    assert run_local(config(), [], policy=SHORT) == 0
    events = read_rows(Path("runs/test/events.jsonl"))
    assert {row["event"] for row in events} == {"failed", "restart"}


def test_existing_run_continues_while_its_disk_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("runs/test").mkdir(parents=True)
    write_programs(trainer=WAITS_FOR_RESTART, generator=FAILS)

    stat = os.stat

    def fails(path: str | Path, **options: bool) -> os.stat_result:
        if str(path).startswith("runs"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", fails)
    assert run_local(config(), [], policy=SHORT) == 0


def test_rejected_settings_keep_the_folder_of_an_earlier_run() -> None:
    Path("runs/test/logs").mkdir(parents=True)
    write_resolved(config(), Path("runs/test"))
    earlier = Path("runs/test/config.toml").read_text()
    Path("runs/test/metrics.jsonl").write_text("{}\n")  # a step of an earlier session
    write_programs(trainer=PAUSE, generator="raise SystemExit(2)")
    assert run_local(config(), []) == 2
    assert Path("runs/test/config.toml").read_text() == earlier
    assert Path("runs/test/logs").exists()
