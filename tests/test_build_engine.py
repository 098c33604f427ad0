"""The engine of a generator from the config and a published version."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from custom_code import files_with_code
from sample_data import tiny_model
from transformers import dynamic_module_utils

from peralta_zmq import build, models
from peralta_zmq.config import Config, load_config
from peralta_zmq.errors import ConfigError
from peralta_zmq.registry import EngineSettings
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber


def config_of(*arguments: str) -> Config:
    return load_config("bin/generator", arguments)


class RecordingEngine:
    """An engine factory that returns the settings with which it is called."""

    @staticmethod
    def open(folder: Path, settings: EngineSettings, *, step: int = 0) -> EngineSettings:
        return settings

    @staticmethod
    def open_live(model: Any, tokenizer: Any, settings: EngineSettings) -> EngineSettings:
        return settings


@pytest.mark.parametrize(("arguments", "keeps_turns"), [
    ((), False),
    (("--task.name", "guess_number"), True),
    (("--task.name", "guess_number", "--task.max-turns", "1"), False),
    (("--task.name", "calculator_tool"), True),
    (("--task.name", "verifiers:words"), True),
    (("--task.name", "reasoning_gym:gcd"), False),
])  # fmt: skip
def test_engine_keeps_turns_for_tasks_that_have_some(
    arguments: tuple[str, ...], keeps_turns: bool
) -> None:
    config = config_of("--engine.name", f"{__name__}:RecordingEngine", *arguments)
    settings = cast(Any, build.make_live_engine(config, cast(Any, None), cast(Any, None)))
    assert settings.keeps_turns == keeps_turns


def test_code_of_a_published_version_runs_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder, store = tmp_path / "model", WeightStore.open(tmp_path / "weights")
    shutil.copytree(models.EMBEDDED, folder)
    for name, content in files_with_code().items():
        (folder / name).write_bytes(content)
    store.claim("run")
    store.publish(0, models.weights_of(tiny_model()), companions=models.companion_files(folder))
    with closing(WeightSubscriber(store, tmp_path / "copy", poll_seconds=0.05)) as subscriber:
        pending = subscriber.poll(timeout=30)
        assert pending is not None
        with pytest.raises(ConfigError, match=r"custom Python code .*model\.trust_remote_code"):
            build.make_engine(config_of(), pending)
        engine, _ = build.make_engine(config_of("--model.trust-remote-code"), pending)
    assert type(cast(Any, engine)._model).__name__ == "MineModel"
