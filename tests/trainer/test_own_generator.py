"""The trainer's own generator: when it starts, that it samples, that it ends with the trainer."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from real_programs import REPO, SMALL, RealRun, has_ended, until

from peralta_zmq.config import load_config
from peralta_zmq.trainer.own_generator import NAME, OwnGenerator, is_wanted

ALWAYS = "--train.samples-while-waiting=always"
ELSEWHERE = ("--wire.bind=0.0.0.0", "--security.insecure", "--model.device=cpu")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RealRun]:
    with closing(RealRun(tmp_path)) as run:
        yield run


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), False),  # the address is a loopback one: all generators are on this machine
        (ELSEWHERE, True),
        ((*ELSEWHERE, "--run.num-workers=2"), False),
        ((*ELSEWHERE, "--security.keys=missing"), False),  # without a key of its own
        ((*ELSEWHERE, "--train.samples-while-waiting=never"), False),
        ((ALWAYS,), True),
    ],
)
def test_auto_is_for_a_cpu_that_no_generator_uses(
    settings: tuple[str, ...], expected: bool
) -> None:
    assert is_wanted(load_config("bin/trainer", [*settings])) == expected


def test_trainer_that_waits_for_half_of_its_time_samples(tmp_path: Path) -> None:
    config = load_config("bin/trainer", [ALWAYS])
    with closing(OwnGenerator(config, tmp_path)) as own:
        own.poll(1000.0)
        own.record(waited=1000.0, seconds=1000.0)  # the first step: generators may still start
        own.record(waited=59.0, seconds=59.0)
        assert own.pid is None, "less than a minute"
        own.record(waited=41.0, seconds=161.0)
        own.poll(19.0)
        assert own.pid is None, "less than half"
        own.poll(21.0)
        assert own.pid is not None


def test_failing_generator_is_started_again(tmp_path: Path) -> None:
    config = load_config("bin/trainer", [ALWAYS])
    pids = set[int | None]()
    # The folder has no settings, so the generator ends at once.
    with closing(OwnGenerator(config, tmp_path, min_seconds=0.0, max_starts=2)) as own:
        own.record(waited=0.0, seconds=0.0)

        def is_started_again() -> bool:
            own.poll(1.0)
            return own.pid not in {None, *pids}

        for _ in range(2):
            until(is_started_again)
            pids.add(own.pid)

        def has_none() -> bool:
            own.poll(1.0)
            return own.pid is None

        until(has_none)  # the last one has ended, and no other is started
    assert "config.toml" in (tmp_path / f"logs/generator-{NAME}.log").read_text("utf-8")


def test_own_generator_makes_the_groups_of_a_run(run: RealRun) -> None:
    trainer = run.trainer("--train.max-steps=4")
    until(lambda: (run.folder / "config.toml").exists(), trainer)
    with closing(OwnGenerator(run.config(ALWAYS), run.folder, min_seconds=0.0)) as own:
        own.record(waited=0.0, seconds=0.0)
        own.record(waited=1.0, seconds=1.0)
        assert trainer.wait(timeout=120.0) == 0, trainer.printed
        log = (run.folder / f"logs/generator-{NAME}.log").read_text("utf-8")
        assert "run complete" in log
    assert [row["gen/own/groups"] for row in run.rows] == [4, 4, 4, 4]
    assert not run.broken(max_steps=4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_goes_on_after_its_only_generator_has_died(run: RealRun) -> None:
    trainer = run.trainer("--train.max-steps=30", ALWAYS)
    generator = run.generator("ann")
    until(lambda: run.step >= 2, trainer, generator)
    generator.kill()
    killed_at = run.step
    assert trainer.wait(timeout=240.0) == 0, trainer.printed  # it waits for a minute first
    assert killed_at < run.step == 30
    assert "gen/own/groups" in run.rows[-1]
    assert not run.broken(max_steps=30)


PARENT = """
import sys
from pathlib import Path
from peralta_zmq.config import load_config
from peralta_zmq.trainer.own_generator import OwnGenerator
config = load_config("bin/trainer", sys.argv[2:])
own = OwnGenerator(config, Path(sys.argv[1]), min_seconds=0.0)
own.record(waited=0.0, seconds=0.0)
own.record(waited=1.0, seconds=1.0)
print(own.pid, flush=True)
sys.stdin.read()
"""


def test_own_generator_ends_with_a_killed_trainer_and_has_the_lowest_priority(run: RealRun) -> None:
    trainer = run.trainer("--train.max-steps=1000")
    until(lambda: (run.folder / "config.toml").exists(), trainer)
    command = [sys.executable, "-c", PARENT, str(run.folder), *SMALL, ALWAYS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO, text=True
    ) as parent:
        assert parent.stdout is not None
        own = psutil.Process(int(parent.stdout.readline()))
        until(lambda: run.step > 0, trainer)
        assert own.nice() == 19
        parent.kill()
    until(lambda: has_ended(own.pid))
