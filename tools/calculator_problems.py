"""Data sets of the calculator task, generated from a seed: math_250, math_1k and math_10k."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

LARGEST_NUMBER = 50


class Row(NamedTuple):
    """One row of a data file; the field names are the column names."""

    python_expression: str
    natural_language: str


def _rows(text: str) -> tuple[Row, ...]:
    """The rows of lines of the form EXPRESSION | SENTENCE."""
    return tuple(Row(*line.split(" | ")) for line in text.split("\n")[1:-1])


# A shape is an expression and its sentence over the numbers a..e.
TRAIN_SHAPES = _rows("""
({a} + {b} + {c}) * {d} - {e} | add {a}, {b}, and {c}, multiply that sum by {d}, then subtract {e}.
({a} * {b} * {c}) + {d} | multiply {a}, {b}, and {c} together, then add {d}.
({a} + {b}) + ({c} * {d}) - {e} | add {a} and {b}, multiply {c} by {d}, add the results, \
then subtract {e}.
{d} * ({a} + {b} + {c}) - {e} | add {a}, {b}, and {c}, multiply that by {d}, then subtract {e}.
({a} - {b}) * {c} | subtract {b} from {a}, then multiply by {c}.
{a} * {b} + {c} * {d} | multiply {a} by {b}, multiply {c} by {d}, and add the two products.
({a} + {b}) / {c} | divide the sum of {a} and {b} by {c}.
({a} + {b}) * ({c} - {d}) | multiply the sum of {a} and {b} by the difference of {c} and {d}.
{a} * {b} - {c} | take the product of {a} and {b} and subtract {c}.
{a} - {b} - {c} | start with {a}, take away {b}, then take away {c}.
({a} + {b}) * {c} + {d} | add {a} and {b}, multiply the result by {c}, then add {d}.
{a} / {b} + {c} | divide {a} by {b}, then add {c}.
({a} * {b} - {c}) * {d} | multiply {a} by {b}, subtract {c}, then multiply by {d}.
{a} + {b} * {c} | add {a} to the product of {b} and {c}.
({a} + {b} - {c}) * {d} | add {a} and {b}, subtract {c}, then multiply everything by {d}.
{a} * ({b} + {c}) | multiply {a} by the sum of {b} and {c}.
{a} - ({b} + {c}) | subtract the sum of {b} and {c} from {a}.
({a} - {b}) / {c} | find the difference of {a} and {b}, then divide by {c}.
2 * ({a} + {b}) | double the sum of {a} and {b}.
({a} - {b}) * ({c} + {d}) - {e} | subtract {b} from {a}, add {c} and {d}, multiply the results, \
then subtract {e}.
""")

HELD_OUT_SHAPES = _rows("""
{a} * {b} + {c} | what is {a} times {b} plus {c}?
{a} ** 2 - {b} | square {a}, then subtract {b}.
3 * {a} + {b} | triple {a} and add {b}.
({a} + {b}) * {c} - {d} | the sum of {a} and {b}, times {c}, minus {d}.
({a} - {b}) * {c} | reduce {a} by {b} and multiply what is left by {c}.
({a} + {b}) / {c} | increase {a} by {b}, then divide by {c}.
{b} * {c} - {a} | take {a} away from the product of {b} and {c}.
({a} + {b}) / 2 + {c} | halve the sum of {a} and {b}, then add {c}.
({a} - {b}) * {c} + {d} | multiply the difference of {a} and {b} by {c}, then add {d}.
{a} * {b} - {c} * {d} | subtract {c} times {d} from {a} times {b}.
""")

EVAL_SHAPES = TRAIN_SHAPES[:18] + HELD_OUT_SHAPES

# One more operation: the new expression, and the words appended to the sentence.
OPERATIONS = _rows("""
{x} + {n} | , then add {n}
{x} - {n} | , then subtract {n}
({x}) * {n} | , then multiply the result by {n}
({x}) / {n} | , then divide the result by {n}
{x} + {n} | , and add {n} to the result
{x} - {n} | , and take {n} away from the result
({x}) * {n} | , and multiply everything by {n}
""")
# An expansion is one or two operations; 14 expansions of 20 shapes make 280 in math_10k.
EXPANSIONS = tuple((first,) for first in OPERATIONS) + tuple(
    (OPERATIONS[i], OPERATIONS[j])
    for i, j in ((0, 5), (1, 6), (2, 4), (3, 0), (4, 3), (5, 2), (6, 1))
)


def row_of(shape: Row, numbers: random.Random) -> Row:
    """Fill a shape with numbers from 1 to 50."""
    values = {letter: numbers.randint(1, LARGEST_NUMBER) for letter in "abcde"}
    return Row(*(text.format(**values) for text in shape))


def expand(row: Row, expansion: tuple[Row, ...], numbers: random.Random) -> Row:
    """Append operations to a row; the sentence keeps its final punctuation."""
    expression, sentence = row.python_expression, row.natural_language
    for template, words in expansion:
        number = numbers.randint(1, LARGEST_NUMBER)
        expression = template.format(x=expression, n=number)
        sentence = sentence[:-1] + words.format(n=number) + sentence[-1]
    return Row(expression, sentence)


def distinct_rows(
    shapes: tuple[Row, ...], *, count: int, seed: int, excluded: frozenset[str] = frozenset()
) -> list[Row]:
    """`count` rows with distinct sentences that are not in `excluded`; shapes take turns."""
    numbers = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < count:
        row = row_of(shapes[len(rows) % len(shapes)], numbers)
        if row.natural_language not in excluded:
            rows.setdefault(row.natural_language, row)
    shuffled = list(rows.values())
    numbers.shuffle(shuffled)
    return shuffled


def expanded_rows(
    rows: list[Row], *, count: int, seed: int, excluded: frozenset[str] = frozenset()
) -> list[Row]:
    """`count` rows: every row is expanded equally often, each time with another expansion."""
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
    """Endless random rows of all shapes, a quarter of them expanded."""
    numbers = random.Random(seed)
    shapes = TRAIN_SHAPES + HELD_OUT_SHAPES
    while True:
        row = row_of(numbers.choice(shapes), numbers)
        if numbers.random() < 0.25:
            row = expand(row, numbers.choice(EXPANSIONS), numbers)
        if row.natural_language not in excluded:
            yield row


def calculator_files(seed: int = 0) -> dict[str, list[Row]]:
    """The three data sets by name; math_250 shares no row with the others."""
    held_out = distinct_rows(EVAL_SHAPES, count=250, seed=seed)
    excluded = frozenset(row.natural_language for row in held_out)
    small = distinct_rows(TRAIN_SHAPES, count=1000, seed=seed + 1, excluded=excluded)
    large = expanded_rows(small, count=10_000, seed=seed + 2, excluded=excluded)
    return {"math_250": held_out, "math_1k": small, "math_10k": large}
