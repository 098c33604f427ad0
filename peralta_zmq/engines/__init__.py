"""Engines: each turns prompts into sampled completions (see the protocol registry.Engine).

requests  what all engines share: problems to requests, tokens to completions, LoRA adapters
native    decode loop with its own KV cache and C kernels
hf        transformers' `generate`
"""

from peralta_zmq.engines.requests import evaluate, generate_groups

__all__ = ["evaluate", "generate_groups"]
