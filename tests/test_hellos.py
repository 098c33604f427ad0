"""The roster of generators: who joins, what they say of themselves, and what is told of it."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from fakes import RUN
from sockets import ANYWHERE

from peralta_zmq import wire
from peralta_zmq.observe.metrics import EVENTS, read_rows
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.trainer.generator_registry import GeneratorRegistry

HERE = {"python": "3.11.7", "torch": "2.13.0"}
HELLO = {"python": "3.10.12", "torch": "2.13.0", "device": "cpu", "mood": "good"}


def opened(stack: ExitStack, folder: Path) -> GeneratorRegistry:
    counters = stack.enter_context(closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)))
    return GeneratorRegistry(
        counters, stack.enter_context(RunLog(folder, run="demo", max_steps=1)), HERE
    )


def events(folder: Path) -> list[tuple[object, object]]:
    return [(row["event"], row["hello"]) for row in read_rows(folder / EVENTS)]


def test_join_is_recorded_with_the_hello_and_told_once(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roster = opened(stack, tmp_path)
    for _ in range(3):
        roster.meet("ann/00", step=1, hello=HELLO)
    assert events(tmp_path) == [("join", HELLO)]
    printed = capsys.readouterr().out
    assert printed.count("generator ann: cpu; Python 3.10.12 (trainer: 3.11.7)") == 1


def test_hello_that_comes_after_the_first_group_is_recorded_too(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roster = opened(stack, tmp_path)
    roster.meet("ann/00", step=1)
    assert "generator ann" not in capsys.readouterr().out
    roster.meet("ann/00", step=1, hello=HELLO)
    roster.meet("ann/00", step=1)
    assert events(tmp_path) == [("join", {}), ("hello", HELLO)]
    assert "generator ann" in capsys.readouterr().out


def test_each_start_says_hello(stack: ExitStack, tmp_path: Path) -> None:
    roster = opened(stack, tmp_path)
    roster.meet("ann/00", step=1, hello=HELLO)
    roster.meet("ann/01", step=1, hello=HELLO)
    assert [event for event, _ in events(tmp_path)] == ["join", "join"]


def test_two_generators_of_one_name_are_told_the_setting(
    stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roster = opened(stack, tmp_path)
    roster.meet("ann/00", step=1)
    roster.meet("bob/00", step=1)
    assert "two generators" not in capsys.readouterr().out
    roster.meet("ann/01", step=1)
    said = "two generators are called ann; if both run, give one --generator.name\n"
    assert capsys.readouterr().out == said
