"""Program bin/replay: repeat the training steps of a run, with its journaled rollouts.

With the run's settings it reproduces the weights that the run published, bit-identically on CPUs,
if it has as many ranks as the run had. With other settings it shows their effect on the same
rollouts. `bin/replay export` writes a published weight version as a model folder.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peralta_zmq import build, models, wire
from peralta_zmq.atomic_files import MANIFEST
from peralta_zmq.config import RESOLVED, Config, load_resolved
from peralta_zmq.config.programs import replay_options
from peralta_zmq.config.sections import check_folder
from peralta_zmq.errors import (
    ConfigError,
    JournalError,
    StoreError,
    failure_text,
    printable,
    program_name,
)
from peralta_zmq.learning.distributed import SINGLE, DistributedRanks, Ranks
from peralta_zmq.models import frozen_base, lora
from peralta_zmq.observe.metrics import EVENTS, number, read_rows
from peralta_zmq.observe.terminal import progress_on_stderr
from peralta_zmq.trainer import checkpoint, journal
from peralta_zmq.trainer.ranks import (
    PolicyLearner,
    join,
    make_policy_learner,
    run_follower,
    shutdown,
)
from peralta_zmq.trainer.recovery import ALL_REFUSED, skip_step
from peralta_zmq.trainer.session import known_run_id
from peralta_zmq.trainer.trained_model import group_limits, write_merged
from peralta_zmq.weights.replica import STATE, load_version
from peralta_zmq.weights.store import RUN_FILE, WEIGHTS_FILE, Version, WeightStore, version_of_step
from peralta_zmq.weights.tensor_set import FileTensors

PRINTED = ("reward", "loss", "grad_norm", "learning_rate")  # metrics in the line of each step


def main(arguments: Sequence[str]) -> int:
    """Replay or export; returns the exit code: 1 for other weights, 3 for unreadable versions.

    Weights are compared only if the options change no setting, and not after steps that a session
    with another number of ranks trained, because the order of a sum changes its last bits. Raises
    ConfigError or JournalError if there is nothing to replay, StoreError.
    """
    options, settings = replay_options(arguments)
    if arguments[:1] == ["export"]:
        version = export(options.run, options.step, options.folder)
        sys.stdout.write(f"step {version.step}, version {version.number}: {options.folder}\n")
        return 0
    run: Path = options.run
    config, ranks = join(_load_config(run, settings))
    if isinstance(ranks, DistributedRanks) and ranks.rank > 0:
        run_follower(config, ranks)
        return 0
    run_config = _load_config(run)
    published, problems = published_ids(run, config) if config == run_config else ({}, [])
    other_ranks = _sessions_on_other_ranks(
        run, ranks.world_size, newest_step=max(published, default=0)
    )
    notes = [_other_ranks_text(other_ranks, ranks.world_size)] if other_ranks else []
    sys.stderr.writelines(f"{printable(text)}\n" for text in (*problems, *notes))
    num_different = 0
    for trained, metrics, digest in replay(config, run, options.first, options.last, ranks):
        step = trained[-1]
        result = ""
        if step in published:
            if digest == published[step]:
                result = "  as published"
            elif any({*trained}.intersection(session.steps) for session in other_ranks):
                result = "  not compared: other number of ranks"
            else:
                result = "  NOT as published"
                num_different = num_different + 1
        numbers = "  ".join(f"{name}={metrics[name]:.6g}" for name in PRINTED if name in metrics)
        numbers = numbers or f"skipped: {ALL_REFUSED}"
        sys.stdout.write(f"step={step}  {numbers}  weights={digest[:16]}{result}\n")
        sys.stdout.flush()
    shutdown(ranks)
    if num_different:
        return 1
    return 3 if problems else 0


def replay(
    config: Config, folder: Path, first: int | None, last: int | None, ranks: Ranks = SINGLE
) -> Iterator[tuple[range, dict[str, float], str]]:
    """Yield the steps trained so far, metrics of the last one, and the sha256 of its weights.

    Training starts from the newest checkpoint before `first`, or from the base model; earlier steps
    than `first` are not yielded. A step whose groups are all refused is skipped and has no metrics.
    Raises JournalError for a gap in the journal.
    """
    run_config = _load_config(folder)
    model = build.load_policy(config, models.model_folder(config.model.name))
    learner = make_policy_learner(config, model, ranks)
    steps = journal.files_in(folder / journal.JOURNAL)
    if not steps:
        raise JournalError(f"{folder}/journal is empty; there is nothing to replay")
    _restore(learner, folder, min(steps), first, is_fork=run_config.run.fork is not None)
    begin = learner.step
    end = max(steps) if last is None else min(last, max(steps))
    # The groups were received under the limits of the run's settings.
    limits = group_limits(run_config, model)
    dtype, _ = models.training_dtype(model, config.train.dtype)
    here = models.arithmetic(model.device, str(dtype).removeprefix("torch."), ranks.world_size)
    with progress_on_stderr("replaying", end - begin) as progress:
        while last is None or learner.step < last:
            step = learner.step + 1
            journaled = _read_step(config, folder, step, limits, is_newest=step >= max(steps))
            if journaled is None:
                break
            if build.update_settings(config, step) != build.update_settings(run_config, step):
                journaled = journaled._replace(begun=None)  # its numbers are changed
            if config == run_config and journaled.begun is not None:
                _use_arithmetic(journaled.begun.arithmetic, here, step)
            if journaled.groups:
                learner.add(journaled.groups)
                metrics = learner.finish_step(repeated=journaled.begun).metrics
            else:
                skip_step(learner)
                metrics = {}
            progress.hide()
            if first is None or step >= first:
                weights = lora.published_weights(model)
                yield range(begin + 1, step + 1), metrics, weights_sha256(weights)
            progress.update(step - begin)
    if first is not None and learner.step < first:
        raise JournalError(f"--from {first}: the last step that can be replayed is {learner.step}")
    if learner.step == begin:
        raise JournalError(
            f"there is nothing to replay: {folder}/journal has no full step after {begin}, the "
            "step of the checkpoint; a run with checkpoint.keep_journal keeps all steps"
        )


def _read_step(
    config: Config, folder: Path, step: int, limits: wire.GroupLimits, *, is_newest: bool
) -> journal.StepRecords | None:
    """Read a step; None if it is an incomplete newest one. JournalError if it lacks groups."""
    records, _ = journal.read_records(folder / journal.JOURNAL, step)
    file = journal.file_of(folder / journal.JOURNAL, step)
    run_id = known_run_id(folder)
    decoded = journal.decode_step(records, limits, file=file, step=step, run_id=run_id)
    if decoded.is_complete(config.train.batch_size, is_newest=is_newest):
        return decoded
    if is_newest:
        return None
    larger = " (or train.batch_size is larger than the run's)" if decoded.groups else ""
    raise JournalError(
        f"{file} is missing or lacks groups{larger}, and there are later steps; put a copy back, "
        "or replay only the steps before it (--to) or after a later checkpoint (--from)"
    )


def _use_arithmetic(recorded: Mapping[str, str], here: Mapping[str, str], step: int) -> None:
    try:
        models.use_arithmetic(recorded, here)
    except ConfigError as error:
        raise JournalError(
            f"step {step} cannot be repeated with the same bits: {error}; replay it with the "
            "machine and software that computed it, or with other settings"
        ) from None


def export(run: Path, step: int | None, target: Path) -> Version:
    """Write a published version, by default the newest, for transformers. Raises StoreError."""
    config = _load_config(run)
    try:
        check_folder(str(target))
    except ValueError as error:
        raise StoreError(f"{target} {error}") from None
    if target.exists():
        raise StoreError(f"{target} exists; choose a new folder")
    store = WeightStore.open(config.weights_address)
    version = version_of_step(store, step)
    with load_version(store, version) as local:
        try:
            if version.field("adapts") is None:  # not LoRA adapters, but a whole model
                shutil.copytree(local, target, ignore=shutil.ignore_patterns(STATE))
            else:
                _export_merged(config, version, local, target)
        except OSError as error:
            raise StoreError(f"{target} cannot be written: {failure_text(error)}") from None
    return version


def _export_merged(config: Config, version: Version, local: Path, target: Path) -> None:
    base_folder = build.base_folder(config, version)
    trust = config.model.trust_remote_code
    base = frozen_base.load_base_weights(
        base_folder, build.base_dtype(version), device=torch.device("cpu"), trust_remote_code=trust
    )
    tokenizer = models.load_tokenizer(base_folder, trust_remote_code=trust)
    adapter = FileTensors(local / WEIGHTS_FILE)
    write_merged(target, base.tensors, adapter, base_folder, tokenizer)


def weights_sha256(weights: Mapping[str, torch.Tensor]) -> str:
    """The sha256 of the names and bfloat16 bytes of all tensors, sorted by name."""
    sha256 = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().to("cpu", torch.bfloat16).contiguous()
        sha256.update(name.encode() + b"\0")
        sha256.update(tensor.view(torch.int16).numpy().tobytes())
    return sha256.hexdigest()


def _load_config(run: Path, settings: Sequence[str] = ()) -> Config:
    if not (run / RESOLVED).exists():
        raise ConfigError(f"{run} has no {RESOLVED}; give the folder of a run, such as runs/demo")
    return load_resolved(f"{program_name('replay')} RUN", run, settings)


@dataclass(frozen=True, slots=True)
class _RecordedSession:
    """A start of the run's trainer, from events.jsonl."""

    steps: range  # steps that it trained, including those replayed from the journal
    num_ranks: int


def _sessions_on_other_ranks(
    run: Path, num_ranks: int, *, newest_step: int
) -> list[_RecordedSession]:
    """Sessions that trained steps up to `newest_step` on another number of ranks."""
    found: list[_RecordedSession] = []
    end = newest_step  # of the session; a later session begins with the step where it ended
    for row in reversed(read_rows(run / EVENTS)):
        if "ranks" in row:
            first = int(number(row, "checkpoint", 0)) + 1
            found.append(_RecordedSession(range(first, end + 1), int(number(row, "ranks", 1))))
            end = min(newest_step, int(number(row, "step", 0)))
    sessions = reversed(found)
    return [each for each in sessions if each.steps and each.num_ranks != num_ranks]


def _other_ranks_text(sessions: Sequence[_RecordedSession], num_ranks: int) -> str:
    counts = ", ".join(
        f"{session.num_ranks} in steps {session.steps[0]} to {session.steps[-1]}"
        for session in sessions
    )
    return (
        f"number of ranks: {counts} of the run, {num_ranks} in this replay, which rounds "
        "differently; for the same bits start the replay of these steps with torchrun on as many "
        "ranks, each with as many threads"
    )


def _restore(
    learner: PolicyLearner, folder: Path, earliest: int, first: int | None, *, is_fork: bool
) -> None:
    """Restore the newest checkpoint before `first`; JournalError if later steps are missing."""
    run_id = known_run_id(folder) or ""
    until = earliest - 1 if first is None else first - 1
    saved = checkpoint.newest(folder / checkpoint.CHECKPOINTS, run_id=run_id, until=until)
    if saved is not None:
        remedy = "replay with the model and optimizer it was made with"
        checkpoint.restore(learner, saved, run_folder=folder, remedy=remedy)
    if learner.step + 1 < earliest or (saved is None and is_fork):
        raise JournalError(
            f"{folder}/journal begins with step {earliest}, and there is no checkpoint before it; "
            "train with --checkpoint.keep-journal to keep all steps"
        )


def published_ids(run: Path, config: Config) -> tuple[dict[int, str], list[str]]:
    """The sha256 of the published weights by step, and a line for each version that cannot be read.

    Leaves out versions that a roll-back has undone. Raises StoreError.
    """
    digests: dict[int, str] = {}
    problems: dict[int, str] = {}  # by version number
    store = WeightStore.open(config.weights_address)
    run_id = store.run_id
    # The step that each roll-back of the run returned to, oldest first.
    rows = read_rows(run / EVENTS)
    targets = [number(row, "step") for row in rows if row.get("event") == "roll_back"]
    if run_id is None:
        return {}, [f"no version is compared: {RUN_FILE} in {store.address} cannot be read"]
    numbers = _numbers_in(store)
    orphans: list[int] = []  # deltas after a removed version
    with progress_on_stderr("reading published weights", len(numbers)) as progress:
        for count, index in enumerate(numbers, start=1):
            version = store.find(index)
            if version is None:
                problems[index] = f"version {index} is not compared: no valid {MANIFEST}"
            elif version.run_id == run_id and not any(
                # The lineage is the number of roll-backs before the version.
                target < version.step
                for target in targets[version.lineage :]
            ):
                # If the step is lower than that of a previous version, the run was rolled back. The
                # event of the roll-back may be missing, because the disk was full.
                digests = {step: value for step, value in digests.items() if step < version.step}
                try:
                    with load_version(store, version) as local:
                        digests[version.step] = weights_sha256(FileTensors(local / WEIGHTS_FILE))
                except StoreError as error:
                    reason = f"version {index} (step {version.step}) is not compared: {error}"
                    problems[index] = reason
                    is_cut_off = version.kind == "delta" and version.parent not in numbers
                    if is_cut_off or version.parent in orphans:
                        orphans.append(index)
                else:
                    if version.kind == "keyframe" and orphans:  # they are obsolete
                        span = f"versions {orphans[0]} to {orphans[-1]}"
                        sys.stderr.write(f"{span} are not compared: an earlier one was removed\n")
                        for orphan in orphans:
                            del problems[orphan]
                        orphans.clear()
            progress.update(count)
    # A version that the running trainer deleted during the loop is no problem.
    remaining = _numbers_in(store)
    return digests, [problems[index] for index in remaining if index in problems]


def _numbers_in(store: WeightStore) -> list[int]:
    try:
        return store.numbers()
    except OSError as error:
        raise StoreError(f"{store.address} cannot be listed ({error.strerror})") from None
