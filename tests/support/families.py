"""Tiny random models in the layout in which families of models are published.

The settings have the names and the relations of the published config.json. Sizes, windows and
original lengths are small.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from engine_data import save_model
from transformers import AutoConfig, AutoModelForCausalLM

WINDOW = 24  # tokens of a sliding window, or of a chunk
ORIGINAL = 32  # tokens before a rotary embedding is scaled
COMMON: dict[str, Any] = {
    "vocab_size": 468, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"] * 2
FACTORS = {"short_factor": [1 + 0.05 * index for index in range(16)],
           "long_factor": [1 + 0.5 * index for index in range(16)]}  # fmt: skip
MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
         "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16, "mamba_conv_bias": True,
         "mamba_proj_bias": False}  # fmt: skip
DELTA_NET = {"linear_conv_kernel_dim": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
             "linear_key_head_dim": 64, "linear_value_head_dim": 64,
             "layer_types": ["linear_attention", "linear_attention", "linear_attention",
                             "full_attention"]}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "norm_topk_prob": True}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": ORIGINAL}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}

# The family's name in docs/models.md -> settings in config.json.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2.5": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": WINDOW,
                "max_window_layers": 2, "rope_theta": 1e6, "tie_word_embeddings": True},
    "Qwen3": {"model_type": "qwen3", "head_dim": 32, "use_sliding_window": False,
              "sliding_window": None, "rope_theta": 1e6, "tie_word_embeddings": True},
    "Qwen3-MoE": {"model_type": "qwen3_moe", "head_dim": 32, "decoder_sparse_step": 1,
                  "rope_theta": 1e6, "mlp_only_layers": [], "use_sliding_window": False, **EXPERTS},
    "Qwen3.5": {"model_type": "qwen3_5_text", "head_dim": 32, **DELTA_NET,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                                    "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                                    "mrope_section": [2, 1, 1]}},
    "Llama 3.1-3.3": {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "SmolLM2": {"model_type": "llama", "rope_theta": 1e5, "tie_word_embeddings": True,
                "rope_interleaved": False, "rope_scaling": None},
    "SmolLM3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0],
                "no_rope_layer_interval": 4, "layer_types": ["full_attention"] * 4,
                "sliding_window": None, "use_sliding_window": False, "rope_theta": 5e6,
                "tie_word_embeddings": True},
    "Gemma 2": {"model_type": "gemma2", "head_dim": 32, "sliding_window": WINDOW,
                "query_pre_attn_scalar": 32, "attn_logit_softcapping": 50.0,
                "tie_word_embeddings": True,
                "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"},
    "Gemma 3 1B": {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": WINDOW,
                   "sliding_window_pattern": 2, "query_pre_attn_scalar": 32,
                   "rope_local_base_freq": 1e4, "rope_theta": 1e6,
                   "tie_word_embeddings": True},
    "Gemma 3 4B-27B": {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": WINDOW,
                       "sliding_window_pattern": 2, "query_pre_attn_scalar": 32,
                       "rope_local_base_freq": 1e4, "rope_theta": 1e6,
                       "tie_word_embeddings": True,
                       "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "Gemma 4": {"model_type": "gemma4_text", "head_dim": 32, "global_head_dim": 64,
                "sliding_window": WINDOW, "layer_types": LAYERS,
                "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 468,
                "num_kv_shared_layers": 2, "final_logit_softcapping": 30.0,
                "tie_word_embeddings": True, "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                                       "partial_rotary_factor": 0.25},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "Mistral 7B v0.1": {"model_type": "mistral", "sliding_window": WINDOW},
    "Ministral 8B": {"model_type": "mistral", "head_dim": 32, "sliding_window": WINDOW,
                     "rope_theta": 1e8},
    "Ministral 3": {"model_type": "ministral3", "head_dim": 32, "sliding_window": None,
                    "rope_parameters": {**YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}},
    "Phi-3-mini-4k": {"model_type": "phi3", "sliding_window": WINDOW},
    "Phi-3-mini-128k": {"model_type": "phi3", "sliding_window": 4096,
                        "original_max_position_embeddings": ORIGINAL,
                        "rope_scaling": {"type": "longrope", **FACTORS}},
    "Phi-4-mini": {"model_type": "phi3", "sliding_window": 4096, "partial_rotary_factor": 0.75,
                   "original_max_position_embeddings": ORIGINAL, "tie_word_embeddings": True,
                   "rope_scaling": {"type": "longrope",
                                    **{name: each[:12] for name, each in FACTORS.items()}}},
    "gpt-oss": {"model_type": "gpt_oss", "head_dim": 32, "sliding_window": WINDOW,
                "layer_types": LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2,
                "swiglu_limit": 7.0, "rope_theta": 15e4,
                "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    "LFM2": {"model_type": "lfm2", "conv_L_cache": 3, "conv_dim": 128, "conv_bias": False,
             "norm_eps": 1e-5, "block_dim": 128, "block_ff_dim": 96,
             "block_auto_adjust_ff_dim": False, "block_multiple_of": 32,
             "block_ffn_dim_multiplier": 1.0, "rope_theta": 1e6, "tie_word_embeddings": True,
             "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "OLMo 2": {"model_type": "olmo2"},
    "OLMo 3": {"model_type": "olmo3", "sliding_window": WINDOW, "layer_types": LAYERS,
               "rope_theta": 5e5,
               "rope_scaling": {**YARN, "attention_factor": 1.2079441541679836,
                                "beta_fast": 32, "beta_slow": 1}},
    "Granite 3": {"model_type": "granite", "attention_multiplier": 0.25,
                  "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
                  "rope_theta": 1e7, "tie_word_embeddings": True},
    "Granite 4 hybrid": {"model_type": "granitemoehybrid", "num_local_experts": 4,
                         "layer_types": ["mamba", "mamba", "attention", "mamba"],
                         "num_experts_per_tok": 2, "shared_intermediate_size": 64,
                         "position_embedding_type": "nope", "attention_multiplier": 0.25,
                         "embedding_multiplier": 2.0, "logits_scaling": 2.0,
                         "residual_multiplier": 0.5, "tie_word_embeddings": True, **MAMBA},
    "Granite 4": {"model_type": "granitemoehybrid", "num_local_experts": 0,
                  "layer_types": ["attention"] * 4, "shared_intermediate_size": 96,
                  "position_embedding_type": "rope", "attention_multiplier": 0.25,
                  "embedding_multiplier": 2.0, "logits_scaling": 2.0,
                  "residual_multiplier": 0.5, "tie_word_embeddings": True, **MAMBA},
    "GLM-4": {"model_type": "glm4", "head_dim": 32, "partial_rotary_factor": 0.5,
              "attention_bias": True, "rope_theta": 1e4},
    "DeepSeek-V3": {"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 32,
                    "kv_lora_rank": 512, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64,
                    "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
                    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                    "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True,
                    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                    "routed_scaling_factor": 2.5,
                    "rope_scaling": {"type": "yarn", "factor": 8, "beta_fast": 32, "beta_slow": 1,
                                     "mscale": 1.0, "mscale_all_dim": 1.0,
                                     "original_max_position_embeddings": ORIGINAL}},
    "Falcon-H1": {"model_type": "falcon_h1", "head_dim": 32, "mamba_d_ssm": 256,
                  "mamba_rms_norm": False, "mamba_norm_before_gate": False, "rope_theta": 1e11,
                  "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
                  "embedding_multiplier": 5.0, "key_multiplier": 0.39, "lm_head_multiplier": 0.5,
                  "mlp_multipliers": [0.88, 0.59], "ssm_in_multiplier": 1.25,
                  "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.35], "ssm_out_multiplier": 0.24,
                  **MAMBA},
    "Nemotron-H": {"model_type": "nemotron_h", "head_dim": 32, "attention_head_dim": 32,
                   "hybrid_override_pattern": "M-M*", "mamba_num_heads": 8, "mamba_head_dim": 16,
                   "ssm_state_size": 16, "n_groups": 1, "conv_kernel": 4, "chunk_size": 16,
                   "layer_norm_epsilon": 1e-5, "mamba_proj_bias": False, "use_bias": False,
                   "use_conv_bias": True},
    "EXAONE 4": {"model_type": "exaone4", "sliding_window": WINDOW,
                 "sliding_window_pattern": "LLLG", "rope_theta": 1e6, "head_dim": 32,
                 "rope_scaling": LLAMA3,
                 "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
}  # fmt: skip


def random_model(
    settings: dict[str, Any], *, folder: Path | None = None, scale: float = 4.0
) -> Any:
    """A model with `settings`, in fp32, that is sharper than an untrained one.

    With a `folder`, it is loaded from there, with config.json in the published layout.
    """
    # transformers adds rope_theta to dictionaries of rotary embeddings.
    config = AutoConfig.for_model(**copy.deepcopy({**COMMON, **settings}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("bias", ".A")):  # zero, or one number
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=random))
            elif tensor.ndim >= 2 and "conv" not in name:
                tensor.mul_(scale)
    if folder is not None:
        save_model(model, folder)
        published = {**COMMON, **settings, "architectures": [type(model).__name__]}
        (folder / "config.json").write_text(json.dumps(published), "utf-8")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model
