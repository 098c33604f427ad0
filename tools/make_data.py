"""Generate the shipped data sets from a seed: `python -m tools.make_data` rewrites the files."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tools import calculator_problems

TEXT = (
    "add ant arm art bag bed bell bird boat book bowl box bread brick bus cake cap car cat chair "
    "clock cloud coat cup desk dog door drum duck ear egg eye farm fish flag foot fork frog game "
    "gate gift glass goat gold hand hat hill horse house ice ink jam jar key kite lamp leaf lion "
    "milk moon nest nose note oak owl pan park pen pig plum rain ring road rock roof rope rose "
    "sand seed ship shoe snow sock soup star sun tail tent tree wall wind wolf wood yard zoo"
)
WORDS = TEXT.split()


# Sentences of the task extract; its held-out file has other names and other cities.
FORMS = (
    "{name} is {age} years old and lives in {city}.",
    "At {age}, {name} still repairs bicycles in {city}.",
    "{city} has been home to {name}, who is {age}, since last spring.",
    "My neighbour {name} turned {age} last week and is moving to {city}.",
    "In {city} I met {name}, aged {age}.",
    "{name} ({age}) runs a bakery in {city}.",
    "The {age}-year-old {name} drives a tram in {city}.",
    "Born {age} years ago, {name} teaches music in {city}.",
)
TRAIN_NAMES = (
    "Alice Amir Beatrix Carlos Chloe Dmitri Elena Farid Greta Hassan "
    "Ingrid Jonas Keiko Liam Maria Nadia Oscar Priya Rosa Sven"
)
TRAIN_CITIES = (
    "Athens Berlin Cairo Dublin Geneva Hamburg Istanbul Jakarta Kyoto Lisbon "
    "Madrid Nairobi Oslo Paris Quito Rome Seoul Tunis Vienna Warsaw"
)
EVAL_NAMES = (
    "Anton Bianca Cedric Daria Emil Fatima Gustav Hana Ivan Julia "
    "Karim Leila Mateo Nora Omar Paula Rahul Sofia Thomas Yuki"
)
EVAL_CITIES = (
    "Amsterdam Boston Copenhagen Delhi Edinburgh Florence Glasgow Helsinki Krakow London "
    "Milan Naples Osaka Prague Riga Stockholm Toronto Utrecht Venice Zurich"
)
AGES = range(18, 90)
EXAMPLE = {"name": "Bob", "age": 50, "city": "Bonn"}


class Row(NamedTuple):
    prompt: str
    answer: str


def countdown(numbers: random.Random) -> Row:
    """Three or four numbers up to 50 and a reachable target from 1 to 100."""
    while True:
        operands = [numbers.randint(1, 50) for _ in range(numbers.choice((3, 4)))]
        target = _combined(operands, numbers)
        if 1 <= target <= 100:
            listed = ", ".join(map(str, operands[:-1]))
            prompt = f"use {listed} and {operands[-1]}, each once, to make {target}."
            return Row(prompt, f"{' '.join(map(str, operands))} = {target}")


def _combined(operands: list[int], numbers: random.Random) -> int:
    """The value of a random expression over all operands; every intermediate value is whole."""
    left, *others = numbers.sample(operands, len(operands))
    for right in others:
        results = [left + right, left - right, left * right]
        if left % right == 0:
            results.append(left // right)
        left = numbers.choice(results)
    return left


def reverse_text(numbers: random.Random) -> Row:
    text = " ".join(numbers.choice(WORDS) for _ in range(numbers.randint(1, 3)))
    return Row(f"reverse: {text}", text[::-1])


def math_answers(numbers: random.Random) -> Row:
    """Fractions, linear and square equations and powers; every answer is exact."""
    return numbers.choice((_fraction, _linear, _square, _power))(numbers)


def _fraction(numbers: random.Random) -> Row:
    a, b, c, d = (numbers.randint(1, 9) for _ in range(4))
    return Row(
        f"Compute {a}/{b} + {c}/{d} as one fraction.", f"\\frac{{{a * d + c * b}}}{{{b * d}}}"
    )


def _linear(numbers: random.Random) -> Row:
    a, x, b = numbers.randint(2, 9), numbers.randint(-9, 9), numbers.randint(1, 20)
    return Row(f"Solve {a}x + {b} = {a * x + b} for x.", str(x))


def _square(numbers: random.Random) -> Row:
    root = numbers.randint(2, 9)
    factor = numbers.choice((2, 3, 5, 7))
    return Row(
        f"What is the positive solution of x^2 = {root * root * factor}?",
        f"{root}\\sqrt{{{factor}}}",
    )


def _power(numbers: random.Random) -> Row:
    base, exponent = numbers.randint(2, 9), numbers.randint(2, 5)
    return Row(f"What is {base} to the power of {exponent}?", str(base**exponent))


def extract_files(seed: int) -> dict[str, list[Row]]:
    """The data sets by file name; all sentences are distinct."""
    return {
        "extract_500": _extract_rows(
            TRAIN_NAMES, TRAIN_CITIES, 500, random.Random(f"extract train {seed}")
        ),
        "extract_60": _extract_rows(
            EVAL_NAMES, EVAL_CITIES, 60, random.Random(f"extract eval {seed}")
        ),
    }


def _extract_rows(names: str, cities: str, num_rows: int, numbers: random.Random) -> list[Row]:
    rows: dict[str, Row] = {}
    while len(rows) < num_rows:
        fields = {
            "name": numbers.choice(names.split()),
            "age": numbers.choice(AGES),
            "city": numbers.choice(cities.split()),
        }
        sentence = numbers.choice(FORMS).format(**fields)
        prompt = (
            "Write the name, age and city of the person as JSON, "
            f"for example {json.dumps(EXAMPLE)}.\n{sentence}"
        )
        rows.setdefault(prompt, Row(prompt, json.dumps(fields)))
    return list(rows.values())


# Task -> (function that makes a random row, number of train rows, number of eval rows).
SETS: dict[str, tuple[Callable[[random.Random], Row], int, int]] = {
    "countdown": (countdown, 1000, 100),
    "reverse_text": (reverse_text, 1000, 100),
    "math_answers": (math_answers, 500, 100),
}


def data_files(seed: int = 0) -> dict[str, Sequence[NamedTuple]]:
    """All data sets by file name; train and eval files of a task share no prompt."""
    files: dict[str, Sequence[NamedTuple]] = {
        **calculator_problems.calculator_files(seed),
        **extract_files(seed),
    }
    for task, (make, num_train, num_eval) in SETS.items():
        numbers = random.Random(f"{task} {seed}")
        rows: dict[str, Row] = {}
        while len(rows) < num_train + num_eval:
            row = make(numbers)
            rows.setdefault(row.prompt, row)
        shuffled = list(rows.values())
        files[f"{task}_{_short(num_eval)}"] = shuffled[:num_eval]
        files[f"{task}_{_short(num_train)}"] = shuffled[num_eval:]
    return files


def _short(count: int) -> str:
    return f"{count // 1000}k" if count % 1000 == 0 else str(count)


def write_data_files(folder: Path, seed: int = 0) -> None:
    """Write every data set as NAME.csv into `folder`."""
    for name, rows in data_files(seed).items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(rows[0]._fields)
            writer.writerows(rows)


if __name__ == "__main__":
    write_data_files(Path(__file__).parents[1] / "peralta_zmq/environments/data")
