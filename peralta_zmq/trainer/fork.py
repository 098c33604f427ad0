"""Forks: a new run continues from the weights of a step of another run, under any settings.

The other run, the source, may be running. Recovery writes its weights as the checkpoint of step 0:
later starts do not need the source. The reference model of a loss is that of model.name, unless
both runs have a moving one (train.ref_sync_steps).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from peralta_zmq import atomic_files, build, models
from peralta_zmq.config import RESOLVED, Config, load_resolved
from peralta_zmq.errors import ConfigError, failure_text, program_name
from peralta_zmq.learning.master_weights import join_masters, split_masters
from peralta_zmq.models import lora
from peralta_zmq.trainer import checkpoint
from peralta_zmq.trainer.checkpoint import CHECKPOINTS, Checkpoint
from peralta_zmq.trainer.journal import JOURNAL, files_in
from peralta_zmq.trainer.session import StopSignal, known_run_id, wait_out
from peralta_zmq.trainer.trained_model import TrainedModel, base_of, trained_text
from peralta_zmq.weights.replica import load_version
from peralta_zmq.weights.store import WEIGHTS_FILE, WeightStore
from peralta_zmq.weights.tensor_set import FileTensors


@dataclass(frozen=True, slots=True)
class Source:
    """The run from which another one continues."""

    name: str  # run.fork of the new run
    folder: Path
    config: Config
    run_id: str

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS


def fork_if_new(config: Config, policy: TrainedModel, stop: StopSignal) -> str:
    """Set the learner to the weights of run.fork, as step 0, if the run has nothing to restore.

    Returns what it restored, if anything. Raises ConfigError for a fork that is impossible.
    """
    folder = config.run_folder

    def saved_steps() -> list[int]:
        return [*atomic_files.steps_in(folder / CHECKPOINTS), *files_in(folder / JOURNAL)]

    if config.run.fork is None or wait_out(saved_steps, folder=folder, stop=stop):
        return ""
    try:
        source = _open_source(config)
        saved = _read_checkpoint(source, config.run.from_step)
        if saved is None:
            saved = _read_published(source, config, policy)
        else:
            _check_model(source, config, policy, saved.progress)
            saved = _rescaled(saved, source.config.lora.alpha / config.lora.alpha)
        state = _forked_state(config, policy.learner.state(), saved.tensors)
        policy.learner.restore(0, {path: tensor.cpu() for path, tensor in state.items()})
    except OSError as error:
        raise ConfigError(
            f"run.fork {config.run.fork}: {error.filename} cannot be read ({failure_text(error)})"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"the weights of run.fork {config.run.fork} do not fit the settings ({error}); "
            f"{_export_remedy(config)}"
        ) from None
    has_optimizer = any(path.startswith(f"{config.train.optim}/") for path in state)
    parts = "weights and optimizer" if has_optimizer else "weights"
    return f"{parts} of step {saved.step} of run {source.run_id}"


# Reading the source.


def _open_source(config: Config) -> Source:
    name = config.run.fork or ""
    parent = Path(config.run.dir).expanduser()
    for folder in (parent / name, Path(os.path.expanduser(name))):
        run_id = known_run_id(folder)
        if run_id is not None and (folder / RESOLVED).exists():
            return Source(name, folder, load_resolved("config", folder), run_id)
    runs = ", ".join(sorted(file.parent.name for file in parent.glob(f"*/{RESOLVED}"))) or "none"
    raise ConfigError(
        f"run.fork {name} is neither a run in {parent} nor the folder of a run; runs there: {runs}"
    )


def _read_checkpoint(source: Source, step: int | None) -> Checkpoint | None:
    """The checkpoint of a step, or the newest one; None if there is none."""
    if step is not None and step not in atomic_files.steps_in(source.checkpoints):
        return None
    saved = checkpoint.newest(source.checkpoints, run_id=source.run_id, until=step)
    return saved if saved is not None and step in (None, saved.step) else None


def _read_published(source: Source, config: Config, policy: TrainedModel) -> Checkpoint:
    """Set the policy to the published weights of run.from_step; returns them as masters."""
    # The default store is in the run folder, which may have been moved.
    store = WeightStore.open(source.config.weights.dir or source.folder / "weights")
    versions = {version.step: version for version in store.versions()}  # the newest of each step
    if config.run.from_step is None or config.run.from_step not in versions:
        step = config.run.from_step
        wanted = "a checkpoint"
        if step is not None:
            wanted = f"a checkpoint or published weights of step {step}"
        checkpoints = ", ".join(map(str, atomic_files.steps_in(source.checkpoints))) or "none"
        published_steps = ", ".join(map(str, sorted(versions))) or "none"
        raise ConfigError(
            f"run.fork {source.name} does not have {wanted}; set run.from_step to one of its "
            f"checkpoints ({checkpoints:.200}) or published steps ({published_steps:.200})"
        )
    version = versions[config.run.from_step]
    _check_model(source, config, policy, version.manifest.about)
    with load_version(store, version) as local:
        published = FileTensors(local / WEIGHTS_FILE)
        apply = lora.apply_published if lora.has_adapters(policy.model) else models.apply_weights
        apply(policy.model, published)
    tensors: dict[str, torch.Tensor] = {}
    make_masters = build.first_masters(config)
    for name, parameter in lora.trained_parameters(policy.model).items():
        weights = parameter.detach()
        tensors[f"model/{name}"] = make_masters(name, weights) if make_masters else weights
    return Checkpoint(version.step, tensors, {})


def _check_model(
    source: Source, config: Config, policy: TrainedModel, fields: Mapping[str, object]
) -> None:
    own = policy.manifest_fields
    tokenizer = fields.get("tokenizer")
    before = None if tokenizer is None else str(tokenizer)
    if changes := models.tokenizer_changes(before, own["tokenizer"]):
        raise ConfigError(
            f"run.fork {source.name} has another tokenizer than model.name {config.model.name}: "
            f"{changes}; use its model, --model.name {source.config.model.name}"
        )
    if base_of(fields) != base_of(own):
        raise ConfigError(
            f"run.fork {source.name} trains {trained_text(fields)}, but with these settings the "
            f"run trains {trained_text(own)}; {_export_remedy(config)}"
        )


def _export_remedy(config: Config) -> str:
    command = f"{program_name('replay')} export RUN STEP FOLDER"
    return (
        f"write the weights as a model with {command}, and train it with --model.name FOLDER "
        f"instead of --run.fork {config.run.fork}"
    )


# The state of the learner.


def _rescaled(saved: Checkpoint, factor: float) -> Checkpoint:
    """The checkpoint, with adapters for a lora.alpha that is lower by `factor`."""
    tensors = {
        path: tensor * factor if path.startswith("model/") and ".lora_B." in path else tensor
        for path, tensor in saved.tensors.items()
    }
    return Checkpoint(saved.step, tensors, saved.progress)


def _forked_state(
    config: Config, fresh: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The state of a new learner, `fresh`, with weights and optimizer of a checkpoint."""
    state = {
        path: saved.get(path, tensor) if path.startswith("reference/") else tensor
        for path, tensor in fresh.items()
        if not path.startswith(("model/", "remainder/"))
    }
    if config.run.fork_optimizer:
        optimizer = f"{config.train.optim}/"
        state |= {path: each for path, each in saved.items() if path.startswith(optimizer)}
    dtype = models.DTYPES[config.weights.dtype]
    for path, weights in saved.items():
        if not path.startswith("model/"):
            continue
        remainder = path.replace("model/", "remainder/", 1)
        masters = join_masters(weights, saved[remainder]) if remainder in saved else weights
        state[path] = masters
        if remainder in fresh:
            state[path], state[remainder] = split_masters(masters, dtype)
    return state
