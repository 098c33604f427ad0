"""The supervisor with real, tiny workers: restarted, given up, ended together, never orphaned.

Every child opens the pipe `alive` and keeps it: its end of file says that all of them are dead.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peralta_zmq.operate import process_group
from peralta_zmq.operate.process_group import Worker, supervise

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
OPEN = """
import os, signal, sys, time
alive = os.open("alive", os.O_WRONLY)
def say(text): os.write(alive, text.encode() + b"\\n")
def on(number, text, code=None):
    def handle(*_):
        say(text)
        if code is not None: os._exit(code)
    signal.signal(number, handle)
def wait(name): open(name).read()  # a pipe that another child opens and closes
def tell(name): open(name, "w").close()
def stay():
    while True: time.sleep(0.05)  # a signal just before it is not slept over
"""
STAYS = "say('generator up'); stay()"
SUPERVISOR = """
import sys
from peralta_zmq.operate.process_group import Worker, supervise
python = (sys.executable, "-c")
leader, generator = (Worker(name, (*python, code)) for name, code in
                     zip(("trainer", "generator-0"), sys.argv[1:]))
sys.exit(supervise([leader, generator], record=lambda event, **fields: None))
"""


@pytest.fixture(autouse=True)
def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(process_group, "FIRST_DELAY", 0.02)
    for name in ("alive", "go", "gone"):
        os.mkfifo(name)
    return Lives()


def worker(name: str, code: str, log: Path | None = None) -> Worker:
    return Worker(name, (sys.executable, "-c", OPEN + code), log)


class Lives:
    """What the children say, and the moment when the last of them is dead."""

    def __init__(self) -> None:
        self._reading = os.open("alive", os.O_RDONLY | os.O_NONBLOCK)
        self._writing = os.open("alive", os.O_WRONLY)  # no end of file before the first child
        os.set_blocking(self._reading, True)
        self.said = ""

    def read(self) -> None:
        """Whatever was said by now."""
        if select.select([self._reading], [], [], 0)[0]:
            self.said += os.read(self._reading, 65536).decode()

    def until(self, *texts: str) -> None:
        while not all(text in self.said for text in texts):
            self.said += os.read(self._reading, 65536).decode()

    def until_all_are_dead(self) -> list[str]:
        os.close(self._writing)
        while piece := os.read(self._reading, 65536).decode():
            self.said += piece
        os.close(self._reading)
        return self.said.splitlines()


@contextmanager
def supervisor(
    leader: str, generator: str, *, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", SUPERVISOR, OPEN + leader, OPEN + generator]
    with subprocess.Popen(command, stdout=stdout) as process:
        try:
            yield process
        finally:
            process.kill()


class Record:
    """The events, as the events file would hold them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def __call__(self, event: str, **fields: object) -> None:
        self.rows.append({"event": event, **fields})


def test_a_killed_worker_is_restarted_and_the_restart_is_said_and_recorded(
    lives: Lives, capfd: pytest.CaptureFixture[str]
) -> None:
    record = Record()
    dies_once = (
        "say('life')\n"
        "if not os.path.exists('mark'): open('mark', 'w'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "tell('go'); stay()"
    )
    workers = [worker("trainer", "wait('go')"), worker("generator-0", dies_once)]
    assert supervise(workers, record=record) == 0
    assert lives.until_all_are_dead() == ["life", "life"]
    reason = "killed by SIGKILL"
    restart = {"event": "restart", "worker": "generator-0", "reason": reason, "delay": 0.02}
    assert record.rows == [{**restart, "killed": False}]  # by itself, for all we know
    assert capfd.readouterr().out == f"restarted generator-0 ({reason}) after 0.02 s\n"


def test_the_trainer_is_restarted_too(lives: Lives) -> None:
    record = Record()
    fails_once = "say('life')\nif not os.path.exists('mark'): open('mark', 'w'); sys.exit(1)"
    assert supervise([worker("trainer", fails_once)], record=record) == 0
    assert lives.until_all_are_dead() == ["life", "life"]
    assert [row["reason"] for row in record.rows] == ["exit code 1"]


def test_after_five_crashes_it_gives_up_and_shows_the_last_twenty_lines(
    lives: Lives, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record, log = Record(), tmp_path / "generator-0.log"
    crashes = "[print('line', n) for n in range(1, 31)]; print('bug', file=sys.stderr); sys.exit(9)"
    workers = [worker("trainer", "say('up'); stay()"), worker("generator-0", crashes, log)]
    assert supervise(workers, record=record) == 1
    lives.until_all_are_dead()
    assert [row["delay"] for row in record.rows] == [0.02, 0.04, 0.08, 0.16]
    out = capfd.readouterr().out.splitlines()
    first = "generator-0 crashed 5 times in 60 s, last: exit code 9; giving up; the end of "
    assert out[4] == f"{first}{log}:"
    assert out[5:] == [*(f"line {n}" for n in range(12, 31)), "bug"]


def test_the_delay_grows_no_further_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "LONGEST_DELAY", 0.05)
    record = Record()
    assert supervise([worker("trainer", "sys.exit(1)")], record=record) == 1
    assert [row["delay"] for row in record.rows] == [0.02, 0.04, 0.05, 0.05]


def test_kills_of_our_own_are_recorded_and_no_reason_to_give_up(lives: Lives) -> None:
    record = Record()

    def on_tick(group: process_group.ProcessGroup) -> None:
        lives.read()
        if lives.said.count("up\n") > len(killed()) and len(killed()) < 6:
            assert group["generator-0"].kill()
            assert not group["generator-0"].kill(), "it is dead already"
        if lives.said.count("up\n") == 7 and len(record.rows) == 12:
            group["trainer"].kill()

    def killed() -> list[object]:
        return [row for row in record.rows if row == {"event": "killed", "worker": "generator-0"}]

    ends = "if os.path.exists('mark'): sys.exit(0)\nopen('mark', 'w'); stay()"
    workers = [worker("trainer", ends), worker("generator-0", "say('up'); stay()")]
    assert supervise(workers, record=record, on_tick=on_tick) == 0
    restarts = [row for row in record.rows if row["event"] == "restart"]
    assert [row["worker"] for row in restarts] == ["generator-0"] * 6 + ["trainer"]
    assert {(row["delay"], row["killed"]) for row in restarts} == {(0.02, True)}


def test_a_worker_that_has_ended_by_itself_cannot_be_struck(lives: Lives) -> None:
    record, struck = Record(), list[bool]()

    def on_tick(group: process_group.ProcessGroup) -> None:
        process = group["generator-0"].process
        if process and not struck:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            struck.append(group["generator-0"].kill())

    fails_once = "if os.path.exists('mark'): tell('go'); stay()\nopen('mark', 'w'); sys.exit(1)"
    workers = [worker("trainer", "wait('go')"), worker("generator-0", fails_once)]
    assert supervise(workers, record=record, on_tick=on_tick) == 0
    assert struck == [False]
    restarts = [(row["event"], row["reason"], row["killed"]) for row in record.rows]
    assert restarts == [("restart", "exit code 1", False)]


def test_a_dismissed_worker_stays_down_until_it_is_recalled(lives: Lives) -> None:
    record, recalled = Record(), []

    def on_tick(group: process_group.ProcessGroup) -> None:
        lives.read()
        if lives.said.count("up") == 1 and not recalled:
            assert group["generator-0"].kill()
            recalled.append("struck")
        if lives.said.count("up") == 2 and recalled == ["struck"]:
            group["generator-0"].stop()
            assert not group["generator-0"].resume(), "it has not left yet"
            recalled.append("soon")
        elif recalled[1:] == ["soon"] and group["generator-0"].resume():
            recalled.append("now")

    again = (
        "on(signal.SIGTERM, 'left', 0)\n"
        "lives = open('lives', 'a+'); lives.write('x'); lives.seek(0); say('up')\n"
        "if len(lives.read()) == 3: tell('go')\n"
        "stay()"
    )
    workers = [worker("trainer", "wait('go')"), worker("generator-0", again)]
    assert supervise(workers, record=record, on_tick=on_tick) == 0
    assert recalled == ["struck", "soon", "now"]
    assert [row["event"] for row in record.rows] == ["killed", "restart"]  # the recall is none
    assert lives.until_all_are_dead()[:4] == ["up", "up", "left", "up"]


def test_a_long_life_resets_the_delay_and_the_count(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "CALM_SECONDS", 0.0)  # every life counts as long
    record = Record()
    fails_six_times = (
        "lives = open('lives', 'a+'); lives.write('x'); lives.seek(0)\n"
        "sys.exit(len(lives.read()) <= 6)"
    )
    assert supervise([worker("trainer", fails_six_times)], record=record) == 0
    assert [row["delay"] for row in record.rows] == [0.02] * 6


def test_bad_settings_end_all_at_once_with_code_2(
    lives: Lives, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record, log = Record(), tmp_path / "generator-0.log"
    refuses = "wait('go'); print('loss.name = x'); sys.exit(2)"
    workers = [
        worker("trainer", "say('up'); tell('go'); stay()"),
        worker("generator-0", refuses, log),
    ]
    assert supervise(workers, record=record) == 2
    assert lives.until_all_are_dead() == ["up"]
    assert record.rows == []
    refused = f"generator-0 refused its settings; the end of {log}:\nloss.name = x\n"
    assert capfd.readouterr().out == refused


def test_a_generator_that_is_done_is_not_restarted(lives: Lives) -> None:
    record = Record()
    crashes_twice = (
        "if not os.path.exists('mark'): wait('gone'); open('mark', 'w'); sys.exit(1)\n"
        "if not os.path.exists('twice'): open('twice', 'w'); sys.exit(1)\n"
        "tell('go')"
    )
    workers = [
        worker("trainer", "wait('go')"),
        worker("generator-0", "say('done'); tell('gone')"),
        worker("generator-1", crashes_twice),
    ]
    assert supervise(workers, record=record) == 0
    assert lives.until_all_are_dead() == ["done"]
    assert [row["worker"] for row in record.rows] == ["generator-1", "generator-1"]


def test_when_the_trainer_is_done_the_generators_end_with_their_children(lives: Lives) -> None:
    has_a_child = (
        "if os.fork() == 0: say('child'); tell('gone'); stay()\n"
        "on(signal.SIGTERM, 'ended', 0); tell('go'); stay()"
    )
    workers = [worker("trainer", "wait('go'); wait('gone')"), worker("generator-0", has_a_child)]
    assert supervise(workers, record=Record()) == 0
    assert lives.until_all_are_dead() == ["child", "ended"]


def test_a_generator_that_will_not_end_is_killed(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "GRACE_SECONDS", 2.0)
    deaf = "on(signal.SIGTERM, 'deaf'); tell('go'); stay()"
    workers = [worker("trainer", "wait('go')"), worker("generator-0", deaf)]
    assert supervise(workers, record=Record()) == 0
    assert lives.until_all_are_dead() == ["deaf"]


def test_a_killed_supervisor_leaves_no_worker_and_no_child_of_one(lives: Lives) -> None:
    with supervisor("os.fork(); say('trainer up'); stay()", STAYS) as process:
        lives.until("trainer up\n", "generator up\n")
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        lives.until_all_are_dead()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_goes_to_the_trainer_and_generators_outlive_it(
    lives: Lives, number: signal.Signals
) -> None:
    saves = f"on({int(number)}, 'trainer saved', 0); say('trainer up'); stay()"
    ends = "on(signal.SIGTERM, 'generator ended', 0); on(signal.SIGINT, 'wrong'); " + STAYS
    with supervisor(saves, ends) as process:
        lives.until("trainer up", "generator up")
        process.send_signal(number)
        assert process.wait() == 0
        assert lives.until_all_are_dead()[-2:] == ["trainer saved", "generator ended"]


def test_the_second_signal_kills_all_now(lives: Lives) -> None:
    with supervisor("on(signal.SIGINT, 'finishing'); say('trainer up'); stay()", STAYS) as process:
        lives.until("trainer up", "generator up")
        process.send_signal(signal.SIGINT)
        lives.until("finishing")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
        assert lives.until_all_are_dead().count("finishing") == 1


def test_a_trainer_that_fails_while_it_stops_is_not_restarted(lives: Lives) -> None:
    with supervisor("on(signal.SIGTERM, 'failed', 3); say('trainer up'); stay()", STAYS) as process:
        lives.until("trainer up", "generator up")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 3
        assert lives.until_all_are_dead().count("trainer up") == 1


def test_the_children_of_a_crashed_worker_die_with_it(lives: Lives) -> None:
    has_a_child = (
        "if os.fork() == 0: gone = open('gone', 'w'); say('child'); tell('go'); stay()\n"
        "wait('go'); sys.exit(1)"
    )
    once = f"if os.path.exists('mark'): stay()\nopen('mark', 'w')\n{has_a_child}"
    workers = [worker("trainer", "wait('gone')"), worker("generator-0", once)]
    assert supervise(workers, record=Record()) == 0
    assert lives.until_all_are_dead() == ["child"]


def test_a_generator_that_dies_while_the_trainer_stops_is_not_restarted(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "FIRST_DELAY", 0.0)
    record = Record()
    stops = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "gone = open('gone')\n"
        "os.kill(os.getppid(), signal.SIGTERM); signal.sigwait([signal.SIGTERM])\n"
        "os.kill(int(open('pid').read()), signal.SIGKILL)\n"
        "gone.read()"  # until the supervisor has cleaned up after the generator
    )
    has_a_child = (
        "open('pid', 'w').write(str(os.getpid())); say('generator up')\n"
        "if os.fork() == 0: gone = open('gone', 'w'); stay()\n"
        "stay()"
    )
    workers = [worker("trainer", stops), worker("generator-0", has_a_child)]
    assert supervise(workers, record=record) == 0
    assert record.rows == []
    assert lives.until_all_are_dead() == ["generator up"]


def test_on_a_terminal_a_restart_is_said_only_after_the_trainers_table(lives: Lives) -> None:
    draws = "print('table begins'); wait('go'); print('table ends')"
    crashes_once = "if not os.path.exists('mark'): open('mark', 'w'); sys.exit(1)\ntell('go')"
    ours, theirs = os.openpty()
    with supervisor(draws, crashes_once, stdout=theirs) as process:
        assert process.wait() == 0
    lives.until_all_are_dead()
    lines = os.read(ours, 65536).decode().replace(process_group.SHOW_CURSOR, "").splitlines()
    os.close(ours)
    os.close(theirs)
    said = "restarted generator-0 (exit code 1) after 0.5 s"
    assert lines == ["table begins", "table ends", said]


def test_a_supervisor_gives_the_signals_back(lives: Lives) -> None:
    def ours(*_: object) -> None: ...

    earlier = signal.signal(signal.SIGTERM, ours)
    try:
        assert supervise([worker("trainer", "pass")], record=Record()) == 0
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, earlier)
