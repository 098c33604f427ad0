"""Unknown settings are refused with the right name."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import refusal, toml_refusal

from peralta_zmq.config.foreign_names import NAMES, RIGHT_NAMES
from peralta_zmq.config.schema import known_fields


def test_unknown_option_names_the_nearest_setting() -> None:
    expected = "unknown setting train.max_step = '3'; did you mean train.max_steps?"
    assert refusal("--train.max-step", "3") == expected


def test_unknown_key_in_file_names_the_nearest_setting(tmp_path: Path) -> None:
    expected = "unknown setting train.learning-rate = 1.0; did you mean train.learning_rate?"
    assert toml_refusal(tmp_path, "[train]\nlearning-rate = 1.0") == expected


def test_unknown_section_names_the_nearest_setting(tmp_path: Path) -> None:
    expected = "unknown setting trian.batch_size = 8; did you mean train.batch_size?"
    assert toml_refusal(tmp_path, "[trian]\nbatch_size = 8") == expected


def test_unknown_empty_section_lists_the_sections(tmp_path: Path) -> None:
    assert toml_refusal(tmp_path, "[xyz]").startswith(
        "unknown section [xyz]; the sections are run, model, task, data, curriculum, "
    )


def test_unknown_setting_lists_settings_of_its_section() -> None:
    expected = "unknown setting log.qqq = '1'; the settings of [log] are level"
    assert refusal("--log.qqq", "1") == expected


def test_setting_in_wrong_section_names_the_right_section() -> None:
    expected = "unknown setting train.temperature = '1'; "
    expected += "'temperature' is a setting of [sampling] here"
    assert refusal("--train.temperature", "1") == expected


def test_foreign_name_is_refused_with_our_name() -> None:
    assert refusal("--train.group-size", "8") == (
        "unknown setting train.group_size = '8'; 'group_size' is called 'num_generations' here, "
        "in [sampling]: write sampling.num_generations"
    )


@pytest.mark.parametrize(
    ("foreign", "right"),
    [
        ("group_size", "sampling.num_generations"),
        ("rollouts_per_prompt", "sampling.num_generations"),
        ("max_tokens", "sampling.max_completion_length"),
        ("max_new_tokens", "sampling.max_completion_length"),
        ("max_completion_len", "sampling.max_completion_length"),
        ("temp", "sampling.temperature"),
        ("num_slots", "engine.slots"),
        ("lr", "train.learning_rate"),
        ("max_norm", "train.max_grad_norm"),
        ("grad_clip", "train.max_grad_norm"),
        ("steps", "train.max_steps"),
        ("batch", "train.batch_size"),
        ("per_device_train_batch_size", "train.batch_size"),
        ("model_name_or_path", "model.name"),
        ("output_dir", "run.dir"),
        ("loss_type", "loss.name"),
        ("save_steps", "checkpoint.interval"),
        ("save_total_limit", "checkpoint.keep_last"),
        ("keep", "weights.keep_last"),
    ],
)
def test_foreign_name_without_section_leads_to_our_setting(foreign: str, right: str) -> None:
    assert refusal(f"--{foreign}", "1").endswith(f"write {right}")


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("checkpoint.keep", "checkpoint.keep_last"),
        ("weights.keep", "weights.keep_last"),
        ("loss.eps", "loss.epsilon"),
        ("optim.lr", "train.learning_rate"),
    ],
)
def test_foreign_name_depends_on_its_section(written: str, right: str) -> None:
    assert refusal(f"--{written}", "1").endswith(f"write {right}")


def test_foreign_section_leads_to_our_section() -> None:
    assert refusal("--ckpt.interval", "3").endswith("did you mean checkpoint.interval?")


def test_foreign_names_lead_to_existing_settings() -> None:
    known = {f"{section}.{leaf}" for section, leaves in known_fields().items() for leaf in leaves}
    assert set(NAMES["settings"]) <= known


def test_foreign_names_are_unique() -> None:
    assert len(RIGHT_NAMES) == sum(len(names.split()) for names in NAMES["settings"].values())
