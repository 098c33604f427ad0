"""Engine on vLLM, for CUDA machines.

vllm_engine  requests in, completions out; newer weights between two steps of vLLM
process      starts the core, a process with vLLM, and detects that it has died or hangs
core         the program of that process: vLLM's LLMEngine, controlled through a socket

vLLM has its own versions of torch and transformers, so a generator with this engine has a virtual
environment of its own. vLLM also runs on a Linux CPU (`make test-vllm`).
"""

from __future__ import annotations

from pathlib import Path

from peralta_zmq.registry import Engine, EngineSettings


class VllmEngine:
    """Opens engines on vLLM; implements the protocol registry.EngineFactory."""

    @staticmethod
    def open(folder: Path, settings: EngineSettings, *, step: int = 0) -> Engine:
        """Open the model and tokenizer in `folder`."""
        from peralta_zmq.engines.vllm.vllm_engine import open_engine

        return open_engine(folder, settings, step=step)
