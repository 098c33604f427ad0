"""The shipped data: its schema, its shapes, its numbers, and that code and files agree."""

from __future__ import annotations

import csv
import itertools
import random
import re
from pathlib import Path

import pytest

from peralta_zmq.environments import calculator_problems
from peralta_zmq.environments.calculator_problems import (
    EVAL_SHAPES,
    EXPANSIONS,
    FURTHER,
    HELD_OUT_SHAPES,
    TRAIN_SHAPES,
    Row,
    data_files,
    distinct_rows,
    expand,
    fresh_rows,
    write_data_files,
)

SIZES = {"math_250": 250, "math_1k": 1000, "math_10k": 10_000}
FOLDER = Path(calculator_problems.__file__).parent / "data"


def shipped(name: str) -> list[Row]:
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["python_expression", "natural_language"]
    return [Row(*row) for row in rows]


def shapes(name: str) -> set[str]:
    """Sentences with N for every number."""
    return {re.sub(r"\d+", "N", row.natural_language) for row in shipped(name)}


def test_the_shipped_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    write_data_files(tmp_path, seed=0)
    for name in SIZES:
        made, kept = (folder / f"{name}.csv" for folder in (tmp_path, FOLDER))
        assert made.read_bytes() == kept.read_bytes()


def test_another_seed_makes_other_rows() -> None:
    assert data_files(seed=0)["math_250"] != data_files(seed=1)["math_250"]


@pytest.mark.parametrize("name", SIZES)
def test_a_file_has_the_size_in_its_name_and_no_row_twice(name: str) -> None:
    rows = shipped(name)
    assert len({row.natural_language for row in rows}) == len(rows) == SIZES[name]


@pytest.mark.parametrize("name", ["math_1k", "math_10k"])
def test_the_held_out_file_shares_no_row_with_a_training_file(name: str) -> None:
    held_out = {row.natural_language for row in shipped("math_250")}
    assert held_out.isdisjoint(row.natural_language for row in shipped(name))


@pytest.mark.parametrize(("name", "count"), [("math_250", 28), ("math_1k", 20), ("math_10k", 280)])
def test_a_file_has_its_number_of_sentence_shapes(name: str, count: int) -> None:
    assert len(shapes(name)) == count


@pytest.mark.parametrize("name", ["math_1k", "math_10k"])
def test_ten_held_out_shapes_are_in_no_training_file(name: str) -> None:
    assert len(shapes("math_250") - shapes(name)) >= 10


def test_exactly_ten_held_out_shapes_are_not_in_the_1k_file() -> None:
    assert len(shapes("math_250") - shapes("math_1k")) == 10


@pytest.mark.parametrize("name", SIZES)
def test_every_number_is_from_1_to_50(name: str) -> None:
    numbers = {int(number) for row in shipped(name) for number in re.findall(r"\d+", "".join(row))}
    assert (min(numbers), max(numbers)) == (1, 50)


@pytest.mark.parametrize("name", SIZES)
def test_every_number_of_a_sentence_is_in_its_expression(name: str) -> None:
    for expression, sentence in shipped(name):
        assert set(re.findall(r"\d+", sentence)) <= set(re.findall(r"\d+", expression))


def test_every_row_of_the_10k_file_continues_a_row_of_the_1k_file() -> None:
    beginnings = {row.natural_language[:-1] for row in shipped("math_1k")}
    for row in shipped("math_10k"):
        sentence = row.natural_language
        cuts = [match.start() for match in re.finditer(", ", sentence)]
        assert any(sentence[:cut] in beginnings for cut in cuts), sentence


def test_the_shapes_are_spread_evenly_over_the_1k_file() -> None:
    texts = [re.sub(r"\d+", "N", row.natural_language) for row in shipped("math_1k")]
    assert {texts.count(shape) for shape in shapes("math_1k")} == {50}


def test_a_further_product_takes_the_whole_expression_in_parentheses() -> None:
    row = expand(Row("1 + 2", "add 1 and 2."), (FURTHER[2],), random.Random(0))
    number = re.findall(r"\d+", row.natural_language)[-1]
    assert row == Row(f"(1 + 2) * {number}", f"add 1 and 2, then multiply the result by {number}.")


def test_a_question_stays_a_question_when_it_is_expanded() -> None:
    row = expand(Row("1 + 2", "what is 1 plus 2?"), EXPANSIONS[7], random.Random(0))
    assert row.natural_language.endswith("?") and row.natural_language.count("?") == 1


def test_distinct_rows_never_hold_an_excluded_sentence() -> None:
    first = {row.natural_language for row in distinct_rows(TRAIN_SHAPES, count=200, seed=3)}
    again = distinct_rows(TRAIN_SHAPES, count=200, seed=3, excluded=frozenset(first))
    assert first.isdisjoint(row.natural_language for row in again)


def test_fresh_rows_never_ask_an_excluded_sentence() -> None:
    first = {
        row.natural_language for row in itertools.islice(fresh_rows(3, excluded=frozenset()), 500)
    }
    again = itertools.islice(fresh_rows(3, excluded=frozenset(first)), 500)
    assert first.isdisjoint(row.natural_language for row in again)


def test_the_held_out_shapes_are_no_training_shapes() -> None:
    sentences = [{row.natural_language for row in rows} for rows in (TRAIN_SHAPES, HELD_OUT_SHAPES)]
    assert sentences[0].isdisjoint(sentences[1])
    assert set(EVAL_SHAPES) - set(TRAIN_SHAPES) == set(HELD_OUT_SHAPES)
