"""Settings of environments and curriculum."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from config_files import load_toml, toml_refusal

from peralta_zmq.build import open_environments
from peralta_zmq.config import earlier_config, load_config, write_resolved
from peralta_zmq.config.training_sections import EnvSection
from peralta_zmq.errors import ConfigError
from peralta_zmq.observe import terminal

TWO = """
[[env]]
task = "calculator"
train = "math_10k"
[[env]]
name = "words"
task = "reverse_text"
address = "http://127.0.0.1:5560"
"""


def test_task_and_data_sections_are_one_environment() -> None:
    config = load_config("bin/x", ["--task.name", "countdown", "--data.train", "my.csv"])
    assert config.environments == (EnvSection(task="countdown", train="my.csv"),)
    assert config.environments[0].data_options == {"train": "my.csv"}
    assert config.eval_environments == config.environments


def test_environments_are_in_file_order(tmp_path: Path) -> None:
    config = load_toml(tmp_path, TWO, "--curriculum.env-ratios", "3,1")
    assert [env.label for env in config.environments] == ["calculator", "words"]
    assert config.curriculum.env_ratios == (3.0, 1.0)


def test_eval_env_replaces_environments_of_evaluation(tmp_path: Path) -> None:
    config = load_toml(tmp_path, TWO + '[[eval.env]]\ntask = "countdown"\n')
    assert [env.label for env in config.eval_environments] == ["countdown"]


def test_slow_loading_shows_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config("bin/x", [])
    with closing(open_environments(config, "eval")):
        assert capsys.readouterr().err == ""  # done within two seconds
    at_once = partial(terminal.Progress, delay=0.0, line_seconds=0.0)
    monkeypatch.setattr(terminal, "Progress", at_once)
    with closing(open_environments(config, "eval")):
        lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading calculator: 0 of 250 (0%)"
    assert lines[125] == "loading calculator: 125 of 250 (50%), 0s left"
    assert len(lines) == 250


def test_environments_survive_write_and_load(tmp_path: Path) -> None:
    text = TWO + '[[eval.env]]\ntask = "countdown"\n[curriculum]\nenv_ratios = [1, 2]\n'
    config = load_toml(tmp_path, text)
    write_resolved(config, tmp_path)
    assert load_config("bin/x", ["@", str(tmp_path / "config.toml")]) == config


def test_resume_allows_new_address_but_not_new_data(tmp_path: Path) -> None:
    write_resolved(load_toml(tmp_path, TWO), tmp_path)
    earlier_config(load_toml(tmp_path, TWO.replace("5560", "5561")), tmp_path)
    with pytest.raises(ConfigError, match="made with other settings: env"):
        earlier_config(load_toml(tmp_path, TWO.replace("math_10k", "math_1k")), tmp_path)


@pytest.mark.parametrize(
    ("text", "argument", "line"),
    [
        (TWO, "--curriculum.env-ratios=0,0", "env_ratios 0, 0 must be 2 numbers, one for each"),
        (TWO, "--curriculum.env-ratios=2,-1", "env_ratios 2, -1 must be 2 numbers"),
        (TWO, "--curriculum.env-ratios=1", "env_ratios 1 must be 2 numbers"),
        (TWO, "--task.name=countdown", "[[env]] and the settings of [task] or [data] exclude"),
        (TWO, "--data.train=x.csv", "[[env]] and the settings of [task] or [data] exclude"),
        ('[[env]]\ntask="countdown"\n' * 2, "", "env.name 'countdown' is used by 2 environments"),
        ('[[env]]\nadress="x"', "", "unknown setting adress in [[env]]; did you mean address?"),
        ('[[eval.env]]\ntrian="x"', "",
         "unknown setting trian in [[eval.env]]; did you mean train"),
        ('[[env]]\naddress="127.0.0.1:1"', "",
         "env.address '127.0.0.1:1' is not of the form http://HOST:PORT"),
        ('[[env]]\nname="a/b"', "",
         "env.0.name = 'a/b' is wrong: should be a plain name; use letters"),
        ("[curriculum]\neasy_threshold = 0.2\nhard_threshold = 0.5", "",
         "hard_threshold 0.5 is not below curriculum.easy_threshold 0.2"),
        ("", "--curriculum.easy-threshold=1.5", "curriculum.easy_threshold"),
        ("", "--eval.num-examples=0", "eval.num_examples 0 evaluates no problem"),
    ],
)  # fmt: skip
def test_invalid_environment_settings_are_refused_on_one_line(
    text: str, argument: str, line: str, tmp_path: Path
) -> None:
    assert line in toml_refusal(tmp_path, text, *([argument] if argument else []))
