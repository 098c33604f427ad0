"""Data sets of the task extract, generated from a seed: extract_500 and extract_60.

The held-out file has the sentence forms of the training file with other names and other cities.
"""

from __future__ import annotations

import json
import random
from typing import NamedTuple

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


def extract_files(seed: int) -> dict[str, list[Row]]:
    """The data sets by file name; all sentences are distinct."""
    return {
        "extract_500": _rows(
            TRAIN_NAMES, TRAIN_CITIES, 500, random.Random(f"extract train {seed}")
        ),
        "extract_60": _rows(EVAL_NAMES, EVAL_CITIES, 60, random.Random(f"extract eval {seed}")),
    }


def _rows(names: str, cities: str, num_rows: int, numbers: random.Random) -> list[Row]:
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
