"""The chaos run with small stand-ins for bin/trainer and bin/generator."""

import re
from pathlib import Path

import pytest

from peralta_zmq.config import Config, programs, write_resolved
from peralta_zmq.config.sections import RunSection
from peralta_zmq.config.training_sections import TrainSection
from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.metrics import EVENTS, METRICS, read_rows
from peralta_zmq.operate.process_group import RestartPolicy
from tools.chaos import SEED, plan_kills, run_chaos

ROOT = Path(__file__).parents[2]
TRAINER = """
import json, os, pathlib, time
from peralta_zmq.observe.metrics import JsonLines, read_rows
folder = pathlib.Path("runs/chaos")
step = len(read_rows(folder / "metrics.jsonl"))
def num_restarts():
    rows = read_rows(folder / "events.jsonl")
    return sum(row["event"] == "restart" for row in rows)
with JsonLines(folder / "events.jsonl") as events, JsonLines(folder / "metrics.jsonl") as metrics:
    events.append_event("resume" if step else "start", step=step)
    events.append_event("publish", number=1, weights_id="aa")
    while step < 20:
        while step == 19 and num_restarts() < 5:  # the run must outlast its kills
            time.sleep(0.01)
        time.sleep(0.02)  # the work
        step += 1
        row = {"step": step, "time": time.time(), "reward": float(os.environ["REWARD"])}
        metrics.append(row | {"gen/local-0/groups": 2})
accounting = {"made": 0, "trained": 0, "no_signal": 0, "stale": 0, "abandoned": 0}
(folder / "summary.json").write_text(json.dumps({"accounting": accounting}))
"""
GENERATOR = (
    "print('loaded version=1 step=1 weights_id=aa', flush=True); import signal; signal.pause()"
)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("REWARD", "0.97")
    monkeypatch.setenv(SEED, "7")
    monkeypatch.setattr(programs, "CHECKOUT_BIN", tmp_path)
    write_resolved(config(), Path("runs/chaos"))


def config(*, num_local_generators: int = 2) -> Config:
    run = RunSection(name="chaos", num_local_generators=num_local_generators)
    return Config(run=run, train=TrainSection(max_steps=20))


def chaos(*, trainer: str = TRAINER, generator: str = GENERATOR) -> int:
    Path("trainer").write_text(trainer)
    Path("generator").write_text(generator)
    return run_chaos(config(), [], policy=RestartPolicy(first_delay=0.02, poll_seconds=0.01))


def failed_lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().out.splitlines() if line.startswith("FAIL")]


def test_chaos_kills_every_worker_and_loses_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert chaos() == 0
    plan = plan_kills(7, ["trainer", "generator-0", "generator-1"], max_steps=20)
    events = read_rows(Path("runs/chaos") / EVENTS)
    killed, restarted = (
        [row["worker"] for row in events if row["event"] == event]
        for event in ("killed", "restart")
    )
    assert killed == [worker for _, worker in plan]
    assert sorted(restarted) == sorted(killed)  # two killed together may restart in either order
    steps = [row["step"] for row in read_rows(Path("runs/chaos") / METRICS)]
    assert steps == list(range(1, 21))
    out = capfd.readouterr().out
    assert re.search(r"^trainer +\d+ +after \d\.\d s$", out, re.MULTILINE)
    assert "ok    kills made: 5 of 5" in out
    assert "ok    P1 torn 0" in out
    assert "ok    ended by themselves 0, after a kill 5\n" in out
    assert "repeat the same kills: make run-chaos SEED=7" in out
    assert "FAIL" not in out


def test_chaos_fails_when_the_final_reward_is_low(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REWARD", "0.94")
    assert chaos() == 1
    (line,) = failed_lines(capfd)
    assert "of the last 5 steps 0.940" in line


def test_chaos_fails_when_the_run_ends_before_its_kills(capfd: pytest.CaptureFixture[str]) -> None:
    assert chaos(trainer="pass") == 1
    assert "FAIL  kills made: 0 of 5: the run ended earlier" in failed_lines(capfd)


@pytest.mark.parametrize("seed", range(20))
def test_plan_kills_covers_all_workers_and_depends_on_the_seed(seed: int) -> None:
    workers = ["trainer", "generator-0", "generator-1"]
    plan = plan_kills(seed, workers, max_steps=80)
    assert len(plan) == 5
    assert {worker for _, worker in plan} == set(workers)
    assert plan == plan_kills(seed, workers, max_steps=80)
    assert plan != plan_kills(seed + 1, workers, max_steps=80)
    assert sorted(plan, key=lambda kill: kill[0]) == plan
    assert plan[0][0] >= 8 and plan[-1][0] <= 64


def test_chaos_needs_two_generators() -> None:
    with pytest.raises(ConfigError, match=r"num_local_generators = 1, .* set it to 2 or more"):
        run_chaos(config(num_local_generators=1), [])
    assert not Path("runs/chaos/logs").exists()
