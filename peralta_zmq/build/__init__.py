"""Build the objects of a run, which take plain values, from settings."""

# Imports that other packages use as attributes of this package:
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from peralta_zmq.build.components import (
    first_masters,
    load_policy,
    make_learner,
    update_settings,
)
from peralta_zmq.build.engines import (
    base_dtype,
    base_folder,
    engine_name,
    eval_group_sampling,
    group_sampling,
    make_engine,
    make_eval_sampling,
    make_live_engine,
    make_sampling,
    open_engine,
    weight_update,
)
from peralta_zmq.build.environments import (
    open_environments,
)
from peralta_zmq.build.memory_checks import (
    MemoryPlanner,
    check_start,
    memory_errors,
    moves_snapshots,
)
