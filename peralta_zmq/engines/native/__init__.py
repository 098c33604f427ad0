"""Native engine: decode loop with a KV cache for Hugging Face decoder models.

native_engine    requests in, completions out; newer weights between two decode steps
prefix_cache     keys and values of prompts, and of their common prefix, computed once
turn_cache       keys and values of completions that may be continued
token_sampler    from logits to a token and its logprob
decoder          forward pass over the KV cache
kv_cache         keys and values of every row, allocated once
packed_linears   weights in the memory order in which this machine multiplies fastest
graphs           CUDA graphs of a decode step
kernels/         C code: decode_layer.c (between the matmuls), gemm.c and gemm_float.c (matmul)
"""
