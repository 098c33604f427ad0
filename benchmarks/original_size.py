"""Steps per hour at the original's size: Qwen3-0.6B's shape, random weights, its constants.

12 problems of 110 tokens, 4 completions of 12, 18, 26 and 40 tokens each, a learning rate of 2e-6.
The original is reimplemented without Ray, whose cost is left out: fp32, one prompt at a time, a
second forward pass for the logprobs, pickled rollouts, padded training of one group after another
with one training step (the logits of all 48 rollouts at every position would need 4.4 GB, several
times), then `save_pretrained` and `from_pretrained`. Each part is measured once in a separate
process, and the parts are added up, although ours overlap in a real run. `--quick` uses a shape a
tenth as large.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from benchmarks import generation, training
from benchmarks.harness import REPO, Claim, progress_of, seconds
from benchmarks.training import LENGTHS, NUM_PROMPT, Setting
from peralta_zmq import models, wire
from peralta_zmq.engines.native import NativeEngine
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.weights.publisher import VersionWriter, WeightPublisher
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.tensor_set import check_finite
from peralta_zmq.weights.version import Version

NUM_GROUPS = 12
PARTS = ("generate", "score", "transfer", "train", "publish", "reload")
RUN = "bench-00112233"
PUBLISH_TIMEOUT = 600.0  # seconds
Seconds = dict[str, float]  # by part


def run(*, quick: bool) -> Iterable[Claim]:
    """Measure one step of each side, part by part."""
    parts: dict[str, Seconds] = {"ours": {}, "original": {}}
    report_progress = progress_of(len(WORK))
    for work in WORK:
        side, _, _ = work.partition("_")
        parts[side] |= measure_in_process(work, quick=quick)
        report_progress(f"{work}: {parts[side]}")
    yield from claims(parts["ours"], parts["original"])


def measure_in_process(work: str, *, quick: bool) -> Seconds:
    """Measure one entry of WORK in a new process."""
    command = [sys.executable, "-m", "benchmarks.original_size", work, str(int(quick))]
    variables = {**os.environ, "PYTHONPATH": str(REPO)}
    result = subprocess.run(
        command, cwd=REPO, env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def claims(ours: Mapping[str, float], original: Mapping[str, float]) -> Iterator[Claim]:
    """Steps per hour if the parts run one after another, and the seconds of each part."""
    rate, peer_rate = (3600 / sum(each.values()) for each in (ours, original))
    yield Claim("steps_per_hour", rate, "steps/h", peer=peer_rate, ratio=rate / peer_rate)
    for part in PARTS:
        ratio = original[part] / ours[part] if ours[part] else None
        yield Claim(f"{part}_seconds", ours[part], "s/step", peer=original[part], ratio=ratio)


def ours_generate(shape: dict[str, Any]) -> Seconds:
    """Sample all completions with their logprobs, and send the groups through a socket."""
    engine = engine_of(shape)
    requests = generation.requests(NUM_GROUPS, list(LENGTHS) * NUM_GROUPS)
    list(engine.generate(requests[:4], generation.SAMPLING))
    sampling = seconds(lambda: list(engine.generate(requests, generation.SAMPLING)))
    return {"generate": sampling, "score": 0.0, "transfer": transfer_seconds(shape)}


def engine_of(shape: dict[str, Any]) -> NativeEngine:
    """An engine without an end token, so that completions have their full length."""
    dtype, _ = models.choose_dtype(torch.device("cpu"))
    engine = NativeEngine(
        generation.endless_model(shape).to(dtype), models.load_tokenizer(models.EMBEDDED), slots=32,
        max_model_len=NUM_PROMPT + generation.NUM_NEW,
    )  # fmt: skip
    engine._end_ids = []  # pyright: ignore[reportPrivateUsage]
    return engine


def transfer_seconds(shape: Mapping[str, object]) -> float:
    """Seconds to encode, send, receive and validate the groups of a step."""
    size = int(str(shape["vocab_size"]))
    groups = [training.group(number, size, run_id=RUN) for number in range(NUM_GROUPS)]
    with ExitStack() as stack:
        limits = wire.GroupLimits(size)
        receiver = wire.RolloutReceiver("tcp://127.0.0.1:*", run_id=RUN, limits=limits)
        stack.enter_context(closing(receiver))
        sender = stack.enter_context(closing(wire.RolloutSender(receiver.address)))

        def transfer() -> None:
            for group in groups:
                assert sender.send(wire.encode_group(group), timeout=10.0)
                assert receiver.receive(timeout=10.0), receiver.refused

        transfer()  # establishes the connection
        return seconds(transfer)


def ours_train(shape: dict[str, Any]) -> Seconds:
    """Take the step, publish its weights, fetch and check them and apply them to the engine."""
    setting = Setting(shape, num_groups=NUM_GROUPS)
    train = getattr(setting, training.chosen_variant(shape))
    train(1)
    with tempfile.TemporaryDirectory(prefix="bench-size-") as folder:
        store = WeightStore.open(Path(folder) / "weights")
        store.claim("bench")
        (Path(folder) / "replica").mkdir()
        replica = LocalReplica(Path(folder) / "replica")
        writer = VersionWriter(store, companions={}, keyframe_interval=1000)
        with closing(WeightPublisher(writer)) as publisher:
            first, _ = publish(publisher, 0, setting)
            replica.advance(store, first)
            step = seconds(lambda: train(NUM_GROUPS))
            version, publishing = publish(publisher, 1, setting)

        engine = engine_of(shape)

        def reload() -> None:
            replica.advance(store, version)
            weights = replica.tensors()
            check_finite(weights)
            engine.apply(WeightUpdate(1, weights))

        return {"train": step, "publish": publishing, "reload": seconds(reload)}


def publish(publisher: WeightPublisher, step: int, setting: Setting) -> tuple[Version, float]:
    """Publish the weights; returns the version and the seconds until it can be read."""
    weights = models.weights_of(setting.model)

    def publish_and_wait() -> None:
        publisher.publish(step, weights)
        assert publisher.wait(PUBLISH_TIMEOUT)

    publishing = seconds(publish_and_wait)
    (report,) = publisher.take_reports()
    assert report.version, report.reason
    return report.version, publishing


def original_generate(shape: dict[str, Any]) -> Seconds:
    """Sample one prompt after another up to its longest completion, and compute its logprobs."""
    model = generation.endless_model(shape)
    sampling = scoring = 0.0
    with torch.inference_mode():
        generation.generated(model, 1, 2)
        for _ in range(NUM_GROUPS):
            started = time.perf_counter()
            sequences = generation.generated(model, 1, max(LENGTHS))
            sampled = time.perf_counter()
            generation.token_logprobs(model, sequences)
            sampling += sampled - started
            scoring += time.perf_counter() - sampled
    groups = [training.group(number, 1000) for number in range(NUM_GROUPS)]
    transfer = seconds(lambda: pickle.loads(pickle.dumps(groups)))
    return {"generate": sampling, "score": scoring, "transfer": transfer}


def original_train(shape: dict[str, Any]) -> Seconds:
    """Take the step, then write and read fp32 weights."""
    setting = Setting(shape, num_groups=NUM_GROUPS)
    setting.original(1)
    step = seconds(lambda: setting.original(NUM_GROUPS, at_once=1))
    with tempfile.TemporaryDirectory(prefix="bench-size-") as folder:
        saving = seconds(lambda: setting.model.save_pretrained(folder))
        cpu = torch.device("cpu")
        loading = seconds(lambda: models.load_model(Path(folder), device=cpu, dtype=torch.float32))
    return {"train": step, "publish": saving, "reload": loading}


WORK: dict[str, Callable[[dict[str, Any]], Seconds]] = {
    work.__name__: work for work in (ours_generate, original_generate, ours_train, original_train)
}


def main(work: str, quick: bool) -> None:
    """Measure one entry of WORK and print its seconds."""
    models.use_threads()
    models.keep_memory()
    parts = WORK[work](generation.QUICK_SHAPE if quick else generation.SHAPE)
    sys.stdout.write(json.dumps(parts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1")
