"""Process groups of real, small workers: restarts, repeated crashes, signals, no orphans.

Every child keeps the pipe `alive` open: its end of file means that all children have ended.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from real_programs import until

from peralta_zmq.operate.process_group import ProcessGroup, RestartPolicy, Worker, supervise

ROOT = Path(__file__).parents[2]
OPEN = """
import os, signal, sys, time
alive = os.open("alive", os.O_WRONLY)
def send(text): os.write(alive, text.encode() + b"\\n")
def on(number, text, code=None):
    def handle(*_):
        send(text)
        if code is not None: os._exit(code)
    signal.signal(number, handle)
def wait(name): open(name).read()  # until another child opens and closes this pipe
def notify(name): open(name, "w").close()
def fail_first(times, code):
    starts = open('starts', 'a+'); starts.write('x'); starts.seek(0)
    if len(starts.read()) <= times: sys.exit(code)
def stay():
    while True: time.sleep(0.05)  # short sleeps: a signal may arrive just before one
"""
SHORT = RestartPolicy(first_delay=0.02)
STAYS = "send('generator up'); stay()"
SUPERVISOR = """
import sys
from pathlib import Path
from peralta_zmq.operate.process_group import Worker, recorder, supervise
python = (sys.executable, "-c")
leader, generator = (Worker(name, (*python, code)) for name, code in
                     zip(("trainer", "generator-0"), sys.argv[1:]))
sys.exit(supervise([leader, generator], record=recorder(Path())))
"""


@pytest.fixture(autouse=True)
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Children:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("alive", "go", "gone"):
        os.mkfifo(name)
    return Children()


def worker(name: str, code: str, log: Path | None = None) -> Worker:
    return Worker(name, (sys.executable, "-c", OPEN + code), log)


class Children:
    """Messages of the child processes, and the end of the last one."""

    def __init__(self) -> None:
        self._reading = os.open("alive", os.O_RDONLY | os.O_NONBLOCK)
        self._writing = os.open("alive", os.O_WRONLY)  # no end of file before the first child
        os.set_blocking(self._reading, True)
        self.messages = ""

    def read(self) -> None:
        """Read the messages that have arrived."""
        if select.select([self._reading], [], [], 0)[0]:
            self.messages += os.read(self._reading, 65536).decode()

    def until(self, *texts: str) -> None:
        while not all(text in self.messages for text in texts):
            self.messages += os.read(self._reading, 65536).decode()

    def until_all_have_ended(self) -> list[str]:
        os.close(self._writing)
        while piece := os.read(self._reading, 65536).decode():
            self.messages += piece
        os.close(self._reading)
        return self.messages.splitlines()


@contextmanager
def supervisor(
    leader: str, generator: str, **streams: Any
) -> Generator[subprocess.Popen[bytes], None, None]:
    command = [sys.executable, "-c", SUPERVISOR, OPEN + leader, OPEN + generator]
    with subprocess.Popen(command, **streams) as process:
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


def supervised(
    *codes: str, code: int = 0, logs: Sequence[Path | None] = (None, None, None), **options: Any
) -> list[dict[str, object]]:
    """Run a trainer and generators with these programs; returns the events."""
    record, names = Record(), ("trainer", "generator-0", "generator-1")
    workers = [worker(*each) for each in zip(names, codes, logs, strict=False)]
    assert supervise(workers, record=record, **{"policy": SHORT, **options}) == code
    return record.rows


@pytest.mark.parametrize(
    ("death", "reason", "hint"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL",
         "; if the system was out of memory, bin/doctor plan shows what to change"),
        ("import mmap; file = open('mark', 'r+b'); file.write(b'1'); file.flush()\n"
         "    content = mmap.mmap(file.fileno(), 1); file.truncate(0); content[0]",
         "killed by SIGBUS",
         "; a file that it had mapped became unreadable: check the disk, or mount the NAS again"),
    ],
)  # fmt: skip
def test_killed_worker_is_restarted_and_recorded(
    children: Children, capfd: pytest.CaptureFixture[str], death: str, reason: str, hint: str
) -> None:
    dies_once = (
        "send('started')\n"
        f"if not os.path.exists('mark'):\n    open('mark', 'w').close(); {death}\n"
        "notify('go'); stay()"
    )
    (row,) = supervised("wait('go')", dies_once)
    assert children.until_all_have_ended() == ["started", "started"]
    assert row == {"event": "restart", "worker": "generator-0", "reason": reason, "delay": 0.02,
                   "killed": False}  # fmt: skip
    assert capfd.readouterr().out == f"restarted generator-0 ({reason}) after 0.02 s{hint}\n"


def test_fifth_crash_ends_the_group_and_shows_twenty_lines(
    children: Children, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "generator-0.log"
    crashes = "[print('line', n) for n in range(1, 31)]; print('bug', file=sys.stderr); sys.exit(9)"
    rows = supervised("send('up'); stay()", crashes, code=1, logs=(None, log))
    children.until_all_have_ended()
    assert [row["delay"] for row in rows] == [0.02, 0.04, 0.08, 0.16]
    out = capfd.readouterr().out.splitlines()
    first = "generator-0 crashed 5 times in 60 s, last: exit code 9; giving up; the end of "
    assert out[4] == f"{first}{log}:"
    assert out[5:] == [*(f"line {n}" for n in range(12, 31)), "bug"]


def test_worker_whose_log_cannot_be_opened_prints_to_the_terminal(
    children: Children, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "away" / "g.log"
    supervised("wait('go')", "print('hello', flush=True); notify('go'); stay()", logs=(None, log))
    children.until_all_have_ended()
    printed = capfd.readouterr()
    assert "hello" in printed.out
    assert f"{log} cannot be written (No such file or directory); the output of" in printed.err


def test_own_kills_do_not_count_as_crashes(children: Children) -> None:
    record = Record()

    def on_tick(group: ProcessGroup) -> None:
        children.read()
        if children.messages.count("up\n") > len(killed()) and len(killed()) < 6:
            assert group["generator-0"].kill()
            assert not group["generator-0"].kill(), "it has been killed already"
        if children.messages.count("up\n") == 7 and len(record.rows) == 12:
            group["trainer"].kill()

    def killed() -> list[object]:
        return [row for row in record.rows if row == {"event": "killed", "worker": "generator-0"}]

    ends = "if os.path.exists('mark'): sys.exit(0)\nopen('mark', 'w'); stay()"
    workers = [worker("trainer", ends), worker("generator-0", "send('up'); stay()")]
    assert supervise(workers, record=record, on_tick=on_tick, policy=SHORT) == 0
    restarts = [row for row in record.rows if row["event"] == "restart"]
    assert [row["worker"] for row in restarts] == ["generator-0"] * 6 + ["trainer"]
    assert {(row["delay"], row["killed"]) for row in restarts} == {(0.02, True)}


def test_ended_worker_cannot_be_killed(children: Children) -> None:
    results = list[bool]()

    def on_tick(group: ProcessGroup) -> None:
        process = group["generator-0"].process
        if process and not results:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            results.append(group["generator-0"].kill())

    fails_once = "if os.path.exists('mark'): notify('go'); stay()\nopen('mark', 'w'); sys.exit(1)"
    (row,) = supervised("wait('go')", fails_once, on_tick=on_tick)
    assert results == [False]
    assert (row["event"], row["reason"], row["killed"]) == ("restart", "exit code 1", False)


def test_stopped_worker_stays_down_until_it_is_resumed(children: Children) -> None:
    calls = list[str]()

    def on_tick(group: ProcessGroup) -> None:
        children.read()
        if children.messages.count("up") == 1 and not calls:
            assert group["generator-0"].kill()
            calls.append("kill")
        if children.messages.count("up") == 2 and calls == ["kill"]:
            group["generator-0"].stop()
            assert not group["generator-0"].resume(), "it is still ending"
            calls.append("stop")
        elif calls[1:] == ["stop"] and group["generator-0"].resume():
            calls.append("resume")

    again = (
        "on(signal.SIGTERM, 'left', 0)\n"
        "starts = open('starts', 'a+'); starts.write('x'); starts.seek(0); send('up')\n"
        "if len(starts.read()) == 3: notify('go')\n"
        "stay()"
    )
    rows = supervised("wait('go')", again, on_tick=on_tick)
    assert calls == ["kill", "stop", "resume"]
    assert [row["event"] for row in rows] == ["killed", "restart"]  # none for `resume`
    assert children.until_all_have_ended()[:4] == ["up", "up", "left", "up"]


@pytest.mark.parametrize(
    ("policy", "num_crashes", "delays"),
    [
        (replace(SHORT, longest_delay=0.05), 5, [0.02, 0.04, 0.05, 0.05]),
        (replace(SHORT, calm_seconds=0.0), 6, [0.02] * 6),  # every run counts as long
    ],
)
def test_delay_doubles_up_to_a_limit_until_a_long_run(
    policy: RestartPolicy, num_crashes: int, delays: list[float]
) -> None:
    rows = supervised(f"fail_first({num_crashes}, 1)", code=int(num_crashes == 5), policy=policy)
    assert [row["delay"] for row in rows] == delays


def test_error_of_the_only_generator_ends_a_new_group_with_code_2(
    children: Children, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "generator-0.log"
    refuses = "wait('go'); print('loss.name = \\x1b[2Jx'); sys.exit(2)"
    assert supervised("send('up'); notify('go'); stay()", refuses, code=2, logs=(None, log)) == []
    assert children.until_all_have_ended() == ["up"]
    failed = "generator-0 ended with an error (exit code 2); giving up"
    assert capfd.readouterr().out == f"{failed}; the end of {log}:\nloss.name = \\x1b[2Jx\n"


def test_trainer_that_ends_with_an_error_is_not_restarted(children: Children) -> None:
    assert supervised("wait('go'); sys.exit(2)", "notify('go'); stay()", code=2) == []


@pytest.mark.parametrize(
    ("fails", "text"),
    [
        ("print('no key'); sys.exit(2)", "generator-0 ended with an error (exit code 2)"),
        ("print('no key'); sys.exit(9)", "crashed 5 times in 60 s, last: exit code 9"),
    ],
    ids=["error", "crashes"],
)
def test_group_continues_without_a_worker_that_cannot_run(
    children: Children, tmp_path: Path, capfd: pytest.CaptureFixture[str], fails: str, text: str
) -> None:
    log, groups = tmp_path / "generator-0.log", list[ProcessGroup]()

    def on_tick(group: ProcessGroup) -> None:
        children.read()
        is_up = "generator up" in children.messages
        if group["generator-0"].failure and is_up and not groups:
            groups.append(group)
            Path("go").write_text("")  # the trainer ends

    stays = "on(signal.SIGTERM, 'ended', 0); " + STAYS
    rows = supervised("wait('go')", fails, stays, logs=(None, log, None), on_tick=on_tick)
    assert children.until_all_have_ended()[-1] == "ended"
    assert [row["worker"] for row in rows if row["event"] == "failed"] == ["generator-0"]
    out = capfd.readouterr().out
    assert f"{text}; the next start is in 60 s; the end of {log}:\nno key\n" in out


@pytest.mark.parametrize(
    ("code", "num_failures", "restarts"),
    [(2, 3, [0.05] * 3), (9, 5, [0.02, 0.04, 0.08, 0.16, 0.05])],
    ids=["error", "crashes"],
)
def test_last_generator_is_started_again_after_the_first_step(
    children: Children, tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int,
    num_failures: int, restarts: list[float],
) -> None:  # fmt: skip
    policy = replace(SHORT, retry_seconds=0.05)
    fails = f"fail_first({num_failures}, {code}); notify('go'); stay()"
    logs = (None, tmp_path / "generator-0.log")
    rows = supervised("wait('go')", fails, logs=logs, has_trained=lambda: True, policy=policy)
    children.until_all_have_ended()
    assert [row["delay"] for row in rows if row["event"] == "restart"] == restarts
    assert [row["worker"] for row in rows if row["event"] == "failed"] == ["generator-0"]
    assert capfd.readouterr().out.count("the next start is in") == 1  # not once for each failure


def test_failure_after_a_long_run_is_reported_again(children: Children) -> None:
    policy = replace(SHORT, retry_seconds=0.05, calm_seconds=0.0)  # each run is long
    fails = "fail_first(2, 2); notify('go'); stay()"
    rows = supervised("wait('go')", fails, has_trained=lambda: True, policy=policy)
    children.until_all_have_ended()
    assert [row["event"] for row in rows] == ["failed", "restart"] * 2


def test_group_continues_while_a_generator_runs_that_failed_before() -> None:
    ended = list[bool]()

    def on_tick(group: ProcessGroup) -> None:
        if group["generator-1"].failure and not ended:
            ended.append(True)
            Path("go").write_text("")  # the trainer ends

    fails_once = "fail_first(1, 2); notify('gone'); stay()"
    policy = replace(SHORT, retry_seconds=0.05)
    rows = supervised(
        "wait('go')", fails_once, "wait('gone'); sys.exit(2)", on_tick=on_tick, policy=policy
    )
    failed = [row["worker"] for row in rows if row["event"] == "failed"]
    assert failed == ["generator-0", "generator-1"]


def test_group_ends_when_its_last_generator_cannot_run(
    children: Children, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    supervised("notify('go'); stay()", "wait('go'); sys.exit(2)", "sys.exit(2)", code=2,
               logs=(None, tmp_path / "0.log", tmp_path / "1.log"))  # fmt: skip
    children.until_all_have_ended()
    assert capfd.readouterr().out.count("ended with an error") == 2


def test_finished_generator_is_not_restarted(children: Children) -> None:
    crashes_twice = (
        "if not os.path.exists('mark'): wait('gone'); open('mark', 'w'); sys.exit(1)\n"
        "if not os.path.exists('twice'): open('twice', 'w'); sys.exit(1)\n"
        "notify('go')"
    )
    rows = supervised("wait('go')", "send('done'); notify('gone')", crashes_twice)
    assert children.until_all_have_ended() == ["done"]
    assert [row["worker"] for row in rows] == ["generator-1", "generator-1"]


def test_end_of_the_trainer_ends_generators_and_their_children(children: Children) -> None:
    has_a_child = (
        "if os.fork() == 0: send('child'); notify('gone'); stay()\n"
        "on(signal.SIGTERM, 'ended', 0); notify('go'); stay()"
    )
    supervised("wait('go'); wait('gone')", has_a_child)
    assert children.until_all_have_ended() == ["child", "ended"]


def test_generator_that_ignores_sigterm_is_killed(children: Children) -> None:
    policy = replace(SHORT, grace_seconds=2.0)
    supervised("wait('go')", "on(signal.SIGTERM, 'ignored'); notify('go'); stay()", policy=policy)
    assert children.until_all_have_ended() == ["ignored"]


def test_killed_supervisor_leaves_no_process(children: Children) -> None:
    with supervisor("os.fork(); send('trainer up'); stay()", STAYS) as process:
        children.until("trainer up\n", "generator up\n")
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        children.until_all_have_ended()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_goes_to_the_trainer_only(children: Children, number: signal.Signals) -> None:
    saves = f"on({int(number)}, 'trainer saved', 0); send('trainer up'); stay()"
    ends = "on(signal.SIGTERM, 'generator ended', 0); on(signal.SIGINT, 'wrong'); " + STAYS
    with supervisor(saves, ends) as process:
        children.until("trainer up", "generator up")
        process.send_signal(number)
        assert process.wait() == 0
        assert children.until_all_have_ended()[-2:] == ["trainer saved", "generator ended"]


def test_second_signal_kills_all(children: Children) -> None:
    with supervisor("on(signal.SIGINT, 'finishing'); send('trainer up'); stay()", STAYS) as process:
        children.until("trainer up", "generator up")
        process.send_signal(signal.SIGINT)
        children.until("finishing")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
        assert children.until_all_have_ended().count("finishing") == 1


def test_trainer_that_fails_while_stopping_is_not_restarted(children: Children) -> None:
    with supervisor(
        "on(signal.SIGTERM, 'failed', 3); send('trainer up'); stay()", STAYS
    ) as process:
        children.until("trainer up", "generator up")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 3
        assert children.until_all_have_ended().count("trainer up") == 1


def test_generator_that_cannot_run_does_not_end_a_trainer_that_stops(children: Children) -> None:
    saves = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); gone = open('gone')\n"
        "os.kill(os.getppid(), signal.SIGTERM); signal.sigwait([signal.SIGTERM])\n"
        "notify('go'); gone.read(); time.sleep(0.5); send('saved')"
    )
    refuses = "gone = open('gone', 'w'); wait('go'); sys.exit(2)"
    assert supervise([worker("trainer", saves), worker("g", refuses)], record=Record()) == 0
    assert children.until_all_have_ended() == ["saved"]


def test_children_of_a_crashed_worker_are_killed(children: Children) -> None:
    has_a_child = (
        "if os.path.exists('mark'): stay()\nopen('mark', 'w')\n"
        "if os.fork() == 0: gone = open('gone', 'w'); send('child'); notify('go'); stay()\n"
        "wait('go'); sys.exit(1)"
    )
    supervised("wait('gone')", has_a_child)
    assert children.until_all_have_ended() == ["child"]


def test_generator_killed_while_the_trainer_stops_is_not_restarted(children: Children) -> None:
    stops = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "gone = open('gone')\n"
        "os.kill(os.getppid(), signal.SIGTERM); signal.sigwait([signal.SIGTERM])\n"
        "os.kill(int(open('pid').read()), signal.SIGKILL)\n"
        "gone.read()"  # until the supervisor has cleaned up after the generator
    )
    has_a_child = (
        "open('pid', 'w').write(str(os.getpid())); send('generator up')\n"
        "if os.fork() == 0: gone = open('gone', 'w'); stay()\n"
        "stay()"
    )
    assert supervised(stops, has_a_child, policy=RestartPolicy(first_delay=0.0)) == []
    assert children.until_all_have_ended() == ["generator up"]


def test_ctrl_z_stops_the_workers_until_the_group_is_continued(children: Children) -> None:
    ends = "send(f'trainer {os.getpid()} up'); wait('go')"
    stays = "send(f'generator {os.getpid()} up'); stay()"
    # A job of a shell: a process group of its own, in the session of its parent.
    with supervisor(ends, stays, preexec_fn=os.setpgrp) as process:
        children.until("trainer", "generator")
        numbers = map(int, re.findall(r"\d+", children.messages))
        processes = [psutil.Process(pid) for pid in (process.pid, *numbers)]
        for _ in range(2):
            process.send_signal(signal.SIGTSTP)
            until(lambda: all(each.status() == "stopped" for each in processes), seconds=20)
            process.send_signal(signal.SIGCONT)
            until(lambda: all(each.status() != "stopped" for each in processes), seconds=20)
        open("go", "w").close()
        assert process.wait() == 0
    children.until_all_have_ended()


def test_ctrl_z_has_no_effect_if_nothing_could_continue_the_group(children: Children) -> None:
    ends = "send('trainer up'); wait('go')"
    with supervisor(ends, STAYS, start_new_session=True) as process:
        children.until("trainer up", "generator up")
        process.send_signal(signal.SIGTSTP)
        open("go", "w").close()
        assert process.wait() == 0
    children.until_all_have_ended()


def test_restart_notice_waits_for_the_trainers_table(children: Children) -> None:
    draws = "print('table begins'); wait('go'); print('table ends')"
    crashes_once = "fail_first(1, 1); notify('go')"
    terminal, stdout = os.openpty()
    with supervisor(draws, crashes_once, stdout=stdout) as process:
        assert process.wait() == 0
    children.until_all_have_ended()
    lines = os.read(terminal, 65536).decode().splitlines()
    os.close(terminal)
    os.close(stdout)
    notice = "restarted generator-0 (exit code 1) after 0.5 s"
    assert lines == ["table begins", "table ends", notice]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_disk_for_output_and_events_ends_no_supervisor(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # data may stay in a buffer until the end
    Path("events.jsonl").symlink_to("/dev/full")
    crashes_once = "send('started'); fail_first(1, 9); wait('go')"
    with (
        open("/dev/full", "wb") as full,
        supervisor(crashes_once, "notify('go')", stdout=full, stderr=full) as process,
    ):
        assert process.wait(timeout=30) == 0
    assert children.until_all_have_ended() == ["started", "started"]


def test_supervise_restores_signal_handlers(children: Children) -> None:
    def handler(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, handler)  # restored by the fixture `signals`
    supervised("pass")
    assert signal.getsignal(signal.SIGTERM) is handler
