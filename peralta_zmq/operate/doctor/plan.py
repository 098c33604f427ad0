"""`bin/doctor plan`: the memory that a run needs, and a dry run of its prompts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peralta_zmq.config import Config, check_memory_fractions, load_config
from peralta_zmq.errors import ConfigError, program_name
from peralta_zmq.operate.doctor.checks import Report

if TYPE_CHECKING:
    from peralta_zmq.build import MemoryPlanner
    from peralta_zmq.memory import Plan, Role
    from peralta_zmq.memory.remedies import Advice

PROGRAM = f"{program_name('doctor')} plan"
USAGE = f"""\
usage: {PROGRAM} [--role trainer|generator] [--memory GIB] [@ FILE.toml ...] [OPTIONS]

Computes the memory of a run from its settings and the model's config.json, compares it with this
machine, and checks the prompts if the model's folder has its tokenizer. Exit code 1 if a role does
not fit or a check fails.
  --role ROLE     only the role of this machine; default: the trainer and the generators that
                  bin/lan local starts (run.num_local_generators)
  --memory GIB    plan for a machine with this memory, or with --model.device cuda for a card

"""


def main(options: argparse.Namespace, settings: Sequence[str]) -> int:
    """Run with the options `role` and `memory`; returns the exit code.

    Raises ConfigError for settings, a model or fractions that cannot be planned.
    """
    config = load_config(PROGRAM, settings)
    if options.memory is not None and options.memory <= 0:
        raise ConfigError(f"--memory {options.memory:g} is not above 0; give GiB, such as 24")
    roles: list[Role] = [options.role] if options.role else ["trainer", "generator"]
    num_generators = config.run.num_local_generators if "generator" in roles else 0
    if not options.role:
        try:
            check_memory_fractions(
                config, has_trainer=True, num_generators=num_generators, machine="this machine"
            )
        except ConfigError as error:
            raise ConfigError(f"{error}, or plan for one of the two with --role") from None
    from peralta_zmq import build, models  # import torch, too slow for --help
    from peralta_zmq.operate.doctor.role_checks import add_findings, fitted

    folder = models.model_folder(config.model.name)
    report = Report()
    has_tokenizer = any(folder.glob("tokenizer*"))
    # The verifiers of a run need not run yet.
    is_here = not any(env.address for env in (*config.environments, *config.eval_environments))
    if has_tokenizer and is_here:
        config = fitted(config, report, options.memory)
    planner = build.MemoryPlanner.of(config, folder, memory_gib=options.memory)
    if has_tokenizer:
        # For another machine (--memory), an engine that this machine lacks is only a note.
        role = roles[0] if options.memory is None else "trainer"
        report.run("prompts", add_findings, config, report, role, weights=False, prompts=is_here)
    _print_model(config, planner)
    plans = [planner.plan(config, role) for role in roles]
    for plan in plans:
        _print_plan(plan, count=num_generators if plan.role == "generator" else 1)
        if not plan.fits:
            _print_advice(planner.advise(config, plan.role))
    fits = all(plan.fits for plan in plans)
    if not options.role:
        fits &= _print_together(config, planner, plans)
    return int(not fits or not all(check.ok for _, check in report.checks))


def _print_model(config: Config, planner: MemoryPlanner) -> None:
    from peralta_zmq.memory import gib, workload_of

    shape = planner.shape
    machine = planner.machine
    work = workload_of(config, shape, machine)
    layers = f"{shape.num_layers} layers of hidden size {shape.hidden_size}"
    size = f"{shape.num_parameters / 1e6:.1f} M parameters"
    _write(f"{config.model.name}: {shape.model_type}, {layers}, {size}")
    _write(
        f"device {machine.kind} with {gib(machine.memory)} GiB, training in "
        f"{machine.training_dtype}, sampling in {machine.sampling_dtype} (engine {machine.engine})"
    )
    _write(
        f"assumes prompts of {work.prompt} tokens, which engine.max_model_len "
        f"{config.engine.max_model_len} permits; set it lower if yours are shorter"
    )
    _write(f"an update then has at most {work.update} tokens, in micro-batches of {work.tokens}")


def _print_plan(plan: Plan, *, count: int) -> None:
    from peralta_zmq.memory import gib

    title = plan.role if count == 1 else f"each of {count} generators"
    _write(f"\n{title}: {_verdict(plan.peak, plan.limit)}")
    small = [name for name, size in plan.parts.items() if gib(size) == "0.00"]
    for name, size in sorted(plan.parts.items(), key=lambda part: -part[1]):
        if name not in small:
            _write(f"  {gib(size):>8}  {name}")
    if small:
        _write(f"  {'< 0.01':>8}  {', '.join(small)}")
    _write(f"  most is needed during: {plan.phase}")


def _print_advice(advice: Advice) -> None:
    from peralta_zmq.memory import gib
    from peralta_zmq.memory.remedies import NOTHING_HELPS

    _write("  GiB with one setting, and with those above it too:")
    for each in advice.attempts:
        sizes = f"{gib(each.alone.peak):>8} {gib(each.combined.peak):>8}"
        _write(f"  {sizes}  {each.options} ({each.cost})")
    if advice.options:
        _write(f"  it fits with {advice.options}")
    else:
        _write(f"  no setting is enough; {NOTHING_HELPS}")


def _print_together(config: Config, planner: MemoryPlanner, plans: Sequence[Plan]) -> bool:
    """Compare the trainer and all generators of this machine with its memory; True if they fit."""
    trainer, generator = (plan.peak for plan in plans)
    memory = planner.machine.memory
    count = config.run.num_local_generators
    total = trainer + count * generator
    title = f"trainer and {count} generator{'s' * (count > 1)} together (bin/lan local)"
    _write(f"\n{title}: {_verdict(total, memory)}")
    if total > memory and all(plan.fits for plan in plans):
        _write(
            "  lower run.num_local_generators or engine.gpu_memory_utilization, or run generators "
            "on another machine (bin/lan up)"
        )
    return total <= memory


def _verdict(peak: float, limit: float) -> str:
    from peralta_zmq.memory import gib

    if peak <= limit:
        return f"fits, {gib(peak)} of {gib(limit)} GiB needed"
    return f"does not fit, {gib(peak)} GiB needed, only {gib(limit)} there"


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
