"""The small data sets: code and files agree, and every answer is worth the whole reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.environments.dataset import load_problems
from peralta_zmq.registry import resolve
from tools import make_data
from tools.make_data import data_files, write_data_files

FOLDER = Path(make_data.__file__).parents[1] / "peralta_zmq/environments/data"


def test_the_shipped_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    write_data_files(tmp_path, seed=0)
    for name in data_files(0):
        made, kept = (folder / f"{name}.csv" for folder in (tmp_path, FOLDER))
        assert made.read_bytes() == kept.read_bytes()


def test_another_seed_makes_other_rows() -> None:
    first, second = data_files(0), data_files(1)
    assert all(first[name] != second[name] for name in first)


@pytest.mark.parametrize(
    ("task", "sizes"),
    [("countdown", (1000, 100)), ("reverse_text", (1000, 100)), ("math_answers", (500, 100))],
)
def test_train_and_eval_share_no_problem(task: str, sizes: tuple[int, int]) -> None:
    if task == "math_answers":
        pytest.importorskip("math_verify")
    part = resolve("task", task)
    train, held_out = (
        {each.id for each in load_problems(part, split, seed=0, options={})}
        for split in ("train", "eval")
    )
    assert (len(train), len(held_out)) == sizes
    assert not train & held_out


def test_every_countdown_can_be_made() -> None:
    """By trying all orders and signs: the answer is no accident of how it was drawn."""
    for row in data_files(0)["countdown_100"]:
        *given, target = map(int, row.answer.replace("=", " ").split())
        assert target in made_of(tuple(given))


def made_of(numbers: tuple[int, ...]) -> set[float]:
    if len(numbers) == 1:
        return {numbers[0]}
    found: set[float] = set()
    for last in range(len(numbers)):
        others, right = numbers[:last] + numbers[last + 1 :], numbers[last]
        for left in made_of(others):
            found |= {left + right, left - right, left * right, left / right}
    return found
