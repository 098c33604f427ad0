"""Workers kept by a machine's keeper: real supervisors, and what is said of each way to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq.config.hosts import Host
from peralta_zmq.operate import lan_status, supervisor
from peralta_zmq.operate.supervisor import Job

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
NAME = "pc-0"
IMPATIENT = f"""
import sys
from peralta_zmq.operate import process_group, supervisor
process_group.FIRST_DELAY = 0.01
sys.exit(supervisor.run(supervisor.Job("{NAME}", (sys.executable, "-c", sys.argv[1]), {{}})))
"""
CRASHES = "[print('line', n) for n in range(30)]; print('bug', flush=True); raise SystemExit(9)"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A project's folder, in which nothing is left running."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    supervisor.FOLDER.mkdir()
    yield
    if pid := supervisor.supervisor_of(NAME):
        os.kill(pid, signal.SIGKILL)


def job(code: str) -> Job:
    return Job(NAME, (sys.executable, "-c", code), {})


def stays(word: str) -> Job:
    return job(f"import signal; print({word!r}, flush=True); signal.pause()")


def called(command: str, *jobs: Job) -> subprocess.CompletedProcess[str]:
    """The keeper as bin/lan calls it."""
    words = [] if jobs else [NAME]
    return subprocess.run(
        [sys.executable, "-m", "peralta_zmq.operate.supervisor", command, *words], check=False,
        input="".join(map(supervisor.job_text, jobs)), capture_output=True, text=True,
    )  # fmt: skip


def started(command: str, *jobs: Job) -> int:
    """The supervisor's process id."""
    done = called(command, *jobs)
    assert done.returncode == 0, done.stderr
    pid = supervisor.supervisor_of(NAME)
    assert pid and f"{NAME}: started pid={pid}\n" in done.stdout
    return pid


def is_gone(pid: int) -> bool:
    """Ended; whoever inherits it may not have taken note yet."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the keeper answers to bin/lan status."""
    capsys.readouterr()
    assert supervisor.say_status([NAME]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_worker_that_gives_up_is_shown_with_its_last_twenty_lines_and_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (supervisor.FOLDER / f"{NAME}.log").open("ab") as log:
        words = [sys.executable, "-c", IMPATIENT, CRASHES]
        assert subprocess.run(words, stdout=log, stderr=log, check=False).returncode == 1
    row = said(capsys)
    assert (row["state"], row["code"], row["restarts"]) == ("given up", 1, 4)
    *shown, reason = row["tail"]
    assert shown == [*(f"line {n}" for n in range(11, 30)), "bug"]
    assert reason == (
        f"{NAME} crashed 5 times in 60 s, last: exit code 9; giving up; its output is above"
    )
    lines = lan_status._described(Host(name="pc"), row).splitlines()
    assert lines[0].split()[:4] == [NAME, "pc", "given", "up"] and lines[0].endswith(reason)
    assert lines[1:] == [f"    {line}" for line in shown]


def test_a_worker_that_runs_is_not_replaced_by_one_with_other_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pid = started("start", stays("one"))
    assert called("start", stays("one")).stdout == f"{NAME}: runs already pid={pid}\n"
    refused = called("start", stays("two"))
    assert refused.returncode == 2 and refused.stderr == (
        f"{NAME} runs already with other settings; bin/lan stop {NAME} first\n"
    )
    assert supervisor.supervisor_of(NAME) == pid
    assert supervisor.stop(NAME) == 0 and said(capsys)["state"] == "stopped"
    started("start", stays("two"))
    until(lambda: said(capsys)["tail"][-1:] == ["two"])
    assert supervisor.stop(NAME) == 0


def test_a_supervisor_that_was_killed_is_told_apart_from_one_that_was_stopped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said(capsys)["state"] == "not started"
    tells = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    pid = started("start", job(tells))
    until(lambda: said(capsys)["tail"])
    worker = int(said(capsys)["tail"][0])
    assert said(capsys)["state"] == "running" and not is_gone(worker)
    os.kill(pid, signal.SIGKILL)
    until(lambda: said(capsys)["state"] == "killed with its supervisor")
    until(lambda: is_gone(worker))
    assert started("restart") != pid
    assert said(capsys)["state"] == "running"
    assert supervisor.stop(NAME) == 0 and said(capsys)["state"] == "stopped"


def test_who_follows_a_worker_follows_it_over_a_restart() -> None:
    started("start", stays("one"))
    words = [sys.executable, "-m", "peralta_zmq.operate.supervisor", "follow", "10", NAME]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout
        assert reader.stdout.readline() == b"pc-0 | one\n"
        assert supervisor.stop(NAME) == 0
        time.sleep(2 * supervisor.LOOK_SECONDS)  # the reader sees that nobody is there
        assert called("start", job("print('two')")).returncode == 0
        assert reader.stdout.readline() == b"pc-0 | two\n"
        assert (
            reader.wait(supervisor.RESTART_SECONDS / 2) == 0
        )  # nobody waits for one that has ended


def test_a_worker_that_was_never_started_here_cannot_be_restarted() -> None:
    refused = called("restart")
    assert refused.returncode == 2
    assert refused.stderr == f"{NAME} was never started here; run bin/lan up\n"
