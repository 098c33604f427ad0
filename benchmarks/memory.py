"""Memory of full fine-tuning, and time of its steps, on random weights in the shapes of Qwen3.

Each cell is a trainer in a process of its own (memory_cell.py): it loads the model, publishes it,
takes steps and writes a checkpoint. `*_memory` is the peak of the memory that the kernel cannot
drop: anonymous and shared memory, and swapped pages; its bound is the limit of the cell.
`*_resident` is the peak of all resident pages, also of mapped files (libraries, weights), which the
kernel can drop and read again. `*_needed` are the weights, gradients and optimizer state alone.
`before` is the package at commit BEFORE. Such a cell and the one without `before` are measured by
turns, TURNS times each; their largest memory and median time count. `before` writes no checkpoint,
because that package copies the weights twice for one and 24 GiB are then too little.

`CELLS="full_1.7b_8bit full_0.6b_fp32" bin/bench memory` measures only these cells. `--quick` uses
tiny shapes. Linux only. The cells of LoRA are the bench `memory_lora`, because they take an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import REPO, Claim, progress
from peralta_zmq import models
from peralta_zmq.weights import tensor_set

BEFORE = "52dee932"  # the last commit that computed whole logits
TURNS = 3
PERIOD = 0.01  # seconds between two samples of a process
NUM_PROMPT = 110
LENGTHS = (12, 18, 26, 40)  # tokens of the completions
DTYPE = "--train.dtype=bfloat16"  # the limits below are for this dtype
RATE = "--train.learning-rate=2e-6"  # usual for full fine-tuning; deltas are then small
CHECKPOINTING = "--train.gradient-checkpointing"
GB, GIB = 10**9, 2**30
COMMON: dict[str, Any] = {
    "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {**COMMON, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
             "intermediate_size": 3072},
    "1.7b": {**COMMON, "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
             "intermediate_size": 6144},
    "4b": {**COMMON, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
           "intermediate_size": 9728},
}  # fmt: skip
QUICK: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "vocab_size": 32000,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A trainer to measure."""

    size: str  # key of SHAPES
    flags: tuple[str, ...] = ()  # settings of the trainer
    lengths: tuple[int, ...] = LENGTHS
    num_steps: int = 2  # the second one has optimizer state
    limit: float | None = None  # bytes
    commit: str = ""  # of the measured package; empty = this checkout


# A trainer whose weights, gradients, moments and copies need most of its memory saves memory at the
# cost of time. With this setting it does so for the 0.6B shape in 24 GiB.
SMALL = "--train.memory-fraction=0.5"
BF16_MOMENTS, EIGHT_BIT = ("--train.optim=adamw_bf16",), ("--train.optim=adamw_8bit",)
CELLS = {
    "full_0.6b_fp32_before": Cell(size="0.6b", commit=BEFORE),
    "full_0.6b_fp32": Cell(size="0.6b"),
    "full_0.6b_fp32_small": Cell(size="0.6b", flags=(SMALL,), limit=10.5 * GB),
    "full_0.6b_fp32_small_checkpointing": Cell(
        size="0.6b", flags=(SMALL, CHECKPOINTING), limit=10.5 * GB
    ),
    "full_0.6b_bf16_moments": Cell(size="0.6b", flags=(*BF16_MOMENTS, SMALL), limit=8.9 * GB),
    "full_1.7b_8bit": Cell(size="1.7b", flags=EIGHT_BIT, limit=20 * GIB),
}


def required(cells: Mapping[str, Cell]) -> dict[str, float]:
    """The least share of each cell that has a limit."""
    return {f"{name}_memory": 1.0 for name, cell in cells.items() if cell.limit}


REQUIRED = required(CELLS)


class Usage(NamedTuple):
    """Memory of a process in bytes."""

    private: int  # anonymous, shared and swapped: what the kernel cannot drop
    resident: int  # the peak of all resident pages


def run(*, quick: bool) -> Iterator[Claim]:
    """Measure full fine-tuning."""
    return measured_cells(CELLS, quick=quick)


def measured_cells(cells: Mapping[str, Cell], *, quick: bool) -> Iterator[Claim]:
    """Measure cells in processes; a failed one is reported and left out."""
    chosen = os.environ.get("CELLS", "").split() or list(cells)
    if unknown := set(chosen) - cells.keys():
        raise SystemExit(f"CELLS has {min(unknown)}; choose from {', '.join(cells)}")
    rounds: dict[str, list[list[Claim]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        for name in by_turns(chosen):
            rounds[name].append(measure(name, cells[name], Path(folder), quick=quick))
    measured = {name: combined(found) for name, found in rounds.items()}
    for claims in measured.values():
        yield from claims
    yield from comparisons(measured)


def by_turns(names: Sequence[str]) -> list[str]:
    """The cells in the order of their measurements."""
    compared = [name for name in names if f"{name}_before" in names]
    pairs = [[f"{name}_before", name] * TURNS for name in compared]
    order = [name for pair in pairs for name in pair]
    return order + [name for name in names if name not in order]


def combined(rounds: Sequence[list[Claim]]) -> list[Claim]:
    """The largest memory and the median time of measurements of one cell."""
    found = [claims for claims in rounds if claims]
    same = [sorted(claims, key=lambda claim: claim.ours) for claims in zip(*found, strict=True)]
    return [each[len(each) // 2 if each[0].unit == "s" else -1] for each in same]


def comparisons(measured: Mapping[str, list[Claim]]) -> Iterator[Claim]:
    """Compare cells with `NAME_before` cells that were measured."""
    for name, claims in measured.items():
        before = {each.name: each for each in measured.get(f"{name}_before", ())}
        for each in claims:
            figure = each.name.removeprefix(name)
            peer = before.get(f"{name}_before{figure}")
            if peer and figure in ("_memory", "_step"):
                ratio = peer.ours / each.ours
                yield Claim(f"{each.name}_vs_before", each.ours, each.unit, peer.ours, ratio)


def measure(name: str, cell: Cell, root: Path, *, quick: bool) -> list[Claim]:
    """Measure a cell in a new process; no claims if it fails."""
    if not (model := root / cell.size).exists():
        write_model({**SHAPES[cell.size], **QUICK} if quick else SHAPES[cell.size], model)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        flags = [f"--model.name={model}", f"--run.dir={folder}", RATE, DTYPE, *cell.flags]
        lengths = [min(length, 32) for length in cell.lengths] if quick else cell.lengths
        arguments = json.dumps(
            [folder, flags, NUM_PROMPT, lengths, cell.num_steps, not cell.commit]
        )
        try:
            package = package_of(cell.commit, root / cell.commit) if cell.commit else REPO
        except subprocess.CalledProcessError:
            progress(f"{name} failed: this clone does not have commit {cell.commit}")
            return []
        command = [sys.executable, str(Path(__file__).with_name("memory_cell.py")), arguments]
        process = subprocess.Popen(
            command, cwd=package, env={**os.environ, "PYTHONPATH": str(package)},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        peak = watch(process)
        output = process.communicate()[0]
    if process.returncode:
        progress(f"{name} failed with status {process.returncode} at {peak.private / GB:.2f} GB")
        return []
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    duration = figures.pop("seconds")
    needed = sum(figures.values())
    parts = ", ".join(f"{part} {size / GB:.2f}" for part, size in figures.items())
    progress(f"{name}: {peak.private / GB:.2f} GB, {duration:.1f} s ({parts})")
    share = cell.limit / peak.private if cell.limit else None
    return [
        Claim(f"{name}_memory", peak.private, "bytes", bound=cell.limit, share=share),
        Claim(f"{name}_resident", peak.resident, "bytes"),
        Claim(f"{name}_needed", needed, "bytes"),
        Claim(f"{name}_step", duration, "s"),
    ]


def watch(process: subprocess.Popen[str]) -> Usage:
    """Sample the memory of a process until it ends."""
    peak = Usage(0, 0)
    while process.poll() is None:
        peak = Usage(*map(max, peak, usage(process.pid)))
        time.sleep(PERIOD)
    return peak


def usage(pid: int) -> Usage:
    """Memory of a process; zeros if it has ended."""
    sizes = dict[str, int]()
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.split()[0]) << 10
    private = sum(sizes.get(name, 0) for name in ("RssAnon", "RssShmem", "VmSwap"))
    return Usage(private, sizes.get("VmHWM", 0))


def package_of(commit: str, folder: Path) -> Path:
    """Folder with the package as of a commit. Raises CalledProcessError without the commit."""
    if not folder.exists():
        archive = folder.with_suffix(".tar")
        command = ["git", "archive", "--output", str(archive), commit, "peralta_zmq"]
        subprocess.run(command, cwd=REPO, check=True)
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    return folder


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
