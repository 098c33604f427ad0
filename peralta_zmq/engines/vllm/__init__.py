"""Engine on vLLM, for CUDA machines and, more slowly, for a Linux CPU.

vLLM has its own versions of torch and transformers, so a generator with this engine has a virtual
environment of its own.
"""
