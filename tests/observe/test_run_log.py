"""RunLog across sessions and roll-backs, and what it prints and writes."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from peralta_zmq.observe.dashboard import view
from peralta_zmq.observe.dashboard.run_files import RunFiles
from peralta_zmq.observe.metrics import ANSWERS, EVALUATIONS, EVENTS, JsonLines, Row, read_rows
from peralta_zmq.observe.run_log import RunLog, abandoned_weights
from peralta_zmq.observe.verdict import verdict
from peralta_zmq.rollout import Answer, Message, Problem


def published(step: int, weights_id: str) -> tuple[str, dict[str, object]]:
    return "publish", {"step": step, "number": step, "weights_id": weights_id}


def resumed(step: int) -> tuple[str, dict[str, object]]:
    return "resume", {"step": step}


@pytest.mark.parametrize(("history", "now", "abandoned"), [
    ([published(1, "a"), published(2, "b")], 2, set()),  # an ordinary restart
    ([published(1, "a"), published(2, "b")], 1, {"b"}),
    ([published(1, "a"), published(2, "b"), resumed(1), published(2, "c")], 2, {"b"}),
    ([published(1, "a"), published(2, "b"), resumed(1), published(2, "b")], 2, set()),
    ([published(1, "a"), resumed(1), published(2, "c"), resumed(0)], 0, {"a", "c"}),
    ([published(10**400, "a"), published(1, "b")], 0, {"b"}),  # a forged step
])  # fmt: skip
def test_roll_back_abandons_weights_of_later_steps(
    tmp_path: Path, history: list[tuple[str, dict[str, object]]], now: int, abandoned: set[str]
) -> None:
    with JsonLines(tmp_path / EVENTS) as events:
        for event, fields in history:
            events.append_event(event, **fields)
    assert abandoned_weights(tmp_path, now) == abandoned


def evaluate(run_log: RunLog, step: int) -> None:
    run_log.evaluation(step, [], accuracy=0.5, figures={}, policy_steps=(step, step))


def test_roll_back_undoes_evaluations_of_later_steps(tmp_path: Path) -> None:
    with RunLog(tmp_path, run="run", max_steps=8) as run_log:
        for step in (0, 4, 8):
            evaluate(run_log, step)
        run_log.rewind(4)
        assert [run_log.has_evaluation(step) for step in (0, 4, 8)] == [True, True, False]
        evaluate(run_log, 8)
        assert run_log.has_evaluation(8)
        run_log.rewind(2)
        evaluate(run_log, 4)
        run_log.rewind(4)
        assert [run_log.has_evaluation(step) for step in (0, 4, 8)] == [True, True, False]


def test_last_step_after_a_roll_back_ignores_the_clock(tmp_path: Path) -> None:
    with RunLog(tmp_path, run="run", max_steps=8) as run_log:
        for step in range(1, 7):
            run_log.step({"step": step, "time": 1e9 + step, "reward": 0.5}, [])
        run_log.rewind(4)
    with RunLog(tmp_path, run="run", max_steps=8) as run_log:
        assert run_log.last_step == 4
        assert run_log.step({"step": 5, "time": 5.0, "reward": 0.5}, [])  # the clock was set back
    with RunLog(tmp_path, run="run", max_steps=8) as run_log:
        assert run_log.last_step == 5


def waiting_rows(num_rows: int) -> list[Row]:
    return [
        {"step": step, "time": 1e9 + step, "step_time": 1.0, "reward": 0.5,
         "time/wait_for_batch": 0.6}
        for step in range(1, num_rows + 1)
    ]  # fmt: skip


def test_terminal_summary_and_report_show_the_same_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = waiting_rows(4)
    with RunLog(tmp_path, run="run", max_steps=4) as run_log:
        run_log.event("start", step=0)
        for row in rows:
            run_log.step(row, [])
        run_log.evaluation(4, [], accuracy=1.0, figures={}, policy_steps=[4, 4])
        run_log.end("complete", step=4)
        run_log.close_run(tmp_path, {"made": 1, "trained": 1, "duplicates": 0}, {})
    printed = capsys.readouterr().out
    assert "verdict: the trainer waits 60% of its time for rollouts; add a generator " in printed
    expected = verdict(rows, [{"event": "start", "step": 0}, {"event": "complete"}])
    assert f"verdict            {expected.sentence}\n" in printed
    assert f"report             {tmp_path / 'report.html'}\n" in printed
    summary = json.loads((tmp_path / "summary.json").read_text())
    html = (tmp_path / "report.html").read_text("utf-8")
    content = html.partition('<script type="application/json" id="report">')[2]
    state = json.loads(content.partition("</script>")[0])["runs"][0]["update"]["state"]
    assert summary["verdict"] == state["verdict"] == asdict(expected)
    assert state["header"]["step"] == "4"


def test_write_report_failure_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog(tmp_path, run="run", max_steps=4) as run_log:
        run_log.write_report()  # writes nothing before the first step
        assert not list(tmp_path.glob("re*"))
        (tmp_path / "report.html").mkdir()
        run_log.step(waiting_rows(1)[0], [])
        capsys.readouterr()
        run_log.write_report()
        (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("report.html not written (")


def test_verdict_of_a_new_session_uses_earlier_rows(tmp_path: Path) -> None:
    *earlier, newest = waiting_rows(4)
    with RunLog(tmp_path, run="run", max_steps=9) as run_log:
        for row in earlier:
            run_log.step(row, [])
    with RunLog(tmp_path, run="run", max_steps=9) as run_log:
        run_log.step(newest, [])
        assert run_log.verdict() == verdict([*earlier, newest])


def test_stall_is_the_same_in_terminal_and_dashboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLog(tmp_path, run="run", max_steps=9) as run_log:
        run_log.event("start", step=0)
        run_log.event("join", generator="ann", incarnation="1", step=1)
        run_log.step({"step": 1, "time": time.time(), "step_time": 1.0}, [])
        run_log.event("leave", generator="ann", incarnation="1")
        run_log.check_stall()
        _, *verdicts = capsys.readouterr().out.splitlines()
        assert verdicts == ["verdict: too few steps to name a bottleneck"]  # of the step
        later = time.time() + 90.0
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 90.0)
        monkeypatch.setattr(time, "time", lambda: later)
        for _ in range(3):
            run_log.check_stall()
        run = RunFiles(tmp_path, live=True)
        run.refresh()
        shown = view.state(run, now=later)["verdict"]
    assert shown["sentence"] == "no step for 1m30s: no generator is up, ann left"
    assert capsys.readouterr().out == f"verdict: {shown['sentence']}; {shown['advice']}\n"


def test_session_end_is_recorded_once_if_it_trained(tmp_path: Path) -> None:
    for has_started in (True, False):
        with RunLog(tmp_path, run="run", max_steps=9) as run_log:
            if has_started:
                run_log.event("start", step=0)
            run_log.end("complete", step=9)
            run_log.end("complete", step=9)
    assert [row["event"] for row in read_rows(tmp_path / EVENTS)] == ["start", "complete"]


def test_evaluation_writes_all_answers_and_its_precision(tmp_path: Path) -> None:
    problems = [
        Problem(str(n), "sums", (Message("user", f"{n} + 1?"),), str(n + 1)) for n in range(9)
    ]
    results = [
        (
            problem,
            [Answer(problem.question, problem.answer, 1.0), Answer("", "so", 0.0, cut_off=True)],
        )
        for problem in problems
    ]
    with RunLog(tmp_path, run="run", max_steps=9) as run_log:
        run_log.evaluation(3, results, accuracy=0.5, stderr=0.125, figures={}, policy_steps=[3, 4])
    (row,) = read_rows(tmp_path / EVALUATIONS)
    assert (row["stderr"], row["num_examples"], len(row["answers"])) == (0.125, 9, 6)
    rows = read_rows(tmp_path / ANSWERS)
    assert len(rows) == 9
    assert rows[8] == {
        "step": 3, "task": "sums", "question": "8 + 1?", "expected": "9",
        "completions": ["9", "so"], "rewards": [1.0, 0.0], "cut_off": [False, True],
    }  # fmt: skip
