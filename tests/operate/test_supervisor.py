"""Detached supervisors of real workers, and the state reported for each way to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_programs import has_ended, until

from peralta_zmq.observe.metrics import EVENTS, JsonLines
from peralta_zmq.operate import lan_monitor, supervisor
from peralta_zmq.operate.supervisor import Job

ROOT = Path(__file__).parents[2]
NAME = "pc-0"
RUN_WITH_SHORT_DELAY = f"""
import sys
from peralta_zmq.operate import supervisor
from peralta_zmq.operate.process_group import RestartPolicy
job = supervisor.Job("{NAME}", (sys.executable, "-c", sys.argv[1]), {{}})
sys.exit(supervisor.run(job, policy=RestartPolicy(first_delay=0.01)))
"""
CRASHES = "[print('line', n) for n in range(30)]; print('bug', flush=True); raise SystemExit(9)"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A project folder; its supervisor is killed at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    supervisor.FOLDER.mkdir()
    yield
    if pid := supervisor.supervisor_pid(NAME):
        os.kill(pid, signal.SIGKILL)


def job(code: str) -> Job:
    return Job(NAME, (sys.executable, "-c", code), {})


def waiting_job(word: str) -> Job:
    return job(f"import signal; print({word!r}, flush=True); signal.pause()")


def call(command: str, *jobs: Job) -> subprocess.CompletedProcess[str]:
    """Call the supervisor as bin/lan does."""
    words = [] if jobs else [NAME]
    return subprocess.run(
        [sys.executable, "-m", "peralta_zmq.operate.supervisor", command, *words],
        input="".join(map(supervisor.job_text, jobs)),
        capture_output=True,
        text=True,
    )


def start(command: str, *jobs: Job) -> int:
    """Process id of the started supervisor."""
    done = call(command, *jobs)
    assert done.returncode == 0, done.stderr
    pid = supervisor.supervisor_pid(NAME)
    assert pid and f"{NAME}: started pid={pid}\n" in done.stdout
    return pid


def status(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    supervisor.print_status([NAME])
    return json.loads(capsys.readouterr().out)


def test_status_of_repeated_crashes_shows_twenty_lines_and_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (supervisor.FOLDER / f"{NAME}.log").open("ab") as log:
        words = [sys.executable, "-c", RUN_WITH_SHORT_DELAY, CRASHES]
        assert subprocess.run(words, stdout=log, stderr=log, check=False).returncode == 1
    row = status(capsys)
    assert (row["state"], row["code"], row["restarts"]) == ("gave up", 1, 4)
    *shown, reason = row["tail"]
    assert shown == [*(f"line {n}" for n in range(11, 30)), "bug"]
    assert reason == (
        f"{NAME} crashed 5 times in 60 s, last: exit code 9; giving up; its output is above"
    )
    assert lan_monitor.print_status([{**row, "host": "pc"}]) == 1
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == [NAME, "pc", "gave", "up"] and lines[0].endswith(reason)
    assert lines[1:] == [f"    {line}" for line in shown]


def test_worker_is_restarted_although_its_state_cannot_be_written() -> None:
    replaces = "os.path.isdir(p) or (os.unlink(p), os.mkdir(p))"
    code = f"import os; p = '{supervisor.FOLDER / NAME}.state'; {replaces}; raise SystemExit(9)"
    words = [sys.executable, "-c", RUN_WITH_SHORT_DELAY, code]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and f"state of {NAME} not written" in done.stderr
    assert done.stdout.count("restarted") == 4


def test_start_keeps_a_running_worker_and_refuses_other_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pid = start("start", waiting_job("one"))
    assert call("start", waiting_job("one")).stdout == f"{NAME}: already running pid={pid}\n"
    refused = call("start", waiting_job("two"))
    assert refused.returncode == 2 and refused.stderr == (
        f"{NAME} is already running with other settings; bin/lan stop {NAME} first\n"
    )
    assert supervisor.supervisor_pid(NAME) == pid
    assert supervisor.stop(NAME) == 0 and status(capsys)["state"] == "stopped"
    start("start", waiting_job("two"))
    until(lambda: status(capsys)["tail"][-1:] == ["two"])
    assert supervisor.stop(NAME) == 0


def test_environment_of_a_worker_is_readable_by_its_owner_only() -> None:
    start("start", Job(NAME, waiting_job("one").command, {"TOKEN": "secret"}))
    path = supervisor.FOLDER / f"{NAME}.json"
    assert "secret" in path.read_text() and path.stat().st_mode & 0o777 == 0o600


def test_status_distinguishes_a_killed_from_a_stopped_supervisor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(capsys)["state"] == "not started"
    pid = start("start", job("import os, signal; print(os.getpid(), flush=True); signal.pause()"))
    until(lambda: status(capsys)["tail"])
    worker = int(status(capsys)["tail"][0])
    assert status(capsys)["state"] == "running" and not has_ended(worker)
    os.kill(pid, signal.SIGKILL)
    until(lambda: status(capsys)["state"] == "crashed")
    until(lambda: has_ended(worker))
    assert start("restart") != pid
    assert status(capsys)["state"] == "running"
    assert supervisor.stop(NAME) == 0 and status(capsys)["state"] == "stopped"


@pytest.mark.parametrize(("lines", "state"), [
    ([], "running"),
    (["12:00:00 bin/generator waiting for trainer tcp://mac:5555 (5 s): no TCP"], "waiting"),
    (["12:00:00 bin/generator no announcement from the trainer for 31 s; keeping"], "waiting"),
    (["waiting for trainer", "12:00:09 bin/generator loaded version=3"], "running"),
])  # fmt: skip
def test_state_of_a_generator_is_waiting_while_its_log_ends_so(
    lines: list[str], state: str
) -> None:
    assert supervisor.activity_of(None, lines) == state


@pytest.mark.parametrize(("newest", "state"), [
    ("start", "waiting"), ("join", "running"), ("evaluate", "evaluating"), ("evaluated", "running"),
    ("replay", "replaying"), ("resume", "waiting"), ("stop", "running"),
])  # fmt: skip
def test_state_of_a_trainer_follows_the_events_of_its_run(
    tmp_path: Path, newest: str, state: str
) -> None:
    kinds = ["start", "join", "evaluate", "evaluated", "replay", "resume", "stop"]
    assert supervisor.activity_of(tmp_path, []) == "running"
    with JsonLines(tmp_path / EVENTS) as events:
        for kind in kinds[: kinds.index(newest) + 1]:
            events.append_event(kind, generator="ann", incarnation="1")
    assert supervisor.activity_of(tmp_path, []) == state


def test_follow_continues_across_a_restart() -> None:
    start("start", waiting_job("one"))
    words = [sys.executable, "-m", "peralta_zmq.operate.supervisor", "follow", "10", NAME]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout
        assert reader.stdout.readline() == b"pc-0 | one\n"
        assert supervisor.stop(NAME) == 0
        time.sleep(0.4)  # the reader must see that no worker runs
        assert call("start", job("print('two')")).returncode == 0
        assert reader.stdout.readline() == b"pc-0 | two\n"
        assert reader.wait(5) == 0  # no grace for a worker that ended


def test_worker_that_was_never_started_cannot_be_restarted() -> None:
    refused = call("restart")
    assert refused.returncode == 2
    assert refused.stderr == f"{NAME} was never started here; run bin/lan up\n"
