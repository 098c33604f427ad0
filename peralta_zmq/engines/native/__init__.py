"""Our own decode loop over the weights of a Hugging Face decoder.

    engine    requests in, completions out, newer weights between two steps
    loop      what a step does to the completions under way
    rows      the completions under way
    prefix_cache what is computed once: the common prefix per weights, a prompt per group
    decoder   a model's forward over our cache: transformers' code, or for Llama's kind
    forward   our own
    kernels   C for what lies between the products, and for a packed weight times rows
    build     what compiles it once for a machine
    graphs    a decode step recorded for a GPU
    memory    whether all of that has room
    cache     keys and values of every row, allocated once
    linears   weights packed for the machine, replaced in place
    products  a packed weight times rows, by oneDNN or in C (gemm.c)
    sampler   from logits to a token and its logprob

Knows a model and token ids; knows nothing of rewards, sockets or the run.
"""

from peralta_zmq.engines.native.engine import NativeEngine, open_engine

__all__ = ["NativeEngine", "open_engine"]
