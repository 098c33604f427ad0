"""Memory plans against this machine: at the start, and after an allocation has failed."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from peralta_zmq import models
from peralta_zmq.build.components import reference_models_used
from peralta_zmq.build.engines import choose_engine, settings_with_turns
from peralta_zmq.build.memory_plan import (
    GIB,
    Machine,
    Plan,
    Role,
    gib,
    plan_generator,
    plan_trainer,
)
from peralta_zmq.build.memory_remedies import (
    Attempt,
    MakePlan,
    generator_remedies,
    sufficient,
    trainer_remedies,
    try_remedies,
)
from peralta_zmq.build.model_shape import ModelShape, read_shape
from peralta_zmq.config import Config, files_given
from peralta_zmq.errors import ConfigError, program_name

# In the text of a RuntimeError of torch for an allocation on cuda, mps and cpu.
MEMORY_TEXTS = ("out of memory", "can't allocate memory")
SAVING = 0.8  # a setting proposed after an error needs at most this part of the planned peak
# Names of the parts in `Plan.certain`.
CERTAIN = {"trainer": "weights, gradients and optimizer state", "generator": "weights"}
logger = logging.getLogger(__name__)


def machine_for(
    config: Config, folder: Path, shape: ModelShape, *, memory_gib: float | None = None
) -> Machine:
    """Device, memory and dtypes for the model in `folder`.

    They are those of this machine, except that `memory_gib` replaces its memory. With it, `cuda`
    may name the card of another machine. Raises ConfigError for a device that cannot be used.
    """
    name, engine = config.model.device, config.engine.name
    engine = "native" if engine == "auto" else engine
    memory = None if memory_gib is None else memory_gib * GIB
    if memory is not None and name.startswith("cuda") and not torch.cuda.is_available():
        return Machine("cuda", memory, engine=engine)
    with suppress(ConfigError):  # the engine runs elsewhere: its generator reports why it cannot
        engine = choose_engine(config, folder)[0]
    device = models.choose_device(name)
    sampling, _ = models.choose_dtype(device, config.model.dtype)
    training, _ = models.training_dtype_of(device, shape.hidden_size, config.train.dtype)
    return Machine(
        kind=device.type,
        memory=models.total_bytes(device) if memory is None else memory,
        training_dtype=str(training).removeprefix("torch."),
        sampling_dtype=str(sampling).removeprefix("torch."),
        engine=engine,
        keeps_turns=settings_with_turns(config).keeps_turns,
    )


def planner(
    config: Config, role: Role, shape: ModelShape, machine: Machine, *, limit: float | None = None
) -> MakePlan:
    """The function from settings to the plan of a role; `limit` replaces that of the plan."""
    if role == "generator":
        make: MakePlan = partial(plan_generator, shape=shape, machine=machine)
    else:
        used, teacher = reference_models_used(config), None
        if config.model.teacher is not None and "teacher" in used:
            teacher = read_shape(models.model_folder(config.model.teacher))
        num_copies = len(used) - (teacher is not None)
        make = partial(
            plan_trainer, shape=shape, machine=machine, num_references=num_copies, teacher=teacher
        )
    return make if limit is None else lambda changed: replace(make(changed), limit=limit)


def attempts_for(
    config: Config, role: Role, shape: ModelShape, machine: Machine, make_plan: MakePlan
) -> list[Attempt]:
    """What each remedy of a role saves."""
    remedies = trainer_remedies if role == "trainer" else generator_remedies
    return try_remedies(config, remedies(config, shape, machine), make_plan)


class MemoryCheck(NamedTuple):
    """A plan compared with this machine."""

    plan: Plan
    problem: str  # with the remedy; empty if the plan fits
    is_certain: bool  # weights, gradients and optimizer state alone do not fit


def check_memory(config: Config, role: Role, folder: Path) -> MemoryCheck:
    """Compare the plan of a role with the memory of this machine, without loading the model.

    Raises ConfigError if the model cannot be planned.
    """
    shape = read_shape(folder)
    machine = machine_for(config, folder, shape)
    plan = planner(config, role, shape, machine)(config)
    device = models.choose_device(config.model.device)
    # A GPU refuses allocations beyond the limit; a CPU also has swap space, and does not know it.
    most = {"cuda": plan.limit, "cpu": machine.memory + psutil.swap_memory().total}
    if plan.certain > most.get(machine.kind, math.inf):
        return MemoryCheck(
            plan,
            f"the {role} needs {gib(plan.certain)} GiB for {CERTAIN[role]} alone, and {device} has "
            f"{gib(plan.limit)}; {_remedy(config, role, shape, machine, plan.limit)}",
            is_certain=True,
        )
    free = min(plan.limit, models.free_bytes(device))
    if plan.peak > free:
        remedy = _remedy(config, role, shape, machine, free)
        return MemoryCheck(
            plan,
            f"the {role} needs about {gib(plan.peak)} GiB ({_parts_text(plan)}), {gib(free)} GiB "
            f"of {device} are free; {remedy}",
            is_certain=False,
        )
    return MemoryCheck(plan, "", is_certain=False)


def check_start(config: Config, role: Role, folder: Path) -> None:
    """Check the memory of this machine before the model is loaded; a model without plan passes.

    Raises ConfigError if the memory is certainly too small; logs one warning if it may be.
    """
    try:
        check = check_memory(config, role, folder)
    except ConfigError as error:
        return logger.debug("memory not planned: %s", error)
    if check.is_certain:
        raise ConfigError(check.problem)
    if check.problem:
        logger.warning("%s", check.problem)


@contextmanager
def memory_errors(config: Config, role: Role) -> Generator[None]:
    """Turn an error of an allocation into a ConfigError that names the setting to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not isinstance(error, MemoryError) and not any(each in text for each in MEMORY_TEXTS):
            raise
        raise ConfigError(_out_of_memory_text(config, role, text)) from None


def _out_of_memory_text(config: Config, role: Role, text: str) -> str:
    """The message for an allocation that failed with `text`."""
    start = f"the {role} is out of memory ({text[:200]})"
    try:
        folder = models.model_folder(config.model.name)
        shape = read_shape(folder)
        machine = machine_for(config, folder, shape)
        plan = planner(config, role, shape, machine)(config)
    except ConfigError:
        hint = f"{program_name('doctor')} plan{files_given()} shows what each setting needs"
        return f"{start}; {hint}"
    limit = min(plan.limit, SAVING * plan.peak)
    remedy = _remedy(config, role, shape, machine, limit)
    return f"{start}; planned were {gib(plan.peak)} GiB ({_parts_text(plan)}); {remedy}"


def _remedy(config: Config, role: Role, shape: ModelShape, machine: Machine, limit: float) -> str:
    """The settings that bring the plan below `limit`, with the numbers."""
    make_plan = planner(config, role, shape, machine, limit=limit)
    chosen = sufficient(attempts_for(config, role, shape, machine, make_plan))
    hint = f"{program_name('doctor')} plan{files_given()} shows all"
    if not chosen:
        return f"choose a smaller model.name or a machine with more memory; {hint}"
    plan = chosen[-1].alone if len(chosen) == 1 else chosen[-1].combined
    options = " ".join(each.option for each in chosen)
    return f"with {options} it needs {gib(plan.peak)}; {hint}"


def _parts_text(plan: Plan) -> str:
    """The largest parts of a plan."""
    largest = sorted(plan.parts.items(), key=lambda part: -part[1])[:4]
    return ", ".join(f"{name} {gib(size)}" for name, size in largest)
