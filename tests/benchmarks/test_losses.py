"""The tables of losses: every row has valid settings; finished rows are not repeated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from benchmarks import loss_steps, losses
from peralta_zmq import build
from peralta_zmq.config import load_config
from peralta_zmq.config.objective_sections import LossSection
from peralta_zmq.learning.composition import MASK_OPTIONS, OBJECTIVES, PRESETS


def test_rows_of_both_tables_have_valid_settings(tmp_path: Path) -> None:
    file = losses.write_demonstrations(tmp_path)
    rows = [*losses.ROWS.values(), *([*loss_steps.GRPO, *row] for row in loss_steps.PARTS.values())]
    for flags in rows:
        flags = [flag.replace(losses.SFT_FILE, str(file)) for flag in flags]
        config = load_config("benchmarks.losses", flags)
        build.make_loss(config)  # raises ConfigError for settings that do not fit the loss
        build.make_advantage(config)


def test_parts_have_every_objective_level_aggregation_and_mask() -> None:
    flags = [flag for row in loss_steps.PARTS.values() for flag in row]
    grpo = PRESETS["grpo"].settings
    literals = get_type_hints(LossSection, include_extras=True)
    values = {
        "objective": OBJECTIVES,
        **{
            option: [value for each in get_args(literals[option]) for value in get_args(each)]
            for option in ("importance_sampling_level", "aggregation")
        },
    }
    for option, names in values.items():
        flag = f"--loss.{option.replace('_', '-')}"
        found = {each.partition("=")[2] for each in flags if each.startswith(f"{flag}=")}
        assert found | {grpo.get(option, "token")} == set(names)
    assert len(values["importance_sampling_level"]) == 3
    masks = {f"--loss.{option.removesuffix('_low').replace('_', '-')}" for option in MASK_OPTIONS}
    assert all(any(flag.startswith(mask) for flag in flags) for mask in masks)


def test_next_start_continues_after_the_finished_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []

    def train(name: str, flags: Sequence[str], num_steps: int) -> losses.Outcome:
        trained.append(name)
        if trained == ["loss grpo", "loss gspo"]:
            raise KeyboardInterrupt
        return losses.Outcome(name, 0.25, 0.5, 0.75, mismatch_kl=0.0, loss_ms=1.0)

    monkeypatch.setattr(losses, "train", train)
    file = str(tmp_path / "rows.jsonl")
    monkeypatch.setattr(sys, "argv", ["losses", "--keep", file, "--rows", "loss grpo", "loss gspo"])
    with pytest.raises(KeyboardInterrupt):
        losses.main()
    losses.main()
    assert trained == ["loss grpo", "loss gspo", "loss gspo"]
    table = capsys.readouterr().out
    assert "| loss grpo | 0.250 | 0.500 | 0.750 " in table and "| loss gspo |" in table


@pytest.mark.parametrize("change", ["commit", "steps", "flags"])
def test_rows_of_other_settings_are_trained_again(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def train(name: str, flags: Sequence[str], num_steps: int) -> losses.Outcome:
        trained.append(name)
        return losses.Outcome(name, 0.25, 0.5, 0.75, mismatch_kl=0.0, loss_ms=1.0)

    monkeypatch.setattr(losses, "train", train)
    monkeypatch.setattr(losses, "commit", lambda: "1234567")
    arguments = ["losses", "--keep", str(tmp_path / "rows.jsonl"), "--rows", "loss grpo"]
    monkeypatch.setattr(sys, "argv", arguments)
    losses.main()
    losses.main()
    assert trained == ["loss grpo"]
    if change == "commit":
        monkeypatch.setattr(losses, "commit", lambda: "89abcde")
    elif change == "steps":
        monkeypatch.setattr(sys, "argv", [*arguments, "--steps", "9"])
    else:
        monkeypatch.setitem(losses.ROWS, "loss grpo", ["--loss.name=grpo", "--loss.delta=2"])
    losses.main()
    assert trained == ["loss grpo"] * 2
