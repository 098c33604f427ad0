"""What the books tell a trainer that starts again.

.venv/bin/python -m pytest tests/observe/test_books.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.observe.books import Books
from peralta_zmq.observe.metrics import EVENTS, Events


def published(step: int, wid: str) -> tuple[str, dict[str, object]]:
    return "publish", {"step": step, "number": step, "wid": wid}


def resumed(step: int) -> tuple[str, dict[str, object]]:
    return "resume", {"step": step}


@pytest.mark.parametrize(
    ("history", "now", "abandoned"),
    [
        ([published(1, "a"), published(2, "b")], 2, set()),  # an ordinary restart
        ([published(1, "a"), published(2, "b")], 1, {"b"}),
        ([published(1, "a"), published(2, "b"), resumed(1), published(2, "c")], 2, {"b"}),
        ([published(1, "a"), published(2, "b"), resumed(1), published(2, "b")], 2, set()),
        ([published(1, "a"), resumed(1), published(2, "c"), resumed(0)], 0, {"a", "c"}),
    ],
)
def test_weights_of_later_steps_are_abandoned_by_a_roll_back(
    tmp_path: Path, history: list[tuple[str, dict[str, object]]], now: int, abandoned: set[str]
) -> None:
    with Events(tmp_path / EVENTS) as events:
        for event, fields in history:
            events.record(event, **fields)
    with Books(tmp_path, run="run", max_steps=3) as books:
        assert books.abandoned_weights(now) == abandoned
