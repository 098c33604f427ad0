"""Which engine runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from peralta_zmq.engines.choice import Machine, choose_engine, live_engine
from peralta_zmq.engines.hf import HfEngine
from peralta_zmq.engines.native import NativeEngine
from peralta_zmq.errors import ConfigError, StoreError
from peralta_zmq.registry import EngineSettings

OTHER = Machine(is_apple=False, has_mlx=False)


class FolderEngine:
    """A user's engine that cannot open a torch model in memory."""

    @staticmethod
    def open() -> None: ...


def test_trainer_evaluates_with_an_engine_for_models_in_memory() -> None:
    assert live_engine("hf") is HfEngine
    assert live_engine("mlx") is live_engine("auto") is NativeEngine
    assert live_engine(f"{__name__}.FolderEngine") is NativeEngine


@pytest.mark.parametrize("name", ["native", "hf", "auto"])
def test_option_that_an_engine_lacks_is_refused_with_the_engines_that_have_it(name: str) -> None:
    engine = r"'native' \(auto: not Apple silicon\)" if name == "auto" else f"'{name}'"
    message = rf"engine\.quantize 4 is not an option of engine {engine}; .*engine\.name to mlx"
    with pytest.raises(ConfigError, match=message):
        choose_engine(name, EngineSettings(quantize=4), machine=OTHER)


def test_option_is_left_to_a_custom_engine() -> None:
    choose_engine("my_lab.Engine", EngineSettings(quantize=4), machine=OTHER)


@pytest.mark.skipif(find_spec("mlx_lm") is not None, reason="mlx-lm is installed")
def test_missing_library_is_named_with_its_remedy() -> None:
    message = r"engine\.name 'mlx' needs mlx_lm .*; pip install 'peralta_zmq\[mlx\]'"
    with pytest.raises(ConfigError, match=message):
        choose_engine("mlx", EngineSettings(), machine=OTHER)


@pytest.mark.parametrize(
    ("machine", "engine", "reason"),
    [
        (Machine(is_apple=True, has_mlx=True), "mlx", "auto: Apple silicon with mlx-lm"),
        (Machine(is_apple=True, has_mlx=False), "native", "auto: mlx-lm is not installed; pip in"),
        (Machine(is_apple=False, has_mlx=True), "native", "auto: not Apple silicon"),
    ],
)
def test_automatic_choice_depends_on_the_machine(
    machine: Machine, engine: str, reason: str
) -> None:
    if engine == "mlx":
        pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    chosen, given = choose_engine("auto", EngineSettings(), machine=machine)
    assert chosen == engine and given.startswith(reason)
    assert choose_engine("hf", EngineSettings(), machine=machine) == ("hf", "set by engine.name")


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
def test_automatic_choice_is_native_for_a_model_that_mlx_lacks(tmp_path: Path) -> None:
    machine = Machine(is_apple=True, has_mlx=True)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3"}')
    assert choose_engine("auto", EngineSettings(), machine=machine, folder=tmp_path)[0] == "mlx"
    config.write_text('{"model_type": "bigbird"}')
    engine, reason = choose_engine("auto", EngineSettings(), machine=machine, folder=tmp_path)
    assert engine == "native" and "auto: engine 'mlx' has no model 'bigbird'" in reason
    config.write_text("{")
    with pytest.raises(StoreError, match="cannot be loaded"):  # not hidden by another engine
        choose_engine("auto", EngineSettings(), machine=machine, folder=tmp_path)
