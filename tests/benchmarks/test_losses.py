"""The tables of losses: every row has valid settings; finished rows are not repeated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import loss_steps, losses
from peralta_zmq import build
from peralta_zmq.config import load_config


def test_rows_of_both_tables_have_valid_settings(tmp_path: Path) -> None:
    file = losses.write_demonstrations(tmp_path)
    rows = [*losses.ROWS.values(), *([*loss_steps.GRPO, *row] for row in loss_steps.PARTS.values())]
    for flags in rows:
        flags = [flag.replace(losses.SFT_FILE, str(file)) for flag in flags]
        config = load_config("benchmarks.losses", flags)
        build.make_loss(config)  # raises ConfigError for settings that do not fit the loss
        build.make_advantage(config)


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
