"""Native engine: a decode loop with its own KV cache for Hugging Face decoder models.

engine        requests in, completions out; newer weights between two decode steps
prefix_cache  prompt work done once: common prefix per weights, one prompt per group
sampler       from logits to a token and its logprob
decoder       forward pass over the KV cache
cache         keys and values of every row, allocated once
linears       weights packed for this machine, replaced in place
graphs        CUDA graphs of a decode step
kernels/      C code: decode_layer.c (between the matmuls), gemm.c (packed matmul)
"""

from peralta_zmq.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
