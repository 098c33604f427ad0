"""Engine on vLLM, for CUDA machines.

vllm_engine  requests in, completions out; newer weights between two steps of vLLM
process      starts the core, a process with vLLM, and detects that it has died or hangs
core         the program of that process: vLLM's LLMEngine, controlled through a socket

vLLM has its own versions of torch and transformers, so a generator with this engine has a virtual
environment of its own. vLLM also runs on a Linux CPU (`make test-vllm`).
"""
