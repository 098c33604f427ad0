"""Memory plans against this machine: at the start, and after an allocation has failed."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from peralta_zmq import memory, models
from peralta_zmq.build.components import reference_models_used
from peralta_zmq.build.engines import engine_name, settings_with_turns
from peralta_zmq.config import RESOLVED, Config, files_given
from peralta_zmq.errors import ConfigError, OutOfMemoryError, program_name
from peralta_zmq.memory import GIB, Machine, ModelShape, Plan, Role, gib, read_shape
from peralta_zmq.memory.remedies import NOTHING_HELPS, Advice, advise
from peralta_zmq.models.frozen_base import has_only_bfloat16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlanner:
    """Plans the memory of one model on one machine, for any settings."""

    shape: ModelShape
    machine: Machine

    @classmethod
    def of(cls, config: Config, folder: Path, *, memory_gib: float | None = None) -> MemoryPlanner:
        """The planner for the model in `folder`, whose weights are not loaded.

        `memory_gib` replaces the memory of this machine, which may then lack the GPU. Raises
        ConfigError for a model that cannot be planned, and for a device that cannot be used.
        """
        shape = read_shape(folder, trust_remote_code=config.model.trust_remote_code)
        engine = "native" if config.engine.name == "auto" else config.engine.name
        try:
            device = models.choose_device(config.model.device)
            with suppress(ConfigError):  # the generator's machine reports it
                engine = engine_name(config, folder)[0]
        except ConfigError:
            kind = config.model.device.partition(":")[0]
            if memory_gib is None or kind not in ("cuda", "mps"):
                raise
            device = torch.device(kind)
        sampling, _ = models.choose_dtype(device, config.model.dtype)
        training, _ = models.training_dtype_of(device, shape.hidden_size, config.train.dtype)
        machine = Machine(
            kind=device.type,
            memory=models.total_bytes(device) if memory_gib is None else memory_gib * GIB,
            training_dtype=str(training).removeprefix("torch."),
            sampling_dtype=str(sampling).removeprefix("torch."),
            engine=engine,
            keeps_turns=settings_with_turns(config).keeps_turns,
        )
        return cls(shape, machine)

    def plan(self, config: Config, role: Role) -> Plan:
        if role == "generator":
            return memory.plan_generator(config, self.shape, self.machine)
        used = reference_models_used(config)
        teacher = config.model.teacher if "teacher" in used else None
        trust = config.model.trust_remote_code
        return memory.plan_trainer(
            config,
            self.shape,
            self.machine,
            num_references=len(used) - (teacher is not None),
            teacher_bytes=_teacher_bytes(teacher, trust) if teacher is not None else 0.0,
        )

    def advise(self, config: Config, role: Role, *, limit: float | None = None) -> Advice:
        """What each remedy of a role saves, and which to choose; `limit` replaces the plan's."""

        def make_plan(changed: Config) -> Plan:
            plan = self.plan(changed, role)
            return plan if limit is None else replace(plan, limit=limit)

        return advise(config, role, make_plan, shape=self.shape, machine=self.machine)


@lru_cache
def _teacher_bytes(name: str, trust_remote_code: bool) -> float:
    folder = models.model_folder(name)
    base_dtype = "bfloat16" if has_only_bfloat16(folder) else "float32"
    return memory.frozen_bytes(read_shape(folder, trust_remote_code=trust_remote_code), base_dtype)


def check_start(config: Config, role: Role, folder: Path) -> None:
    """Log a warning, before the model is loaded, if the plan exceeds the memory of this machine.

    It is no error, because the plan is an estimate: a run with short prompts needs less.
    """
    try:
        planner = MemoryPlanner.of(config, folder)
        plan = planner.plan(config, role)
        device = models.choose_device(config.model.device)
        free = min(plan.limit, models.free_bytes(device))
        if plan.peak > free:
            logger.warning(
                "the %s needs about %s GiB (%s), %s GiB of %s are free; %s",
                role, gib(plan.peak), _parts_text(plan), gib(free), device,
                _remedy(planner, config, role, free),
            )  # fmt: skip
    except ConfigError as error:
        logger.debug("memory not planned: %s", error)


def moves_snapshots(config: Config, folder: Path) -> bool:
    """Whether the trainer of the model in `folder` moves snapshots to a file (memory/plan.py).

    It does not if the model cannot be planned.
    """
    try:
        planner = MemoryPlanner.of(config, folder)
    except ConfigError:
        return False
    return memory.moves_snapshots(config, planner.shape, planner.machine)


@contextmanager
def memory_errors(config: Config, role: Role) -> Generator[None]:
    """Turn the error of an allocation into OutOfMemoryError, which names a setting to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not models.is_out_of_memory(error):
            raise
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OutOfMemoryError(_out_of_memory_text(config, role, text)) from None


def _out_of_memory_text(config: Config, role: Role, text: str) -> str:
    start = f"the {role} is out of memory ({text[:200]})"
    try:
        planner = MemoryPlanner.of(config, models.model_folder(config.model.name))
        plan = planner.plan(config, role)
    except ConfigError:
        hint = f"{program_name('doctor')} plan{files_given()} shows what each setting needs"
        return f"{start}; {hint}"
    # The plan was too small: the proposed setting needs at least a fifth less.
    remedy = _remedy(planner, config, role, min(plan.limit, 0.8 * plan.peak))
    if (config.run_folder / RESOLVED).exists():
        remedy += f"; run {config.run.name} keeps its settings: choose another --run.name"
    return f"{start}; planned were {gib(plan.peak)} GiB ({_parts_text(plan)}); {remedy}"


def _remedy(planner: MemoryPlanner, config: Config, role: Role, limit: float) -> str:
    advice = planner.advise(config, role, limit=limit)
    hint = f"{program_name('doctor')} plan{files_given()} shows all"
    if advice.plan is None:
        return f"{NOTHING_HELPS}; {hint}"
    return f"with {advice.options} it needs {gib(advice.plan.peak)}; {hint}"


def _parts_text(plan: Plan) -> str:
    """The largest parts of a plan."""
    largest = sorted(plan.parts.items(), key=lambda part: -part[1])[:4]
    return ", ".join(f"{name} {gib(size)}" for name, size in largest)
