"""The engine of a generator from the config and a published version."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import torch
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


@pytest.mark.parametrize(("identity", "is_refused"), [
    ("vocab_size=468 end_tokens=0,2", True), ("vocab_size=468 end_tokens=2", False), (None, False)
])  # fmt: skip
def test_generator_refuses_a_version_of_another_tokenizer(
    tmp_path: Path, identity: str | None, is_refused: bool
) -> None:
    store = WeightStore.open(tmp_path / "weights")
    store.claim("run")
    companions = models.companion_files(models.EMBEDDED, models.load_tokenizer(models.EMBEDDED))
    about = {"tokenizer": identity} if identity else {}
    weights = models.weights_of(load_embedded())
    store.publish(0, weights, companions=companions, about=about)
    with closing(WeightSubscriber(store, tmp_path / "copy", poll_seconds=0.05)) as subscriber:
        pending = subscriber.poll(timeout=30)
        assert pending is not None
        if not is_refused:
            build.make_engine(config_of(), pending)
            return
        words = r"generator ann has another tokenizer .*end_tokens=0,2 -> end_tokens=2\); install"
        with pytest.raises(ConfigError, match=words):
            build.make_engine(config_of("--generator.name=ann"), pending)


def load_embedded() -> Any:
    return models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.bfloat16)


def test_code_of_a_published_version_runs_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    folder, store = tmp_path / "model", WeightStore.open(tmp_path / "weights")
    shutil.copytree(models.EMBEDDED, folder)
    for name, content in files_with_code().items():
        (folder / name).write_bytes(content)
    store.claim("run")
    companions = models.companion_files(folder, models.load_tokenizer(models.EMBEDDED))
    store.publish(0, models.weights_of(tiny_model()), companions=companions)
    with closing(WeightSubscriber(store, tmp_path / "copy", poll_seconds=0.05)) as subscriber:
        pending = subscriber.poll(timeout=30)
        assert pending is not None
        with pytest.raises(ConfigError, match=r"custom Python code .*model\.trust_remote_code"):
            build.make_engine(config_of(), pending)
        assert capsys.readouterr().out == ""
        build.make_engine(config_of("--model.trust-remote-code"), pending)
    assert "code of the model folder runs" in capsys.readouterr().out
