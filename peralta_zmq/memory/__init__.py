"""Memory that a run needs, computed from its settings and the model's config.json.

No weights are loaded.
"""

# Imports that other packages use as attributes of this package:
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from peralta_zmq.memory.model_shape import ModelShape, read_shape
from peralta_zmq.memory.plan import (
    GIB,
    Machine,
    Plan,
    Role,
    Workload,
    frozen_bytes,
    gib,
    moves_snapshots,
    plan_generator,
    plan_trainer,
    workload_of,
)
