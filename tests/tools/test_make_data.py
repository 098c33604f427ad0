"""The shipped data files are those that the code generates, and their problems are sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.environments.dataset import load_problems
from peralta_zmq.registry import resolve
from tools import make_data
from tools.make_data import data_files, write_data_files

FOLDER = Path(make_data.__file__).parents[1] / "peralta_zmq/environments/data"


def test_shipped_files_equal_generated_files(tmp_path: Path) -> None:
    write_data_files(tmp_path, seed=0)
    assert {path.stem for path in FOLDER.glob("*.csv")} == set(data_files(0))
    for name in data_files(0):
        generated, shipped = (folder / f"{name}.csv" for folder in (tmp_path, FOLDER))
        assert generated.read_bytes() == shipped.read_bytes()


@pytest.mark.parametrize(("task", "sizes"), [
    *(("calculator", (1000, 250)), ("countdown", (1000, 100))),
    *(("reverse_text", (1000, 100)), ("math_answers", (500, 100)), ("extract", (500, 60))),
])  # fmt: skip
def test_train_and_eval_files_share_no_problem(task: str, sizes: tuple[int, int]) -> None:
    if task == "math_answers":
        pytest.importorskip("math_verify")
    module = resolve("task", task)
    train, held_out = (
        {problem.id for problem in load_problems(module.problems, split, seed=0, options={})}
        for split in ("train", "eval")
    )
    assert (len(train), len(held_out)) == sizes
    assert not train & held_out


def test_countdown_targets_are_reachable() -> None:
    """Tries all orders and operations, independently of the generating code."""
    for _, answer in data_files(0)["countdown_100"]:
        *operands, target = map(int, answer.replace("=", " ").split())
        assert target in values_of(tuple(operands))


def values_of(numbers: tuple[int, ...]) -> set[float]:
    if len(numbers) == 1:
        return {numbers[0]}
    values: set[float] = set()
    for last in range(len(numbers)):
        others, right = numbers[:last] + numbers[last + 1 :], numbers[last]
        for left in values_of(others):
            values |= {left + right, left - right, left * right, left / right}
    return values
