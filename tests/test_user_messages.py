"""Messages about missing programs and missing signal, and the page of the settings."""

from __future__ import annotations

import re
import sys

import pytest

from peralta_zmq.config.load import help_text
from peralta_zmq.config.schema import known_fields
from peralta_zmq.generator.weight_sync import waiting_text
from peralta_zmq.trainer.collector import no_rollouts_text
from tools import config_reference

COMMAND_LINE = ["bin/x", "@", "configs/lan.toml", "--train.max-steps", "9"]
DENIED = "/nas cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("answers", "why", "problem"),
    [
        (False, "", "no TCP answer. Start it: bin/trainer @ configs/lan.toml."),
        (False, DENIED, f"no TCP answer, and {DENIED}. Start it: bin/trainer @ configs/lan.toml."),
        (True, "", "it answers, but /nas has no weights. Is that the trainer's weights.dir?"),
        (True, DENIED, f"it answers, but {DENIED}."),
    ],
)
def test_generator_without_a_trainer_or_a_version_names_the_commands(
    monkeypatch: pytest.MonkeyPatch, answers: bool, why: str, problem: str
) -> None:
    monkeypatch.setattr(sys, "argv", COMMAND_LINE)
    assert waiting_text("tcp://mac.local:5555", 15.2, "/nas", answers=answers, why=why) == (
        f"waiting for trainer tcp://mac.local:5555 (15 s): {problem} "
        "Diagnose: bin/doctor @ configs/lan.toml"
    )


def test_trainer_without_generators_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", COMMAND_LINE)
    assert no_rollouts_text(30.4, "tcp://127.0.0.1:5555", []) == (
        "no rollouts for 30 s on tcp://127.0.0.1:5555. "
        "Start a generator: bin/generator @ configs/lan.toml"
    )
    text = no_rollouts_text(30.4, "tcp://127.0.0.1:5555", ["cat"])
    assert text == "no rollouts for 30 s: no group of cat is complete yet"


def test_settings_page_equals_the_schema() -> None:
    assert config_reference.DOCUMENT.read_text("utf-8") == config_reference.config_text(), (
        "run make docs"
    )


def test_settings_page_has_every_setting_once() -> None:
    page = config_reference.config_text()
    for section, leaves in known_fields().items():
        part = page.partition(f"## [{section}]\n")[2].partition("\n## ")[0]
        listed = re.findall(r"^\| `(\w+)`", part, re.MULTILINE)
        assert sorted(listed) == sorted(set(leaves) - {"env"}), section


def test_settings_page_and_help_have_docstrings_without_indentation() -> None:
    for text in (config_reference.config_text(), help_text("bin/x", topic="early_stop")):
        assert "\n\nAfter 10 steps in a row beyond a limit, " in text


def test_settings_page_names_bounds_and_choices() -> None:
    page = config_reference.config_text()
    assert "| `num_generations` | `8` | int >=2 |" in page
    assert "| `update` | `in_flight` | `in_flight` or `between_groups` |" in page
    assert "| `max_mbit_per_s` | `None` | float >0 or None |" in page
