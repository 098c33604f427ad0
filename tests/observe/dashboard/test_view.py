"""Content of the dashboard as JSON."""

from __future__ import annotations

import fcntl
import io
import json
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import ANY

import pytest
from synthetic_runs import append, group, make_run, read_run, row

from peralta_zmq.observe.dashboard import view
from peralta_zmq.observe.dashboard.run_files import RunFiles
from peralta_zmq.observe.metrics import Row
from peralta_zmq.observe.terminal import Terminal


def test_update_has_only_points_after_the_cursor(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    run = read_run(folder)
    first = view.update(run, now=time.time())
    assert first["charts"][0]["x"] == [1, 2, 3]
    for same in (run, read_run(folder)):  # a restarted server accepts the cursor, too
        update = view.update(same, cursor=first["cursor"], now=0.0)
        assert (update["reset"], update["charts"]) == (False, [])
    append(folder / "metrics.jsonl", row(4))
    run.refresh()
    second = view.update(run, cursor=first["cursor"], now=time.time())
    assert (second["reset"], second["charts"][0]["x"]) == (False, [4])
    append(folder / "metrics.jsonl", row(2))  # after a roll-back
    run.refresh()
    third = view.update(run, cursor=second["cursor"], now=time.time())
    assert (third["reset"], third["charts"][0]["x"]) == (True, [1, 2])


@pytest.mark.parametrize("cursor", [
    "x", "::", "a:b:c", "1:-1:2", ":99999999999999:0", "\ud800",
    "VALID:99999:0", "VALID:4:0",  # of a server that had read more of the file
])  # fmt: skip
def test_invalid_cursor_sends_everything(tmp_path: Path, cursor: str) -> None:
    run = read_run(make_run(tmp_path / "hand", num_steps=3))
    update = view.update(run, cursor=cursor.replace("VALID", run.generation), now=0.0)
    assert (update["reset"], update["charts"][0]["x"]) == (True, [1, 2, 3])


EXPLANATIONS = {
    "waiting": "Start one: bin/generator @ CONFIG",
    "stalled": "The trainer is running and has taken no step for 40s.",
    "finished": "3 steps in 1m05s; held-out accuracy 0.400 -> 0.875.",
}


def header_of(run: RunFiles, *, later: float = 1.0) -> dict[str, object]:
    return view.state(run, now=run.newest_time + later)["header"]


@pytest.mark.parametrize(("lock", "num_steps", "later", "event", "status"), [
    ("none", 0, 1.0, None, "waiting"),
    ("none", 0, 1.0, "join", "empty"),
    ("none", 3, 1.0, None, "training"),
    ("none", 3, 40.0, None, "silent"),
    ("none", 0, 40.0, None, "silent"),
    ("free", 3, 1.0, None, "training"),
    ("free", 3, 40.0, None, "crashed"),
    ("free", 0, 40.0, None, "crashed"),
    ("held", 3, 40.0, None, "stalled"),
    ("held", 0, 3600.0, None, "waiting"),
    ("held", 0, 3600.0, "join", "empty"),
    ("live", 3, 40.0, None, "stalled"),
    ("live", 0, 3600.0, None, "waiting"),
    ("free", 3, 40.0, "stop", "stopped"),
    ("free", 3, 40.0, "complete", "finished"),
    ("held", 3, 1.0, "evaluate", "evaluating"),
    ("held", 3, 3600.0, "evaluate", "evaluating"),
    ("free", 3, 40.0, "evaluate", "crashed"),
    ("held", 3, 1.0, "replay", "replaying"),
    ("held", 3, 3600.0, "replay", "replaying"),
    ("free", 3, 40.0, "replay", "crashed"),
    ("held", 3, 1.0, "resume", "waiting"),
])  # fmt: skip
def test_header_explains_the_status_of_the_run(
    tmp_path: Path, stack: ExitStack, *,
    lock: str, num_steps: int, later: float, event: str | None, status: str,
) -> None:  # fmt: skip
    folder = make_run(tmp_path / "hand", num_steps=num_steps)
    summary = {"steps": 3, "seconds": 65.0, "eval_before": 0.4, "eval_after": 0.875}
    (folder / "summary.json").write_text(json.dumps(summary))
    if lock in ("free", "held"):
        file = stack.enter_context((folder / "lock").open("ab"))
        if lock == "held":
            fcntl.flock(file, fcntl.LOCK_EX)
    if event:
        append(folder / "events.jsonl", {"time": time.time(), "event": event, "step": 3})
    run = RunFiles(folder, live=lock == "live")
    run.refresh()
    header = header_of(run, later=later)
    assert (header["status"], header["explanation"]) == (status, EXPLANATIONS.get(status, ANY))


def test_eta_ignores_pauses_and_equals_the_terminals(tmp_path: Path) -> None:
    """Ten steps of 0.4 s, eight hours of pause, a resume, and steps of 2 s."""
    folder = make_run(tmp_path / "hand", num_steps=10, max_steps=50, quiet=8 * 3600)
    resumed = time.time() - 30.0
    append(folder / "events.jsonl", {"time": resumed, "event": "resume", "step": 10})
    replayed = row(10, when=resumed - 1.0, step_time=0.0)
    live = [row(step, when=resumed + 2.0 * (step - 10), step_time=2.0) for step in range(11, 16)]
    run = read_run(folder)
    assert header_of(run)["eta"] == ""  # no step in this session yet
    stream = io.StringIO()
    with Terminal(50, stream) as terminal:
        terminal.step(replayed)
        for newest in live:
            terminal.step(newest)
            append(folder / "metrics.jsonl", newest)
            run.refresh()
            assert stream.getvalue().rstrip().endswith(f"eta={header_of(run)['eta']}")
    assert header_of(run)["eta"] == "1m10s"  # 35 steps of 2 s


def test_partly_read_file_is_loading(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=1)
    append(folder / "metrics.jsonl", *(row(step, note="x" * 50_000) for step in range(2, 100)))
    assert (folder / "metrics.jsonl").stat().st_size > 4 << 20
    run = RunFiles(folder)
    run.refresh(seconds=0.0)
    header = header_of(run)
    assert view.update(run, now=time.time())["loading"]
    assert header["status"] == "loading"
    run.refresh(seconds=0.0)
    assert header_of(run)["status"] == "training"


def test_wait_card_and_verdict_use_the_same_steps(tmp_path: Path) -> None:
    """Both ignore a session's first step and replayed steps."""
    folder = make_run(tmp_path / "hand", num_steps=0)
    first = row(1, step_time=40.0) | {"time/wait_for_batch": 40.0}
    append(folder / "metrics.jsonl", first, *map(row, range(2, 7)), row(7, step_time=0.0))
    state = view.state(read_run(folder), now=time.time())
    card = next(card for card in state["cards"] if card["id"] == "wait")
    assert (card["value"], card["note"]) == ("50%", "of the last 5 steps")
    assert "the trainer waits 50% of its time" in state["verdict"]["sentence"]


def generators_of(run: RunFiles, *, later: float = 1.0) -> tuple[dict[str, str], str, str]:
    """State of each generator by name; value and note of their card."""
    state = view.state(run, now=run.newest_time + later)
    card = next(card for card in state["cards"] if card["id"] == "generators")
    states = {generator["name"]: generator["state"] for generator in state["generators"]}
    return states, card["value"], card["note"]


def leave(name: str) -> Row:
    return {"time": time.time(), "event": "leave", "generator": name, "incarnation": name}


def test_generator_that_left_or_stopped_reporting_is_gone(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    without_bob = {key: value for key, value in row(4).items() if "/bob/" not in key}
    append(folder / "metrics.jsonl", without_bob)
    assert generators_of(read_run(folder)) == ({"ann": "up", "bob": "gone"}, "1", "of 2 seen")
    append(folder / "events.jsonl", leave("ann"))
    assert generators_of(read_run(folder)) == ({"ann": "gone", "bob": "gone"}, "0", "of 2 seen")


@pytest.mark.parametrize("event", [None, "stop", "complete"])
def test_generators_of_an_ended_run_are_unknown(tmp_path: Path, event: str | None) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    append(folder / "events.jsonl", leave("bob"))
    if event:
        append(folder / "events.jsonl", {"time": time.time(), "event": event, "step": 3})
    run = read_run(folder)
    generators = generators_of(run, later=40.0)
    assert generators == ({"ann": "unknown", "bob": "gone"}, "-", "unknown, 2 seen")
    assert "up" not in view.state(run, now=run.newest_time + 40.0)["verdict"]["sentence"].split()


@pytest.mark.parametrize(
    ("num_steps", "sentence"), [(0, "waiting for the first step"), (3, "no step for 1h00m")]
)
def test_crashed_run_is_not_evaluating(tmp_path: Path, num_steps: int, sentence: str) -> None:
    folder = make_run(tmp_path / "hand", num_steps=num_steps)
    append(folder / "events.jsonl", {"time": time.time(), "event": "evaluate", "step": num_steps})
    state = view.state(read_run(folder), now=time.time() + 3600.0)
    assert state["verdict"]["sentence"].startswith(sentence)


def test_sample_shows_turns_and_null_for_a_missing_reward(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    sample: Row = {
        "step": 1,
        "prompt": "<user>\nadd\n",
        "texts": ["<user>\nadd\n3 + 4", "other"],
        "cut_off": [False, True],
        "rewards": [1.0, None],
        "advantages": [0.5, -0.5],
        "num_turns": [1, 2],
        "outcome": "trained",
    }
    append(folder / "samples.jsonl", sample)
    (shown,) = view.samples(read_run(folder))
    assert (shown["prompt"], shown["mean"], shown["outcome"]) == ("<user>\nadd\n", 1.0, "trained")
    assert shown["rollouts"] == [
        {"text": "3 + 4", "reward": 1.0, "cut_off": False, "advantage": 0.5, "num_turns": 1},
        {"text": "other", "reward": None, "cut_off": True, "advantage": -0.5, "num_turns": 2},
    ]


def test_group_without_signal_shows_its_completions(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    equal = {"rewards": [0.0, 0.0], "advantages": [], "outcome": "no_signal"}
    append(folder / "samples.jsonl", {**group(1, "a", "b"), **equal})
    (shown,) = view.samples(read_run(folder))
    assert [(each["text"], each["advantage"]) for each in shown["rollouts"]] == [
        ("a", None), ("b", None),
    ]  # fmt: skip
    assert shown["outcome"] == "no signal"


def test_samples_of_all_steps_can_be_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    append(folder / "samples.jsonl", *(group(step // 2) for step in range(2, 62)))
    run = read_run(folder)

    def numbers(**where: int) -> list[int]:
        return [sample["number"] for sample in view.samples(run, **where)]

    assert numbers() == list(range(49, 61))
    assert numbers(first=1) == list(range(1, 13))
    assert (numbers(first=58), numbers(first=61)) == ([58, 59, 60], [])
    assert numbers(step=7) == list(range(13, 25))
    assert [sample["step"] for sample in view.samples(run, step=7)[:3]] == [7, 7, 8]


def held_out(step: int, *answers: str, expected: str = "7") -> Row:
    return {
        "step": step, "question": "add 3 to 4", "expected": expected,
        "completions": list(answers), "rewards": [float(each == expected) for each in answers],
        "cut_off": [False] * len(answers),
    }  # fmt: skip


def test_answers_are_those_of_the_newest_evaluation_of_the_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    rows = [(0, "8"), (5, "of an interrupted evaluation"), (5, "x"), (5, "y"), (5, "7"),
            (5, "9", "7")]  # fmt: skip
    append(folder / "answers.jsonl", *(held_out(*row) for row in rows))
    evaluation: Row = {"step": 5, "accuracy": 0.75, "stderr": 0.25, "num_examples": 2}
    append(folder / "eval.jsonl", {"step": 0, "accuracy": 0.5}, evaluation)
    run = read_run(folder)
    shown = view.answers(run, step=5)
    assert (shown["num_examples"], [each["expected"] for each in shown["examples"]]) == (
        2,
        ["7", "7"],
    )
    assert shown["examples"][1]["answers"] == [
        {"text": "9", "reward": 0.0, "cut_off": False},
        {"text": "7", "reward": 1.0, "cut_off": False},
    ]
    state = view.state(run, now=time.time())
    assert state["evaluations"] == [
        {"step": 0, "accuracy": "0.500", "precision": ""},
        {"step": 5, "accuracy": "0.750", "precision": "\u00b1 0.250, n = 2"},
    ]
    card = next(card for card in state["cards"] if card["id"] == "eval")
    assert card["note"] == "\u00b1 0.250, n = 2; step 5; 0.500 at 0"


def test_answers_in_one_response_have_a_limit(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    append(folder / "answers.jsonl", *(held_out(0, *["x" * 9000] * 8) for _ in range(40)))
    shown = view.answers(read_run(folder), step=0)
    assert shown["num_examples"] == 40 and 15 < len(shown["examples"]) < 25


def test_settings_have_the_full_names_of_config_toml(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    with (folder / "config.toml").open("a") as file:
        file.write('lr = 1e-5\nstop = ["a", "b"]\n[[env]]\ntask = "calculator"\n')
    settings = view.settings(read_run(folder))
    assert settings["model.name"] == "embedded"
    assert (settings["train.lr"], settings["train.stop"]) == ("1e-05", '["a", "b"]')
    assert settings["env.0.task"] == "calculator"
    (folder / "config.toml").unlink()
    assert view.settings(read_run(folder)) == {}


def test_task_that_the_data_decide_is_not_shown_as_none(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=1)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('"calculator"', '"None"'))
    assert header_of(read_run(folder))["task"] == ""


def test_speed_of_a_slow_generator_is_not_rounded_to_zero(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    speeds = {"gen/ann/tokens_per_s": 0.04, "gen/bob/tokens_per_s": 0.0}
    append(folder / "metrics.jsonl", row(1, num_rollouts=1, step_time=60.0, **speeds))
    state = view.state(read_run(folder), now=time.time())
    shown = {each["name"]: each["tokens_per_s"] for each in state["generators"]}
    assert shown == {"ann": "0.04", "bob": "-"}  # bob has not finished a group
    card = next(card for card in state["cards"] if card["id"] == "rollouts")
    assert (card["value"], card["note"]) == ("0.017", "0.16 generated tokens/s")


def test_silent_connection_is_listed_and_marked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    connection = {"generator": "ann", "incarnation": "0a", "connection": "announcements", "step": 2}
    append(folder / "events.jsonl", {"time": time.time(), "event": "silent", **connection})
    update = view.update(read_run(folder), now=time.time())
    for listed in (update["state"]["events"][0], update["state"]["markers"][-1]):
        assert listed["event"] == "silent"
        assert listed["text"] == "generator=ann  connection=announcements  step=2"


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    hostile, escaped = "a\x1b[2J\u202eb", r"a\x1b[2J\u202eb"
    folder = make_run(tmp_path / "hand", num_steps=2)
    append(folder / "metrics.jsonl", row(3, **{f"gen/{hostile}/tokens_per_s": 1.0}))
    append(folder / "samples.jsonl", {**group(3, f"{hostile}\n\t"), "generator": hostile})
    info = {hostile: hostile, "threads": 1}
    append(folder / "events.jsonl",
           {"event": "worker_info", "generator": hostile, "worker_info": info},
           leave(hostile))  # fmt: skip
    run = read_run(folder)
    update = view.update(run, now=time.time())
    (*_, sample) = view.samples(run)
    assert [event["text"] for event in update["state"]["events"][:2]] == [
        f"generator={escaped}", f"generator={escaped}  {escaped}={escaped}  threads=1",
    ]  # fmt: skip
    assert update["state"]["generators"][0]["name"] == escaped
    assert update["state"]["verdict"]["sentence"].startswith(f"{escaped} is gone")
    assert (sample["generator"], sample["rollouts"][0]["text"]) == (escaped, f"{escaped}\n\t")
    labels = {line["label"] for chart in update["charts"] for line in chart["lines"]}
    assert escaped in labels and hostile not in labels
