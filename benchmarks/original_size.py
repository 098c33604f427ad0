"""A step at the original's size: Qwen3-0.6B's shape with random weights, the original's constants.

12 problems of 110 tokens, 4 completions of 12, 18, 26 and 40 tokens each, a learning rate of 2e-6.
The original, made again without Ray, whose cost is left out: fp32, one prompt at a time, a second
forward for the logprobs, pickled rollouts, training padded, one group after another with one step
of the optimizer (logits at every position of all 48 rollouts would be 4.4 GB, several times), then
`save_pretrained`, `from_pretrained`. Both are measured whole, once, and their parts are added up,
although ours run side by side in a real run. Each part is a process of its own, one after another.
`--quick` takes a shape a tenth as large.
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
from peralta_zmq.weights.publisher import WeightPublisher
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.tensors import check_finite
from peralta_zmq.weights.version import Version

NUM_GROUPS = 12
PARTS = ("generate", "score", "transfer", "train", "publish", "reload")
RUN = "bench-00112233"
PATIENCE = 600.0  # seconds, for the publisher
Seconds = dict[str, float]  # of each part


def run(*, quick: bool) -> Iterable[Claim]:
    """One step of each side, part by part."""
    taken: dict[str, Seconds] = {"ours": {}, "original": {}}
    tell = progress_of(len(WORK))
    for work in WORK:
        side, _, _ = work.partition("_")
        taken[side] |= alone(work, quick=quick)
        tell(f"{work}: {taken[side]}")
    yield from claims(taken["ours"], taken["original"])


def alone(work: str, *, quick: bool) -> Seconds:
    """What a process of its own measured."""
    command = [sys.executable, "-m", "benchmarks.original_size", work, str(int(quick))]
    surroundings = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        command, cwd=REPO, env=surroundings, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def claims(ours: Mapping[str, float], original: Mapping[str, float]) -> Iterator[Claim]:
    """Steps per hour when the parts follow each other, and the seconds of each."""
    mine, theirs = (3600 / sum(each.values()) for each in (ours, original))
    yield Claim("steps_per_hour", mine, "steps/h", peer=theirs, ratio=mine / theirs)
    for part in PARTS:
        ratio = original[part] / ours[part] if ours[part] else None
        yield Claim(f"{part}_seconds", ours[part], "s/step", peer=original[part], ratio=ratio)


# The parts.


def ours_generate(shape: dict[str, Any]) -> Seconds:
    """All completions with their logprobs, and the groups through a socket."""
    engine = engine_of(shape)
    asked = generation.requests(NUM_GROUPS, list(LENGTHS) * NUM_GROUPS)
    list(engine.generate(asked[:4], generation.SAMPLING))
    sampling = seconds(lambda: list(engine.generate(asked, generation.SAMPLING)))
    return {"generate": sampling, "score": 0.0, "transfer": sent(shape)}


def engine_of(shape: dict[str, Any]) -> NativeEngine:
    """One that never ends a completion before its length."""
    dtype, _ = models.choose_dtype(torch.device("cpu"))
    engine = NativeEngine(
        generation.endless_model(shape).to(dtype), models.load_tokenizer(models.EMBEDDED), slots=32,
        max_model_len=NUM_PROMPT + generation.NUM_NEW,
    )  # fmt: skip
    engine._end_ids = []  # pyright: ignore[reportPrivateUsage]
    return engine


def sent(shape: Mapping[str, object]) -> float:
    """Seconds in which the groups of a step are encoded, sent, received and checked."""
    size = int(str(shape["vocab_size"]))
    groups = [training.group(number, size, run_id=RUN) for number in range(NUM_GROUPS)]
    with ExitStack() as stack:
        receiver = wire.RolloutReceiver("tcp://127.0.0.1:*", run_id=RUN, vocab_size=size)
        stack.enter_context(closing(receiver))
        sender = stack.enter_context(closing(wire.RolloutSender(receiver.address)))

        def once() -> None:
            for group in groups:
                assert sender.send(wire.encode_group(group), timeout=10.0)
                assert receiver.receive(timeout=10.0), receiver.refused

        once()  # until the connection stands
        return seconds(once)


def ours_train(shape: dict[str, Any]) -> Seconds:
    """The step; then publish what it changed, fetch and check it, and have the engine apply it."""
    setting = Setting(shape, num_groups=NUM_GROUPS)
    setting.narrow(1)
    with tempfile.TemporaryDirectory(prefix="bench-size-") as folder:
        store = WeightStore.open(Path(folder) / "weights")
        store.claim("bench")
        (Path(folder) / "copy").mkdir()
        copy = LocalReplica(Path(folder) / "copy")
        with closing(WeightPublisher(store, companions={}, keyframe_interval=1000)) as publisher:
            first, _ = published(publisher, 0, setting)
            copy.advance(store, first)
            step = seconds(lambda: setting.narrow(NUM_GROUPS))
            version, publishing = published(publisher, 1, setting)

        engine = engine_of(shape)

        def reload() -> None:
            copy.advance(store, version)
            newer = copy.tensors()
            check_finite(newer)
            engine.apply(newer, step=1)

        return {"train": step, "publish": publishing, "reload": seconds(reload)}


def published(publisher: WeightPublisher, step: int, setting: Setting) -> tuple[Version, float]:
    """The version, and the seconds until others can read it."""
    weights = models.weights_of(setting.model)

    def publish() -> None:
        publisher.publish(step, weights)
        assert publisher.wait(PATIENCE)

    taken = seconds(publish)
    (report,) = publisher.take_reports()
    assert report.version, report.reason
    return report.version, taken


def original_generate(shape: dict[str, Any]) -> Seconds:
    """One prompt after another, each up to its longest completion, and its logprobs."""
    model = generation.endless_model(shape)
    sampling = scoring = 0.0
    with torch.inference_mode():
        generation.generated(model, 1, 2)
        for _ in range(NUM_GROUPS):
            began = time.perf_counter()
            sequences = generation.generated(model, 1, max(LENGTHS))
            sampled = time.perf_counter()
            models.token_logprobs(model, sequences, torch.ones_like(sequences))
            sampling += sampled - began
            scoring += time.perf_counter() - sampled
    groups = [training.group(number, 1000) for number in range(NUM_GROUPS)]
    passing = seconds(lambda: pickle.loads(pickle.dumps(groups)))
    return {"generate": sampling, "score": scoring, "transfer": passing}


def original_train(shape: dict[str, Any]) -> Seconds:
    """The step; then write and read fp32 weights."""
    setting = Setting(shape, num_groups=NUM_GROUPS)
    setting.original(1)
    step = seconds(lambda: setting.original(NUM_GROUPS, at_once=1))
    with tempfile.TemporaryDirectory(prefix="bench-size-") as folder:
        saving = seconds(lambda: setting.model.save_pretrained(folder))
        cpu = torch.device("cpu")
        loading = seconds(lambda: models.load_model(Path(folder), device=cpu, dtype=torch.float32))
    return {"train": step, "publish": saving, "reload": loading}


WORK: dict[str, Callable[[dict[str, Any]], Seconds]] = {
    each.__name__: each for each in (ours_generate, original_generate, ours_train, original_train)
}


def main(work: str, quick: bool) -> None:
    """Do one part and print its seconds."""
    models.use_threads()
    models.keep_memory()
    taken = WORK[work](generation.QUICK_SHAPE if quick else generation.SHAPE)
    sys.stdout.write(json.dumps(taken) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1")
