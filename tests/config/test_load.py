"""Settings from the command line and TOML files, and the shipped files."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

import pytest
from config_files import CONFIGS, REPO, load, refusal, toml_refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peralta_zmq.config import FITTED, Config, is_set, with_settings
from peralta_zmq.config.schema import section_models
from peralta_zmq.config.sections import default_text, row_model_of
from peralta_zmq.errors import ConfigError


def test_load_option_overrides_file_overrides_default(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nmax_steps = 5\nwarmup_steps = 2\n")
    config = load("@", str(tmp_path / "a.toml"), "--train.warmup-steps", "3")
    train = config.train
    assert (train.batch_size, train.max_steps, train.warmup_steps) == (64, 5, 3)


def test_load_accepts_each_default_on_the_command_line() -> None:
    arguments = [
        f"--{name}.{leaf.replace('_', '-')}={default_text(field)}"
        for name, section in section_models().items()
        for leaf, field in section.model_fields.items()
        if not row_model_of(field) and (name, leaf) != ("eval", "sampling")  # a table
    ]
    assert load(*arguments) == Config()


def test_groups_per_step_is_batch_size_by_num_generations() -> None:
    assert load("--train.batch-size", "48", "--sampling.num-generations", "4").groups_per_step == 12


def test_number_of_bits_is_one_of_two() -> None:
    assert load("--engine.quantize", "4").engine.quantize == 4
    assert "should be 4 or 8" in refusal("--engine.quantize", "6")


def test_weights_folder_defaults_to_run_folder() -> None:
    config = load("--run.dir", "/a", "--run.name", "b")
    assert (config.run_folder, config.weights_folder) == (Path("/a/b"), Path("/a/b/weights"))
    assert load("--weights.dir", "/nas/w").weights_folder == Path("/nas/w")


def test_demo_file_differs_from_defaults_only_in_task_slots_and_what_follows_the_model() -> None:
    config = load("@", str(CONFIGS / "demo.toml"))
    assert config.engine.slots == config.train.batch_size  # the completions of a step
    fitted = {
        "train.learning_rate": 2e-4,
        "train.batch_size": 128,
        "train.max_tokens_per_microbatch": 16384,
        "sampling.max_completion_length": 48,
        "engine.max_model_len": 512,
        "eval.interval": 100,
    }
    assert fitted.keys() == set(FITTED)
    assert all(is_set(config, name) for name in FITTED)
    others = {"task.name": "calculator", "engine.slots": 128}
    assert config == with_settings(Config(), fitted | others)


@pytest.mark.parametrize("name", ["lan", "guess_number", "calculator_tool"])
def test_other_files_for_the_embedded_model_have_the_demo_settings(name: str) -> None:
    config, demo = (load("@", str(CONFIGS / f"{each}.toml")) for each in (name, "demo"))
    differing = {"guess_number": {"sampling.max_completion_length"}}.get(name, set())
    for setting in {*FITTED} - differing:
        assert is_set(config, setting)
        assert attrgetter(setting)(config) == attrgetter(setting)(demo), setting


def test_lan_file_binds_all_interfaces_and_publishes_to_nas() -> None:
    config = load(f"@{CONFIGS / 'lan.toml'}")  # without a space
    assert config.wire.bind == "0.0.0.0"
    assert config.weights_folder == Path("/mnt/nas/peralta/lan-demo")


def test_option_without_value_is_refused() -> None:
    expected = "--run.name has no value; write --run.name VALUE (or --run.name=VALUE)"
    assert refusal("--run.name", "--train.max-steps", "4") == expected
    assert refusal("--run.name") == expected


@pytest.mark.parametrize(("arguments", "expected"), [
    (["stray"], "unexpected argument 'stray'; settings are written --section.name VALUE, config "
     "files @ FILE.toml"),
    (["--security.insecure", "stray"], "unexpected argument 'stray'; settings are written "),
    (["@", "configs/demo.toml", "stray"], "unexpected argument 'stray'; settings are written "),
    (["--run.name", "x", "configs/demo.toml", "--run.seed", "1"],
     "config file configs/demo.toml needs an @: bin/trainer @ configs/demo.toml"),
])  # fmt: skip
def test_positional_argument_is_refused(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    assert refusal(*arguments).startswith(expected)


def test_switch_may_have_a_value_of_its_own() -> None:
    assert not load("--security.insecure", "false", "--run.seed", "1").security.insecure


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--model", "Qwen/Qwen3-0.6B"],
     "--model is a section; did you mean --model.name Qwen/Qwen3-0.6B?"),
    (["--model=Qwen/Qwen3-0.6B"],
     "--model is a section; did you mean --model.name Qwen/Qwen3-0.6B?"),
    (["--data", "my.jsonl"], "--data is a section; did you mean --data.train my.jsonl?"),
    (["--loss"], "--loss is a section; did you mean --loss.name VALUE?"),
    (["--log", "5"], "--log is a section; its settings: level"),
])  # fmt: skip
def test_option_that_is_a_section_names_the_setting(arguments: list[str], expected: str) -> None:
    assert refusal(*arguments) == expected


def test_no_steps_name_the_program_that_only_evaluates() -> None:
    assert refusal("--train.max-steps", "0") == (
        "train.max_steps = '0' is wrong: should be greater than 0; bin/evaluate RUN|MODEL "
        "evaluates without training"
    )


def test_value_for_a_section_is_refused(tmp_path: Path) -> None:
    message = toml_refusal(tmp_path, "log = 5")
    assert message == "'log' is a section, not a setting (log = 5); its settings: level"


def test_missing_file_names_the_nearest_file() -> None:
    expected = f"config file {CONFIGS}/dmeo.toml does not exist; did you mean {CONFIGS}/demo.toml?"
    assert refusal("@", f"{CONFIGS}/dmeo.toml") == expected


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("a.yaml", b"train: {}", "a.yaml is not a TOML file"),
    ("a.toml", b"\xff\xfe", "UTF-8"),
    ("a.toml", b"[run]\nname =\n", "Invalid TOML in .*line 2"),
])  # fmt: skip
def test_invalid_file_is_refused(name: str, content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(expected, refusal("@", str(tmp_path / name)))


@settings(deadline=None)
@given(st.lists(st.text(max_size=12) | st.sampled_from(["@", "--", "--train", "--run.name=x"])))
@example(["@", "a\nb"])
def test_any_command_line_fails_with_one_line_at_most(words: list[str]) -> None:
    words = [word for word in words if word not in ("-h", "--help")]
    try:
        load(*words)
    except ConfigError as error:
        assert len(str(error).split("\n")) == 1
