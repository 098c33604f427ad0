"""Which engine runs."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from peralta_zmq.engines.choice import check_engine, live_engine
from peralta_zmq.engines.hf import HfEngine
from peralta_zmq.engines.native import NativeEngine
from peralta_zmq.errors import ConfigError


class FolderEngine:
    """A user's engine that cannot open a torch model in memory."""

    @staticmethod
    def open() -> None: ...


def test_trainer_evaluates_with_an_engine_for_models_in_memory() -> None:
    assert live_engine("hf") is HfEngine
    assert live_engine("mlx") is NativeEngine
    assert live_engine(f"{__name__}.FolderEngine") is NativeEngine


@pytest.mark.parametrize("name", ["native", "hf"])
def test_option_that_an_engine_lacks_is_refused_with_the_engines_that_have_it(name: str) -> None:
    message = rf"engine\.quantize 4 is not an option of engine '{name}'; .*engine\.name to mlx"
    with pytest.raises(ConfigError, match=message):
        check_engine(name, {"quantize": 4})
    check_engine(name, {"quantize": None})


def test_option_is_left_to_a_custom_engine() -> None:
    check_engine("my_lab.Engine", {"quantize": 4})


@pytest.mark.skipif(find_spec("mlx_lm") is not None, reason="mlx-lm is installed")
def test_missing_library_is_named_with_its_remedy() -> None:
    message = r"engine\.name 'mlx' needs mlx_lm .*; pip install 'peralta_zmq\[mlx\]'"
    with pytest.raises(ConfigError, match=message):
        check_engine("mlx", {})
