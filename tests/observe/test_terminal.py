"""What a person sees while a run goes on, on a real pseudo-terminal and off one."""

import io
import os
import pty
import re
import threading
from collections.abc import Callable

import pytest

from peralta_zmq.observe.metrics import Row
from peralta_zmq.observe.terminal import Terminal
from peralta_zmq.observe.verdict import Verdict

pytestmark = pytest.mark.timeout(20)

ROW: Row = {
    "step": 12, "time": 1000.0, "reward": 0.71, "frac_reward_zero_std": 0.125,
    "staleness/mean": 0.9, "queue/depth": 3, "time/wait_for_batch": 0.21, "num_rollouts": 128,
    "step_time": 0.875, "generators": 2,
}  # fmt: skip


def plain(*rows: Row, max_steps: int = 60) -> list[str]:
    stream = io.StringIO()
    with Terminal(max_steps, stream) as terminal:
        for row in rows:
            terminal.step(row)
    return stream.getvalue().splitlines()


def on_a_terminal(show: Callable[[Terminal], None]) -> str:
    """What `show` leaves on a real terminal, control sequences taken out."""
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # EIO: the other side is closed
                return
            if not piece:
                return
            seen.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as stream, Terminal(60, stream, run="demo") as terminal:
        show(terminal)
    reader.join()
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(seen).decode())


@pytest.fixture(autouse=True)
def an_ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")


def test_off_a_terminal_a_step_is_one_plain_line() -> None:
    # 48 steps left at 0.875 s are 42 s; 128 rollouts in 0.875 s are 146 in one
    assert plain(ROW) == [
        "step=12/60 reward=0.71 no_signal=12% staleness=0.9 queue=3 wait=0.21s "
        "rollouts/s=146 generators=2 eta=42s"
    ]


def test_the_time_left_follows_the_clock_and_not_the_first_step() -> None:
    # 2 steps in 5 s: 46 left take 115 s
    lines = plain(ROW, ROW | {"step": 14, "time": 1005.0})
    assert lines[1].endswith("eta=1m55s")


def test_a_value_that_is_missing_or_null_is_a_dash() -> None:
    assert plain({"step": 1, "reward": None, "step_time": 0.0}) == [
        "step=1/60 reward=- no_signal=- staleness=- queue=- wait=- rollouts/s=- generators=- eta=-"
    ]


def test_off_a_terminal_a_note_is_its_own_line() -> None:
    stream = io.StringIO()
    with Terminal(60, stream) as terminal:
        terminal.note("resumed: step=[12]")
    assert stream.getvalue() == "resumed: step=[12]\n"


def test_on_a_terminal_the_table_names_run_progress_and_time_left() -> None:
    seen = on_a_terminal(lambda terminal: terminal.step(ROW))
    assert "demo  step 12 of 60 (20%)  42s left" in seen
    for heading in ("step", "reward", "no signal", "staleness", "queue", "wait", "rollouts/s"):
        assert heading in seen
    assert re.search(r"12 .*0\.71.*12%.*0\.9.*3.*0\.21s.*146.*2", seen)


WAITS = Verdict("the trainer waits 60% of its time for rollouts", "add a generator", "warn")
BALANCED = Verdict("balanced: the trainer waits 8%", "", "ok")


def verdicts(*shown: tuple[float, Verdict]) -> list[str]:
    """Lines beside those of the steps, for verdicts at these times."""
    stream = io.StringIO()
    with Terminal(60, stream) as terminal:
        for moment, verdict in shown:
            terminal.step(ROW | {"time": moment}, verdict)
    return [line for line in stream.getvalue().splitlines() if not line.startswith("step=")]


def test_off_a_terminal_a_verdict_is_a_line_when_another_one_holds() -> None:
    later = Verdict("the trainer waits 63% of its time for rollouts", "add a generator", "warn")
    assert verdicts((1, WAITS), (2, later), (3, BALANCED), (4, BALANCED)) == [
        "verdict: the trainer waits 60% of its time for rollouts; add a generator",
        "verdict: balanced: the trainer waits 8%",
    ]


def test_verdicts_that_come_and_go_are_told_once_a_minute() -> None:
    flicker = [(float(second), (WAITS, BALANCED)[second % 2]) for second in range(100)]
    assert [line[9:12] for line in verdicts(*flicker)] == ["the", "bal", "the", "bal"]


def silent(seconds: str) -> Verdict:
    return Verdict(f"no step for {seconds}", "look at the newest event", "bad")


def test_off_a_terminal_a_silence_is_told_once_however_long_it_lasts() -> None:
    stream = io.StringIO()
    with Terminal(60, stream) as terminal:
        terminal.judge(BALANCED, now=1000.0)
        for second, told in ((1031.0, "31s"), (1100.0, "1m40s"), (9000.0, "2h13m")):
            terminal.judge(silent(told), now=second)
    assert stream.getvalue() == "verdict: no step for 31s; look at the newest event\n"


def test_on_a_terminal_a_silence_stands_below_the_table_and_before_the_first_step() -> None:
    def show(terminal: Terminal) -> None:
        terminal.judge(silent("31s"), now=1031.0)
        terminal.step(ROW, BALANCED)
        terminal.judge(silent("1m01s"), now=1061.0)

    seen = on_a_terminal(show)
    first, _, rest = seen.partition("no step for 31s; look at the newest event")
    assert "step 12 of 60" not in first
    assert rest.rindex("0.71") < rest.rindex("no step for 1m01s; look at the newest event")


def test_on_a_terminal_the_verdict_stands_below_the_table() -> None:
    seen = on_a_terminal(lambda terminal: terminal.step(ROW, WAITS))
    told = "the trainer waits 60% of its time for rollouts; add a generator"
    assert seen.index("0.71") < seen.index(told)


def test_the_table_keeps_the_last_twelve_steps() -> None:
    def show(terminal: Terminal) -> None:
        for step in range(101, 114):
            terminal.step(ROW | {"step": step})

    last_table = on_a_terminal(show).rpartition("step 113 of 60")[2]
    assert "102" in last_table
    assert "101" not in last_table


def test_on_a_terminal_a_note_is_printed_as_it_is() -> None:
    seen = on_a_terminal(lambda terminal: terminal.note("held-out [before] 0.5"))
    assert "held-out [before] 0.5" in seen


def test_last_words_stand_below_the_table() -> None:
    def show(terminal: Terminal) -> None:
        terminal.step(ROW)
        terminal.end("the last words")

    seen = on_a_terminal(show)
    assert seen.rstrip().endswith("the last words")
    assert seen.index("0.71") < seen.index("the last words")


def test_a_full_disk_behind_the_output_ends_the_talk_and_not_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Closing the file would fail, were anything still buffered.
    with open("/dev/full", "w") as full, Terminal(3, full) as terminal:
        terminal.note("said in vain")
        terminal.step({"step": 1})
        terminal.end("the last words")
    assert caplog.messages == ["no more output here: No space left on device"]


def test_on_a_terminal_progress_stands_below_the_table_and_goes_away() -> None:
    def show(terminal: Terminal) -> None:
        terminal.step(ROW, BALANCED)
        terminal._show_progress("evaluating step 12: 5 of 10")
        terminal._show_progress("")

    seen = on_a_terminal(show)
    before, _, after = seen.partition("evaluating step 12: 5 of 10")
    assert "balanced" in before and "balanced" in after
    assert "evaluating" not in after


def test_off_a_terminal_progress_is_a_line_in_its_time() -> None:
    stream = io.StringIO()
    with Terminal(60, stream) as terminal, terminal.progress("evaluating step 0", 10) as progress:
        progress.reach(5)  # at once: nobody waits yet
    assert stream.getvalue() == ""
