"""A model folder with custom code."""

from __future__ import annotations

import json

from sample_data import TINY

# mine.py of a model with custom code, which prints a line when it runs.
MODEL_CODE = b"""
from transformers import Qwen3Config, Qwen3ForCausalLM

print("code of the model folder runs")

class MineConfig(Qwen3Config):
    model_type = "mine"

class MineModel(Qwen3ForCausalLM):
    config_class = MineConfig
"""


def files_with_code(model_type: str = "mine") -> dict[str, bytes]:
    """config.json and mine.py of a model as `tiny_model`, whose classes are in mine.py."""
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineModel"}
    config = {**TINY, "model_type": model_type, "auto_map": auto_map}
    return {"config.json": json.dumps(config).encode(), "mine.py": MODEL_CODE}
