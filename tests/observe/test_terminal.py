"""Terminal output on a pseudo-terminal and in a plain stream; progress; worker info."""

import io
import os
import pty
import re
import signal
import threading
from collections.abc import Callable
from typing import TextIO

import pytest

from peralta_zmq.observe.metrics import Row
from peralta_zmq.observe.terminal import (
    Progress,
    Terminal,
    WaitReport,
    progress_on_stderr,
    worker_info_text,
)
from peralta_zmq.observe.verdict import Verdict

ROW: Row = {
    "step": 12, "time": 1000.0, "reward": 0.71, "frac_reward_zero_std": 0.125,
    "staleness/mean": 0.9, "queue/depth": 3, "time/wait_for_batch": 0.21, "num_rollouts": 128,
    "step_time": 0.875, "generators": 2,
}  # fmt: skip


def on_a_terminal(show: Callable[[Terminal], None], *, encoding: str = "utf-8") -> str:
    """Output of `show` on a pseudo-terminal, without control sequences."""
    written = written_on_a_terminal(lambda terminal, _: show(terminal), encoding=encoding)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


def written_on_a_terminal(show: Callable[[Terminal, TextIO], None], *, encoding: str) -> str:
    """Output of `show` on a pseudo-terminal."""
    master, slave = pty.openpty()
    output: list[bytes] = []

    def read() -> None:
        while True:
            try:
                block = os.read(master, 65536)
            except OSError:  # EIO: the slave side is closed
                return
            if not block:
                return
            output.append(block)

    reader = threading.Thread(target=read)
    reader.start()
    stream = os.fdopen(slave, "w", encoding=encoding)
    with stream, Terminal(60, stream, run="demo") as terminal:
        show(terminal, stream)
    reader.join()
    os.close(master)
    return b"".join(output).decode()


@pytest.fixture(autouse=True)
def terminal_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")


def test_step_and_note_are_lines_with_a_dash_for_null_off_a_terminal() -> None:
    # 48 steps left at 0.875 s are 42 s; then 2 steps in 5 s: 46 left take 115 s.
    stream = io.StringIO()
    with Terminal(60, stream) as terminal:
        terminal.note("resumed: step=[12]")
        terminal.step(ROW)
        terminal.step(ROW | {"step": 14, "time": 1005.0})
    note, first, second = stream.getvalue().splitlines()
    assert note == "resumed: step=[12]"
    assert first == (
        "step=12/60 reward=0.71 no_signal=12% staleness=0.9 queue=3 wait=0.21s "
        "rollouts/s=146 generators=2 eta=42s"
    )
    assert second.endswith("eta=1m55s")
    stream = io.StringIO()
    with Terminal(60, stream) as terminal:
        terminal.step({"step": 1, "reward": None, "step_time": 0.0})
    names = ("reward", "no_signal", "staleness", "queue", "wait", "rollouts/s", "generators", "eta")
    assert stream.getvalue().split() == ["step=1/60", *(f"{name}=-" for name in names)]


def test_live_table_is_between_notes_and_verdict() -> None:
    def show(terminal: Terminal) -> None:
        terminal.note("held-out [before] 0.5")  # not markup
        terminal.step(ROW, WAITS)
        terminal.close("closing report")

    seen = on_a_terminal(show)
    assert "demo  step 12 of 60 (20%)  42s left" in seen
    for heading in ("step", "reward", "no signal", "staleness", "queue", "wait", "rollouts/s"):
        assert heading in seen
    assert re.search(r"12 .*0\.71.*12%.*0\.9.*3.*0\.21s.*146.*2", seen)
    verdict = "the trainer waits 60% of its time for rollouts; add a generator"
    texts = ("held-out [before] 0.5", "0.71", verdict, "closing report")
    places = [seen.index(text) for text in texts]
    assert places == sorted(places)
    assert seen.rstrip().endswith("closing report")


HEADINGS = ("step", "reward", "no signal", "staleness", "queue", "wait", "rollouts/s", "generators")


@pytest.mark.parametrize(("columns", "lacking"), [
    (120, ""), (89, ""), (80, "generators"), (60, "generators queue staleness"),
    (40, "generators queue staleness no_signal wait"), (20, "all"),
])  # fmt: skip
def test_narrow_terminal_lacks_whole_columns_and_cuts_none(
    monkeypatch: pytest.MonkeyPatch, columns: int, lacking: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    row = {**ROW, "step": 1234567}
    seen = on_a_terminal(lambda terminal: terminal.step(row, WAITS))
    dropped = HEADINGS[2:] if lacking == "all" else [n.replace("_", " ") for n in lacking.split()]
    table = seen[seen.rindex("\u250f") : seen.rindex("\u2518")]
    assert "\u2026" not in seen and max(map(len, table.splitlines())) <= columns
    assert [name for name in HEADINGS if name in table] == [
        name for name in HEADINGS if name not in dropped]  # fmt: skip
    assert "1234567" in table and "0.71" in table


def test_terminal_without_utf_8_gets_a_table_in_ascii() -> None:
    seen = on_a_terminal(lambda terminal: terminal.step(ROW, WAITS), encoding="ascii")
    assert "generators" in seen and seen.isascii() and "\\u" not in seen


def test_table_is_drawn_below_what_the_shell_printed_after_ctrl_z() -> None:
    def show(terminal: Terminal, stream: TextIO) -> None:
        terminal.step(ROW, WAITS)
        stream.write("$ fg\n")  # by the shell
        os.kill(os.getpid(), signal.SIGCONT)
        terminal.step({**ROW, "step": 13}, WAITS)
        terminal.step({**ROW, "step": 14}, WAITS)

    drawn = written_on_a_terminal(show, encoding="utf-8")
    places = [drawn.index(text) for text in ("step 12 of", "$ fg", "step 13 of", "step 14 of")]
    shell, first, second = places[1:]
    assert places == sorted(places)
    moves = drawn[shell:first].count("\x1b[1A"), drawn[first:second].count("\x1b[1A")
    assert moves[1] > moves[0] > 0 and moves[0] < drawn[shell:first].count("\n")  # only blank lines
    assert drawn.rfind("\x1b[?25l", 0, shell) < drawn.rfind("\x1b[?25h", 0, shell)  # has a cursor


WAITS = Verdict("the trainer waits 60% of its time for rollouts", "add a generator", "warn")
BALANCED = Verdict("balanced: the trainer waits 8%", "", "ok")


def verdicts(*shown: tuple[float, Verdict]) -> list[str]:
    """Lines other than steps, for verdicts at these times."""
    stream = io.StringIO()
    with Terminal(60, stream) as terminal:
        for moment, verdict in shown:
            terminal.step(ROW | {"time": moment}, verdict)
    return [line for line in stream.getvalue().splitlines() if not line.startswith("step=")]


def test_verdict_is_printed_when_its_kind_changes() -> None:
    later = Verdict("the trainer waits 63% of its time for rollouts", "add a generator", "warn")
    assert verdicts((1, WAITS), (2, later), (3, BALANCED), (4, BALANCED)) == [
        "verdict: the trainer waits 60% of its time for rollouts; add a generator",
        "verdict: balanced: the trainer waits 8%",
    ]
    # Alternating verdicts are printed once a minute.
    flicker = [(float(second), (WAITS, BALANCED)[second % 2]) for second in range(100)]
    assert [line[9:12] for line in verdicts(*flicker)] == ["the", "bal", "the", "bal"]


def test_verdict_that_returns_within_a_minute_is_printed_after_it() -> None:
    shown = [(1.0, WAITS), (11.0, BALANCED), *((float(second), WAITS) for second in range(21, 71))]
    assert [line[9:12] for line in verdicts(*shown)] == ["the", "bal", "the"]


HOSTILE = "ann\x1b]0;owned\x07\x1b[2J\u202e\x9b1m"
ESCAPED = r"ann\x1b]0;owned\x07\x1b[2J\u202e\x9b1m"


def test_control_characters_are_escaped_off_a_terminal() -> None:
    stream = io.StringIO()
    with Terminal(60, stream) as terminal:
        terminal.note(f"{HOSTILE}\nforged")
        terminal.step(ROW, Verdict(HOSTILE, HOSTILE, "bad"))
        terminal.close(f"report\n{HOSTILE}")
    note, _, verdict, *report = stream.getvalue().splitlines()
    assert note == rf"{ESCAPED}\nforged"
    assert verdict == f"verdict: {ESCAPED}; {ESCAPED}"
    assert report == ["report", ESCAPED]


def test_control_characters_are_escaped_on_a_terminal() -> None:
    def show(terminal: Terminal) -> None:
        terminal.note(HOSTILE)
        terminal.step(ROW, Verdict(HOSTILE, "", "bad"))
        terminal.close(HOSTILE)

    seen = on_a_terminal(show)
    assert seen.count(ESCAPED) >= 3
    assert not set("\x07\x9b\u202e") & set(seen)


def stalled(seconds: str) -> Verdict:
    return Verdict(f"no step for {seconds}", "check the newest event", "bad")


def test_stall_is_printed_once_off_a_terminal() -> None:
    stream = io.StringIO()
    with Terminal(60, stream) as terminal:
        terminal.stall(BALANCED, now=1000.0)
        for second, duration in ((1031.0, "31s"), (1100.0, "1m40s"), (9000.0, "2h13m")):
            terminal.stall(stalled(duration), now=second)
    assert stream.getvalue() == "verdict: no step for 31s; check the newest event\n"


def test_stall_and_progress_are_shown_below_the_table() -> None:
    def show(terminal: Terminal) -> None:
        terminal.stall(stalled("31s"), now=1031.0)
        terminal.step(ROW, BALANCED)
        terminal.wait("evaluating step 12: 5 of 10")
        terminal.stall(stalled("1m01s"), now=1061.0)  # replaces the progress

    seen = on_a_terminal(show)
    stall, _, rest = seen.partition("no step for 31s; check the newest event")
    table, _, end = rest.partition("evaluating step 12: 5 of 10")
    assert "step 12 of 60" not in stall and "balanced" in table
    assert end.rindex("0.71") < end.rindex("no step for 1m01s; check the newest event")
    assert "evaluating" not in end


def test_table_keeps_the_last_twelve_steps() -> None:
    def show(terminal: Terminal) -> None:
        for step in range(101, 114):
            terminal.step(ROW | {"step": step})

    last_table = on_a_terminal(show).rpartition("step 113 of 60")[2]
    assert "102" in last_table
    assert "101" not in last_table


def test_full_disk_ends_the_output_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    # Closing the file would fail if data were still buffered.
    with open("/dev/full", "w") as full, Terminal(3, full) as terminal:
        terminal.note("lost")
        terminal.step({"step": 1})
        terminal.close("closing report")
    assert caplog.messages == ["no more output on this terminal: No space left on device"]


@pytest.mark.parametrize(("in_place", "num_items", "seconds", "texts"), [
    # off a terminal: one line every ten seconds
    (False, 100, 1.0, [f"walk: {done} of 100 ({done}%), {left} left" for done, left in (
        (2, "1m38s"), (12, "1m28s"), (22, "1m18s"), (32, "1m08s"), (42, "58s"), (52, "48s"),
        (62, "38s"), (72, "28s"), (82, "18s"), (92, "8s"))]),
    # on a terminal: redrawn after two seconds, and removed at the end
    (True, 5, 1.0, [f"walk: {done} of 5 ({20 * done}%), {5 - done}s left"
                    for done in (2, 3, 4)] + [""]),
    (False, 3, 0.6, []),  # too short for a progress display
    (False, 2, 3.0, ["walk: 1 of 2 (50%), 3s left"]),
])  # fmt: skip
def test_progress_shows_share_and_time_left(
    monkeypatch: pytest.MonkeyPatch, *,
    in_place: bool, num_items: int, seconds: float, texts: list[str],
) -> None:  # fmt: skip
    """Each of the items takes `seconds`."""
    now, shown = 0.0, list[str]()
    monkeypatch.setattr("peralta_zmq.observe.terminal.time.monotonic", lambda: now)
    with Progress("walk", num_items, shown.append, in_place=in_place) as progress:
        for done in range(num_items + 1):
            now = seconds * done
            progress.update(done)
    assert shown == texts


def test_progress_on_a_terminal_is_erased_by_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", screen)
    seconds = 0.0
    monkeypatch.setattr("peralta_zmq.observe.terminal.time.monotonic", lambda: seconds)
    progress = progress_on_stderr("drawing", 10)
    seconds = 3.0
    progress.update(0)
    progress.hide()
    assert screen.getvalue() == "\rdrawing: 0 of 10 (0%)\x1b[K\r\r\x1b[K\r"


class Screen(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def waited(monkeypatch: pytest.MonkeyPatch, screen: Screen, *moments: tuple[float, str]) -> None:
    """Report waits at these seconds on a screen, which also has the log lines."""
    now = 0.0
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("peralta_zmq.observe.terminal.time.monotonic", lambda: now)
    report = WaitReport(lambda text: screen.write(f"{text}\n"))
    for now, text in moments:  # noqa: B007 - the clock reads it
        if text:
            report.show(text)
        else:
            report.hide()


SILENT = [(5.0 * count, f"no answer for {5 * count} s; start it") for count in range(1, 26)]


def test_wait_is_one_line_on_a_terminal_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=True)
    waited(monkeypatch, screen, *SILENT, (130.0, "no weights"), (131.0, ""), (132.0, ""))
    logged, rewritten = screen.getvalue().split("\n", 1)
    assert logged == "no answer for 5 s; start it"
    parts = rewritten.split("\r")  # before and after each rewritten line
    assert parts[1] == "no answer for 10 s;\x1b[K"  # what fits into the line
    assert len(parts) == 2 * 26 + 1
    assert parts[49:] == ["\x1b[K", "no weights\n", "\x1b[K", ""]  # a new reason, and the end


def test_wait_is_a_log_line_per_minute_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=False)
    waited(monkeypatch, screen, *SILENT, (126.0, ""), (127.0, "no weights"))
    assert screen.getvalue().splitlines() == [
        "no answer for 5 s; start it", "no answer for 65 s; start it",
        "no answer for 125 s; start it",
    ]  # fmt: skip


def test_wait_of_the_trainer_is_shown_in_place_or_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("peralta_zmq.observe.terminal.time.monotonic", lambda: now)
    stream = io.StringIO()
    with Terminal(60, stream) as terminal:
        for now in (20.0, 40.0, 60.0, 80.0):
            terminal.wait(f"no rollouts for {now:.0f} s")
    assert stream.getvalue() == "no rollouts for 20 s\nno rollouts for 80 s\n"

    def show(terminal: Terminal) -> None:
        terminal.step(ROW, BALANCED)
        terminal.wait("no rollouts for 20 s")
        terminal.wait("no rollouts for 40 s")
        terminal.step(ROW, BALANCED)

    end = on_a_terminal(show).rpartition("no rollouts for 40 s")[2]
    assert "balanced" in end and "no rollouts" not in end


TRAINER = {"package": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "transformers": "5.1.0",
           "device": "cuda:0", "dtype": "bfloat16", "threads": "8"}  # fmt: skip


@pytest.mark.parametrize(("info", "trainer", "text"), [
    ({**TRAINER, "device": "cpu", "dtype": "float32", "threads": "2"}, TRAINER,
     "cpu float32, threads: 2; same versions as the trainer"),
    ({**TRAINER, "python": "3.10.12", "torch": "2.6.0"}, TRAINER,
     "cuda:0 bfloat16, threads: 8; "
     "python 3.10.12 (trainer: 3.11.7), torch 2.6.0 (trainer: 2.13.0)"),
    ({"torch": "3.0", "mood": "good"}, {}, "device unknown; torch 3.0 (trainer: unknown)"),
])  # fmt: skip
def test_worker_info_text_lists_device_and_differences(
    info: dict[str, str], trainer: dict[str, str], text: str
) -> None:
    assert worker_info_text("ann", info, trainer=trainer) == f"generator ann: {text}"
