"""Defaults that follow the model, the data and the machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from peralta_zmq import models
from peralta_zmq.build import MemoryPlanner
from peralta_zmq.build.fitted_settings import adopted, fit_settings, manifest_field
from peralta_zmq.config import (
    FITTED,
    Config,
    earlier_config,
    load_config,
    with_fitted_of_run,
    with_settings,
    write_resolved,
)
from peralta_zmq.errors import ConfigError

LARGE = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model with 100 M parameters, without weights."""
    folder = tmp_path / "large"
    shutil.copytree(models.EMBEDDED, folder)
    sizes = json.loads((folder / "config.json").read_text())
    sizes |= {**LARGE, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    del sizes["layer_types"]
    sizes |= {"intermediate_size": 1536, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows with short prompts and answers."""
    return write_rows(tmp_path / "rows.jsonl", 30)


def write_rows(path: Path, count: int) -> Path:
    rows = [{"prompt": f"What is {each} plus 1?", "answer": each + 1} for each in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def load(model: Path, data: Path, *arguments: str) -> Config:
    sources = ["--model.name", str(model), "--data.train", str(data)]
    return load_config("bin/x", [*sources, "--model.device", "cpu", *arguments])


def test_defaults_follow_a_large_model(model: Path, data: Path) -> None:
    config, reasons = fit_settings(load(model, data))
    assert set(reasons) == set(FITTED)
    assert config.train.learning_rate == 1e-5
    assert config.train.batch_size == 64
    assert config.eval.interval == 20
    assert config.sampling.max_completion_length == 256
    assert 256 < config.engine.max_model_len <= 512
    assert config.engine.max_model_len % 64 == 0
    assert config.train.max_tokens_per_microbatch >= config.engine.max_model_len


def test_lora_has_a_higher_learning_rate(model: Path, data: Path) -> None:
    config, _ = fit_settings(load(model, data, "--lora.rank", "8"))
    assert config.train.learning_rate == 1e-4


def test_settings_of_the_user_stay(model: Path, data: Path) -> None:
    given = ["--train.learning-rate", "3e-3", "--sampling.max-completion-length", "48"]
    config, reasons = fit_settings(load(model, data, *given, "--train.batch-size", "8"))
    assert (config.train.learning_rate, config.train.batch_size) == (3e-3, 8)
    assert config.sampling.max_completion_length == 48
    assert config.engine.max_model_len == 64
    assert not {"train.learning_rate", "train.batch_size"} & set(reasons)


def test_a_set_context_limits_the_completion(model: Path, data: Path) -> None:
    config, reasons = fit_settings(load(model, data, "--engine.max-model-len", "128"))
    assert 64 < (config.sampling.max_completion_length or 0) < 128
    assert "leave this much" in reasons["sampling.max_completion_length"]


def test_long_answers_and_thinking_lengthen_the_completion(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "Write.", "answer": "word " * 150}))
    config, _ = fit_settings(load(model, path))
    assert 256 < (config.sampling.max_completion_length or 0) <= 1024
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}<think>")
    path.write_text(json.dumps({"prompt": "Write.", "answer": "1"}))
    assert fit_settings(load(model, path)).config.sampling.max_completion_length == 1024


def test_micro_batch_is_the_largest_that_fits(model: Path, data: Path) -> None:
    config = fit_settings(load(model, data), memory_gib=8.0).config
    planner = MemoryPlanner.of(config, model, memory_gib=8.0)
    tokens = config.train.max_tokens_per_microbatch

    def peak_gib(size: int) -> float:
        changed = with_settings(config, {"train.max_tokens_per_microbatch": size})
        return planner.plan(changed, "trainer").peak / (1 << 30)

    assert peak_gib(tokens) <= 0.7 * 8.0 < peak_gib(2 * tokens)


def test_one_long_prompt_does_not_set_the_lengths(model: Path, data: Path) -> None:
    with data.open("a") as file:
        file.write("\n" + json.dumps({"prompt": "word " * 1500, "answer": "1"}))
    config, reasons = fit_settings(load(model, data))
    assert config.engine.max_model_len <= 512
    assert config.sampling.max_completion_length == 256
    assert "1 are much longer" in reasons["engine.max_model_len"]


def test_context_has_room_for_the_longest_completion_of_all(model: Path, data: Path) -> None:
    config, _ = fit_settings(load(model, data, "--eval.sampling.max-completion-length", "1000"))
    assert 1000 < config.engine.max_model_len < 1200


def test_small_model_has_a_higher_learning_rate(data: Path) -> None:
    config, reasons = fit_settings(load(models.EMBEDDED, data))
    assert set(reasons) == set(FITTED)
    assert config.train.learning_rate == 1e-4
    assert reasons["train.learning_rate"] == "full fine-tuning of 1.71 M parameters"
    assert (config.train.batch_size, reasons["train.batch_size"]) == (64, "whole groups of 8")
    assert config.engine.max_model_len <= 1024  # positions of the model


@pytest.mark.parametrize(
    ("num_problems", "batch", "reason"),
    [
        (1, 8, "a group of each training problem"),
        (7, 56, "a group of each training problem"),
        (8, 64, "whole groups of 8"),
    ],
)
def test_batch_has_at_most_one_group_of_each_problem(
    num_problems: int, batch: int, reason: str, tmp_path: Path, data: Path
) -> None:
    few = write_rows(tmp_path / "few.jsonl", num_problems)
    config, reasons = fit_settings(load(models.EMBEDDED, few, f"--data.eval={data}"))
    assert (config.train.batch_size, reasons["train.batch_size"]) == (batch, reason)


def test_generator_adopts_what_it_leaves_out(model: Path, data: Path) -> None:
    trainer = fit_settings(load(model, data)).config
    generator = adopted(load(model, data, "--engine.max-model-len", "300"), manifest_field(trainer))
    assert generator.sampling.max_completion_length == 256
    assert generator.engine.max_model_len == 300
    assert adopted(load(model, data), None) == load(model, data)


@pytest.mark.parametrize(
    "field",
    ["[", "[]x", '{"engine.max_model_len": "many"}', '{"train.batch_size": -1}', "[" * 9999],
)
def test_invalid_settings_of_a_version_are_refused(model: Path, data: Path, field: str) -> None:
    with pytest.raises(ConfigError, match="invalid settings"):
        adopted(load(model, data), field)


def test_resumed_run_keeps_the_chosen_defaults(model: Path, data: Path, tmp_path: Path) -> None:
    given = ["--run.dir", str(tmp_path), "--run.name", "x"]
    first = fit_settings(load(model, data, *given)).config
    write_resolved(first, first.run_folder)
    with data.open("a") as file:  # the data has changed, and with it what would be chosen
        file.write("\n" + json.dumps({"prompt": "word " * 400, "answer": "1"}))
    again = load(model, data, *given)
    assert earlier_config(again, again.run_folder) == first
    resumed, reasons = fit_settings(with_fitted_of_run(again))
    assert (resumed, reasons) == (first, {})
