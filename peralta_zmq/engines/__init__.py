"""Engines, which sample completions of prompts (protocol registry.Engine).

requests  shared code: problems to requests, tokens to completions, LoRA adapters
native    decode loop with its own KV cache and C kernels
hf        transformers' `generate`
"""

from peralta_zmq.engines.requests import evaluate, generate_groups

__all__ = ["evaluate", "generate_groups"]
