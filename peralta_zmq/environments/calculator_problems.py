"""The calculator's sentences: shapes, seeded rows, and the expander behind math_10k.csv.

Knows words and expressions; knows nothing of rewards or models.
`python -m peralta_zmq.environments.calculator_problems` rewrites the three CSV files in data/.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LARGEST_NUMBER = 50


class Row(NamedTuple):
    """One line of a data file; the field names are the column names."""

    python_expression: str
    natural_language: str


# A shape is an expression and its sentence over the numbers a..e.
TRAIN_SHAPES = (
    Row(
        "({a} + {b} + {c}) * {d} - {e}",
        "add {a}, {b}, and {c}, multiply that sum by {d}, then subtract {e}.",
    ),
    Row("({a} * {b} * {c}) + {d}", "multiply {a}, {b}, and {c} together, then add {d}."),
    Row(
        "({a} + {b}) + ({c} * {d}) - {e}",
        "add {a} and {b}, multiply {c} by {d}, add the results, then subtract {e}.",
    ),
    Row(
        "{d} * ({a} + {b} + {c}) - {e}",
        "add {a}, {b}, and {c}, multiply that by {d}, then subtract {e}.",
    ),
    Row("({a} - {b}) * {c}", "subtract {b} from {a}, then multiply by {c}."),
    Row(
        "{a} * {b} + {c} * {d}",
        "multiply {a} by {b}, multiply {c} by {d}, and add the two products.",
    ),
    Row("({a} + {b}) / {c}", "divide the sum of {a} and {b} by {c}."),
    Row(
        "({a} + {b}) * ({c} - {d})",
        "multiply the sum of {a} and {b} by the difference of {c} and {d}.",
    ),
    Row("{a} * {b} - {c}", "take the product of {a} and {b} and subtract {c}."),
    Row("{a} - {b} - {c}", "start with {a}, take away {b}, then take away {c}."),
    Row("({a} + {b}) * {c} + {d}", "add {a} and {b}, multiply the result by {c}, then add {d}."),
    Row("{a} / {b} + {c}", "divide {a} by {b}, then add {c}."),
    Row("({a} * {b} - {c}) * {d}", "multiply {a} by {b}, subtract {c}, then multiply by {d}."),
    Row("{a} + {b} * {c}", "add {a} to the product of {b} and {c}."),
    Row(
        "({a} + {b} - {c}) * {d}", "add {a} and {b}, subtract {c}, then multiply everything by {d}."
    ),
    Row("{a} * ({b} + {c})", "multiply {a} by the sum of {b} and {c}."),
    Row("{a} - ({b} + {c})", "subtract the sum of {b} and {c} from {a}."),
    Row("({a} - {b}) / {c}", "find the difference of {a} and {b}, then divide by {c}."),
    Row("2 * ({a} + {b})", "double the sum of {a} and {b}."),
    Row(
        "({a} - {b}) * ({c} + {d}) - {e}",
        "subtract {b} from {a}, add {c} and {d}, multiply the results, then subtract {e}.",
    ),
)

HELD_OUT_SHAPES = (
    Row("{a} * {b} + {c}", "what is {a} times {b} plus {c}?"),
    Row("{a} ** 2 - {b}", "square {a}, then subtract {b}."),
    Row("3 * {a} + {b}", "triple {a} and add {b}."),
    Row("({a} + {b}) * {c} - {d}", "the sum of {a} and {b}, times {c}, minus {d}."),
    Row("({a} - {b}) * {c}", "reduce {a} by {b} and multiply what is left by {c}."),
    Row("({a} + {b}) / {c}", "increase {a} by {b}, then divide by {c}."),
    Row("{b} * {c} - {a}", "take {a} away from the product of {b} and {c}."),
    Row("({a} + {b}) / 2 + {c}", "halve the sum of {a} and {b}, then add {c}."),
    Row("({a} - {b}) * {c} + {d}", "multiply the difference of {a} and {b} by {c}, then add {d}."),
    Row("{a} * {b} - {c} * {d}", "subtract {c} times {d} from {a} times {b}."),
)

EVAL_SHAPES = TRAIN_SHAPES[:18] + HELD_OUT_SHAPES

# One further operation: how the expression grows, and the words for it.
FURTHER = (
    Row("{x} + {n}", ", then add {n}"),
    Row("{x} - {n}", ", then subtract {n}"),
    Row("({x}) * {n}", ", then multiply the result by {n}"),
    Row("({x}) / {n}", ", then divide the result by {n}"),
    Row("{x} + {n}", ", and add {n} to the result"),
    Row("{x} - {n}", ", and take {n} away from the result"),
    Row("({x}) * {n}", ", and multiply everything by {n}"),
)
# Expansions are one or two of them; 7 + 7 of 20 shapes make 280 shapes in math_10k.csv.
EXPANSIONS = tuple((first,) for first in FURTHER) + tuple(
    (FURTHER[i], FURTHER[j]) for i, j in ((0, 5), (1, 6), (2, 4), (3, 0), (4, 3), (5, 2), (6, 1))
)


def row_of(shape: Row, numbers: random.Random) -> Row:
    """Fill a shape with numbers from 1 to 50."""
    values = {letter: numbers.randint(1, LARGEST_NUMBER) for letter in "abcde"}
    return Row(*(text.format(**values) for text in shape))


def expand(row: Row, expansion: tuple[Row, ...], numbers: random.Random) -> Row:
    """Append further operations to a row; the sentence keeps its final punctuation."""
    expression, sentence = row.python_expression, row.natural_language
    for grow, words in expansion:
        number = numbers.randint(1, LARGEST_NUMBER)
        expression = grow.format(x=expression, n=number)
        sentence = sentence[:-1] + words.format(n=number) + sentence[-1]
    return Row(expression, sentence)


def distinct_rows(
    shapes: tuple[Row, ...], *, count: int, seed: int, excluded: frozenset[str] = frozenset()
) -> list[Row]:
    """`count` rows that share no sentence with each other or with `excluded`, shapes in turn."""
    numbers = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < count:
        row = row_of(shapes[len(rows) % len(shapes)], numbers)
        if row.natural_language not in excluded:
            rows.setdefault(row.natural_language, row)
    drawn = list(rows.values())
    numbers.shuffle(drawn)
    return drawn


def expanded_rows(
    rows: list[Row], *, count: int, seed: int, excluded: frozenset[str] = frozenset()
) -> list[Row]:
    """`count` rows made by expanding each of `rows` equally often, each time in another way."""
    numbers = random.Random(seed)
    expanded: dict[str, Row] = {}
    while len(expanded) < count:
        turn, index = divmod(len(expanded), len(rows))
        expansion = EXPANSIONS[(index + turn) % len(EXPANSIONS)]
        row = expand(rows[index], expansion, numbers)
        if row.natural_language not in excluded:
            expanded.setdefault(row.natural_language, row)
    return list(expanded.values())


def fresh_rows(seed: int, *, excluded: frozenset[str]) -> Iterator[Row]:
    """Endless rows of every shape with fresh numbers, a quarter of them expanded."""
    numbers = random.Random(seed)
    shapes = TRAIN_SHAPES + HELD_OUT_SHAPES
    while True:
        row = row_of(numbers.choice(shapes), numbers)
        if numbers.random() < 0.25:
            row = expand(row, numbers.choice(EXPANSIONS), numbers)
        if row.natural_language not in excluded:
            yield row


def data_files(seed: int = 0) -> dict[str, list[Row]]:
    """The three data sets by name; math_250 shares no row with the others."""
    held_out = distinct_rows(EVAL_SHAPES, count=250, seed=seed)
    excluded = frozenset(row.natural_language for row in held_out)
    small = distinct_rows(TRAIN_SHAPES, count=1000, seed=seed + 1, excluded=excluded)
    large = expanded_rows(small, count=10_000, seed=seed + 2, excluded=excluded)
    return {"math_250": held_out, "math_1k": small, "math_10k": large}


def write_data_files(folder: Path, seed: int = 0) -> None:
    """Write math_250.csv, math_1k.csv and math_10k.csv into `folder`."""
    for name, rows in data_files(seed).items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Row._fields)
            writer.writerows(rows)


if __name__ == "__main__":
    write_data_files(Path(__file__).parent / "data")
