"""Unknown settings are refused with the right name."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import refusal, toml_refusal

from peralta_zmq.config import load_config
from peralta_zmq.config.foreign_names import EXPLANATIONS, NAMES, REMOVED, RIGHT_NAMES
from peralta_zmq.config.schema import known_fields


@pytest.mark.parametrize(("flag", "value", "expected"), [
    ("train.max-step", "3", "train.max_step = '3'; did you mean train.max_steps?"),
    ("log.qqq", "1", "log.qqq = '1'; the settings of [log] are level"),
    ("ckpt.interval", "3", "ckpt.interval = '3'; did you mean checkpoint.interval?"),
    ("train.temperature", "1",
     "train.temperature = '1'; 'temperature' is a setting of [sampling] here"),
    ("num_epochs", "3",
     "num_epochs = '3'; a run is counted in steps: train.max_steps = epochs x problems x "
     "sampling.num_generations / train.batch_size"),
    ("train.num-train-epochs", "3",
     "train.num_train_epochs = '3'; a run is counted in steps: train.max_steps = epochs x problems "
     "x sampling.num_generations / train.batch_size"),
    ("train.group-size", "8",
     "train.group_size = '8'; 'group_size' is called 'num_generations' here, in "
     "[sampling]: write sampling.num_generations"),
    ("loss.c-clip", "3",
     "loss.c_clip = '3'; this setting was removed: use loss.delta, which limits the loss in the "
     "same way"),
    ("filter.overlong.enforce", "true",
     "filter.overlong = {'enforce': 'true'}; this setting was removed: write filter.count or "
     'filter.remove = ["overlong"]'),
])  # fmt: skip
def test_unknown_option_names_the_right_setting(flag: str, value: str, expected: str) -> None:
    assert refusal(f"--{flag}", value) == f"unknown setting {expected}"


@pytest.mark.parametrize(("text", "expected"), [
    ("[train]\nlearning-rate = 1.0", "setting train.learning-rate = 1.0; did you mean train"),
    ("[trian]\nbatch_size = 8", "setting trian.batch_size = 8; did you mean train.batch_size?"),
    ("[xyz]", "section [xyz]; the sections are run, model, task, data, curriculum, "),
    ("[[env]]\nadress = 'x'", "setting adress in [[env]]; did you mean address?"),
    ("[[env]]\nq = 1", "setting q in [[env]]; the settings there are train, eval, "),
    ("[[env]]\nreward_functions = ['regex']",
     "setting reward_functions in [[env]]; this setting was removed: list the functions in reward"),
])  # fmt: skip
def test_unknown_key_in_file_names_the_right_setting(
    text: str, expected: str, tmp_path: Path
) -> None:
    assert toml_refusal(tmp_path, text).startswith(f"unknown {expected}")


@pytest.mark.parametrize(("right", "foreign"), [
    ("sampling.num_generations", "group_size rollouts_per_prompt"),
    ("sampling.max_completion_length", "max_tokens max_new_tokens max_completion_len"),
    ("sampling.temperature", "temp"),
    ("engine.slots", "num_slots"),
    ("train.learning_rate", "lr optim.lr"),
    ("train.max_grad_norm", "max_norm grad_clip"),
    ("train.max_steps", "steps"),
    ("train.batch_size", "batch per_device_train_batch_size"),
    ("model.name", "model_name_or_path"),
    ("run.dir", "output_dir"),
    ("run.fork", "checkpoint.skip_progress"),
    ("run.from_step", "checkpoint.resume_step"),
    ("loss.name", "loss_type"),
    ("loss.epsilon", "loss.eps"),
    ("checkpoint.interval", "save_steps"),
    ("checkpoint.keep_last", "save_total_limit checkpoint.keep"),
    ("weights.keep_last", "keep"),
])  # fmt: skip
def test_foreign_name_leads_to_our_setting(right: str, foreign: str) -> None:
    for name in foreign.split():
        assert refusal(f"--{name}", "1").endswith(f"write {right}")


def test_foreign_names_lead_to_existing_settings() -> None:
    known = {f"{section}.{leaf}" for section, leaves in known_fields().items() for leaf in leaves}
    assert set(NAMES["settings"]) <= known
    assert not known & REMOVED.keys()


def test_foreign_names_are_unique() -> None:
    assert len(RIGHT_NAMES) == sum(len(names.split()) for names in NAMES["settings"].values())
    assert not RIGHT_NAMES.keys() & EXPLANATIONS.keys()


@pytest.mark.parametrize(("options", "name", "value"), [
    (["--train.num-workers", "2", "--generator.num-workers", "2"], "run.num_workers", 2),
    (["--task.reward-functions", "regex"], "task.reward", ("regex",)),
    (["--no-dashboard.enabled"], "dashboard.port", None),
    (["--dashboard.enabled"], "dashboard.port", 8470),
    (["--dashboard.enabled", "--dashboard.port", "80"], "dashboard.port", 80),
])  # fmt: skip
def test_merged_setting_is_read_by_its_former_name(
    options: list[str], name: str, value: object
) -> None:
    section, _, leaf = name.partition(".")
    config = load_config("trainer", options)
    assert getattr(getattr(config, section), leaf) == value
