"""What is read of a run, what is sent of it, and to whom.

.venv/bin/python -m pytest tests/observe/dashboard
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import io
import json
import math
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from runs import append, group, make_run, row

from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.dashboard import __main__ as door
from peralta_zmq.observe.dashboard import view
from peralta_zmq.observe.dashboard.export import report
from peralta_zmq.observe.dashboard.follow import Tail
from peralta_zmq.observe.dashboard.run_files import RunFiles, open_runs
from peralta_zmq.observe.dashboard.samples import sample
from peralta_zmq.observe.dashboard.server import Dashboard
from peralta_zmq.observe.dashboard.table import MAX_COLUMNS, Table, picked
from peralta_zmq.observe.metrics import Row
from peralta_zmq.observe.terminal import Terminal

STATIC = files("peralta_zmq.observe.dashboard") / "static"
VENDORED = {  # of uPlot 1.6.32, as npm has it
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
TOKEN = "0123456789abcdef" * 2


def followed(folder: Path) -> RunFiles:
    run = RunFiles(folder)
    run.refresh()
    return run


# Reading.


def test_a_row_is_read_once_and_a_torn_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    assert tail.read() == ([], False)
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n{"st')
    assert tail.read() == ([{"step": 1}, {"step": 2}], False)
    assert tail.read() == ([], False)
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert tail.read() == ([{"step": 3}], False)


@pytest.mark.parametrize(
    "bad", ['{"a": [1\n2]}', '{"step": 7}, {"step": 8}', "", "[3]", '{"step": "\\', "[" * 100_000]
)
def test_a_line_that_is_no_row_is_passed_over_alone(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n' + bad + '\n{"step": 2}\n')
    assert Tail(path).read() == ([{"step": 1}, {"step": 2}], False)


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tail = Tail(path)
    tail.read()
    (tmp_path / "new").write_text('{"step": 9}\n')
    (tmp_path / "new").rename(path)
    assert tail.read() == ([{"step": 9}], True)


def test_a_step_that_is_trained_again_replaces_what_came_after_it() -> None:
    table = Table()
    table.extend([{"step": step, "reward": reward}
                  for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.7))])  # fmt: skip
    assert list(table.steps) == [1, 2]
    assert table.values("reward").tolist() == [0.1, 0.7]
    assert table.rewinds == 1


def test_what_no_row_says_is_derived() -> None:
    table = Table()
    table.extend([row(1)])  # 128 rollouts in 0.4 s: 0.2 s waited, 0.2 s of work
    told = {key: table.value(key, 0) for key in table.columns}
    assert told["rollouts_per_s"] == pytest.approx(320)
    assert told["tokens_per_s"] == pytest.approx(3040)  # 9.5 generated in each; prompts are none
    assert told["time/waiting"] == pytest.approx(0.2)
    assert told["time/rest"] == pytest.approx(0.0, abs=1e-12)
    assert (told["dropped"], told["weights/seconds"]) == (3, pytest.approx(0.03))
    assert told["reload/max"] == pytest.approx(0.012)
    assert (told["reward/low"], told["reward/high"]) == (
        pytest.approx(told["reward"] - 0.2), pytest.approx(told["reward"] + 0.2)
    )  # fmt: skip


def test_rows_are_the_same_columns_however_they_come() -> None:
    rows = [
        {"step": 1, "a": 1}, {"step": 2, "b": True, "a": None}, {"step": None, "a": 7},
        {"step": 3, "a": math.inf, "c": math.nan}, {"step": 4, "a": "4"}, {"step": 5, "a": 10**400},
        {"step": 7, "a": 9}, {"a": 8}, {"step": 6, "dropped/x": 2, "b": [5]},
        {"step": 8, "dropped/y": 1, "step_time": 0.0},
    ]  # fmt: skip
    whole, single = Table(), Table()
    whole.extend(rows)
    for each in rows:
        single.extend([each])
    nan = math.nan
    for table in (whole, single):
        assert (list(table.steps), table.rewinds) == ([1, 2, 3, 4, 5, 6, 8], 1)
        found = {key: table.values(key).tolist() for key in ("a", "b", "dropped", "rollouts_per_s")}
        assert str(found) == str({
            "a": [1.0, *6 * [nan]], "b": [nan, 1.0, *5 * [nan]],
            "dropped": [*5 * [0.0], 2.0, 1.0], "rollouts_per_s": 7 * [nan],
        })  # fmt: skip
        assert not {"c", "reload/max", "rollouts_per_s"} & table.columns.keys()
    assert whole.columns.keys() == single.columns.keys()


def test_a_table_has_room_for_what_is_derived_and_for_so_many_columns() -> None:
    rows = [{**row(step), **dict.fromkeys((f"gen/{step}/{name}" for name in "abcdefgh"), 1)}
            for step in range(1, MAX_COLUMNS // 8)]  # fmt: skip
    table = Table()
    table.extend(rows)
    assert len(table.columns) == MAX_COLUMNS
    assert {"time/rest", "dropped", "reward/low", "rollouts_per_s"} <= table.columns.keys()
    assert table.values("dropped").tolist() == [3] * len(rows)


def test_of_many_points_every_extreme_and_every_gap_is_kept() -> None:
    values = np.zeros(10_000)
    values[[1234, 5678]] = 9.0, -9.0
    values[7777] = math.nan
    chosen = picked([values], num_buckets=100)
    assert {0, 1234, 5678, 7777, 9999} <= set(chosen.tolist())
    assert len(chosen) <= 302


NEWER = {"time": 2e9, "step": 7, "event": "start", "accuracy": 0.5, "texts": []}


def shown(run: RunFiles) -> dict[str, list[Row]]:
    """What is known of each file but the metrics."""
    return {"eval.jsonl": list(run.evaluations.values()), "events.jsonl": list(run.events),
            "samples.jsonl": [each for _, each in run.samples]}  # fmt: skip


def test_of_a_run_that_began_anew_nothing_earlier_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=30)
    append(folder / "eval.jsonl", {"step": 0, "accuracy": 0.4})
    run = followed(folder)
    cursor = view.answer(run, now=0.0)["cursor"]
    shutil.rmtree(folder)
    make_run(folder, num_steps=2)
    run.refresh()
    found = view.answer(run, cursor=cursor, now=0.0)
    assert (found["anew"], found["charts"][0]["x"]) == (True, [1, 2])
    assert shown(run) == shown(followed(folder))
    assert [each["step"] for each in shown(run)["samples.jsonl"]] == [2]
    assert shown(run)["eval.jsonl"] == []


@pytest.mark.parametrize("name", ["eval.jsonl", "events.jsonl", "samples.jsonl"])
def test_a_file_that_was_replaced_alone_is_shown_anew(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    append(folder / "eval.jsonl", {"step": 0, "accuracy": 0.4})
    run = followed(folder)
    before, cursor = shown(run), view.answer(run, now=0.0)["cursor"]
    append(folder / "new", NEWER)
    (folder / "new").rename(folder / name)
    run.refresh()
    assert shown(run) == before | {name: [NEWER]}
    assert view.answer(run, cursor=cursor, now=0.0)["anew"]


# Answers.


def test_an_answer_has_only_what_is_new_since_the_cursor(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    run = followed(folder)
    first = view.answer(run, now=time.time())
    assert first["charts"][0]["x"] == [1, 2, 3]
    assert view.answer(run, cursor=first["cursor"], now=0.0)["charts"] == []
    append(folder / "metrics.jsonl", row(4))
    run.refresh()
    second = view.answer(run, cursor=first["cursor"], now=time.time())
    assert (second["anew"], second["charts"][0]["x"]) == (False, [4])
    append(folder / "metrics.jsonl", row(2))  # rolled back
    run.refresh()
    third = view.answer(run, cursor=second["cursor"], now=time.time())
    assert (third["anew"], third["charts"][0]["x"]) == (True, [1, 2])


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [(0.5625, 3, "0.563"), (-0.5625, 3, "-0.563"), (2.5, 0, "3"), (1234567.891, 1, "1,234,567.9"),
     (1e300, 3, f"{1e300:,.0f}"), (math.nan, 2, "-"), (math.inf, 2, "-")],
)  # fmt: skip
def test_a_number_is_rounded_as_the_charts_round(value: float, digits: int, shown: str) -> None:
    assert view.text(value, digits) == shown


def test_a_cursor_holds_for_a_server_that_was_started_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    cursor = view.answer(followed(folder), now=0.0)["cursor"]
    again = view.answer(followed(folder), cursor=cursor, now=0.0)
    assert (again["anew"], again["charts"]) == (False, [])


@pytest.mark.parametrize("cursor", [
    "x", "::", "a:b:c", "1:-1:2", ":99999999999999:0", "\ud800",
    "OURS:99999:0", "OURS:4:0",  # of a server that had read more of the file
])  # fmt: skip
def test_a_cursor_that_is_not_ours_is_the_beginning(tmp_path: Path, cursor: str) -> None:
    run = followed(make_run(tmp_path / "hand", num_steps=3))
    found = view.answer(run, cursor=cursor.replace("OURS", run.generation), now=0.0)
    assert (found["anew"], found["charts"][0]["x"]) == (True, [1, 2, 3])


@pytest.mark.parametrize(
    ("lock", "num_steps", "later", "event", "condition"),
    [
        ("none", 3, 1.0, None, "training"),
        ("none", 3, 31.0, None, "silent"),
        ("none", 0, 1.0, None, "empty"),
        ("none", 0, 31.0, None, "silent"),
        ("free", 3, 1.0, None, "training"),
        ("free", 3, 31.0, None, "crashed"),
        ("free", 0, 31.0, None, "crashed"),
        ("held", 3, 31.0, None, "quiet"),
        ("held", 0, 3600.0, None, "empty"),
        ("live", 3, 31.0, None, "quiet"),
        ("live", 0, 3600.0, None, "empty"),
        ("free", 3, 31.0, "stop", "stopped"),
        ("free", 3, 31.0, "complete", "finished"),
    ],
)
def test_the_condition_of_a_run(
    tmp_path: Path, stack: ExitStack, *,
    lock: str, num_steps: int, later: float, event: str | None, condition: str,
) -> None:  # fmt: skip
    folder = make_run(tmp_path / "hand", num_steps=num_steps)
    if lock in ("free", "held"):
        file = stack.enter_context((folder / "lock").open("ab"))
        if lock == "held":
            fcntl.flock(file, fcntl.LOCK_EX)
    if event:
        append(folder / "events.jsonl", {"time": time.time(), "event": event, "step": 3})
    run = RunFiles(folder, live=lock == "live")
    run.refresh()
    assert view.condition_of(run, now=run.newest_time + later) == condition


SAVED = {"steps": 3, "seconds": 65.0, "eval_before": 0.4, "eval_after": 0.875}
SAID = {  # condition: its pill, and the sentence beside it
    "empty": ("waiting for the first step",
              "No generator has joined yet. Start one: bin/generator @ CONFIG"),
    "training": ("training", ""),
    "quiet": ("no news", "The trainer runs and has taken no step for 40s."),
    "crashed": ("ended without a word",
                "Nothing new for 40s, and no trainer of this machine works here: it was killed "
                "or crashed, unless it runs elsewhere. "
                "The same command resumes it with nothing lost."),
    "silent": ("no sign of life",
               "Nothing new for 40s: the trainer waits, or it was killed. "
               "The same command resumes it with nothing lost."),
    "stopped": ("stopped", "Stopped by hand and saved. The same command resumes it."),
    "finished": ("finished", "3 steps in 1m05s; held-out accuracy 0.400 -> 0.875."),
    "loading": ("reading the files of this run", ""),
}  # fmt: skip
ENDS = {"stopped": "stop", "finished": "complete"}


def header_of(run: RunFiles, *, later: float = 1.0) -> dict[str, object]:
    return view.state(run, now=run.newest_time + later)["header"]


@pytest.mark.parametrize("condition", sorted(SAID.keys() - {"loading"}))
def test_each_condition_has_its_words(tmp_path: Path, condition: str) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0 if condition == "empty" else 3)
    (folder / "summary.json").write_text(json.dumps(SAVED))
    if event := ENDS.get(condition):
        append(folder / "events.jsonl", {"time": time.time(), "event": event, "step": 3})
    if condition == "crashed":
        (folder / "lock").touch()
    run = RunFiles(folder, live=condition == "quiet")
    run.refresh()
    header = header_of(run, later=1.0 if condition in ("empty", "training") else 40.0)
    assert header["condition"] == condition
    assert (header["condition_text"], header["explanation"]) == SAID[condition]


def test_no_condition_is_without_words() -> None:
    assert SAID.keys() == view.STATES.keys()


def test_a_pause_is_no_pace_and_the_terminal_agrees(tmp_path: Path) -> None:
    """Ten steps of 0.4 s, eight hours of nothing, a resume, and steps of 2 s."""
    folder = make_run(tmp_path / "hand", num_steps=10, max_steps=50, quiet=8 * 3600)
    resumed = time.time() - 30.0
    append(folder / "events.jsonl", {"time": resumed, "event": "resume", "step": 10})
    replayed = row(10, when=resumed - 1.0, step_time=0.0)
    live = [row(step, when=resumed + 2.0 * (step - 10), step_time=2.0) for step in range(11, 16)]
    run = followed(folder)
    assert header_of(run)["eta"] == ""  # nothing of this session speaks yet
    stream = io.StringIO()
    with Terminal(50, stream) as terminal:
        terminal.step(replayed)
        for each in live:
            terminal.step(each)
            append(folder / "metrics.jsonl", each)
            run.refresh()
            assert stream.getvalue().rstrip().endswith(f"eta={header_of(run)['eta']}")
    assert header_of(run)["eta"] == "1m10s"  # 35 steps of 2 s


@pytest.mark.parametrize(("count", "told"), [
    (1, "1 generator has joined; charts appear with the first step."),
    (2, "2 generators have joined; charts appear with the first step."),
])  # fmt: skip
def test_before_the_first_step_those_who_joined_are_counted(
    tmp_path: Path, count: int, told: str
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    joins = [{"time": time.time(), "event": "join", "generator": str(n)} for n in range(count)]
    append(folder / "events.jsonl", *joins)
    assert header_of(followed(folder))["explanation"] == told


def test_before_the_first_step_those_who_left_are_not_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    append(folder / "events.jsonl", *(
        {"time": time.time(), "event": event, "generator": "ann", "incarnation": "1"}
        for event in ("join", "leave")
    ))  # fmt: skip
    told = "All who joined have left. Start one: bin/generator @ CONFIG"
    assert header_of(followed(folder))["explanation"] == told


def test_a_file_that_one_look_does_not_read_is_loading(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=1)
    append(folder / "metrics.jsonl", *(row(step, note="x" * 50_000) for step in range(2, 100)))
    assert (folder / "metrics.jsonl").stat().st_size > 4 << 20
    run = RunFiles(folder)
    run.refresh(patience=0.0)
    header = header_of(run)
    assert view.answer(run, now=time.time())["loading"]
    assert (header["condition_text"], header["explanation"]) == SAID["loading"]
    run.refresh(patience=0.0)
    assert header_of(run)["condition"] == "training"


def test_the_card_and_the_verdict_tell_the_waiting_of_the_same_steps(tmp_path: Path) -> None:
    """Neither counts a session's first step, which has its start in it, nor a replayed one."""
    folder = make_run(tmp_path / "hand", num_steps=0)
    first = row(1, step_time=40.0) | {"time/wait_for_batch": 40.0}
    append(folder / "metrics.jsonl", first, *map(row, range(2, 7)), row(7, step_time=0.0))
    state = view.state(followed(folder), now=time.time())
    card = next(each for each in state["cards"] if each["id"] == "wait")
    assert (card["value"], card["note"]) == ("50%", "of the last 5 steps")
    assert "the trainer waits 50% of its time" in state["verdict"]["sentence"]


def generators_of(run: RunFiles, *, later: float = 1.0) -> tuple[dict[str, str], str, str]:
    """The state of each by its name, and what their card says."""
    told = view.state(run, now=run.newest_time + later)
    card = next(each for each in told["cards"] if each["id"] == "generators")
    states = {each["name"]: each["state"] for each in told["generators"]}
    return states, card["value"], card["note"]


def test_a_generator_that_left_or_is_not_heard_is_gone(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    without_bob = {key: value for key, value in row(4).items() if "/bob/" not in key}
    append(folder / "metrics.jsonl", without_bob)
    assert generators_of(followed(folder)) == ({"ann": "up", "bob": "gone"}, "1", "of 2 seen")
    append(folder / "events.jsonl",
           {"time": time.time(), "event": "leave", "generator": "ann",
           "incarnation": "ann"})  # fmt: skip
    assert generators_of(followed(folder)) == (
        {"ann": "gone", "bob": "gone"}, "0", "of 2 seen"
    )  # fmt: skip


@pytest.mark.parametrize("event", [None, "stop", "complete"])
def test_when_nobody_hears_generators_none_is_called_up(tmp_path: Path, event: str | None) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    leave = {"time": time.time(), "event": "leave", "generator": "bob", "incarnation": "bob"}
    append(folder / "events.jsonl", leave)
    if event:
        append(folder / "events.jsonl", {"time": time.time(), "event": event, "step": 3})
    run = followed(folder)
    told = generators_of(run, later=40.0)
    assert told == ({"ann": "unknown", "bob": "gone"}, "-", "unknown, 2 seen")
    assert "up" not in view.state(run, now=run.newest_time + 40.0)["verdict"]["sentence"].split()


@pytest.mark.parametrize("num_steps", [0, 3])
def test_who_was_killed_while_it_evaluated_does_so_no_longer(
    tmp_path: Path, num_steps: int
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=num_steps)
    append(folder / "events.jsonl", {"time": time.time(), "event": "evaluate", "step": num_steps})
    run = followed(folder)
    told = view.state(run, now=time.time() + 3600.0)
    assert "evaluated" not in told["verdict"]["sentence"]
    assert "still up" not in told["verdict"]["sentence"]


def test_the_prompt_of_an_old_row_is_what_all_answers_begin_with_line_by_line() -> None:
    texts = ["<user>\nadd\n<assistant>\n3 + 4", "<user>\nadd\n<assistant>\n3 4 +"]
    told = sample(1, {"step": 1, "texts": texts, "rewards": [1.0, math.nan]})
    assert told["prompt"] == "<user>\nadd\n<assistant>\n"
    assert [each["text"] for each in told["rollouts"]] == ["3 + 4", "3 4 +"]
    assert [each["reward"] for each in told["rollouts"]] == [1.0, None]


def test_runs_of_equal_names_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / where / "demo", num_steps=1) for where in ("a", "b")]
    assert [run.name for run in open_runs(folders)] == ["a/demo", "b/demo"]
    deeper = make_run(tmp_path / "c" / "a" / "demo", num_steps=1)
    assert [run.name for run in open_runs([folders[0], deeper])] == [
        f"{tmp_path.name}/a/demo", "c/a/demo"]  # fmt: skip
    assert [run.name for run in open_runs([folders[0], tmp_path / "b"])] == ["demo", "b"]
    assert [run.name for run in open_runs([folders[0], folders[0]])] == ["demo", "demo"]


# Serving.


@pytest.fixture
def page(tmp_path: Path, stack: ExitStack) -> Dashboard:
    folder = make_run(tmp_path / "hand", num_steps=3)
    page = stack.enter_context(closing(Dashboard([folder], host="127.0.0.1", port=0)))
    page.start()
    return page


def asked(
    page: Dashboard, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body; the path goes out as it is written."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    with closing(connection):
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def test_every_answer_carries_the_policy(page: Dashboard) -> None:
    for path in ("/", "/dashboard.js", "/api/runs/0", "/nothing", "/metrics"):
        _, headers, _ = asked(page, path)
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", [
    "/../../metrics.jsonl", "/static/../page.py", "/%2e%2e/%2e%2e/etc/passwd", "/..%2fpage.py",
    "/api/runs/../../config.toml", "/api/runs/1", "/api/runs/-1", "//etc/passwd",
    "/dashboard.js/..",
    "/uPlot.LICENSE", "/api/runs/99999999999999999999999",
])  # fmt: skip
def test_no_path_leads_out_of_the_page(page: Dashboard, path: str) -> None:
    assert asked(page, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_the_page_only_reads(page: Dashboard, method: str) -> None:
    assert asked(page, "/api/runs/0", method=method)[0] == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:1", 200), ("localhost:1", 200), ("[::1]:1", 200),
     ("evil.example", 400), ("127.0.0.1.evil.example:1", 400), ("10.1.2.3", 400), ("", 400)],
)  # fmt: skip
def test_a_name_that_a_stranger_lets_point_here_is_refused(
    page: Dashboard, host: str, status: int
) -> None:
    assert asked(page, "/api/runs", headers={"Host": host})[0] == status


def test_what_json_cannot_say_is_null(tmp_path: Path, page: Dashboard) -> None:
    append(tmp_path / "hand" / "metrics.jsonl", row(4, reward=math.nan, loss=math.inf))
    append(tmp_path / "hand" / "samples.jsonl", group(4, "half a pair \ud800", "b"))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for path in ("/api/runs/0", "/api/runs/0/samples", "/healthz"):
        status, _, body = asked(page, path)
        assert status == 200
        json.loads(body, parse_constant=refuse)
    charts = json.loads(asked(page, "/api/runs/0")[2])["charts"]
    assert charts[0]["x"][-1] == 4 and charts[0]["columns"][2][-1] is None


def test_an_answer_has_a_bound(tmp_path: Path, page: Dashboard) -> None:
    append(
        tmp_path / "hand" / "samples.jsonl", *(group(4, *["x" * 100_000] * 100) for _ in range(8))
    )
    assert len(asked(page, "/api/runs/0/samples")[2]) < 6_000_000
    append(
        tmp_path / "hand" / "metrics.jsonl", {f"gen/{i}/step": 1.0 for i in range(5000)} | row(4)
    )
    assert len(asked(page, "/api/runs/0")[2]) < 1_000_000


def test_a_small_file_that_has_grown_huge_is_not_read(tmp_path: Path) -> None:
    run = followed(make_run(tmp_path / "hand", num_steps=1))
    assert run.config()["model"] == {"name": "embedded"}
    with (run.folder / "config.toml").open("a") as file:
        file.write("#" * 2_000_000)
    assert run.config() == {}


def test_an_event_tells_what_its_parts_hold(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=1)
    told = {"device": "cpu", "threads": 1}
    append(folder / "events.jsonl",
           {"event": "hello", "generator": "ann", "hello": told},
           {"event": "join", "generator": "bob", "hello": {}})  # fmt: skip
    events = view.state(followed(folder), now=0.0)["events"]
    assert [each["text"] for each in events[:2]] == [
        "generator=bob", "generator=ann  device=cpu  threads=1",
    ]  # fmt: skip


def test_prometheus_and_health(page: Dashboard) -> None:
    status, headers, body = asked(page, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b'run="hand"' in body and b"nan" not in body.lower()
    told = json.loads(asked(page, "/healthz")[2])
    assert (told["status"], told["runs"]["hand"]["step"]) == ("ok", 3)
    assert told["runs"]["hand"]["age_seconds"] < 60


def test_prometheus_and_health_are_of_all_runs(tmp_path: Path, stack: ExitStack) -> None:
    folders = [make_run(tmp_path / "a" / "demo", num_steps=1),
               make_run(tmp_path / "b" / "demo", num_steps=2)]  # fmt: skip
    page = stack.enter_context(closing(Dashboard(folders, host="127.0.0.1", port=0)))
    page.start()
    body = asked(page, "/metrics")[2].decode()
    assert 'peralta_step{run="a/demo"} 1.0\nperalta_step{run="b/demo"} 2.0\n' in body
    told = json.loads(asked(page, "/healthz")[2])["runs"]
    assert {name: each["step"] for name, each in told.items()} == {"a/demo": 1, "b/demo": 2}


def test_a_taken_port_gives_way_to_the_next_and_says_so(tmp_path: Path, stack: ExitStack) -> None:
    folder = make_run(tmp_path / "hand", num_steps=1)
    taken = stack.enter_context(closing(socket.socket()))
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    page = stack.enter_context(closing(Dashboard([folder], host="127.0.0.1", port=port)))
    assert port < page.port < port + 20
    assert page.greeting == [f"page: http://127.0.0.1:{page.port} (port {port} is taken)"]


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_that_is_none_is_refused(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=f"port {port} of the page is none; choose one from 1"):
        Dashboard([tmp_path], host="127.0.0.1", port=port)


def test_strangers_cannot_fill_the_console(
    page: Dashboard, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.create_connection(("127.0.0.1", page.port), 10)) as stranger:
        stranger.sendall(b"NONSENSE\r\n\r\n")
        assert stranger.recv(100).startswith(b"HTTP/1.1 400")
    assert caplog.messages == []


def test_other_machines_need_a_token(tmp_path: Path, stack: ExitStack) -> None:
    folder = make_run(tmp_path / "hand", num_steps=1)
    with pytest.raises(ConfigError, match=r"dashboard.host 0.0.0.0 would show this run to whoever"):
        Dashboard([folder], host="0.0.0.0", port=0)
    page = Dashboard([folder], host="0.0.0.0", port=0, token=TOKEN)
    stack.enter_context(closing(page))
    page.start()
    assert page.greeting[1].startswith("warning: other machines reach the page, without encryption")
    assert page.greeting[0] == f"page: http://{socket.gethostname()}:{page.port}"
    for path in ("/", "/api/runs", "/metrics", "/?token=wrong", "/healthz"):
        assert asked(page, path)[0] == 401
    status, headers, _ = asked(page, f"/?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=strict" in headers["set-cookie"]
    cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
    assert asked(page, "/api/runs", headers=cookie)[0] == 200
    assert asked(page, "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
    assert asked(page, "/", headers={**cookie, "Host": "evil.example"})[0] == 400
    assert asked(page, "/", headers={**cookie, "Host": page.address[len("http://") :]})[0] == 200


def test_a_fault_of_the_page_stays_in_its_thread(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(view, "answer", fails)
    folder = make_run(tmp_path / "hand", num_steps=1)
    page = stack.enter_context(closing(Dashboard([folder], host="127.0.0.1", port=0)))
    page.start()
    assert [asked(page, "/api/runs/0")[0] for _ in range(3)] == [500] * 3
    assert asked(page, "/healthz")[0] == 200
    assert caplog.messages == ["the page fails at /api/runs/0 (RuntimeError('broken'))"]
    monkeypatch.setattr(Dashboard, "_made", fails)
    broken = stack.enter_context(closing(Dashboard([folder], host="127.0.0.1", port=0)))
    broken.start()
    broken._thread.join(30)
    assert not broken._thread.is_alive()
    assert "broken" in caplog.text and "training goes on" in caplog.text


def test_at_ten_thousand_steps_the_page_takes_less_than_a_hundredth_of_the_trainers_time(
    tmp_path: Path, stack: ExitStack
) -> None:
    """A page asks once a second; a new step and its samples have come each time."""
    folder = make_run(tmp_path / "hand", num_steps=10_000)
    page = stack.enter_context(closing(Dashboard([folder], host="127.0.0.1", port=0, live=True)))
    page.start()
    cursor = json.loads(asked(page, "/api/runs/0")[2])["cursor"]
    thread = page._thread
    assert isinstance(thread, threading.Thread) and thread.ident
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    for step in range(10_001, 10_041):
        append(folder / "metrics.jsonl", row(step))
        append(folder / "samples.jsonl", group(step, *["x" * 400] * 16))
        told = json.loads(asked(page, f"/api/runs/0?cursor={cursor}")[2])
        cursor, newest = told["cursor"], told["state"]["num_samples"]
        sent = json.loads(asked(page, f"/api/runs/0/samples?after={newest - 1}")[2])["samples"]
        assert [each["step"] for each in sent] == [step]
    spent = (time.clock_gettime(clock) - before) / 40
    print(f"{1000 * spent:.2f} ms of the thread for each second")
    assert spent < 0.01


# One file, and the door.


def test_the_exported_file_names_its_parts_by_their_hashes_and_nothing_else(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    append(folder / "samples.jsonl", group(3, "</script><script>alert(1)</script>", "b"))
    told = report([RunFiles(folder)])
    assert "default-src 'none'; script-src 'sha256-" in told
    assert told.count("<script") == told.count("</script>") == 2
    assert "http://" not in told.replace("http://www.w3.org/", "").replace("http://${", "")
    assert "src=" not in told.partition('<script type="application/json"')[0]


def test_the_door_writes_a_file_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    assert door.main([str(folder), "--export", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").stat().st_size > 50_000
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    with pytest.raises(ConfigError, match="is no folder of a run"):
        door.main([str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match="--exprot is no option; did you mean --export"):
        door.main([str(folder), "--exprot", "x.html"])
    with pytest.raises(ConfigError, match="cannot be written"):
        door.main([str(folder), "--export", str(tmp_path / "no" / "report.html")])


@pytest.mark.parametrize(("name", "digest"), VENDORED.items())
def test_uplot_is_what_its_makers_published(name: str, digest: str) -> None:
    assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest
    assert b"MIT" in (STATIC / "uPlot.LICENSE").read_bytes()


@pytest.mark.parametrize("name", ["dashboard.js", "charts.js", "samples.js"])
def test_no_word_can_become_markup(name: str) -> None:
    script = (STATIC / name).read_text("utf-8")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                "new Function", "DOMParser", "createContextualFragment"):  # fmt: skip
        assert way not in script
