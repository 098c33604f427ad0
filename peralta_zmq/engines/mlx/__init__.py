"""Engine on MLX: decode loop with mlx-lm's models, for Macs, and for tests on a Linux CPU.

MLX is imported when an engine is opened, so that a trainer without MLX can read the same config.
"""

from __future__ import annotations

from pathlib import Path

from peralta_zmq.registry import Engine, EngineSettings


def open(folder: Path, settings: EngineSettings, *, step: int = 0) -> Engine:
    from peralta_zmq.engines.mlx.mlx_engine import open_engine

    return open_engine(folder, settings, step=step)
