"""Tasks of agents: their names, and where their problems come from."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from peralta_zmq import registry
from peralta_zmq.build import open_environments
from peralta_zmq.config import load_config
from peralta_zmq.environments import rows_task
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate.doctor.machine_checks import check_reward

CALCULATOR = "agent:tests/support/calculator_agent.py:solve"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("agent:", "names no agent; use agent:FILE.py:FUNCTION"),
        ("agent:mine.py", "names no agent"),
        ("agent:mine.py:", "names no agent"),
        ("agent:nowhere.py:solve", "cannot be imported: FileNotFoundError: no file nowhere.py"),
        ("agent:agent_functions:solv", "has no attribute 'solv'"),
    ],
)
def test_name_without_a_usable_agent_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.resolve("task", name)


def test_problems_are_those_of_the_module_or_the_rows(tmp_path: Path) -> None:
    assert registry.resolve("task", "agent:./agent --fast").problems is rows_task.problems
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Hello", "answer": "1", "level": 3}\n' * 2)
    name = "agent:agent_functions:silent"
    settings = [f"--task.name={name}", f"--data.train={rows}"]
    with closing(open_environments(load_config("test", settings), "train")) as environments:
        problem, _ = environments.problems
        assert (problem.question, problem.answer, problem.task) == ("Hello", "1", name)
        assert problem.info["level"] == 3
        assert environments.has_agent(problem)
    with closing(
        open_environments(load_config("test", [f"--task.name={CALCULATOR}"]), "eval")
    ) as of:
        assert len(of.problems) == 250


def test_agent_cannot_run_at_a_verifier() -> None:
    config = load_config("test", [f"--task.name={CALCULATOR}"])
    with pytest.raises(ConfigError, match="an agent runs beside a generator only"):
        open_environments(config, "train", local=True)


def test_doctor_does_not_run_an_agent() -> None:
    check = check_reward(load_config("test", [f"--task.name={CALCULATOR}"]))
    assert check.ok
    assert "rewarded by an agent, which was not run" in check.detail
