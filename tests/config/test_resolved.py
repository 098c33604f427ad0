"""config.toml of a run: written completely, read back, and compared when the run is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli
from config_files import load
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peralta_zmq.config import Config, earlier_config, load_resolved, write_resolved
from peralta_zmq.config.resolved import toml_text
from peralta_zmq.config.schema import known_fields
from peralta_zmq.errors import ConfigError

COSINE = ("--sampling.temp-scheduler", "cosine")


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
@example('\x7f \n " \\ \U0001f600')
def test_toml_text_preserves_any_text(text: str) -> None:
    config = Config.model_validate({"data": {"system_prompt": f">{text}"}})
    assert tomli.loads(toml_text(config))["data"]["system_prompt"] == f">{text}"


def test_toml_text_preserves_tables(tmp_path: Path) -> None:
    config = load(
        *("--loss.kwargs", '{"a b": "x\\"y", "c": {"d": [1, 2.5, true]}}', "--filter.overlong"),
        *("--filter.repetition.window=7", "--filter.gibberish.enforce"),
        *("--loss.epsilon-high", "0.3", "--no-eval.eval-base-model"),
        *("--filter.custom", '{"my.filters.own": {"enforce": true, "kwargs": {"limit": 3}}}'),
    )
    write_resolved(config, tmp_path)
    again = load("@", str(tmp_path / "config.toml"))
    assert again == config
    assert again.loss.kwargs == {"a b": 'x"y', "c": {"d": [1, 2.5, True]}}
    overlong, repetition, gibberish = (
        getattr(again.filter, name) for name in ("overlong", "repetition", "gibberish")
    )
    assert (overlong.enforce, repetition.window, gibberish.enforce) == (False, 7, True)
    assert again.filter.custom["my.filters.own"].kwargs == {"limit": 3}


def test_write_resolved_has_every_setting(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    write_resolved(Config(), folder)
    assert [path.name for path in folder.iterdir()] == ["config.toml"]
    written = tomli.loads((folder / "config.toml").read_text())
    known = {section: set(leaves) - {"env"} for section, leaves in known_fields().items()}
    assert {section: set(leaves) for section, leaves in written.items()} == known


def test_earlier_config_names_changed_settings_and_remedies(tmp_path: Path) -> None:
    write_resolved(Config(), tmp_path)
    changed = load("--loss.name", "grpo", "--train.batch-size", "64")
    with pytest.raises(ConfigError) as caught:
        earlier_config(changed, tmp_path)
    assert str(caught.value) == (
        f"run folder {tmp_path} was made with other settings: train.batch_size 128 -> 64, "
        "loss.name 'reinforce' -> 'grpo'; choose another --run.name, "
        "or delete the folder to start again (FRESH=1 make run)"
    )


@pytest.mark.parametrize("argument", [
    "--run.seed=0",  # unchanged
    "--run.dir=elsewhere", "--run.num-local-generators=3", "--log.level=debug",
    "--generator.name=x", "--wire.port=6000", "--train.num-workers=3", "--train.max-steps=81",
    "--no-eval.eval-base-model", "--checkpoint.interval=5", "--weights.keep-last=9",
    "--model.device=cpu",
])  # fmt: skip
def test_earlier_config_accepts_free_settings(argument: str, tmp_path: Path) -> None:
    assert earlier_config(load(argument), tmp_path) == load(argument)  # a new run
    write_resolved(Config(), tmp_path)
    assert earlier_config(load(argument), tmp_path) == Config()


@pytest.mark.parametrize("argument", [
    "--run.seed=1", "--model.name=other", "--model.dtype=float32", "--task.name=other",
    "--data.train=math_10k", "--sampling.temperature=0.9", "--engine.slots=2",
    "--train.learning-rate=1e-5", "--train.max-steps=59", "--loss.epsilon=0.1",
    "--advantage.name=group_zscore",
    # The replay of the journal has to repeat the bits of the published weights.
    "--train.max-tokens-per-microbatch=512", "--train.gradient-checkpointing",
])  # fmt: skip
def test_earlier_config_refuses_changed_learning(argument: str, tmp_path: Path) -> None:
    write_resolved(Config(), tmp_path)
    with pytest.raises(ConfigError, match="made with other settings"):
        earlier_config(load(argument), tmp_path)


def test_earlier_config_refuses_more_steps_with_schedule(tmp_path: Path) -> None:
    scheduled = (*COSINE, "--sampling.temp-start", "1", "--sampling.temp-end", "0.5")
    write_resolved(load(*scheduled), tmp_path)
    assert earlier_config(load(*scheduled), tmp_path) == load(*scheduled)
    with pytest.raises(ConfigError, match=r"train\.max_steps 80 -> 81"):
        earlier_config(load(*scheduled, "--train.max-steps", "81"), tmp_path)


def test_earlier_config_names_damaged_file_and_remedies(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run")
    with pytest.raises(ConfigError, match=r"does not load .* choose another --run.name"):
        earlier_config(Config(), tmp_path)


def test_earlier_config_refuses_iterations_that_meant_mini_batches(tmp_path: Path) -> None:
    reused = load("--train.num-iterations=4")
    write_resolved(reused, tmp_path)
    assert earlier_config(reused, tmp_path) == reused
    of_older_version(tmp_path / "config.toml")
    with pytest.raises(
        ConfigError, match=r"num_iterations 4 meant train\.num_minibatches 4; choose"
    ):
        earlier_config(reused, tmp_path)


def test_earlier_config_refuses_grpo_that_meant_dapo(tmp_path: Path) -> None:
    grpo = load("--loss.name=grpo")
    write_resolved(grpo, tmp_path)
    assert earlier_config(grpo, tmp_path) == grpo
    of_older_version(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"loss\.name grpo meant loss\.name dapo; choose another"):
        earlier_config(grpo, tmp_path)


def test_earlier_config_accepts_older_run_without_iterations(tmp_path: Path) -> None:
    write_resolved(Config(), tmp_path)
    of_older_version(tmp_path / "config.toml")
    assert earlier_config(Config(), tmp_path).engine.name == "native"


def test_earlier_config_of_older_lora_run_has_a_float32_base(tmp_path: Path) -> None:
    adapters = load("--lora.rank=4")
    write_resolved(adapters, tmp_path)
    file = tmp_path / "config.toml"
    file.write_text(file.read_text().replace('base_dtype = "bfloat16"\n', ""))
    with pytest.raises(ConfigError, match=r"lora\.base_dtype 'float32' -> 'bfloat16'"):
        earlier_config(adapters, tmp_path)
    earlier_config(load("--lora.rank=4", "--lora.base-dtype=float32"), tmp_path)


def test_settings_of_an_older_lora_run_change_only_by_name(tmp_path: Path) -> None:
    write_resolved(load("--lora.rank=4"), tmp_path)
    file = tmp_path / "config.toml"
    file.write_text(file.read_text().replace('base_dtype = "bfloat16"\n', ""))
    assert load_resolved("replay", tmp_path).lora.base_dtype == "float32"
    assert load_resolved("replay", tmp_path, ["--lora.rank=8"]).lora.base_dtype == "float32"
    chosen = load_resolved("replay", tmp_path, ["--lora.base-dtype=nf4"])
    assert chosen.lora.base_dtype == "nf4"


def of_older_version(file: Path) -> None:
    """Remove the setting that older versions did not have, and add those that only they had."""
    older = (
        '[loss]\nuse_decoupled_loss = true\nbehav_imp_weight_cap = "None"\nratio_type = "None"\n'
    )
    text = file.read_text().replace('[engine]\nname = "auto"', '[engine]\nname = "native"')
    lines = text.replace("[loss]\n", older).splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith("num_minibatches")))
