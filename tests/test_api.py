"""The front door: a run from rows and a function in this process, and what it returns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import peralta_zmq as pz
from peralta_zmq.errors import ConfigError, RunError
from tools.link_proxy import free_ports

ROWS = [
    {"prompt": f"add {one} to the product of 3 and {two}.", "answer": f"{one} + 3 * {two}"}
    for one in range(1, 6)
    for two in range(1, 6)
]
STEPS = 3
NO_PAGE = {"port": None}


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    return {
        **{"run": {"dir": str(folder)}, "wire": {"port": free_ports()}, "dashboard": NO_PAGE},
        **{"max_completion_length": 24, "num_generations": 4, "batch_size": 16, "slots": 16},
        **others,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pz.Run]:
    folder = tmp_path_factory.mktemp("runs")
    wanted = "add"  # the function is a closure, which has no import path

    def starts_right(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        assert all(prompt.startswith(wanted) for prompt in prompts)
        pairs = zip(completions, answer, strict=True)
        return [float(text.strip() == right) for text, right in pairs]

    started = pz.train(
        "embedded", ROWS, starts_right, eval_data=ROWS[:4], **settings(folder, max_steps=STEPS)
    )
    try:
        yield started.wait(timeout=120, show=False)
    finally:
        started.stop()


@pytest.mark.timeout(180)
def test_run_trains_on_rows_with_a_closure_as_reward(run: pz.Run) -> None:
    assert run.is_complete and not run.is_running and run.step == STEPS
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    assert run.config.data.train == str(run.folder / "inputs" / "train.jsonl")
    assert {0.0, 1.0} >= {reward for row in run.samples() for reward in row["rewards"]}  # type: ignore[attr-defined]
    assert all(row["step"] == 2 for row in run.samples(2))
    assert [row["step"] for row in run.evaluations()][-1] == STEPS
    assert len(run.answers(STEPS)) == 4
    assert "complete" in repr(run) and "the run is complete" in run.verdict.sentence
    assert pz.load_run(run.folder).step == STEPS


@pytest.mark.timeout(180)
def test_policy_of_a_run_and_its_export_give_the_same_answer(run: pz.Run, tmp_path: Path) -> None:
    question = ROWS[0]["prompt"]
    answer = run.chat(question, max_completion_length=24)
    exported = run.export(tmp_path / "model")
    with pz.open_policy(exported, slots=4) as policy:
        assert policy.chat([{"role": "user", "content": question}]) == answer
        two = policy.sample([question, "add 1 to 2."], n=3, temperature=1.0)
        assert [len(group) for group in two] == [3, 3]
        assert len({completion.text for completion in policy.sample([question], 8)[0]}) > 1
        with pytest.raises(KeyError):  # when the first prompt is in flight
            policy.sample(["add 4 to 5.", [{"role": "user"}]], temperature=0.0)
        assert policy.chat(question) == answer
        with pytest.raises(ConfigError, match="temprature"):
            policy.sample([question], temprature=1.0)
    found = run.evaluate(num_examples=2)
    assert found["n"] == 2 and 0.0 <= float(str(found["reward"])) <= 1.0


@pytest.mark.timeout(180)
def test_stopped_run_is_continued_by_its_name_and_forked(run: pz.Run, tmp_path: Path) -> None:
    options = settings(tmp_path, max_steps=100_000, task={"name": "calculator"})
    first = pz.train("embedded", name="own", **options)
    while first.step < 2:
        assert first.is_running
        time.sleep(0.05)
    inputs = {file: file.read_bytes() for file in (first.folder / "inputs").iterdir()}
    with pytest.raises(ConfigError, match="is running; load_run"):
        pz.train("embedded", ROWS, len, name="own", **{**options, "task": {}})
    assert {file: file.read_bytes() for file in (first.folder / "inputs").iterdir()} == inputs
    with pytest.raises(RunError, match="was started by another process"):
        pz.load_run(first.folder).stop()
    with pytest.raises(TimeoutError, match=r"still runs after 0\.1 s"):
        first.wait(0.1, show=False)
    first.stop()
    stopped_at = first.step
    again = pz.train("embedded", name="own", **{**options, "max_steps": stopped_at + 2})
    assert again.wait(60, show=False).step == stopped_at + 2
    fork = run.fork("other", run={"dir": str(tmp_path)}, max_steps=1, learning_rate=1e-5)
    fork.wait(60, show=False)
    assert fork.step == 1 and fork.config.run.fork == str(run.folder)


def test_wrong_settings_are_refused_and_leave_no_folder(tmp_path: Path) -> None:
    for wrong, reason in (
        ({"max_step": 3}, r"unknown setting max_step = 3; did you mean train\.max_steps\?"),
        ({"port": 3}, r"several sections have the setting port: write .*wire=\{'port': 3\}"),
        ({"max_steps": "many"}, r"train\.max_steps = 'many' is wrong"),
        ({"run": "own"}, r"run = 'own'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            pz.train("embedded", ROWS, **settings(tmp_path, **wrong))
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        pz.train("embedded", [{"prompt": "a", "answer": {1, 2}}], **settings(tmp_path))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"is no run: it has no config\.toml"):
        pz.load_run(tmp_path)


@pytest.mark.timeout(120)
def test_error_of_the_trainer_is_raised(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"model 'no/such' is neither a folder nor in .*run\.log"):
        pz.train("no/such", ROWS, **settings(tmp_path, max_steps=1))
