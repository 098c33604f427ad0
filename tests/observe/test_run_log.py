"""What the books tell a trainer that starts again.

.venv/bin/python -m pytest tests/observe/test_books.py
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq.observe.dashboard import view
from peralta_zmq.observe.dashboard.run_files import RunFiles
from peralta_zmq.observe.metrics import EVENTS, Events, Row, read_rows
from peralta_zmq.observe.run_log import EVALUATIONS, RunLog
from peralta_zmq.observe.verdict import verdict


def published(step: int, weights_id: str) -> tuple[str, dict[str, object]]:
    return "publish", {"step": step, "number": step, "weights_id": weights_id}


def resumed(step: int) -> tuple[str, dict[str, object]]:
    return "resume", {"step": step}


@pytest.mark.parametrize(
    ("history", "now", "abandoned"),
    [
        ([published(1, "a"), published(2, "b")], 2, set()),  # an ordinary restart
        ([published(1, "a"), published(2, "b")], 1, {"b"}),
        ([published(1, "a"), published(2, "b"), resumed(1), published(2, "c")], 2, {"b"}),
        ([published(1, "a"), published(2, "b"), resumed(1), published(2, "b")], 2, set()),
        ([published(1, "a"), resumed(1), published(2, "c"), resumed(0)], 0, {"a", "c"}),
    ],
)
def test_weights_of_later_steps_are_abandoned_by_a_roll_back(
    tmp_path: Path, history: list[tuple[str, dict[str, object]]], now: int, abandoned: set[str]
) -> None:
    with Events(tmp_path / EVENTS) as events:
        for event, fields in history:
            events.record(event, **fields)
    with RunLog(tmp_path, run="run", max_steps=3) as books:
        assert books.abandoned_weights(now) == abandoned


def evaluate(books: RunLog, step: int) -> None:
    books.evaluation(step, [], accuracy=0.5, figures={}, policy_steps=(step, step))


def test_an_evaluation_of_a_line_that_was_rolled_back_stands_for_no_step_of_the_new_one(
    tmp_path: Path,
) -> None:
    with RunLog(tmp_path, run="run", max_steps=8) as books:
        for step in (0, 4, 8):
            evaluate(books, step)
        books.rewind(4)
        assert [books.has_evaluation(step) for step in (0, 4, 8)] == [True, True, False]
        evaluate(books, 8)
        assert books.has_evaluation(8)


def test_an_evaluation_before_a_roll_back_to_its_step_stands(tmp_path: Path) -> None:
    with RunLog(tmp_path, run="run", max_steps=8) as books:
        evaluate(books, 8)
        books.rewind(2)
        evaluate(books, 4)
        books.rewind(4)
        assert [books.has_evaluation(step) for step in (4, 8)] == [True, False]


def test_what_is_written_after_a_roll_back_stands_whatever_the_clock_says(
    tmp_path: Path,
) -> None:
    with RunLog(tmp_path, run="run", max_steps=8) as books:
        for step in range(1, 7):
            books.step({"step": step, "time": 1e9 + step, "reward": 0.5}, {})
        books.rewind(4)
    with RunLog(tmp_path, run="run", max_steps=8) as books:
        assert books.last_step == 4
        assert books.step({"step": 5, "time": 5.0, "reward": 0.5}, {})  # it fell back
    with RunLog(tmp_path, run="run", max_steps=8) as books:
        assert books.last_step == 5


def test_an_evaluation_written_without_its_line_counts(tmp_path: Path) -> None:
    (tmp_path / EVALUATIONS).write_text('{"step": 8, "accuracy": 0.5, "answers": []}\n')
    with RunLog(tmp_path, run="run", max_steps=8) as books:
        assert books.has_evaluation(8)


def rows_in_which_the_trainer_waits(num_rows: int) -> list[Row]:
    return [
        {"step": step, "time": 1e9 + step, "step_time": 1.0, "reward": 0.5,
         "time/wait_for_batch": 0.6}
        for step in range(1, num_rows + 1)
    ]  # fmt: skip


def test_terminal_and_summary_tell_the_verdict_of_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_in_which_the_trainer_waits(4)
    with RunLog(tmp_path, run="run", max_steps=4) as books:
        for row in rows:
            books.step(row, {})
        books.evaluation(4, [], accuracy=1.0, figures={}, policy_steps=[4, 4])
        books.close_run(tmp_path, {"made": 1, "trained": 1, "duplicates": 0}, {})
    found = verdict(rows)
    assert found.sentence == "the trainer waits 60% of its time for rollouts"
    assert f"verdict: {found.text}\n" in capsys.readouterr().out
    told = json.loads((tmp_path / "summary.json").read_text())["verdict"]
    assert told == {"sentence": found.sentence, "advice": found.advice, "level": "warn"}


def reported(folder: Path) -> dict[str, Any]:
    """What report.html says of the run."""
    page = (folder / "report.html").read_text("utf-8")
    told = page.partition('<script type="application/json" id="report">')[2]
    return json.loads(told.partition("</script>")[0])["runs"][0]["answer"]


def test_the_end_of_a_run_writes_the_page_into_a_file_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_in_which_the_trainer_waits(4)
    with RunLog(tmp_path, run="run", max_steps=4) as books:
        books.event("start", step=0)
        for row in rows:
            books.step(row, {})
        books.evaluation(4, [], accuracy=1.0, figures={}, policy_steps=[4, 4])
        books.end("complete", step=4)
        books.close_run(tmp_path, {"made": 1, "trained": 1, "duplicates": 0}, {})
    state = reported(tmp_path)["state"]
    assert state["header"]["step"] == "4"
    assert state["verdict"]["sentence"] == verdict(rows).sentence
    assert f"report             {tmp_path / 'report.html'}\n" in capsys.readouterr().out


def test_before_the_first_step_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with RunLog(tmp_path, run="run", max_steps=4) as books:
        books.draw()
    assert not list(tmp_path.glob("re*"))


def test_pictures_that_cannot_be_written_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").mkdir()
    with RunLog(tmp_path, run="run", max_steps=4) as books:
        books.step(rows_in_which_the_trainer_waits(1)[0], {})
        capsys.readouterr()
        books.draw()
        told = capsys.readouterr().out
    assert told.startswith("no reward.png or report.html (") and told.count("\n") == 1
    assert (tmp_path / "reward.png").exists()


def test_a_new_session_judges_with_the_rows_of_the_last_one(tmp_path: Path) -> None:
    *earlier, newest = rows_in_which_the_trainer_waits(4)
    with RunLog(tmp_path, run="run", max_steps=9) as books:
        for row in earlier:
            books.step(row, {})
    with RunLog(tmp_path, run="run", max_steps=9) as books:
        books.step(newest, {})
        assert books.verdict() == verdict([*earlier, newest])


def test_a_stall_is_the_same_sentence_in_the_terminal_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLog(tmp_path, run="run", max_steps=9) as books:
        books.event("start", step=0)
        books.event("join", generator="ann", incarnation="1", step=1)
        books.step({"step": 1, "time": time.time(), "step_time": 1.0}, {})
        books.event("leave", generator="ann", incarnation="1")
        books.look()
        _, *told = capsys.readouterr().out.splitlines()
        assert told == ["verdict: too early to say who waits for whom"]  # the step's
        later = time.time() + 90.0
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 90.0)
        monkeypatch.setattr(time, "time", lambda: later)
        for _ in range(3):
            books.look()
        run = RunFiles(tmp_path, live=True)
        run.refresh()
        page = view.state(run, now=later)["verdict"]
    assert page["sentence"] == "no step for 1m30s: no generator is up, ann left"
    assert capsys.readouterr().out == f"verdict: {page['sentence']}; {page['advice']}\n"


def test_the_end_of_a_session_is_told_once_and_only_if_it_trained(tmp_path: Path) -> None:
    for begun in (True, False):
        with RunLog(tmp_path, run="run", max_steps=9) as books:
            if begun:
                books.event("start", step=0)
            books.end("complete", step=9)
            books.end("complete", step=9)
    assert [row["event"] for row in read_rows(tmp_path / EVENTS)] == ["start", "complete"]
