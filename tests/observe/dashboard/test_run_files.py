"""Incremental reading of run folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from synthetic_runs import append, group, make_run, read_run

from peralta_zmq.observe.dashboard import view
from peralta_zmq.observe.dashboard.run_files import RunFiles, RunList, Tail
from peralta_zmq.observe.metrics import Row


def test_tail_reads_each_complete_row_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = Tail(path, 1 << 20)
    assert tail.read() == []
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n{"st')
    assert tail.read() == [{"step": 1}, {"step": 2}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert tail.read() == [{"step": 3}]
    assert not tail.is_replaced()


NEWER: Row = {"time": 2e9, "step": 7, "event": "start", "accuracy": 0.5}


def shown(run: RunFiles) -> dict[str, object]:
    """Content of each file except the metrics."""
    accuracies = {step: evaluation.accuracy for step, evaluation in run.evaluations.items()}
    samples = [run.samples.read(index) for index in range(len(run.samples.steps))]
    return {"eval.jsonl": accuracies, "events.jsonl": list(run.events), "samples.jsonl": samples}


def test_run_started_again_shows_nothing_of_the_earlier_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=30)
    append(folder / "eval.jsonl", {"step": 0, "accuracy": 0.4})
    run = read_run(folder)
    cursor = view.update(run, now=0.0)["cursor"]
    shutil.rmtree(folder)
    make_run(folder, num_steps=2)
    run.refresh()
    update = view.update(run, cursor=cursor, now=0.0)
    assert (update["reset"], update["charts"][0]["x"]) == (True, [1, 2])
    assert shown(run) == shown(read_run(folder))
    assert list(run.samples.steps) == [2]
    assert run.evaluations == {}


@pytest.mark.parametrize("name", ["eval.jsonl", "events.jsonl", "samples.jsonl"])
def test_replaced_file_is_read_again(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    append(folder / "eval.jsonl", {"step": 0, "accuracy": 0.4})
    run = read_run(folder)
    before, cursor = shown(run), view.update(run, now=0.0)["cursor"]
    append(folder / "new", NEWER)
    (folder / "new").rename(folder / name)
    run.refresh()
    newer = {7.0: 0.5} if name == "eval.jsonl" else [NEWER]
    assert shown(run) == before | {name: newer}
    assert view.update(run, cursor=cursor, now=0.0)["reset"]


def test_runs_with_equal_names_get_unique_ones(tmp_path: Path) -> None:
    def names(*folders: Path) -> list[str]:
        return [run.name for run in RunList(folders).runs]

    first, second = (make_run(tmp_path / where / "demo", num_steps=1) for where in ("a", "b"))
    assert names(first, second) == ["a/demo", "b/demo"]
    deeper = make_run(tmp_path / "c" / "a" / "demo", num_steps=1)
    assert names(first, deeper) == ["a/demo", "c/a/demo"]
    assert names(first, first) == ["demo"]


def test_folder_of_runs_has_those_that_are_started_later(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_run(tmp_path / name, num_steps=1)
    (tmp_path / "notes").mkdir()
    runs = RunList([tmp_path, tmp_path / "b"])
    assert [run.name for run in runs.runs] == ["a", "b"]
    make_run(tmp_path / "0", num_steps=1)
    runs.find()
    assert [run.name for run in runs.runs] == ["a", "b", "0"]  # the numbers stay the same
    assert [run.name for run in RunList([tmp_path / "notes"], live=True).runs] == ["notes"]


def test_sample_is_read_by_its_position(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    path = folder / "samples.jsonl"
    append(path, group(1, "\u00e9" * 3), {"no": "step"}, group(2, "two"))
    run = read_run(folder)
    append(path, group(3, "three"))
    run.refresh()
    texts = [run.samples.read(index).get("texts") for index in range(4)]
    assert texts == [["\u00e9" * 3], None, ["two"], ["three"]]
    path.unlink()
    assert run.samples.read(0) == {}
