"""Weight synchronization: the first version, newer ones in place, rejection of bad ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from engine_data import GREEDY, sampled, scored
from engine_data import requests as prompts
from generators import FakeEngine, apply_until, publish
from sample_data import tiny_model

from peralta_zmq import atomic_files, models, wire
from peralta_zmq.config import load_config
from peralta_zmq.errors import OutageError
from peralta_zmq.generator import weight_sync
from peralta_zmq.generator.weight_sync import (
    ServedWeights,
    apply_newest,
    open_engine,
    open_subscriber,
)
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.weights.store import WEIGHTS_FILE, Version, WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber

ABSENT = "tcp://127.0.0.1:9"  # nothing listens there


class ModelEngine:
    """Applies weights to a real model."""

    def __init__(self, model: Any) -> None:
        self.step, self.model = 0, model

    def apply(self, update: WeightUpdate) -> None:
        models.apply_weights(self.model, update.tensors)
        self.step = update.step


def has_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> bool:
    current = models.weights_of(model)
    return all(torch.equal(current[name], tensor) for name, tensor in weights.items())


def test_version_of_another_tokenizer_is_refused_in_use(
    store: WeightStore, subscriber: WeightSubscriber, caplog: pytest.LogCaptureFixture
) -> None:
    def publish_of(step: int, tokenizer: str) -> Version:
        weights, about = {"w": torch.full((4,), float(step))}, {"tokenizer": tokenizer}
        return store.publish(step, weights, companions={}, about=about)

    first = apply_until(engine := FakeEngine(), subscriber, publish_of(1, "end_tokens=2"), 1)
    publish_of(2, "end_tokens=5")
    assert subscriber.poll(timeout=20) is not None
    assert apply_newest(engine, subscriber, first) is first
    assert "another tokenizer (end_tokens=2 -> end_tokens=5); restart this gener" in caplog.text
    assert engine.weights["w"].tolist() == [1.0] * 4


class FullDisk(FakeEngine):
    """Has no room for new weights while `is_full`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full, self.num_failures = False, 0

    def apply(self, update: WeightUpdate) -> None:
        if self.is_full:
            self.num_failures += 1
            raise OutageError("disk full")
        super().apply(update)


def test_weights_that_cannot_be_written_are_applied_after_the_outage(
    store: WeightStore,
    subscriber: WeightSubscriber,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = apply_until(engine := FullDisk(), subscriber, publish(store, 1, 1.0), 1)
    weights, newest, engine.is_full = ServedWeights(subscriber, first), publish(store, 2, 2.0), True
    while engine.num_failures == 0:  # the test's deadline ends a hang
        subscriber.poll(timeout=0.2)
        weights.apply_due(engine, num_in_flight=1)
    for _ in range(9):  # between two tokens
        weights.apply_due(engine, num_in_flight=1)
    assert (engine.num_failures, weights.version.step) == (1, 1)
    assert caplog.messages[-1] == "weights not applied, trying again: reason=disk full"
    engine.is_full = False
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + weight_sync.REPORT_SECONDS)
    weights.apply_due(engine, num_in_flight=1)
    assert (engine.weights["w"].tolist(), weights.version) == ([2.0] * 4, newest)


def damaged(weights: dict[str, torch.Tensor], damage: str) -> dict[str, torch.Tensor]:
    norm = "model.norm.weight"
    if damage == "missing":
        return {name: tensor for name, tensor in weights.items() if name != norm}
    if damage == "shape":
        return {**weights, norm: torch.ones(7)}
    return {**weights, norm: torch.full_like(weights[norm], torch.nan)}


@pytest.mark.parametrize("damage", ["missing", "shape", "nan", "integers", "wrong manifest"])
def test_damaged_version_leaves_the_model_unchanged(
    store: WeightStore, subscriber: WeightSubscriber, damage: str
) -> None:
    good = models.weights_of(tiny_model(seed=1))
    engine = ModelEngine(tiny_model(seed=2))
    first = apply_until(engine, subscriber, store.publish(1, good, companions={}), 1)
    if damage in ("integers", "wrong manifest"):
        bits = {name: tensor.to(torch.int16) for name, tensor in good.items()}
        about = {"run_id": "run", "number": 2, "step": 2}
        if damage == "wrong manifest":  # it names the tensors and shapes of the model
            about["model"] = first.field("model")
        weights = {WEIGHTS_FILE: safetensors.torch.save(bits)}
        atomic_files.write_folder(store.folder / "step_00000002", weights, about)
    else:
        store.publish(2, damaged(good, damage), companions={})
    subscriber.notify(2)
    pending = subscriber.poll(timeout=0.5)
    assert pending is None or apply_newest(engine, subscriber, first) is first
    assert has_weights(engine.model, good)
    store.publish(3, {name: tensor + 1 for name, tensor in good.items()}, companions={})
    assert apply_until(engine, subscriber, first, 3).number == 3


def test_engine_opens_on_keyframe_and_deltas_and_shares_no_memory(tmp_path: Path) -> None:
    store = WeightStore.open(tmp_path / "run" / "weights")
    store.claim("run")
    cpu, norm = torch.device("cpu"), "model.norm.weight"
    model = models.load_model(models.EMBEDDED, device=cpu, dtype=torch.float32).bfloat16()
    companions = models.companion_files(models.EMBEDDED, models.load_tokenizer(models.EMBEDDED))
    weights = models.weights_of(model)
    versions = [store.publish(4, weights, companions=companions)]

    def publish_delta(step: int, index: slice | int) -> None:
        base = {name: tensor.clone() for name, tensor in weights.items()}
        weights[norm].view(-1)[index] += 1
        versions.append(
            store.publish(step, weights, companions=companions, base=(versions[-1], base))
        )

    publish_delta(5, 5)
    publish_delta(6, 6)
    config = load_config(
        "bin/generator",
        ["--run.dir", str(tmp_path), "--run.name", "run", "--model.dtype", "bfloat16"],
    )
    requests: list[str] = []
    with (
        closing(wire.AnnouncementSubscriber(ABSENT)) as announcements,
        closing(open_subscriber(config, "ann")) as subscriber,
    ):
        _, version, engine, _ = open_engine(
            config, subscriber, announcements, wire.TrainerAddress(ABSENT), requests.append
        )
        assert (requests, version.step, engine.step) == ([], 6, 6)
        (before,) = sampled(engine, GREEDY, prompts([[5, 9]]))
        assert np.allclose(before.logprobs, scored(model, before, 1.0), atol=0.1)  # bfloat16
        publish_delta(7, slice(None))
        assert subscriber.poll(timeout=20) is not None  # the replica has changed
        (after,) = sampled(engine, GREEDY, prompts([[5, 9]]))
        assert after.logprobs.tolist() == before.logprobs.tolist()


@pytest.mark.parametrize("config_file", [b"[" * 100_000, b"{}", b'{"dtype": []}'])
def test_version_whose_files_raise_is_refused_and_another_one_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config_file: bytes
) -> None:
    store = WeightStore.open(tmp_path / "run" / "weights")
    store.claim("run")
    cpu = torch.device("cpu")
    weights = models.weights_of(
        models.load_model(models.EMBEDDED, device=cpu, dtype=torch.float32).bfloat16()
    )
    companions = models.companion_files(models.EMBEDDED, models.load_tokenizer(models.EMBEDDED))
    store.publish(1, weights, companions=companions)
    damaged_files = {**companions, "config.json": config_file}
    store.publish(2, weights, companions=damaged_files)
    store.publish(3, weights, companions=companions, about={"settings": "[" * 500})
    arguments = ["--run.dir", str(tmp_path), "--run.name", "run"]
    with (
        closing(wire.AnnouncementSubscriber(ABSENT)) as announcements,
        closing(
            open_subscriber(config := load_config("bin/generator", arguments), "ann")
        ) as subscriber,
    ):
        address = wire.TrainerAddress(ABSENT)
        _, version, _, _ = open_engine(config, subscriber, announcements, address, str)
    assert version.step == 1
    refused = [line for line in caplog.messages if line.startswith("refused version=")]
    assert [line.split()[1] for line in refused] == ["version=3", "version=2"]


def test_reason_of_an_unreadable_store_is_reported_during_the_wait(tmp_path: Path) -> None:
    (tmp_path / "nas").touch()
    arguments = ["--run.dir", str(tmp_path), "--weights.dir", str(tmp_path / "nas")]
    config = load_config("bin/generator", arguments)

    def report(run_id: str) -> None:
        raise RuntimeError(run_id)  # ends the wait

    with (
        closing(wire.AnnouncementSubscriber(ABSENT)) as announcements,
        closing(open_subscriber(config, "ann")) as subscriber,
        pytest.raises(RuntimeError, match="run-7"),
    ):
        announcements.latest = wire.Announcement("run-7")
        open_engine(config, subscriber, announcements, wire.TrainerAddress(ABSENT), report)
    assert "nas cannot be read: Not a directory;" in subscriber.store_error
