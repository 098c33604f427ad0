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
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber


def config_of(*arguments: str) -> Config:
    return load_config("bin/generator", arguments)


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
