"""`bin/replay RUN`: train a run again from its journal, with no generator; write nothing into it.

The same settings give the same weights, bit for bit on a CPU. Other settings (`--loss.name grpo`)
answer what they would have made of the same rollouts. Knows the config and the leaves.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from peralta_zmq import build, models, wire
from peralta_zmq.config import RESOLVED, Config, load_config
from peralta_zmq.errors import ConfigError, JournalError, StoreError
from peralta_zmq.learning.learner import Learner
from peralta_zmq.models import lora
from peralta_zmq.observe.metrics import METRICS, number, read_rows
from peralta_zmq.observe.terminal import progress_on
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import adapter_files, checkpoint, journal
from peralta_zmq.trainer.run_folder import run_id_of
from peralta_zmq.weights.backends import open_backend
from peralta_zmq.weights.replica import export_step, load_version
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.tensors import MappedTensors
from peralta_zmq.weights.version import WEIGHTS, Version

USAGE = """\
bin/replay RUN [--from K] [--to N] [--section.name VALUE ...]
       bin/replay export RUN STEP FOLDER"""
SHOWN = ("reward", "loss", "grad_norm", "learning_rate")


def main(arguments: Sequence[str]) -> int:
    """Replay or export; 1 when the weights differ from those that the run published.

    Each step has the learning rate it had, as metrics.jsonl tells, unless the settings that make
    it are other ones; where it does not tell, weights that differ say nothing.
    Raises ConfigError or JournalError when there is nothing to replay.
    """
    if arguments[:1] == ["export"]:
        return export(arguments[1:])
    parser = argparse.ArgumentParser(prog="bin/replay", usage=USAGE, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--from", dest="first", type=int, help="first step (default: the earliest)")
    parser.add_argument("--to", dest="last", type=int, help="last step (default: all there are)")
    asked, settings = parser.parse_known_args(arguments)
    config, own = _config_of(asked.run, settings)
    rates = _rates_of(asked.run)
    theirs = rates if _schedule(config) == _schedule(own) else {}
    replayed = replay(config, asked.run, first=asked.first, last=asked.last, rates=theirs)
    published = _published(config) if config == own else {}
    differ = 0
    for step, metrics, digest in replayed:
        verdict = "" if step not in published else "  as published"
        if published.get(step, digest) != digest:
            verdict = _difference(asked.run, step, rates)
        differ += verdict.startswith("  NOT")
        numbers = "  ".join(f"{name}={metrics[name]:.6g}" for name in SHOWN)
        sys.stdout.write(f"step={step}  {numbers}  weights={digest[:16]}{verdict}\n")
        sys.stdout.flush()
    return 1 if differ else 0


def replay(
    config: Config,
    folder: Path,
    *,
    first: int | None = None,
    last: int | None = None,
    rates: Mapping[int, float] = MappingProxyType({}),
) -> Iterator[tuple[int, dict[str, float], str]]:
    """Every step with its metrics and the sha256 of the weights that it would publish.

    Steps before `first` back to a checkpoint (or the base model) are trained again too, unseen.
    `rates` are the learning rates of steps that had another than the settings give them.
    Raises JournalError when the journal does not reach back far enough or has a gap, and when
    `first` is beyond its last step.
    """
    models.use_threads(config.train.num_workers)
    model = build.load_policy(config, models.model_folder(config.model.name))
    learner = build.make_learner(config, model)
    scheduled = build.learning_rate_schedule(config)

    def rate(step: int) -> float:
        return rates.get(step, scheduled(step))

    learner.learning_rate = rate
    there = journal.steps_in(folder / "journal")
    if not there:
        raise JournalError(f"{folder}/journal is empty; there is nothing to replay")
    _start(learner, folder, min(there), first)
    begin, end = learner.step, max(there) if last is None else min(last, max(there))
    with progress_on("replaying", end - begin) as progress:
        while last is None or learner.step < last:
            groups = _groups_of(folder, learner.step + 1, int(model.config.vocab_size))
            if not build.is_full(config, groups):
                _check_last(folder, learner.step + 1, there, empty=not groups)
                break
            metrics = learner.learn(groups)
            progress.hide()
            if first is None or learner.step >= first:
                yield learner.step, metrics, fingerprint(lora.published_weights(model))
            progress.update(learner.step - begin)
    if first is not None and learner.step < first:
        raise JournalError(f"--from {first}: the last step that can be replayed is {learner.step}")


def export(arguments: Sequence[str]) -> int:
    """Write one published version as a folder that transformers can load."""
    parser = argparse.ArgumentParser(prog="bin/replay export", usage=USAGE)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("step", type=int, help="optimizer step")
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    asked = parser.parse_args(arguments)
    config, _ = _config_of(asked.run, [])
    version = _export(config, asked.step, asked.folder)
    sys.stdout.write(f"step {version.step}, version {version.number}: {asked.folder}\n")
    return 0


def _export(config: Config, step: int, target: Path) -> Version:
    """As published; an adapter merged into its base."""
    store = _store_of(config)
    version = store.version_of_step(step)
    if version.field("adapts") is None:
        return export_step(store, step, target)
    if target.exists():
        raise StoreError(f"{target} is there already; name a new folder")
    folder = build.base_folder(config, version)
    base = models.load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    with load_version(store, version) as local:
        adapter_files.write_merged(
            target, models.weights_of(base), MappedTensors(local / WEIGHTS),
            companions=models.companion_files(folder), dtype=models.DTYPES[config.weights.dtype],
        )  # fmt: skip
    return version


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names and bfloat16 bytes, in the order of the names."""
    hashed = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().to("cpu", torch.bfloat16).contiguous()
        hashed.update(name.encode() + b"\0")
        hashed.update(tensor.view(torch.int16).numpy().tobytes())
    return hashed.hexdigest()


def _config_of(run: Path, settings: Sequence[str]) -> tuple[Config, Config]:
    """The run's settings with these changes, and without."""
    if not (run / RESOLVED).exists():
        raise ConfigError(f"{run} has no {RESOLVED}; give the folder of a run, such as runs/demo")
    own = ["@", str(run / RESOLVED)]
    config = load_config("bin/replay RUN", [*own, *settings])
    return config, load_config("bin/replay RUN", own)


def _schedule(config: Config) -> Mapping[str, object]:
    return build.learning_rate_schedule(config).keywords


def _rates_of(run: Path) -> dict[int, float]:
    """The learning rate that each step had: a run that is continued gets another schedule."""
    rates: dict[int, float] = {}
    for row in read_rows(run / METRICS):
        step = int(number(row, "step", 0))
        while rates and next(reversed(rates)) >= step:  # rolled back
            rates.popitem()
        if "learning_rate" in row:
            rates[step] = number(row, "learning_rate")
    return rates


def _difference(run: Path, step: int, rates: Mapping[int, float]) -> str:
    """What to say of a step whose weights are not those that were published."""
    there = journal.steps_in(run / "journal")
    lacking = next((each for each in there if each <= step and each not in rates), None)
    if lacking is None:
        return "  NOT as published"
    return f"  not compared: {METRICS} lacks the learning rate of step {lacking}"


def _start(learner: Learner, folder: Path, earliest: int, first: int | None) -> None:
    if earliest == 1 and first is None:
        return
    run_id = run_id_of(folder, folder.name)
    until = earliest - 1 if first is None else first - 1
    saved = checkpoint.newest(folder / "checkpoints", run_id=run_id, until=until)
    if saved is not None:
        try:
            learner.restore(saved.step, saved.tensors)
        except ValueError as error:
            raise JournalError(
                f"checkpoint of step {saved.step} in {folder} does not fit ({error}); "
                "replay with the model and optimizer it was made with"
            ) from None
    if learner.step + 1 < earliest:
        raise JournalError(
            f"{folder}/journal begins with step {earliest} and no checkpoint fits before it; "
            "train with --checkpoint.keep-journal to keep all"
        )


def _groups_of(folder: Path, step: int, vocab_size: int) -> list[RolloutGroup]:
    records, _ = journal.read_records(folder / "journal", step)
    return [
        wire.decode_group(each.content, vocab_size=vocab_size)
        for each in records if each.kind == journal.GROUP
    ]  # fmt: skip


def _check_last(folder: Path, step: int, there: Sequence[int], *, empty: bool) -> None:
    """Raise JournalError when a step that is no batch is not the last: groups of it are gone.

    Unless some are there (not `empty`): then the batch may just be larger than the run's.
    """
    if step < max(there):
        larger = "" if empty else " (or train.batch_size is larger than the run's)"
        raise JournalError(
            f"{journal.file_of(folder / 'journal', step)} is missing or lacks groups{larger}, and "
            "there are later steps; put a copy back, or replay only what comes before it (--to) or "
            "after a later checkpoint (--from)"
        )


def _published(config: Config) -> dict[int, str]:
    """Fingerprint by step of every version that the run's weights folder still has."""
    found: dict[int, str] = {}
    store = _store_of(config)
    versions = store.versions()
    with progress_on("reading published weights", len(versions)) as progress:
        for count, version in enumerate(versions, start=1):
            # Where a later one is of an earlier step, a roll-back has left these behind.
            found = {step: each for step, each in found.items() if step < version.step}
            with load_version(store, version) as local:
                found[version.step] = fingerprint(MappedTensors(local / WEIGHTS))
            progress.update(count)
    return found


def _store_of(config: Config) -> WeightStore:
    return WeightStore(open_backend(config.weights_address))
