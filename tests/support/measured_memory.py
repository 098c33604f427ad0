"""Measure the peak memory of a trainer's steps, or of a generator's engine, in this process.

python tests/support/measured_memory.py trainer|generator FOLDER [OPTIONS] prints the measured and
the planned peak in bytes, as JSON. FOLDER has a model.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.training import random_group
from peralta_zmq import build, models, registry
from peralta_zmq.build.engines import engine_settings
from peralta_zmq.config import Config, load_config
from peralta_zmq.learning.distributed import SINGLE
from peralta_zmq.memory import Machine, Role
from peralta_zmq.models import lora
from peralta_zmq.rollout import Request, RolloutGroup
from peralta_zmq.trainer import trained_model
from peralta_zmq.weights.publisher import VersionWriter, WeightPublisher
from peralta_zmq.weights.store import WeightStore

NUM_STEPS = 3
PERIOD = 0.005  # seconds between two samples


class PeakMemory(threading.Thread):
    """Within the block, samples the memory of this process that the kernel cannot drop.

    That is anonymous, shared and swapped memory, without the pages of mapped files. `peak` is the
    largest sample in bytes, `before` the one at the start.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = self._sample()
        self._is_ended = threading.Event()

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_ended.set()
        self.join()

    def run(self) -> None:
        while not self._is_ended.wait(PERIOD):
            self.peak = max(self.peak, self._sample())

    def _sample(self) -> int:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        kinds = ("RssAnon", "RssShmem", "VmSwap")
        return sum(int(fields[kind].split()[0]) for kind in kinds) << 10


def group(config: Config, vocab_size: int, *, number: int) -> RolloutGroup:
    """Rollouts of the longest prompts and completions, with different rewards."""
    num_generated = config.max_completion_length
    lengths = [num_generated] * config.sampling.num_generations
    num_prompt = config.engine.max_model_len - num_generated
    return random_group(number, vocab_size, lengths, num_prompt=num_prompt)


def mapped_bytes(folder: Path) -> int:
    """Resident bytes of mapped files in `folder`: a base model in bfloat16 stays in its files."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):  # a mapping: addresses, mode, ..., path
            is_inside = rest[-1].startswith(str(folder))
        elif is_inside and name in ("Shared_Clean:", "Private_Clean:"):
            total += int(rest[0]) << 10
    return total


def train(config: Config, folder: Path) -> int:
    """Take steps and publish each, with an evaluation before and after, as the trainer does.

    Returns the bytes of mapped weights.
    """
    tokenizer = models.load_tokenizer(models.model_folder(config.model.name))
    opened = trained_model.open_trained_model(config, tokenizer, SINGLE)
    vocab_size = int(opened.model.config.vocab_size)
    groups = [group(config, vocab_size, number=each) for each in range(config.groups_per_step)]
    with tempfile.TemporaryDirectory() as published:
        store = WeightStore.open(published)
        store.claim("run")
        writer = VersionWriter(store, companions={})
        dtype = models.DTYPES[config.weights.dtype]
        moves = build.moves_snapshots(config, opened.base_folder)
        publisher = WeightPublisher(writer, dtype=dtype, moves_snapshots=moves)
        with closing(publisher):
            sample(config, opened.open_engine())
            for step in range(1, NUM_STEPS + 1):
                result = opened.learner.learn(groups)
                assert not result.skip_reason, result
                publisher.publish(step, lora.published_weights(opened.model))
                assert publisher.wait(60.0)
            sample(config, opened.open_engine())
    return mapped_bytes(folder)


def serve(config: Config, folder: Path, machine: Machine) -> None:
    """Sample as a generator does."""
    settings = replace(engine_settings(config), dtype=machine.sampling_dtype)
    engine = registry.resolve("engine", machine.engine).open(folder, settings)
    engine.apply(registry.WeightUpdate(1, models.folder_weights(folder)))  # into memory
    sample(config, engine)


def sample(config: Config, engine: registry.Engine) -> None:
    """Sample completions of the largest length in all slots."""
    random, length = np.random.default_rng(0), config.engine.max_model_len
    num_prompt, size = length - config.max_completion_length, config.sampling.num_generations
    prompts = random.integers(3, 400, (config.engine.slots // size + 1, num_prompt), np.int32)
    sampling = build.make_sampling(config, seed=0)
    engine.submit(
        [Request(index, prompts[index // size], sampling) for index in range(config.engine.slots)]
    )
    num_completions = 0
    while num_completions < config.engine.slots:
        num_completions += len(engine.advance())


def main(role: Role, name: str, *arguments: str) -> None:
    folder = Path(name)
    config = load_config("measured_memory", ["--model.name", name, *arguments])
    models.keep_memory()
    planner = build.MemoryPlanner.of(config, folder)
    plan = planner.plan(config, role)
    with PeakMemory() as memory:
        if role == "trainer":
            mapped = train(config, folder)
        else:
            mapped = 0  # the engine has copied the weights
            serve(config, folder, planner.machine)
    parts = {name: int(size) for name, size in plan.parts.items()}
    row = {
        "process": memory.before,
        "measured": memory.peak + mapped,
        "planned": int(plan.peak),
        "phase": plan.phase,
    }
    print(json.dumps({**row, "parts": parts}))


if __name__ == "__main__":
    main(cast(Role, sys.argv[1]), *sys.argv[2:])
