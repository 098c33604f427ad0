"""Build the objects of a run from settings: learner, loss, engine, environments.

The classes that these modules build take plain values; the loops, the verifier and the programs
that start them keep the settings (`config`).

components    learner, loss, reference models
engines       engine, sampling
environments  problems, reward functions and demonstrations

These modules compute the memory that a run needs; the model is not loaded.

model_shape       sizes of a model, from its config.json
memory_plan       the memory of trainer and generator
memory_remedies   settings that make a plan fit
memory_checks     plans against this machine, and errors of allocations
"""

from peralta_zmq.build.components import (
    early_divisor,
    learning_rate_schedule,
    load_policy,
    make_advantage,
    make_filters,
    make_learner,
    make_loss,
    make_reference_models,
    make_scorer,
    reference_models_used,
)
from peralta_zmq.build.engines import (
    base_dtype,
    base_folder,
    choose_engine,
    eval_sampling_overrides,
    make_engine,
    make_eval_sampling,
    make_live_engine,
    make_sampling,
    sampling_overrides,
    weight_update,
)
from peralta_zmq.build.environments import (
    make_demonstrations,
    make_reward_functions,
    make_reward_pool,
    open_environments,
)
from peralta_zmq.build.memory_checks import (
    attempts_for,
    check_memory,
    check_start,
    machine_for,
    memory_errors,
    planner,
)
from peralta_zmq.build.memory_plan import gib, workload_of
from peralta_zmq.build.memory_remedies import sufficient
from peralta_zmq.build.model_shape import read_shape

__all__ = [
    "attempts_for",
    "base_dtype",
    "base_folder",
    "check_memory",
    "check_start",
    "choose_engine",
    "early_divisor",
    "eval_sampling_overrides",
    "gib",
    "learning_rate_schedule",
    "load_policy",
    "machine_for",
    "make_advantage",
    "make_demonstrations",
    "make_engine",
    "make_eval_sampling",
    "make_filters",
    "make_learner",
    "make_live_engine",
    "make_loss",
    "make_reference_models",
    "make_reward_functions",
    "make_reward_pool",
    "make_sampling",
    "make_scorer",
    "memory_errors",
    "open_environments",
    "planner",
    "read_shape",
    "reference_models_used",
    "sampling_overrides",
    "sufficient",
    "weight_update",
    "workload_of",
]
