"""A whole local run with small stand-ins for the two doors, also under chaos."""

from pathlib import Path

import pytest

from peralta_zmq.config import Config, write_resolved
from peralta_zmq.config.sections import RunSection, TrainSection
from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.metrics import EVENTS, METRICS, Row, read_rows
from peralta_zmq.operate import local, process_group
from peralta_zmq.operate.local import local_workers, run_local
from tools.chaos import SEED, Strike, plan_of, seconds_until_back

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
TRAINER = """
import json, os, pathlib, time
from peralta_zmq.observe.metrics import Events, JsonLines, last_step, read_rows
folder = pathlib.Path("runs/chaos")
step = last_step(folder / "metrics.jsonl") or 0
def num_restarts():
    rows = read_rows(folder / "events.jsonl")
    return sum(row["event"] == "restart" for row in rows)
with Events(folder / "events.jsonl") as events, JsonLines(folder / "metrics.jsonl") as metrics:
    events.record("resume" if step else "start", step=step)
    events.record("publish", number=1, weights_id="aa")
    while step < 20:
        while step == 19 and num_restarts() < 5:  # the run is longer than its accidents
            time.sleep(0.01)
        time.sleep(0.02)  # the work
        step += 1
        row = {"step": step, "time": time.time(), "reward": float(os.environ["REWARD"])}
        metrics.append(row | {"gen/local-0/groups": 2})
accounting = {"made": 0, "trained": 0, "no_signal": 0, "stale": 0, "abandoned": 0}
(folder / "summary.json").write_text(json.dumps({"accounting": accounting}))
"""
WAITS = "import signal; signal.pause()"
LOADS = "print('loaded version=1 step=1 wid=aa', flush=True); " + WAITS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("REWARD", "0.97")
    monkeypatch.setenv(SEED, "7")
    monkeypatch.setattr(process_group, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(process_group, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(local, "BIN", tmp_path)


def doors(*, trainer: str, generator: str) -> None:
    Path("trainer").write_text(trainer)
    Path("generator").write_text(generator)


def config(*, num_local_generators: int = 2) -> Config:
    run = RunSection(name="chaos", num_local_generators=num_local_generators)
    return Config(run=run, train=TrainSection(max_steps=20))


def test_each_worker_knows_its_place() -> None:
    folder = Path("runs/demo")
    arguments = ["@", "lan.toml", "--loss.name", "grpo"]
    trainer, first, second = local_workers(folder, arguments, num_generators=2)
    assert trainer.command[1] == str(Path.cwd() / "trainer")
    assert trainer.command[2:] == (*arguments, "--train.num-workers", "3")
    assert trainer.log is None
    assert first.command[2:6] == second.command[2:6] == tuple(arguments)
    assert second.command[6:] == (
        *("--generator.index", "1", "--generator.count", "2"),
        *("--generator.num-workers", "3", "--generator.name", "local-1"),
    )
    assert second.log == folder / "logs" / "generator-1.log"


def test_a_run_ends_with_its_trainer_and_keeps_the_generators_words() -> None:
    speaks = "print('hello'); open('spoken', 'w').close(); " + WAITS
    waits = "import os, time\nwhile not os.path.exists('spoken'): time.sleep(0.01)"
    doors(trainer=waits, generator=speaks)
    assert run_local(config(num_local_generators=1), []) == 0
    assert Path("runs/chaos/logs/generator-0.log").read_text() == "hello\n"


def test_refused_settings_leave_no_folder_behind() -> None:
    doors(trainer=WAITS, generator="print('loss.name = x'); raise SystemExit(2)")
    assert run_local(config(), []) == 2
    assert not Path("runs/chaos").exists()


def test_refused_settings_touch_nothing_of_an_earlier_run() -> None:
    Path("runs/chaos/logs").mkdir(parents=True)
    write_resolved(config(), Path("runs/chaos"))
    earlier = Path("runs/chaos/config.toml").read_text()
    doors(trainer=WAITS, generator="raise SystemExit(2)")
    assert run_local(config(), []) == 2
    assert Path("runs/chaos/config.toml").read_text() == earlier
    assert Path("runs/chaos/logs").exists()


def test_chaos_kills_every_worker_and_finds_nothing_lost(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_resolved(config(), Path("runs/chaos"))
    doors(trainer=TRAINER, generator=LOADS)
    assert run_local(config(), [], chaos=True) == 0
    plan = plan_of(7, ["trainer", "generator-0", "generator-1"], max_steps=20)
    events = read_rows(Path("runs/chaos") / EVENTS)
    killed, restarted = (
        [row["worker"] for row in events if row["event"] == event]
        for event in ("killed", "restart")
    )
    assert killed == [worker for _, worker in plan]
    assert sorted(restarted) == sorted(killed)  # two that die together may come back either way
    steps = [row["step"] for row in read_rows(Path("runs/chaos") / METRICS)]
    assert steps == list(range(1, 21))
    out = capfd.readouterr().out
    assert "ok    kills made: 5 of 5" in out
    assert "ok    P1 torn 0" in out
    assert "ok    ended by themselves 0, after a kill 5\n" in out
    assert "the same kills again: make run-chaos SEED=7" in out
    assert "FAIL" not in out


def test_chaos_fails_when_the_reward_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REWARD", "0.94")
    write_resolved(config(), Path("runs/chaos"))
    doors(trainer=TRAINER, generator=LOADS)
    assert run_local(config(), [], chaos=True) == 1
    failed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1 and "of the last 5 steps 0.940" in failed[0]


def test_chaos_that_finds_a_torn_version_fails(capfd: pytest.CaptureFixture[str]) -> None:
    write_resolved(config(), Path("runs/chaos"))
    doors(trainer=TRAINER, generator=LOADS.replace("wid=aa", "wid=ff"))
    assert run_local(config(), [], chaos=True) == 1
    failed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1 and failed[0].startswith("FAIL  P1 torn")


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_strikes_everyone_and_is_the_same_for_its_seed(seed: int) -> None:
    workers = ["trainer", "generator-0", "generator-1"]
    plan = plan_of(seed, workers, max_steps=80)
    assert len(plan) == 5
    assert {worker for _, worker in plan} == set(workers)
    assert plan == plan_of(seed, workers, max_steps=80) != plan_of(seed + 1, workers, max_steps=80)
    assert sorted(plan, key=lambda kill: kill[0]) == plan
    assert plan[0][0] >= 8 and plan[-1][0] <= 64


def test_a_seed_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED, "x")
    with pytest.raises(ConfigError, match=r"PERALTA_CHAOS_SEED = 'x' is no seed; set it to a"):
        run_local(config(), [], chaos=True)


def test_chaos_needs_two_generators() -> None:
    with pytest.raises(ConfigError, match=r"num_local_generators = 1, .* set it to 2 or more"):
        run_local(config(num_local_generators=1), [], chaos=True)
    assert not Path("runs").exists()


def test_a_run_that_was_over_before_its_kills_fails_the_chaos_report(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_resolved(config(), Path("runs/chaos"))
    doors(trainer="pass", generator=LOADS)
    assert run_local(config(), [], chaos=True) == 1
    assert "FAIL  kills made: 0 of 5: the run was over before" in capfd.readouterr().out


def rows(*pairs: tuple[int, float]) -> list[Row]:
    return [{"step": step, "time": moment} for step, moment in pairs]


def test_a_trainer_is_back_with_its_next_step() -> None:
    strike = Strike("trainer", step=2, time=20.5)
    assert seconds_until_back(strike, rows((1, 10.0), (2, 20.0), (3, 27.0), (4, 30.0)), []) == 6.5
    assert seconds_until_back(strike, rows((1, 10.0), (2, 20.0)), []) is None


def test_a_generator_is_back_when_its_new_start_joins() -> None:
    joins: list[Row] = [
        {"event": "join", "generator": "local-1", "time": 1.0},
        {"event": "join", "generator": "local-0", "time": 12.0},
        {"event": "join", "generator": "local-1", "time": 14.0},
    ]
    steps = rows((1, 11.0), (2, 13.0))
    assert seconds_until_back(Strike("generator-1", step=0, time=10.0), steps, joins) == 4.0
    assert seconds_until_back(Strike("generator-1", step=0, time=15.0), steps, joins) is None
