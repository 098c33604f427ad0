"""The trained model: load it with its learner, publish its weights, export them.

With LoRA only the adapters are trained and published; the base model stays in its own folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from peralta_zmq import addresses, atomic_files, build, models, registry, wire
from peralta_zmq.build import fitted_settings
from peralta_zmq.config import Config
from peralta_zmq.engines.sessions import MAX_BRANCHES
from peralta_zmq.errors import ConfigError, OutageError, StoreError
from peralta_zmq.learning.distributed import DistributedRanks, Ranks
from peralta_zmq.models import frozen_layers, lora
from peralta_zmq.observe.run_log import recorded_versions
from peralta_zmq.trainer.ranks import PolicyLearner, make_policy_learner
from peralta_zmq.trainer.session import Session
from peralta_zmq.weights import tensor_set
from peralta_zmq.weights.publisher import PublishReport, Retention, VersionWriter, WeightPublisher
from peralta_zmq.weights.server import serve_weights
from peralta_zmq.weights.store import WEIGHTS_FILE, Version, WeightStore


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The trained model and everything that was built from it."""

    base_folder: Path  # of the untrained model
    model: models.Model
    tokenizer: models.Tokenizer
    companions: dict[str, bytes]  # files of every version: content by name
    manifest_fields: dict[str, str]  # additional fields of each version's manifest
    learner: PolicyLearner
    num_ranks: int  # processes that compute each step
    open_engine: Callable[[], registry.Engine]  # samples from the model, for one evaluation
    worker_info: Mapping[str, str]  # device and dtype, to show to users
    arithmetic: Mapping[str, str]  # what computes its steps


def open_trained_model(config: Config, tokenizer: models.Tokenizer, ranks: Ranks) -> TrainedModel:
    """Load the model of the tokenizer; build learner and engine. Raises ConfigError."""
    folder = models.model_folder(config.model.name)
    if not isinstance(ranks, DistributedRanks):  # the plan is that of a single process
        build.check_start(config, "trainer", folder)
    model = build.load_policy(config, folder)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = models.folder_end_ids(folder, tokenizer)
    companions, manifest_fields = version_files(config, folder, model, tokenizer)
    dtype, _ = models.training_dtype(model, config.train.dtype)
    learner = make_policy_learner(config, model, ranks)
    open_engine = partial(build.make_live_engine, config, model, tokenizer)
    open_engine()  # raises ConfigError now if its keys and values do not fit into memory
    worker_info = models.worker_info(model.device, dtype)
    arithmetic = models.arithmetic(model.device, worker_info["dtype"], ranks.world_size)
    models.release_memory()  # loading leaves gaps that are too small for a step's tensors
    return TrainedModel(
        folder,
        model,
        tokenizer,
        companions,
        manifest_fields,
        learner,
        ranks.world_size,
        open_engine,
        worker_info,
        arithmetic,
    )


def group_limits(config: Config, model: models.Model) -> wire.GroupLimits:
    """Limits of groups that generators with these settings send."""
    evaluated = config.eval_environments
    sizes = dict(config.group_sizes)
    num_rollouts = max(*sizes.values(), *map(config.rollouts_per_example_of, evaluated))
    if agents := [env.label for env in (*config.environments, *evaluated) if env.has_agent]:
        num_rollouts *= MAX_BRANCHES
        sizes |= dict.fromkeys(agents, 0)  # any number
    samplings = [build.make_sampling(config, env, seed=0) for env in config.environments]
    samplings += [build.make_eval_sampling(config, env, seed=0) for env in evaluated]
    return wire.GroupLimits(
        int(model.config.vocab_size),
        max_rollouts=num_rollouts,
        max_tokens=min(config.engine.max_model_len, models.max_positions(model)),
        max_generated=max(sampling.max_completion_length for sampling in samplings),
        max_turns=config.task.max_turns,
        num_rollouts=sizes,
    )


def version_files(
    config: Config, folder: Path, model: models.Model, tokenizer: models.Tokenizer
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the companion files (content by name) and manifest fields of versions.

    By the fields of LoRA adapters, generators check that they have the same base model: its digest,
    name and format (`adapts_dtype`), and the digest of its packed weights (`adapts_packed`).
    """
    identity = {
        "tokenizer": models.tokenizer_identity(folder, tokenizer),
        "settings": fitted_settings.manifest_field(config),
    }
    if not lora.has_adapters(model):
        return models.companion_files(folder, tokenizer), identity
    name = config.model.name
    # peft looks the base model up by folder or name; it does not have the names of embedded ones.
    is_embedded = folder in (models.EMBEDDED, models.EMBEDDED_TURNS)
    content = lora.config_file(model, base=str(folder) if is_embedded else name)
    fields = {
        "adapts": lora.weights_digest(folder),
        "adapts_name": name,
        "adapts_dtype": config.lora.base_dtype,
        **identity,
    }
    if (digest := frozen_layers.packed_digest(model)) is not None:
        fields["adapts_packed"] = digest
    return {lora.CONFIG_FILE: content}, fields


def base_of(fields: Mapping[str, object]) -> list[object]:
    """What identifies the base model of adapters in manifest fields; Nones for all weights."""
    return [fields.get(name) for name in ("adapts", "adapts_dtype", "adapts_packed")]


def trained_text(fields: Mapping[str, object]) -> str:
    base = ", ".join(str(each) for each in base_of(fields) if each is not None)
    return f"adapters for {fields.get('adapts_name')} ({base})" if base else "all weights"


# Publishing to the weight store.


def open_store(config: Config) -> WeightStore:
    """Open the weight store for publishing. Raises ConfigError for an http:// address."""
    if config.weights_address.startswith("http://"):
        raise ConfigError(
            f"weights.dir {config.weights.dir} is an address for generators only; on the "
            "trainer set weights.dir to a folder, and weights.serve_port to serve it over HTTP"
        )
    addresses.read_private_token(config.security.token_file)  # a bad file raises before any write
    return WeightStore.open(config.weights_address)


class PolicyPublisher:
    """Publishes the weights in a thread; announces each version when it is readable."""

    def __init__(
        self, session: Session, store: WeightStore, policy: TrainedModel, stack: ExitStack
    ) -> None:
        self.store = store
        self.newest_step = -1  # of the newest weights passed to `publish` or `announce`; -1: none
        self._session = session
        self._model = policy.model
        self._manifest_fields: dict[str, str | int] = {**policy.manifest_fields}
        self._newest: PublishReport | None = None  # of the newest published version
        self._failure: PublishReport | None = None  # of the last attempt to publish, if it failed
        config = session.config
        weights = session.config.weights
        token = addresses.read_private_token(config.security.token_file)
        if weights.serve_port:
            folder = config.weights_folder
            port = weights.serve_port
            host = wire.interface_address(config.wire.bind)
            stack.enter_context(closing(serve_weights(folder, host=host, port=port, token=token)))
        writer = VersionWriter(
            store,
            companions=policy.companions,
            about=self._manifest_fields,  # read for each version; `publish` sets the lineage
            retention=Retention(weights.keep_last, weights.keep_interval, weights.keep_seconds),
            max_mbit_per_s=weights.max_mbit_per_s,
            before_write=session.address_file.check,
            on_published=self.announce,
        )
        self._publisher = WeightPublisher(
            writer,
            dtype=models.DTYPES[weights.dtype],
            moves_snapshots=build.moves_snapshots(config, policy.base_folder),
        )
        stack.callback(lambda: self._publisher.close(self._timeout()))

    def publish(self, step: int, *, keyframe: bool = False) -> float:
        """Publish the weights of `step` in the background; returns the seconds of their copy."""
        self.newest_step = step
        # transformers can load the folder of the last step.
        keyframe = keyframe or step >= self._session.config.train.max_steps
        self._manifest_fields["lineage"] = self._session.run_log.lineage
        return self._publisher.publish(step, lora.published_weights(self._model), keyframe=keyframe)

    def announce(self, version: Version) -> None:
        self._session.announcer.publish(version=version.number, weights_id=version.weights_id)

    def metrics(self) -> dict[str, float]:
        """Size and timings of the newest published version, which may lag behind the step."""
        if (report := self._newest) is None or report.version is None:
            return {}
        return {
            "weights/version": report.version.number,
            "weights/step": report.version.step,
            "weights/bytes": report.version.size,
            "weights/stall_seconds": report.stall_seconds,
            "weights/encode_seconds": report.encode_seconds,
            "weights/write_seconds": report.write_seconds,
        }

    def wait(self) -> None:
        """Wait until the newest weights are published or have failed; report a timeout."""
        started = time.monotonic()
        while not self._publisher.wait(0.2):
            if time.monotonic() - started > (timeout := self._timeout()):
                note = f"the last version is still not published after {timeout:.0f} s"
                self._session.run_log.note(note)
                break
        self.record_reports()

    def wait_out(self) -> bool:
        """As `wait`, also during an outage; False after a stop request."""
        self._publisher.lift_rate_limit()
        try:
            self._session.wait_out(self._check_published)
        except OutageError:
            return False
        return True

    def _check_published(self) -> None:
        self.wait()
        if self._publisher.is_pending:
            if self._failure is not None:
                raise OutageError(self._failure.reason) from self._failure.cause
            raise OutageError(f"the last version is still being published to {self.store.address}")
        self.record_reports()  # an attempt after `wait` may have succeeded

    def record_reports(self) -> None:
        """Record each version that was published, or failed, since the last call."""
        for report in self._publisher.take_reports():
            if report.version is None:  # failed; training continues, generators keep their version
                run_log = self._session.run_log
                run_log.event("publish_failed", step=report.step, reason=report.reason)
                if self._failure is None or report.reason != self._failure.reason:
                    run_log.note(report.reason)  # only once if it repeats
                self._failure = report
            else:
                self._newest = report
                self._failure = None
                self._record(report.version)

    def record_unrecorded(self) -> None:
        """Record versions that an earlier session published just before a kill."""
        folder = self._session.folder
        recorded = self._session.wait_out(lambda: recorded_versions(folder))
        # No number is published again, even if the version is gone.
        self.store.min_number = max(recorded.values(), default=-1) + 1
        try:
            versions = self.store.versions()
        except StoreError as error:
            self._session.run_log.note(str(error))
            return
        for version in versions:
            if version.weights_id not in recorded:
                self._record(version)

    def _record(self, version: Version) -> None:
        self._session.run_log.event(
            "publish",
            step=version.step,
            number=version.number,
            weights_id=version.weights_id,
            kind=version.kind,
            bytes=version.size,
        )

    def _timeout(self) -> float:
        # After a stop request, the next start publishes them.
        return 2.0 if self._session.stop.requested else 60.0


# Exporting the weights to folders that transformers and peft can load.


def final_weights(config: Config, policy: TrainedModel, store: WeightStore) -> Path:
    """The folder of the last weights for transformers: the newest version, or merged adapters."""
    if lora.has_adapters(policy.model):
        return export_adapter(
            config, config.run_folder, policy.base_folder, policy.model, policy.tokenizer
        )
    newest = store.newest()
    return newest.folder if newest else store.folder


def export_adapter(
    config: Config,
    folder: Path,
    model_folder: Path,
    model: models.Model,
    tokenizer: models.Tokenizer,
) -> Path:
    """Write `folder/adapter` for peft and `folder/merged`, which is returned. Raises OSError."""
    adapter = tensor_set.copy_set(lora.published_weights(model), torch.float32)
    companions, manifest_fields = version_files(config, model_folder, model, tokenizer)
    files = {lora.WEIGHTS_FILE: tensor_set.file_of(adapter, {}), **companions}
    atomic_files.remove_folder(folder / "adapter")
    atomic_files.write_folder(folder / "adapter", files, manifest_fields)
    base = frozen_layers.unpacked_weights(model)
    return write_merged(folder / "merged", base, adapter, model_folder, tokenizer)


def write_merged(
    target: Path,
    base: Mapping[str, torch.Tensor],
    adapter: Mapping[str, torch.Tensor],
    model_folder: Path,
    tokenizer: models.Tokenizer,
) -> Path:
    """Write the base weights with the adapter, in float32, for transformers. Raises OSError."""
    companions = models.companion_files(model_folder, tokenizer, dtype="float32")
    merged = models.converted_weights(lora.merged_weights(base, adapter), torch.float32)
    files = {WEIGHTS_FILE: tensor_set.file_of(merged, {}), **companions}
    atomic_files.remove_folder(target)
    atomic_files.write_folder(target, files, {})
    return target
