"""Tiny random models in the layouts in which real models are published."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from sample_data import TINY
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from peralta_zmq import models

SIZES = {**TINY, "vocab_size": 468, "head_dim": 16, "num_attention_heads": 4}
SIZES["num_key_value_heads"] = 2
GEMMA3: dict[str, Any] = {
    "mm_tokens_per_image": 4,
    "eos_token_id": [2],
    "text_config": {
        **SIZES,
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    },
}
QWEN3_5: dict[str, Any] = {
    "tie_word_embeddings": True,
    "text_config": {
        **SIZES,
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 16,
        "num_position_embeddings": 16,
    },
}
MULTIMODAL = {"gemma3": GEMMA3, "qwen3_5": QWEN3_5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TEXT: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {"tie_word_embeddings": False},
    "nemotron_h": {
        "hybrid_override_pattern": "*E",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
    },
    "gpt2": {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 256},
}


def text_model(model_type: str, *, seed: int = 0) -> Any:
    """A random model of a type in TEXT."""
    torch.manual_seed(seed)
    settings = {**SIZES, **TEXT[model_type], "model_type": model_type}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).eval()


def multimodal_model(model_type: str, folder: Path) -> Any:
    """A random model of a type in MULTIMODAL, saved in `folder` with the embedded tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **MULTIMODAL[model_type])
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    for file in models.EMBEDDED.glob("tokenizer*"):
        shutil.copy(file, folder)
    return model
