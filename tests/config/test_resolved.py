"""config.toml of a run: written completely, read back, and compared when the run is resumed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from config_files import load
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peralta_zmq.config import Config, earlier_config, keep_fork, write_resolved
from peralta_zmq.config.resolved import toml_text
from peralta_zmq.config.schema import known_fields
from peralta_zmq.errors import ConfigError


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
@example('\x7f \n " \\ \U0001f600')
def test_toml_text_preserves_any_text(text: str) -> None:
    config = Config.model_validate({"data": {"system_prompt": f">{text}"}})
    assert tomllib.loads(toml_text(config))["data"]["system_prompt"] == f">{text}"


def test_toml_text_preserves_tables(tmp_path: Path) -> None:
    config = load(
        *("--loss.name", "my.loss"),
        *("--loss.kwargs", '{"a b": "x\\"y", "c": {"d": [1, 2.5, true]}}'),
        *("--filter.count", "overlong,my.filters.own", "--filter.remove", "gibberish"),
        *("--filter.kwargs", '{"my.filters.own": {"limit": 3}}'),
        *("--loss.epsilon-high", "0.3", "--no-eval.eval-base-model"),
    )
    write_resolved(config, tmp_path)
    again = load("@", str(tmp_path / "config.toml"))
    assert again == config
    assert again.loss.kwargs == {"a b": 'x"y', "c": {"d": [1, 2.5, True]}}
    assert again.filter.count == ("overlong", "my.filters.own")
    assert again.filter.kwargs["my.filters.own"] == {"limit": 3}


def test_settings_of_a_named_loss_are_not_those_of_the_next_one(tmp_path: Path) -> None:
    config = load("--loss.name=gspo", "--loss.epsilon=0.1", "--loss.beta=0")
    assert (config.loss.aggregation, config.loss.epsilon_high) == ("rollout", 4e-4)
    write_resolved(config, tmp_path)
    file = str(tmp_path / "config.toml")
    assert load("@", file) == config
    other = load("@", file, "--loss.name=dapo").loss
    assert (other.aggregation, other.epsilon, other.epsilon_high) == ("token", 0.1, None)


def test_write_resolved_has_every_setting(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    write_resolved(Config(), folder)
    assert [path.name for path in folder.iterdir()] == ["config.toml"]
    written = tomllib.loads((folder / "config.toml").read_text())
    known = {section: set(leaves) - {"env"} for section, leaves in known_fields().items()}
    known["loss"] = set()  # the defaults of a named loss are not written
    assert {section: set(leaves) for section, leaves in written.items()} == known


def test_earlier_config_names_changed_settings_and_remedies(tmp_path: Path) -> None:
    write_resolved(Config(), tmp_path)
    changed = load("--loss.name", "grpo", "--train.batch-size", "128")
    with pytest.raises(ConfigError) as caught:
        earlier_config(changed, tmp_path)
    assert str(caught.value) == (
        f"run folder {tmp_path} was made with other settings: train.batch_size 64 -> 128, "
        "loss.name 'reinforce' -> 'grpo'; to continue from its weights with these settings, add to "
        f"the command: --run.fork demo --run.name {tmp_path.name}-2; "
        "or delete the folder to start again (FRESH=1 make run)"
    )


def test_earlier_config_refuses_a_fork_to_an_existing_run(tmp_path: Path) -> None:
    forked = ("--run.fork", "first", "--run.from-step", "4")
    tmp_path.with_name(f"{tmp_path.name}-2").mkdir()
    write_resolved(Config(), tmp_path)
    with pytest.raises(ConfigError) as caught:
        earlier_config(load(*forked), tmp_path)
    assert str(caught.value) == (
        f"run folder {tmp_path} exists already, and run.fork first makes a new run; "
        f"choose another name: --run.name {tmp_path.name}-3"
    )
    write_resolved(load(*forked), tmp_path)  # the fork itself is resumed
    for arguments in (forked, ()):
        earlier = earlier_config(load(*arguments), tmp_path)
        assert keep_fork(load(*arguments), earlier) == earlier == load(*forked)
    with pytest.raises(ConfigError, match="exists already"):
        earlier_config(load("--run.fork", "first", "--run.from-step", "2"), tmp_path)


@pytest.mark.parametrize("argument", [
    "--run.seed=0",  # unchanged
    "--run.dir=elsewhere", "--run.num-local-generators=3", "--log.level=debug",
    "--generator.name=x", "--wire.port=6000", "--run.num-workers=3", "--train.max-steps=81",
    "--no-eval.eval-base-model", "--checkpoint.interval=5", "--weights.keep-last=9",
    "--model.device=cpu", "--train.learning-rate=1e-4", "--train.lr-scheduler-type=constant",
    "--train.warmup-steps=3", "--train.max-steps=59",
    "--train.weight-decay=0.1", "--train.max-grad-norm=2",
])  # fmt: skip
def test_earlier_config_accepts_free_settings(argument: str, tmp_path: Path) -> None:
    assert earlier_config(load(argument), tmp_path) == load(argument)  # a new run
    write_resolved(Config(), tmp_path)
    assert earlier_config(load(argument), tmp_path) == Config()


@pytest.mark.parametrize("argument", [
    "--run.seed=1", "--model.name=other", "--model.dtype=float32", "--task.name=other",
    "--data.train=math_10k", "--sampling.temperature=0.9", "--engine.slots=2",
    "--loss.epsilon-high=0.1", "--advantage.name=group_zscore", "--train.optim=adamw_bf16",
    # The replay of the journal has to repeat the bits of the published weights.
    "--train.max-tokens-per-microbatch=512", "--train.gradient-checkpointing",
])  # fmt: skip
def test_earlier_config_refuses_changed_learning(argument: str, tmp_path: Path) -> None:
    write_resolved(Config(), tmp_path)
    with pytest.raises(ConfigError, match="made with other settings"):
        earlier_config(load(argument), tmp_path)


def test_earlier_config_names_damaged_file_and_remedies(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run")
    with pytest.raises(ConfigError, match=r"does not load .* choose another --run.name"):
        earlier_config(Config(), tmp_path)
