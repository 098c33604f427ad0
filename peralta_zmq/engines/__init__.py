"""Engines: each turns prompts into sampled completions. `generate_groups` samples from any of them.

requests     problems to requests, tokens to completions: common to all engines
native       decode loop with its own KV cache and C kernels
hf           transformers' `generate`
lora_engine  wrapper that serves LoRA adapters through either of them
"""

from peralta_zmq.engines.requests import evaluate, generate_groups

__all__ = ["evaluate", "generate_groups"]
