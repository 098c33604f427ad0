"""Program bin/evaluate: answer the held-out problems with a model or with the weights of a run."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import fmean

from peralta_zmq import build, models, registry
from peralta_zmq.addresses import read_private_token
from peralta_zmq.build import dry_run, fitted_settings
from peralta_zmq.config import RESOLVED, Config, load_config, load_resolved
from peralta_zmq.config.programs import evaluate_options
from peralta_zmq.config.sections import RunSection
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.held_out import summarize
from peralta_zmq.errors import ConfigError, printable, program_name
from peralta_zmq.observe.metrics import format_number
from peralta_zmq.observe.terminal import progress_on_stderr
from peralta_zmq.rollout import CUT_OFF, Answer, Problem
from peralta_zmq.trainer.evaluation import Answering
from peralta_zmq.weights.replica import load_version
from peralta_zmq.weights.store import WEIGHTS_FILE, WeightStore, version_of_step
from peralta_zmq.weights.subscriber import PendingWeights
from peralta_zmq.weights.tensor_set import FileTensors

PROGRAM = program_name("evaluate")


def main(arguments: Sequence[str]) -> None:
    """Evaluate and print the results. Raises ConfigError, StoreError or TaskError."""
    target, step, settings = evaluate_options(arguments)
    title, results = evaluate_target(target, step, settings)
    sys.stdout.write(printable(report_text(title, results), keep="\n"))


def evaluate_target(
    target: str, step: int | None, settings: Sequence[str]
) -> tuple[str, list[tuple[Problem, list[Answer]]]]:
    """Evaluate a run or a model; returns a title, and the problems with their answers."""
    config, run = load_target(target, step, settings)
    with ExitStack() as stack:
        held_out = build.open_environments(config, "eval", limit=config.eval.num_examples)
        stack.enter_context(closing(held_out))
        engine, tokenizer = open_target(config, run, step, stack)
        reader = dry_run.PromptReader.of(config, tokenizer)
        held_out = dry_run.usable_environments(config, held_out, "eval", reader)
        results = answer_all(config, engine, tokenizer, held_out)
    return f"{run}, step {engine.step}" if run else target, results


def load_target(
    target: str, step: int | None, settings: Sequence[str]
) -> tuple[Config, Path | None]:
    """The settings for a run or a model, and the folder of the run; None for a model."""
    for folder in (Path(os.path.expanduser(target)), Path(RunSection().dir) / target):
        if (folder / RESOLVED).is_file():
            here = folder.resolve()  # the run may have been moved
            place = [f"--run.dir={here.parent}", f"--run.name={here.name}"]
            return load_resolved(f"{PROGRAM} RUN", folder, [*settings, *place]), folder
    if step is not None:
        raise ConfigError(f"--step {step} needs a run, but {target} has no {RESOLVED}")
    config = load_config(PROGRAM, [*settings, f"--model.name={target}"])
    return fitted_settings.fit_settings(config, splits=("eval",)).config, None


def open_target(
    config: Config, run: Path | None, step: int | None, stack: ExitStack
) -> tuple[registry.Engine, models.Tokenizer]:
    """Open an engine and the tokenizer; files of a run's weights exist until `stack` closes."""
    models.keep_memory()
    models.use_threads(config.run.num_workers)
    with build.memory_errors(config, "generator"):
        if run is not None:
            token = read_private_token(config.security.token_file)
            store = WeightStore.open(config.weights_address, token=token)
            version = version_of_step(store, step)
            folder = stack.enter_context(load_version(store, version))
            tensors = FileTensors(folder / WEIGHTS_FILE)
            return build.make_engine(config, PendingWeights(version, tensors, folder, 0, 0.0))
        folder = models.model_folder(config.model.name)
        trust = config.model.trust_remote_code
        tokenizer = models.load_tokenizer(folder, trust_remote_code=trust)
        return build.open_engine(config, folder), tokenizer


def answer_all(
    config: Config, engine: registry.Engine, tokenizer: models.Tokenizer, held_out: Environments
) -> list[tuple[Problem, list[Answer]]]:
    """The held-out problems with their answers, without those whose reward failed."""
    answered: dict[int, list[Answer]] = {}  # by id() of the problem
    waiting = deque(held_out.problems)
    with (
        closing(Answering(config, engine, tokenizer, held_out)) as answering,
        progress_on_stderr("evaluating", len(held_out.problems)) as progress,
    ):
        while waiting or answering.is_busy:
            while waiting and answering.has_room:
                answering.start(waiting.popleft())
            for problem, answers in answering.advance():
                answered[id(problem)] = answers
                progress.update(len(answered))
        answering.check()
    problems = (problem for problem in held_out.problems if id(problem) in answered)
    return [(problem, answered[id(problem)]) for problem in problems]


def report_text(title: str, results: Sequence[tuple[Problem, Sequence[Answer]]]) -> str:
    """The mean reward with its standard error over the problems, and some answers."""
    mean, error, figures = summarize(results)
    answers = [each for _, answers in results for each in answers]
    lines: list[str] = []
    for problem, answered in results[:4]:
        first = answered[0]
        texts = {
            "problem": first.problem,
            "expected": problem.answer,
            "answer": first.answer + CUT_OFF * first.cut_off,
            "reward": f"{first.reward:g}",
        }
        lines += [f"{name:<12}{' '.join(text.split())}" for name, text in texts.items()]
        lines.append("")
    lines.append(title)
    lines.append(
        f"{'reward':<12}{mean:.3f}, standard error "
        f"{format_number(error, '.3f')}, n {len(results)} problems, {len(answers)} answers"
    )
    lines.append(f"{'cut off':<12}{fmean(each.cut_off for each in answers):.0%}")
    if len(figures) > 2:  # avg@1 and pass@1 equal the reward
        shown = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
        lines.append(f"{'figures':<12}{shown}")
    return "\n".join(lines) + "\n"
