"""Engines, which sample completions of prompts (protocol registry.Engine).

group_sampler    problems to groups of completions with any engine, with the replies of the tasks
choice           which engine runs
row_engine       engine of native, hf and mlx: requests to rows, a token for every row
completion_rows  completions in progress, their ends, their policy steps
engine_models    opening a folder as a torch model; adapters
native           decoder with its own KV cache and C kernels
hf_engine        transformers' forward pass and cache, for every model
mlx              mlx-lm's models, for Macs
vllm             vLLM in a process of its own, for CUDA
"""

from peralta_zmq.engines.group_sampler import Group, Sampler

__all__ = ["Group", "Sampler"]
