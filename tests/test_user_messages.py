"""Messages about missing programs and missing signal, and the pages that quote messages."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_data import group_of

from peralta_zmq import models
from peralta_zmq.config.load import help_text
from peralta_zmq.config.schema import known_fields
from peralta_zmq.generator.weight_sync import waiting_text
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.trainer.collector import no_rollouts_text
from peralta_zmq.trainer.loop import NO_SIGNAL_STEPS, NoSignalWarning
from tools import config_reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


COMMAND_LINE = ["bin/x", "@", "configs/lan.toml", "--train.max-steps", "9"]


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        (False, "no TCP answer. Start it: bin/trainer @ configs/lan.toml."),
        (True, "it answers, but /nas has no weights. Is that the trainer's weights.dir?"),
    ],
)
def test_generator_without_a_trainer_or_a_version_names_the_commands(
    monkeypatch: pytest.MonkeyPatch, answers: bool, problem: str
) -> None:
    monkeypatch.setattr(sys, "argv", COMMAND_LINE)
    assert waiting_text("tcp://mac.local:5555", 15.2, "/nas", answers=answers) == (
        f"waiting for trainer tcp://mac.local:5555 (15 s): {problem} "
        "Diagnose: bin/doctor @ configs/lan.toml"
    )


@pytest.mark.parametrize(
    ("dropped", "exception"),
    [([], ""), (["ann", "bob"], ", except dropped ones of ann, bob (logprob mismatch)")],
)
def test_trainer_without_generators_names_the_command_and_dropped_ones(
    monkeypatch: pytest.MonkeyPatch, dropped: list[str], exception: str
) -> None:
    monkeypatch.setattr(sys, "argv", COMMAND_LINE)
    assert no_rollouts_text(30.4, "tcp://127.0.0.1:5555", dropped) == (
        f"no rollouts for 30 s on tcp://127.0.0.1:5555{exception}. "
        "Start a generator: bin/generator @ configs/lan.toml"
    )


def test_steps_without_signal_are_named_once_with_three_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    groups = [group_of([0.25, 0.25], seed=seed) for seed in range(4)]
    with RunLog(tmp_path, run="demo", max_steps=99) as run_log:
        warning, printed = NoSignalWarning(run_log, tokenizer), dict[int, str]()
        for step in range(1, NO_SIGNAL_STEPS + 5):
            warning.update(step, groups, 1.0)
            printed[step] = capsys.readouterr().out
    assert [step for step, text in printed.items() if text] == [NO_SIGNAL_STEPS]
    assert (
        "no learning signal: 100% of groups have equal rewards for 20 steps; "
        "check the reward and the task's difficulty. Samples: "
    ) in printed[NO_SIGNAL_STEPS]
    assert printed[NO_SIGNAL_STEPS].count(" -> 0.25") == 3


# The pages.


def literals(source: str) -> Iterator[str]:
    """Every string of a program; `...` replaces the values of f-strings and log arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(map(_text_of, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[.0-9]*[sdf]", "...", node.value)


def _text_of(part: ast.expr) -> str:
    """Text of a part of an f-string, as a program in bin/ prints it; `...` for a value."""
    match part:
        case ast.Constant(value):
            return str(value)
        case ast.FormattedValue(ast.Call(ast.Name("program_name"), [ast.Constant(name)])):
            return f"bin/{name}"
        case _:
            return "..."


PROGRAM = [
    text
    for file in sorted((ROOT / "peralta_zmq").rglob("*.py"))
    for text in literals(file.read_text("utf-8"))
]
ROWS = [
    line.split(" | ")
    for line in (DOCS / "troubleshooting.md").read_text("utf-8").splitlines()
    if line.startswith("| `")
]


def is_printed(message: str) -> bool:
    """True if one string of the program has the fixed parts of the message, in their order."""
    words = [part for part in message.split("...") if part.strip()]
    pattern = re.compile(".*".join(map(re.escape, words)))
    return any(pattern.search(text) for text in PROGRAM)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_message_of_the_troubleshooting_page_is_printed(row: list[str]) -> None:
    messages = re.findall(r"`([^`]+)`", row[0])
    assert messages and all(map(is_printed, messages))
    assert len(row) == 3 and all(len(cell.strip(" |")) > 6 for cell in row)


@pytest.mark.parametrize("message", [
    # faults that other systems do not report
    "no TCP answer. Start it: bin/trainer", "no rollouts for", "no learning signal: 100% of groups",
    "macOS keeps this program from the local network", "is in use by", "was made with other",
    "giving up", "is not a multiple of", "the same command resumes it", "cannot keep up",
    # problems of a machine
    "cannot be reached; is it on", "does not accept your ssh key", "there is no ...; install it",
    "does not run Python 3.10", "is full:", "is listed", "are both the trainer",
    "it is another folder", "another trainer uses", "another trainer (...) publishes to",
    "copying stopped halfway", "copied code is incomplete",
    "differ from the trainer's: mismatch_kl",
    # dashboard
    "no dashboard: ", "would let every machine", "dashboard stopped", "dashboard request failed",
    "reward.png or report.html not written",
])  # fmt: skip
def test_common_message_has_a_row(message: str) -> None:
    assert len([row for row in ROWS if message in row[0]]) == 1
    assert is_printed(message)


def test_is_printed_rejects_an_unknown_message() -> None:
    assert len(ROWS) > 35
    assert not is_printed("no rollouts for ... s on ... since Tuesday")


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
    for text in (config_reference.config_text(), help_text("bin/trainer")):
        assert "\n\nAfter `patience` steps in a row beyond a limit, " in text


def test_settings_page_names_bounds_and_choices() -> None:
    page = config_reference.config_text()
    assert "| `num_generations` | `8` | whole number, at least 2 |" in page
    assert "| `update` | `in_flight` | `in_flight` or `between_groups` |" in page
    assert "| `max_mbit_per_s` | `None` | number, above 0 or None |" in page
