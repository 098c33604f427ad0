"""The calculator's data files: columns, sentence shapes, numbers, disjoint splits."""

from __future__ import annotations

import csv
import itertools
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tools import calculator_problems
from tools.calculator_problems import (
    EXPANSIONS,
    OPERATIONS,
    TRAIN_SHAPES,
    Row,
    distinct_rows,
    expand,
    fresh_rows,
)

FOLDER = Path(calculator_problems.__file__).parents[1] / "peralta_zmq/environments/data"


def shipped(name: str) -> list[Row]:
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["python_expression", "natural_language"]
    return [Row(*row) for row in rows]


def shapes(name: str) -> set[str]:
    """Sentences with N for every number."""
    return {re.sub(r"\d+", "N", row.natural_language) for row in shipped(name)}


@pytest.mark.parametrize(
    ("name", "num_rows", "num_shapes"),
    [("math_250", 250, 28), ("math_1k", 1000, 20), ("math_10k", 10_000, 280)],
)
def test_file_has_distinct_rows_of_the_expected_shapes_and_numbers(
    name: str, num_rows: int, num_shapes: int
) -> None:
    rows = shipped(name)
    assert len({row.natural_language for row in rows}) == len(rows) == num_rows
    assert len(shapes(name)) == num_shapes
    numbers = {int(number) for row in rows for number in re.findall(r"\d+", "".join(row))}
    assert (min(numbers), max(numbers)) == (1, 50)
    for expression, sentence in rows:
        assert set(re.findall(r"\d+", sentence)) <= set(re.findall(r"\d+", expression))


@pytest.mark.parametrize("name", ["math_1k", "math_10k"])
def test_eval_file_shares_no_row_with_train_files(name: str) -> None:
    held_out = {row.natural_language for row in shipped("math_250")}
    assert held_out.isdisjoint(row.natural_language for row in shipped(name))


def test_train_files_lack_ten_of_the_eval_shapes() -> None:
    assert len(shapes("math_250") - shapes("math_1k")) == 10
    assert len(shapes("math_250") - shapes("math_10k")) >= 10


def test_1k_file_has_50_rows_of_each_shape() -> None:
    texts = Counter(re.sub(r"\d+", "N", row.natural_language) for row in shipped("math_1k"))
    assert set(texts.values()) == {50}


def test_10k_rows_extend_1k_rows() -> None:
    beginnings = {row.natural_language[:-1] for row in shipped("math_1k")}
    for row in shipped("math_10k"):
        sentence = row.natural_language
        cuts = [match.start() for match in re.finditer(", ", sentence)]
        assert any(sentence[:cut] in beginnings for cut in cuts), sentence


def test_expand_with_product_adds_parentheses() -> None:
    row = expand(Row("1 + 2", "add 1 and 2."), (OPERATIONS[2],), random.Random(0))
    number = re.findall(r"\d+", row.natural_language)[-1]
    assert row == Row(f"(1 + 2) * {number}", f"add 1 and 2, then multiply the result by {number}.")


def test_expand_keeps_question_mark() -> None:
    row = expand(Row("1 + 2", "what is 1 plus 2?"), EXPANSIONS[7], random.Random(0))
    assert row.natural_language.endswith("?") and row.natural_language.count("?") == 1


def test_random_rows_contain_no_excluded_sentence() -> None:
    first = {row.natural_language for row in distinct_rows(TRAIN_SHAPES, count=200, seed=3)}
    again = distinct_rows(TRAIN_SHAPES, count=200, seed=3, excluded=frozenset(first))
    assert first.isdisjoint(row.natural_language for row in again)
    fresh = itertools.islice(fresh_rows(3, excluded=frozenset(first)), 2000)
    assert first.isdisjoint(row.natural_language for row in fresh)
