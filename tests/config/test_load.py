"""Settings from the command line and TOML files, and the shipped files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_files import CONFIGS, load, refusal, toml_refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peralta_zmq.config import Config
from peralta_zmq.config.schema import section_models
from peralta_zmq.config.sections import default_text, row_model_of
from peralta_zmq.errors import ConfigError


def test_load_option_overrides_file_overrides_default(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nmax_steps = 5\nwarmup_steps = 2\n")
    config = load("@", str(tmp_path / "a.toml"), "--train.warmup-steps", "3")
    train = config.train
    assert (train.batch_size, train.max_steps, train.warmup_steps) == (128, 5, 3)


def test_load_accepts_each_default_on_the_command_line() -> None:
    arguments = [
        f"--{name}.{leaf.replace('_', '-')}={default_text(field)}"
        for name, section in section_models().items()
        for leaf, field in section.model_fields.items()
        if not row_model_of(field)
    ]
    assert load(*arguments) == Config()


@pytest.mark.parametrize("value", ["4", "8"])
def test_number_of_bits_is_one_of_two(value: str) -> None:
    assert load("--engine.quantize", value).engine.quantize == int(value)
    assert "should be 4 or 8" in refusal("--engine.quantize", "6")


def test_switch_without_default_can_be_set() -> None:
    for value in (True, False):
        loss = load(f"--loss.use-bias-correction-kl={value}").loss
        assert loss.use_bias_correction_kl is value


def test_groups_per_step_is_batch_size_by_num_generations() -> None:
    assert load("--train.batch-size", "48", "--sampling.num-generations", "4").groups_per_step == 12


def test_weights_folder_defaults_to_run_folder() -> None:
    config = load("--run.dir", "/a", "--run.name", "b")
    assert (config.run_folder, config.weights_folder) == (Path("/a/b"), Path("/a/b/weights"))
    assert load("--weights.dir", "/nas/w").weights_folder == Path("/nas/w")


def test_demo_file_differs_from_defaults_only_in_slots() -> None:
    config = load("@", str(CONFIGS / "demo.toml"))
    engine = config.engine
    assert engine.slots == config.train.batch_size  # the completions of a step
    assert config.model_copy(update={"engine": engine.model_copy(update={"slots": 32})}) == Config()


def test_calculator_file_has_the_original_settings() -> None:
    config = load("@", str(CONFIGS / "calculator.toml"))
    sampling, train = config.sampling, config.train
    assert config.model.name == "Qwen/Qwen3-0.6B"
    assert (train.batch_size, sampling.num_generations, train.max_steps) == (48, 4, 40)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.95, 40)
    assert sampling.max_completion_length == 48
    assert (train.learning_rate, train.lr_scheduler_type) == (2e-6, "constant")
    assert train.max_grad_norm == 0.5
    assert (config.loss.name, config.advantage.name) == ("reinforce", "group_mean")
    assert (config.data.train, config.data.eval, config.wire.hwm) == ("math_1k", "math_250", 12)


def test_calculator_file_prompt_has_a_correct_example() -> None:
    prompt = load("@", str(CONFIGS / "calculator.toml")).data.system_prompt or ""
    assert prompt.splitlines()[-1] == "Python: (8 * 5 + 3) / 2"
    assert prompt.startswith("Given a description of a math problem, output Python to compute it.")


def test_lan_file_binds_all_interfaces_and_publishes_to_nas() -> None:
    config = load(f"@{CONFIGS / 'lan.toml'}")  # without a space
    assert config.wire.bind == "0.0.0.0"
    assert config.weights_folder == Path("/mnt/nas/peralta/lan-demo")


def test_option_without_value_is_refused() -> None:
    expected = "--run.name has no value; write --run.name VALUE (or --run.name=VALUE)"
    assert refusal("--run.name", "--train.max-steps", "4") == expected
    assert refusal("--run.name") == expected


def test_positional_argument_is_refused() -> None:
    assert "stray" in refusal("stray")


def test_value_for_a_section_is_refused(tmp_path: Path) -> None:
    assert refusal("--train", "3").startswith("--train is a config group")
    assert toml_refusal(tmp_path, 'loss = "grpo"').startswith("'loss' is a section, not a setting")
    message = toml_refusal(tmp_path, "log = 5")
    assert message == "'log' is a section, not a setting (log = 5); its settings: level, samples"


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
