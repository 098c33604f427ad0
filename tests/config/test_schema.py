"""Values out of bounds and contradictions between settings are refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import load, refusal, toml_refusal

from peralta_zmq.config import load_config
from peralta_zmq.errors import ConfigError


@pytest.mark.parametrize(("text", "expected"), [
    ("[train]\nmax_steps = 'x'", "train.max_steps = 'x' is wrong: should be a valid integer"),
    ("[train]\nmax_steps = true", "train.max_steps = True is wrong: should be a number or te"),
    ("[run]\nname = 5", "run.name = 5 is wrong: should be a valid string"),
    ("[train]\nmax_steps = 'x'\nmax_grad_norm = 0", "train.max_steps = 'x' is wrong: should be a "
     "valid integer, unable to parse string as an integer; train.max_grad_norm = 0 is wrong: "),
    ("[train]\nwarmup_steps = 81", "train.warmup_steps 81 is more than train.max_steps 80; use 80"),
    ("[lora]\nrank = 4\nbase_dtype = 'int4'", "lora.base_dtype = 'int4' is wrong: should be "
     "'bfloat16', 'float32', 'int8' or 'nf4'"),
    ("[log]\nlevel = 'loud'", "log.level = 'loud' is wrong: should be 'debug', 'info', 'warn"),
])  # fmt: skip
def test_value_of_another_type_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    assert toml_refusal(tmp_path, text).startswith(expected)


@pytest.mark.parametrize("setting", [
    "sampling.num-generations=1", "sampling.temperature=0",
    "sampling.top-p=1.1", "sampling.top-p=0", "sampling.top-k=-1",
    "sampling.max-completion-length=0", "train.max-steps=0", "train.learning-rate=0",
    "train.learning-rate=inf", "train.learning-rate=nan",
    "train.max-async-level=-1", "loss.epsilon=0",
    "loss.epsilon=1",  # no ratio is below 0
    "eval.num-examples=-2", "eval.num-examples=0", "wire.port=65535",
    "weights.interval=0", "loss.token-mask=8,1",
])  # fmt: skip
def test_value_out_of_bounds_is_refused(setting: str) -> None:
    name = setting.partition("=")[0].replace("-", "_")
    assert refusal(f"--{setting}").startswith(name)


@pytest.mark.parametrize(("batch_size", "nearest"), [("55", "48 or 56"), ("5", "8 or 16")])
def test_indivisible_batch_size_names_the_two_nearest(batch_size: str, nearest: str) -> None:
    expected = f"{batch_size} is not a multiple of sampling.num_generations 8; use {nearest}"
    assert refusal("--train.batch-size", batch_size) == f"train.batch_size {expected}"


@pytest.mark.parametrize(("setting", "value", "needed"), [
    ("loss.sft_weight", "0.5", "loss.sft_file"),
    ("generator.token_file", "key", "generator.serve_port"),
    ("lora.base_dtype", "nf4", "lora.rank"),
])  # fmt: skip
def test_setting_without_the_one_that_uses_it_is_refused(
    setting: str, value: str, needed: str
) -> None:
    option = f"--{setting}={value}".replace("_", "-")
    assert (
        refusal(option) == f"{setting} has no effect without {needed}; set it or remove {setting}"
    )
    load(option, f"--{needed}=9".replace("_", "-"))


def test_weights_interval_without_older_weights_is_refused() -> None:
    assert refusal("--weights.interval", "2", "--train.max-async-level", "0") == (
        "weights.interval 2 needs older weights in the steps between two versions, but "
        "train.max_async_level is 0; use weights.interval 1, or train.max_async_level 1 or more"
    )
    assert refusal("--weights.interval", "5") == (
        "weights.interval 5 with train.max_async_level 1 makes groups up to 9 steps old, and "
        "train.max_off_policy_steps 8 would drop them; set it to 9 or more, or lower "
        "weights.interval"
    )
    assert load("--weights.interval", "4").weights.interval == 4
    assert load("--train.max-async-level", "0").weights.interval == 1


@pytest.mark.parametrize("key", ["run.name", "generator.name"])
@pytest.mark.parametrize("name", ["a/b", "..", "", "-x", "a b", "a\x1b[2J", "a\n", "ü", "x" * 129])
def test_name_with_other_characters_or_of_129_is_refused(key: str, name: str) -> None:
    message = refusal(f"--{key}={name}")
    assert message.startswith(f"{key} ") and message.isprintable()


def test_default_generator_name_has_only_allowed_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Jürgen's Mac.local")
    assert load().generator.full_name == "J_rgen_s_Mac.local"
    assert load("--generator.name", "ann").generator.full_name == "ann"


@pytest.mark.parametrize("bind", ["0.0.0.0", "*", "::", "10.0.0.7", "eth0", "trainer.local"])
def test_public_bind_without_keys_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"bin/doctor keygen.*--security\.insecure"):
        load_config("trainer", ["--wire.bind", bind])
    load_config("trainer", ["--wire.bind", bind, "--security.keys", "keys"])
    load_config("trainer", ["--wire.bind", bind, "--security.insecure"])
    for loopback in ("127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"):
        assert load_config("trainer", ["--wire.bind", loopback]).keys_folder is None


@pytest.mark.parametrize("setting", ["wire.host", "wire.bind", "verifier.host", "dashboard.host"])
@pytest.mark.parametrize("host", [
    "tcp://box", "box:5555", "box/x", "bo x", " box", "box\n", "b\xfcx",
    "a..b", "a" * 64, ".", "[box:1]", "::g", "user@box",
])  # fmt: skip
def test_host_that_is_no_name_or_address_is_refused(setting: str, host: str) -> None:
    reason = refusal(f"--{setting}={host}")
    assert reason.startswith(f"{setting} = ") and "should be only the name" in reason
    assert "\n" not in reason


@pytest.mark.parametrize(("text", "host"), [
    ("box.lan", "box.lan"), ("BOX_1", "BOX_1"), ("box.", "box."), ("::1", "::1"),
    ("[fd00::2]", "fd00::2"), ("fe80::1%eth0", "fe80::1%eth0"), ("192.168.1.5", "192.168.1.5"),
])  # fmt: skip
def test_host_is_a_name_or_an_address_without_brackets(text: str, host: str) -> None:
    config = load("--wire.host", text, "--wire.bind", text, "--security.insecure")
    assert config.wire.host == config.wire.bind == host


@pytest.mark.parametrize("setting", [
    *("weights.dir", "run.dir", "wire.address_dir", "security.keys"),
    *("generator.token_file", "security.token_file", "dashboard.token_file"),
])  # fmt: skip
@pytest.mark.parametrize("path", [
    "nas:/x", "me@nas:/x", "nas:x", r"\\nas\share", "//nas/share", "smb://nas/x", "nfs://nas/x",
    "file:///x", "https://nas/x", "$HOME/x", "/scratch/${USER}/x", "~nobody-here/x",
])  # fmt: skip
def test_path_of_another_machine_or_of_a_shell_is_refused(setting: str, path: str) -> None:
    options = ("--generator.serve-port", "8000") if setting.startswith("generator") else ()
    reason = refusal(*options, f"--{setting}={path}")
    assert reason.startswith(f"{setting} = ") and "mount it" in reason


@pytest.mark.parametrize("path", [
    "/mnt/nas/w", "~/w", "runs/w", "./12:30/w", "/mnt/a:b", "/mnt/c$/w", "///w", "/mnt/my nas/w",
    "http://box:5570", "http://[::1]:5570", "s3://bucket/prefix",
])  # fmt: skip
def test_path_or_url_of_a_weight_store_is_kept(path: str) -> None:
    assert load("--weights.dir", path).weights.dir == path
