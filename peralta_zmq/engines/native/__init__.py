"""Native engine: decode loop with a KV cache for Hugging Face decoder models.

engine        requests in, completions out; newer weights between two decode steps
prefix_cache  computes the prefix of all prompts once per version of the weights, and the rest of a
              prompt once per group (the completions of one prompt)
turn_cache    keeps the keys and values of completions that may be continued
sampler       from logits to a token and its logprob
decoder       forward pass over the KV cache
cache         keys and values of every row, allocated once
linears       weights in the memory order in which this machine multiplies fastest
graphs        CUDA graphs of a decode step
kernels/      C code: decode_layer.c (between the matmuls), gemm.c and gemm_float.c (packed matmul)
"""

from peralta_zmq.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
