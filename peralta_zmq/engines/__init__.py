"""Engines, which sample completions of prompts (protocol registry.Engine).

requests      problems to completions, with any engine
episodes      completions of several turns, with the replies of the tasks
choice        which engine runs
rows          what the engines share: completions in progress, their ends, their policy steps
loading       opening a folder as a torch model; adapters
native        decode loop with its own KV cache and C kernels
hf            transformers' `generate`
mlx           decode loop with mlx-lm's models, for Macs
vllm          vLLM in a process of its own, for CUDA
"""

from peralta_zmq.engines.requests import GroupSampler, evaluate, generate_groups

__all__ = ["GroupSampler", "evaluate", "generate_groups"]
