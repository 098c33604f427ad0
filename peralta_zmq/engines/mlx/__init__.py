"""Engine on MLX: decode loop with mlx-lm's models, for Macs.

mlx_engine  rows of mlx-lm's caches; from logits to a token and its logprob
mlx_model   an mlx-lm model of a folder, and published weights as MLX arrays

MLX is imported when an engine is opened, so that a trainer without MLX can read the same config.
MLX also runs on a Linux CPU (`make test-mlx`).
"""

from __future__ import annotations

from pathlib import Path

from peralta_zmq.registry import Engine, EngineSettings


class MlxEngine:
    """Opens engines on MLX; implements the protocol registry.EngineFactory."""

    @staticmethod
    def open(folder: Path, settings: EngineSettings, *, step: int = 0) -> Engine:
        """Open the model and tokenizer in `folder`."""
        from peralta_zmq.engines.mlx.mlx_engine import open_engine

        return open_engine(folder, settings, step=step)
