"""What a person can write, and the one line that answers when it cannot be used."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import tomli
from hypothesis import example, given, settings
from hypothesis import strategies as st

from peralta_zmq.config import (
    Config,
    earlier_config,
    load_config,
    run_plain_program,
    run_program,
    toml_text,
    write_resolved,
)
from peralta_zmq.config.names import FOREIGN, RIGHT_NAMES
from peralta_zmq.config.section import default_text, rows_of
from peralta_zmq.config.settings import known_fields, sections
from peralta_zmq.errors import ConfigError, WireError

REPO = Path(__file__).resolve().parents[2]
CONFIGS = REPO / "configs"


def load(*arguments: str) -> Config:
    return load_config("bin/trainer", list(arguments))


def refusal(*arguments: str) -> str:
    """The error that the arguments cause, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def toml_refusal(folder: Path, text: str) -> str:
    """The error that a configuration file causes."""
    (folder / "given.toml").write_text(text, encoding="utf-8")
    return refusal("@", str(folder / "given.toml"))


# What can be written.


def test_no_arguments_give_the_embedded_demo() -> None:
    assert load() == Config()


def test_a_later_source_wins_default_then_file_then_option(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nmax_steps = 5\nwarmup_steps = 2\n")
    config = load("@", str(tmp_path / "a.toml"), "--train.warmup-steps", "3")
    train = config.train
    assert (train.batch_size, train.max_steps, train.warmup_steps) == (128, 5, 3)


def test_an_option_takes_scientific_notation() -> None:
    assert load("--train.learning-rate", "1e-5").train.learning_rate == 0.00001


def test_every_knob_can_be_set_to_its_default_on_the_command_line() -> None:
    arguments = [
        f"--{name}.{leaf.replace('_', '-')}={default_text(field)}"
        for name, section in sections().items()
        for leaf, field in section.model_fields.items()
        if not rows_of(field)
    ]
    assert load(*arguments) == Config()


def test_a_file_may_stick_to_its_sign() -> None:
    assert load(f"@{CONFIGS / 'lan.toml'}").run.name == "lan-demo"


def test_groups_per_step_are_rollouts_divided_by_siblings() -> None:
    assert load("--train.batch-size", "48", "--sampling.num-generations", "4").groups_per_step == 12


def test_the_run_folder_is_dir_and_name() -> None:
    assert load("--run.dir", "/a", "--run.name", "b").run_folder == Path("/a/b")


def test_weights_lie_in_the_run_folder_unless_told_otherwise() -> None:
    assert load("--run.dir", "/a").weights_folder == Path("/a/demo/weights")
    assert load("--weights.dir", "/nas/w").weights_folder == Path("/nas/w")


def test_data_options_are_what_was_set_and_nothing_else() -> None:
    assert load("--data.train", "my.csv").data_options == {"train": "my.csv"}


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().train.max_steps = 3


# The shipped files.


def test_demo_file_says_what_holds_anyway_but_for_the_slots() -> None:
    config = load("@", str(CONFIGS / "demo.toml"))
    engine = config.engine
    assert engine.slots == config.train.batch_size // 2  # a step's share of two generators
    assert config.model_copy(update={"engine": engine.model_copy(update={"slots": 32})}) == Config()


def test_calculator_file_is_the_original_experiment() -> None:
    config = load("@", str(CONFIGS / "calculator.toml"))
    sampling, train = config.sampling, config.train
    assert config.model.name == "Qwen/Qwen3-0.6B"
    assert (train.batch_size, sampling.num_generations, train.max_steps) == (48, 4, 40)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.95, 40)
    assert sampling.max_completion_length == 48
    assert (train.learning_rate, train.lr_scheduler_type) == (2e-6, "constant")
    assert (train.max_grad_norm, config.loss.name, config.advantage.name) == (
        0.5, "reinforce", "group_mean",
    )  # fmt: skip
    assert (config.data.train, config.data.eval, config.wire.hwm) == ("math_1k", "math_250", 12)


def test_the_example_in_the_calculator_prompt_is_right() -> None:
    prompt = load("@", str(CONFIGS / "calculator.toml")).data.system_prompt or ""
    assert prompt.splitlines()[-1] == "Python: (8 * 5 + 3) / 2"
    assert prompt.startswith("Given a description of a math problem, output Python to compute it.")


def test_lan_file_listens_on_every_network_and_publishes_to_the_nas() -> None:
    config = load("@", str(CONFIGS / "lan.toml"))
    assert config.wire.bind == "0.0.0.0"
    assert config.weights_folder == Path("/mnt/nas/peralta/lan-demo")


# Names that do not exist.


def test_a_misspelt_option_is_answered_with_the_nearest_name() -> None:
    expected = "unknown setting train.max_step = '3'; did you mean train.max_steps?"
    assert refusal("--train.max-step", "3") == expected


def test_a_misspelt_key_in_a_file_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    expected = "unknown setting train.learning-rate = 1.0; did you mean train.learning_rate?"
    assert toml_refusal(tmp_path, "[train]\nlearning-rate = 1.0") == expected


def test_a_misspelt_section_is_answered_with_the_nearest_setting(tmp_path: Path) -> None:
    expected = "unknown setting trian.batch_size = 8; did you mean train.batch_size?"
    assert toml_refusal(tmp_path, "[trian]\nbatch_size = 8") == expected


def test_an_unknown_section_without_settings_is_answered_with_the_menu(tmp_path: Path) -> None:
    assert toml_refusal(tmp_path, "[xyz]").startswith(
        "unknown section [xyz]; the sections are run, model, task, data, curriculum, "
    )


def test_a_name_like_no_other_is_answered_with_the_menu_of_its_section() -> None:
    expected = "unknown setting log.qqq = '1'; the settings of [log] are level"
    assert refusal("--log.qqq", "1") == expected


def test_a_setting_in_the_wrong_section_is_answered_with_the_right_one() -> None:
    expected = "unknown setting train.temperature = '1'; "
    expected += "'temperature' is a setting of [sampling] here"
    assert refusal("--train.temperature", "1") == expected


def test_a_foreign_synonym_is_refused_with_the_right_name_and_its_section() -> None:
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
def test_a_known_synonym_leads_to_its_setting_even_at_the_root(foreign: str, right: str) -> None:
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
def test_a_synonym_is_read_in_its_section(written: str, right: str) -> None:
    assert refusal(f"--{written}", "1").endswith(f"write {right}")


def test_a_foreign_section_is_known_too() -> None:
    assert refusal("--ckpt.interval", "3").endswith("did you mean checkpoint.interval?")


def test_every_synonym_leads_to_a_setting_that_exists() -> None:
    known = {f"{section}.{leaf}" for section, leaves in known_fields().items() for leaf in leaves}
    assert set(FOREIGN) <= known


def test_no_synonym_is_claimed_twice() -> None:
    assert len(RIGHT_NAMES) == sum(len(names.split()) for names in FOREIGN.values())


# Values that do not fit.


def test_a_word_for_a_number_is_named_with_its_setting() -> None:
    assert refusal("--train.max-steps", "many") == (
        "train.max_steps = 'many' is wrong: "
        "should be a valid integer, unable to parse string as an integer"
    )


def test_a_wrong_choice_is_answered_with_the_menu() -> None:
    assert refusal("--train.lr-scheduler-type", "linaer") == (
        "train.lr_scheduler_type = 'linaer' is wrong: should be 'constant', 'linear' or 'cosine'"
    )


def test_true_is_not_the_number_one(tmp_path: Path) -> None:
    message = toml_refusal(tmp_path, "[train]\nmax_steps = true")
    assert message.startswith("train.max_steps = True is not a number or text; ")


def test_a_number_is_not_a_name(tmp_path: Path) -> None:
    message = toml_refusal(tmp_path, "[run]\nname = 5")
    assert message == "run.name = 5 is wrong: should be a valid string"


def test_all_wrong_values_are_named_at_once() -> None:
    message = refusal("--train.max-steps", "x", "--wire.port", "0")
    assert "train.max_steps = 'x'" in message
    assert "wire.port = '0'" in message


@pytest.mark.parametrize(
    ("flag", "written"),
    [
        ("sampling.num-generations", "1"),
        ("sampling.temperature", "0"),
        ("sampling.temp-end", "0"),
        ("sampling.top-p", "1.1"),
        ("sampling.top-p", "0"),
        ("sampling.top-k", "-1"),
        ("sampling.max-completion-length", "0"),
        ("train.max-steps", "0"),
        ("train.learning-rate", "0"),
        ("train.learning-rate", "inf"),
        ("train.learning-rate", "nan"),
        ("train.adam-beta2", "1"),
        ("train.max-async-level", "-1"),
        ("loss.epsilon", "0"),
        ("loss.epsilon", "1"),  # no ratio is below 0
        ("eval.num-examples", "-2"),
        ("eval.num-examples", "0"),
        ("wire.port", "65535"),
        ("wire.hwm", "0"),
        ("weights.poll-seconds", "0"),
        ("advantage.ddof", "2"),
    ],
)
def test_a_value_out_of_bounds_is_refused(flag: str, written: str) -> None:
    assert refusal(f"--{flag}={written}").startswith(flag.replace("-", "_"))


@pytest.mark.parametrize(
    ("batch_size", "below", "above"), [("50", 48, 56), ("55", 48, 56), ("5", 8, 16)]
)
def test_a_batch_that_does_not_divide_is_answered_with_the_two_nearest(
    batch_size: str, below: int, above: int
) -> None:
    assert refusal("--train.batch-size", batch_size) == (
        f"train.batch_size {batch_size} is not a multiple of sampling.num_generations 8; "
        f"use {below} or {above}"
    )


COSINE = ("--sampling.temp-scheduler", "cosine")


def test_a_temperature_and_a_scheduler_exclude_each_other() -> None:
    ends = ("--sampling.temp-start", "1", "--sampling.temp-end", "0.5")
    assert refusal(*COSINE, *ends, "--sampling.temperature", "1") == (
        "sampling.temperature 1.0 and sampling.temp_scheduler cosine exclude each other; "
        "leave one of them out, or set it to None"
    )
    assert load(*COSINE, *ends, "--sampling.temperature", "None").sampling.temp_end == 0.5


@pytest.mark.parametrize("end", ["start", "end"])
def test_an_end_of_a_temperature_needs_a_scheduler(end: str) -> None:
    assert refusal(f"--sampling.temp-{end}", "2").startswith(
        f"sampling.temp_{end} 2.0 needs a sampling.temp_scheduler; choose linear or cosine"
    )


@pytest.mark.parametrize(("given", "missing"), [("start", "end"), ("end", "start")])
def test_a_temperature_scheduler_needs_both_ends(given: str, missing: str) -> None:
    assert refusal(*COSINE, f"--sampling.temp-{given}", "2") == (
        f"sampling.temp_scheduler cosine needs sampling.temp_{missing}; give it a temperature"
    )


def test_warm_up_cannot_outlast_the_run() -> None:
    expected = "train.warmup_steps 81 is more than train.max_steps 80; use 80 or less"
    assert refusal("--train.warmup-steps", "81") == expected
    assert load("--train.warmup-steps", "80").train.warmup_steps == 80


def test_a_generator_beyond_the_count_is_refused() -> None:
    message = refusal("--generator.index", "2", "--generator.count", "2")
    assert message.startswith("generator.index 2 is not below generator.count 2; ")


@pytest.mark.parametrize("name", ["a/b", "..", "", "-x", "a b"])
def test_a_run_name_that_is_no_folder_name_is_refused(name: str) -> None:
    assert refusal(f"--run.name={name}").startswith("run.name ")


@pytest.mark.parametrize("key", ["run.name", "generator.name"])
def test_a_name_has_128_letters_at_most(key: str) -> None:
    load(f"--{key}", "x" * 128)
    assert refusal(f"--{key}", "x" * 129) == f"{key} has 129 letters; use 128 at most"


# Command lines and files that cannot be read.


def test_an_option_without_a_value_is_refused_not_fed_the_next_option() -> None:
    expected = "--run.name has no value; write --run.name VALUE (or --run.name=VALUE)"
    assert refusal("--run.name", "--train.max-steps", "4") == expected
    assert refusal("--run.name") == expected


def test_a_stray_word_is_refused() -> None:
    assert "stray" in refusal("stray")


def test_a_section_is_not_a_setting(tmp_path: Path) -> None:
    assert refusal("--train", "3").startswith("--train is a config group")
    message = toml_refusal(tmp_path, "log = 5")
    assert message == "'log' is a section, not a setting (log = 5); its settings: level"


def test_a_missing_file_is_answered_with_the_nearest_one() -> None:
    expected = f"config file {CONFIGS}/dmeo.toml does not exist; did you mean {CONFIGS}/demo.toml?"
    assert refusal("@", f"{CONFIGS}/dmeo.toml") == expected


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {}")
    assert "a.yaml is not a TOML file" in refusal("@", str(tmp_path / "a.yaml"))


def test_broken_toml_is_named_with_its_line(tmp_path: Path) -> None:
    message = toml_refusal(tmp_path, "[run]\nname =\n")
    assert "Invalid TOML" in message
    assert "line 2" in message


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refusal("@", str(tmp_path / "a.toml"))


@settings(deadline=None)
@given(st.lists(st.text(max_size=12) | st.sampled_from(["@", "--", "--train", "--run.name=x"])))
@example(["@", "a\nb"])
def test_no_command_line_is_answered_with_anything_but_one_line(words: list[str]) -> None:
    words = [word for word in words if word not in ("-h", "--help")]
    try:
        load(*words)
    except ConfigError as error:
        assert len(str(error).split("\n")) == 1


# Doors.


def door(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, error: BaseException | None = None
) -> int:
    """The exit code of a door whose loop raises `error`, or does nothing."""

    def main(config: Config) -> None:
        if error:
            raise error

    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    commands = ("local", "chaos") if "local" in arguments or "remote" in arguments else ()
    return run_program(main, "bin/x", commands=commands)


def test_a_door_exits_with_0_when_its_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert door(monkeypatch) == 0


def test_a_door_prints_a_refused_setting_as_one_line_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert door(monkeypatch, "--train.batch-size", "50") == 2
    assert capsys.readouterr().err == (
        "bin/x: error: train.batch_size 50 is not a multiple of sampling.num_generations 8; "
        "use 48 or 56\n"
    )


def test_a_door_prints_an_error_of_its_loop_as_one_line_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert door(monkeypatch, error=WireError("port 5555 is taken")) == 2
    assert capsys.readouterr().err == "bin/x: error: port 5555 is taken\n"


@pytest.mark.parametrize(("name", "code"), [("builtins:sum", 0), ("peralta_zmq.errors:none", 1)])
def test_once_a_door_has_imported_its_loop_garbage_is_collected_again(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["x"])
    gc.unfreeze()
    with ExitStack() as stack:
        if code:
            stack.enter_context(pytest.raises(AttributeError))
        assert run_plain_program(name, "bin/x") == code
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert frozen > 0  # what stays is looked at no more


def test_an_interrupted_door_exits_with_130_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert door(monkeypatch, error=KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_a_bug_in_the_loop_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        door(monkeypatch, error=ZeroDivisionError())


def test_a_door_with_commands_takes_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert door(monkeypatch, "local", "--train.max-steps", "3") == 0


def test_a_door_refuses_an_unknown_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert door(monkeypatch, "remote") == 2
    expected = "'remote' is not a command; write bin/x local or bin/x chaos\n"
    assert capsys.readouterr().err == f"bin/x: error: {expected}"


def test_help_of_a_door_with_commands_shows_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        door(monkeypatch, "local", "--help")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: bin/x {local,chaos} [@ FILE.toml ...]")


@pytest.mark.parametrize("name", ["trainer", "generator"])
def test_help_lists_every_knob_with_its_meaning_and_loads_no_large_library(name: str) -> None:
    """Nothing that computes or speaks is imported, so that it takes a third of a second."""
    code = f"""
import runpy, sys
sys.argv = ["bin/{name}", "--help"]
try:
    runpy.run_path({str(REPO / "bin" / name)!r})
except SystemExit as error:
    large = {{"torch", "transformers", "numpy", "zmq"}} & set(sys.modules)
    print(error.code, sorted(large), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr == "0 []\n"
    words = " ".join(result.stdout.split())
    for section, model in sections().items():
        for leaf, field in model.model_fields.items():
            if rows_of(field):
                continue
            default = default_text(field)
            flag = f"--{section}.{leaf.replace('_', '-')} {default} {field.description}"
            assert " ".join(flag.split()) in words


@pytest.mark.parametrize("name", ["trainer", "generator"])
def test_a_refused_setting_ends_the_program_before_torch_is_imported(name: str) -> None:
    code = f"""
import runpy, sys
sys.argv = ["bin/{name}", "--train.batch-size", "50"]
try:
    runpy.run_path({str(REPO / "bin" / name)!r})
except SystemExit as error:
    print(error.code, "torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "2 False\n"


@pytest.mark.parametrize("name", ["trainer", "generator", "lan"])
def test_a_door_finds_the_project_s_python_by_itself(name: str, tmp_path: Path) -> None:
    """Started by a Python without the libraries (-S hides site-packages), from anywhere."""
    if not (REPO / ".venv" / "bin" / "python").exists():
        pytest.skip("no .venv in this checkout")
    command = [sys.executable, "-S", str(REPO / "bin" / name), "--help"]
    plain = getattr(sys, "_base_executable", sys.executable)
    command[0] = plain
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.startswith(f"usage: bin/{name} ")


# The settings kept with a run.


def test_resolved_settings_are_read_back_as_written(tmp_path: Path) -> None:
    config = load("--loss.epsilon-high", "0.3", "--no-eval.eval-base-model")
    write_resolved(config, tmp_path)
    assert load("@", str(tmp_path / "config.toml")) == config


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
@example('\x7f \n " \\ \U0001f600')
def test_any_text_survives_config_toml(text: str) -> None:
    config = Config.model_validate({"data": {"system_prompt": f">{text}"}})
    assert tomli.loads(toml_text(config))["data"]["system_prompt"] == f">{text}"


def test_tables_survive_config_toml(tmp_path: Path) -> None:
    config = load(
        "--loss.kwargs", '{"a b": "x\\"y", "c": {"d": [1, 2.5, true]}}', "--filter.overlong",
        "--filter.repetition.window=7", "--filter.gibberish.enforce",
        "--filter.custom", '{"my.filters.own": {"enforce": true, "kwargs": {"limit": 3}}}',
    )  # fmt: skip
    write_resolved(config, tmp_path)
    again = load("@", str(tmp_path / "config.toml"))
    assert again == config
    assert again.loss.kwargs == {"a b": 'x"y', "c": {"d": [1, 2.5, True]}}
    overlong, repetition, gibberish = (
        getattr(again.filter, name) for name in ("overlong", "repetition", "gibberish")
    )
    assert (overlong.enforce, repetition.window, gibberish.enforce) == (False, 7, True)
    assert again.filter.custom["my.filters.own"].kwargs == {"limit": 3}


def test_every_setting_is_in_config_toml(tmp_path: Path) -> None:
    write_resolved(Config(), tmp_path)
    lines = (tmp_path / "config.toml").read_text().splitlines()
    there = sum(" = " in line for line in lines)
    assert there == sum(map(len, known_fields().values())) - 1  # [[eval.env]] is no line


def test_nothing_else_is_left_beside_config_toml(tmp_path: Path) -> None:
    write_resolved(Config(), tmp_path / "new" / "run")
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == ["config.toml"]


def test_a_run_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\)"):
        write_resolved(Config(), tmp_path / "file" / "run")


def test_a_new_folder_and_the_same_settings_are_the_same_run(tmp_path: Path) -> None:
    earlier_config(Config(), tmp_path)
    write_resolved(Config(), tmp_path)
    earlier_config(Config(), tmp_path)


def test_other_settings_are_named_with_both_values_and_the_two_ways_on(tmp_path: Path) -> None:
    write_resolved(Config(), tmp_path)
    changed = load("--loss.name", "grpo", "--train.batch-size", "64")
    with pytest.raises(ConfigError) as caught:
        earlier_config(changed, tmp_path)
    assert str(caught.value) == (
        f"run folder {tmp_path} was made with other settings: train.batch_size 128 -> 64, "
        "loss.name 'reinforce' -> 'grpo'; choose another --run.name, "
        "or delete the folder to start anew (FRESH=1 make run)"
    )


@pytest.mark.parametrize(
    "argument",
    [
        "--log.level=debug",
        "--generator.name=x",
        "--wire.port=6000",
        "--run.dir=elsewhere",
        "--run.num-local-generators=3",
        "--train.num-workers=3",
        "--train.max-steps=81",
        "--no-eval.eval-base-model",
        "--checkpoint.interval=5",
        "--weights.keep-last=9",
        "--model.device=cpu",
    ],
)
def test_what_does_not_define_the_run_may_change(argument: str, tmp_path: Path) -> None:
    write_resolved(Config(), tmp_path)
    earlier_config(load(argument), tmp_path)


@pytest.mark.parametrize(
    "argument",
    [
        "--run.seed=1",
        "--model.name=other",
        "--model.dtype=float32",
        "--task.name=other",
        "--data.train=math_10k",
        "--sampling.temperature=0.9",
        "--engine.slots=2",
        "--train.learning-rate=1e-5",
        "--train.max-steps=59",
        "--loss.epsilon=0.1",
        "--advantage.name=group_zscore",
    ],
)
def test_what_defines_the_run_may_not_change(argument: str, tmp_path: Path) -> None:
    write_resolved(Config(), tmp_path)
    with pytest.raises(ConfigError, match="made with other settings"):
        earlier_config(load(argument), tmp_path)


def test_a_scheduled_temperature_keeps_its_number_of_steps(tmp_path: Path) -> None:
    scheduled = (*COSINE, "--sampling.temp-start", "1", "--sampling.temp-end", "0.5")
    write_resolved(load(*scheduled), tmp_path)
    assert earlier_config(load(*scheduled), tmp_path) == load(*scheduled)
    with pytest.raises(ConfigError, match=r"train\.max_steps 80 -> 81"):
        earlier_config(load(*scheduled, "--train.max-steps", "81"), tmp_path)


def test_a_broken_config_toml_is_named_with_the_two_ways_on(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run")
    with pytest.raises(ConfigError, match=r"does not load .* choose another --run.name"):
        earlier_config(Config(), tmp_path)


# Who may connect.


@pytest.mark.parametrize("bind", ["0.0.0.0", "*", "::", "10.0.0.7", "eth0", "trainer.local"])
def test_listening_beyond_this_machine_without_keys_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"bin/doctor keygen.*--security\.insecure"):
        load_config("trainer", ["--wire.bind", bind])
    load_config("trainer", ["--wire.bind", bind, "--security.keys", "keys"])
    load_config("trainer", ["--wire.bind", bind, "--security.insecure"])


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_listening_on_this_machine_needs_no_keys(bind: str) -> None:
    assert load_config("trainer", ["--wire.bind", bind]).keys_folder is None
