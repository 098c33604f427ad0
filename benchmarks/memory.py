"""Memory of a trainer, and time of its steps, on random weights in the shapes of Qwen3.

Each cell is a trainer in a process of its own, without sockets: it loads the model, publishes it,
takes steps that are each published in the background during the next step, and writes a checkpoint.
`*_memory` is the peak of the memory that the kernel cannot drop: anonymous and shared memory, and
swapped pages, without mapped files (libraries, weights); its bound is the limit of the cell.
`*_needed` are the weights, gradients and optimizer state alone.

`CELLS="full_1.7b_8bit lora_4b_nf4" bin/bench memory` measures only these cells; those of LoRA take
an hour. `--quick` uses tiny shapes. Linux only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import REPO, TOY, Claim, progress
from benchmarks.training import LENGTHS, SHAPE, random_group
from peralta_zmq import build, models
from peralta_zmq.config import load_config
from peralta_zmq.learning.distributed import SINGLE
from peralta_zmq.models import lora
from peralta_zmq.trainer.checkpoint import Checkpoint, write_checkpoint
from peralta_zmq.trainer.trained_model import TrainedModel, open_trained_model
from peralta_zmq.weights import tensor_set
from peralta_zmq.weights.publisher import VersionWriter, WeightPublisher
from peralta_zmq.weights.store import WeightStore

PERIOD = 0.01  # seconds between two samples of a process
PUBLISH_TIMEOUT = 600.0  # seconds
DTYPE = "--train.dtype=bfloat16"  # the limits below are for this dtype
RATE = "--train.learning-rate=2e-6"  # usual for full fine-tuning; deltas are then small
CHECKPOINTING = "--train.gradient-checkpointing"
GB, GIB = 10**9, 2**30
COMMON: dict[str, Any] = {**SHAPE, "max_position_embeddings": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": COMMON,
    "1.7b": {**COMMON, "hidden_size": 2048, "intermediate_size": 6144},
    "4b": {**COMMON, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
           "intermediate_size": 9728},
}  # fmt: skip
QUICK: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "vocab_size": 32000,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    size: str  # key of SHAPES
    flags: tuple[str, ...] = ()  # settings of the trainer
    lengths: tuple[int, ...] = LENGTHS
    num_steps: int = 2  # the second one has optimizer state
    limit: float | None = None  # bytes


def lora_cell(size: str, base_dtype: str, *, limit: float | None = None) -> Cell:
    """Adapters on a frozen base; one step, because a step takes minutes."""
    flags = ("--lora.rank=16", f"--lora.base-dtype={base_dtype}", CHECKPOINTING)
    return Cell(size=size, flags=flags, lengths=(512,) * 8, num_steps=1, limit=limit)


# A trainer whose weights, gradients, moments and copies need most of its memory saves memory at the
# cost of time. With this setting it does so for the 0.6B shape in 24 GiB.
SMALL = "--train.memory-fraction=0.5"
CELLS = {
    "full_0.6b_fp32": Cell(size="0.6b"),
    "full_0.6b_fp32_small": Cell(size="0.6b", flags=(SMALL,), limit=10.5 * GB),
    "full_0.6b_fp32_small_checkpointing": Cell(
        size="0.6b", flags=(SMALL, CHECKPOINTING), limit=10.5 * GB
    ),
    "full_0.6b_bf16_moments": Cell(
        size="0.6b", flags=("--train.optim=adamw_bf16", SMALL), limit=8.9 * GB
    ),
    "full_1.7b_8bit": Cell(size="1.7b", flags=("--train.optim=adamw_8bit",), limit=20 * GIB),
    "lora_1.7b_bf16": lora_cell("1.7b", "bfloat16"),
    "lora_4b_bf16": lora_cell("4b", "bfloat16"),
    "lora_4b_int8": lora_cell("4b", "int8"),
    "lora_4b_nf4": lora_cell("4b", "nf4", limit=12 * GIB),
}
REQUIRED = {f"{name}_memory": 1.0 for name, cell in CELLS.items() if cell.limit}  # the least share


def run(*, quick: bool) -> Iterator[Claim]:
    """Measure cells in processes; a failed one is reported and left out."""
    chosen = os.environ.get("CELLS", "").split() or list(CELLS)
    if unknown := set(chosen) - CELLS.keys():
        raise SystemExit(f"CELLS has {min(unknown)}; choose from {', '.join(CELLS)}")
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        for name in chosen:
            yield from measure(name, CELLS[name], Path(folder), quick=quick)


def measure(name: str, cell: Cell, root: Path, *, quick: bool) -> list[Claim]:
    """Measure a cell in a new process; no claims if it fails."""
    if not (model := root / cell.size).exists():
        write_model({**SHAPES[cell.size], **QUICK} if quick else SHAPES[cell.size], model)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        flags = [f"--model.name={model}", f"--run.dir={folder}", RATE, DTYPE, *cell.flags]
        lengths = [min(length, 32) for length in cell.lengths] if quick else cell.lengths
        arguments = json.dumps([folder, flags, lengths, cell.num_steps])
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.memory", arguments],
            cwd=REPO, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        peak = watch(process)
        output = process.communicate()[0]
    if process.returncode:
        progress(f"{name} failed with status {process.returncode} at {peak / GB:.2f} GB")
        return []
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    duration = figures.pop("seconds")
    parts = ", ".join(f"{part} {size / GB:.2f}" for part, size in figures.items())
    progress(f"{name}: {peak / GB:.2f} GB, {duration:.1f} s ({parts})")
    share = cell.limit / peak if cell.limit else None
    return [
        Claim(f"{name}_memory", peak, "bytes", bound=cell.limit, share=share),
        Claim(f"{name}_needed", sum(figures.values()), "bytes"),
        Claim(f"{name}_step", duration, "s"),
    ]


def watch(process: subprocess.Popen[str]) -> int:
    """Sample the memory of a process until it ends; returns the peak in bytes."""
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory_of(process.pid))
        time.sleep(PERIOD)
    return peak


def memory_of(pid: int) -> int:
    """Bytes that the kernel cannot drop: anonymous, shared and swapped."""
    sizes = dict[str, int]()
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0]) << 10
    return sum(sizes.get(name, 0) for name in ("RssAnon", "RssShmem", "VmSwap"))


def take_steps(
    folder: Path, flags: Sequence[str], lengths: Sequence[int], num_steps: int
) -> dict[str, float]:
    """Be the trainer of a cell; `flags` are the settings, and `folder` gets all files.

    Returns the seconds of the last step and the bytes of weights, gradients and optimizer state.
    """
    config = load_config("bench", [*TOY, *flags])
    tokenizer = models.load_tokenizer(models.model_folder(config.model.name))
    policy = open_trained_model(config, tokenizer, SINGLE)
    store = WeightStore.open(folder / "weights")
    store.claim("bench")
    about = cast("dict[str, str | int]", policy.manifest_fields)
    writer = VersionWriter(store, companions=policy.companions, about=about)
    moves = build.moves_snapshots(config, policy.base_folder)
    seconds = 0.0
    with closing(WeightPublisher(writer, moves_snapshots=moves)) as publisher:
        publisher.publish(0, lora.published_weights(policy.model))
        for step in range(1, num_steps + 1):
            group = random_group(step, int(policy.model.config.vocab_size), lengths)
            started = time.perf_counter()
            policy.learner.add([group])
            result = policy.learner.finish_step()
            publisher.publish(step, lora.published_weights(policy.model))
            seconds = time.perf_counter() - started
            assert not result.skip_reason and not result.excluded, result
            assert result.metrics["grad_norm"] > 0
        assert publisher.wait(PUBLISH_TIMEOUT)
        assert all(report.version for report in publisher.take_reports())
    state = policy.learner.state()
    write_checkpoint(folder / "checkpoints", Checkpoint(num_steps, state, {}), run_id="bench")
    return {"seconds": seconds, **needed_bytes(policy, state)}


def needed_bytes(policy: TrainedModel, state: dict[str, torch.Tensor]) -> dict[str, float]:
    model: Any = policy.model
    tensors = [*model.parameters(), *model.buffers()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return {
        "weights": sum(each.nbytes() for each in storages.values()),
        "gradients": sum(each.nbytes for each in lora.trained_parameters(model).values()),
        "optimizer": sum(each.nbytes for path, each in state.items() if path.startswith("adamw")),
    }


def write_model(shape: dict[str, Any], folder: Path) -> None:
    """Write a folder with random bf16 weights; one tensor at a time is in memory."""
    settings = dict(shape)
    config = AutoConfig.for_model(settings.pop("model_type"), dtype="bfloat16", **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir()
    config.save_pretrained(folder)
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    for name, content in models.companion_files(models.EMBEDDED, tokenizer).items():
        if name.startswith("tokenizer"):
            (folder / name).write_bytes(content)
    weights = RandomWeights({name: each.shape for name, each in model.named_parameters()})
    with (folder / "model.safetensors").open("wb") as file:
        file.writelines(tensor_set.file_of(weights, {}))


class RandomWeights(Mapping[str, torch.Tensor]):
    """Tensors of these shapes, created when read: matrices are random, norms 1."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes
        random = torch.Generator().manual_seed(0)
        # All matrices repeat one block, because random numbers take minutes.
        self._block = torch.randn((1 << 22) + 1, generator=random).mul_(0.02).bfloat16()

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        repeats = -(-shape.numel() // len(self._block))
        return self._block.repeat(repeats)[: shape.numel()].view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


if __name__ == "__main__":
    models.use_threads()
    models.keep_memory()
    place, *options = cast("list[Any]", json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(take_steps(Path(place), *options)) + "\n")
