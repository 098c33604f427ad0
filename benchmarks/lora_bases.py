"""Memory, load time and step time of each format of the base model of LoRA adapters.

`python -m benchmarks.lora_bases [--quick] [--repeats N] [--document FILE]`. The model has the shape
of Qwen3-0.6B and random weights; adapters of rank 16 are in all linear layers. The steps of all
formats follow each other in every round, so that changes of the machine's speed affect all.
`--quick` uses a shape a tenth as large.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import interleaved, seconds
from benchmarks.pages import write_between
from benchmarks.report import when
from benchmarks.training import NUM_GROUPS, QUICK_SHAPE, SHAPE, group
from peralta_zmq import build, models
from peralta_zmq.config import Config, load_config
from peralta_zmq.learning.learner import Learner
from peralta_zmq.models.base_formats import BYTES_PER_WEIGHT
from tools.base_model import new_model

BEGIN, END = "<!-- table: make time-lora -->", "<!-- end of table -->"
FORMATS = ("float32", "bfloat16", "int8", "nf4")
REPEATS = 3  # rounds of steps
MIB = 1 << 20


@dataclass(slots=True)
class Row:
    """One row of the table."""

    base_dtype: str
    num_bytes: int  # of the base, with embeddings
    load_seconds: float
    step_seconds: float = 0.0  # median


def main() -> None:
    """Measure every format and print the table; with --document, also write it into the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--document", type=Path, help="Markdown file with the begin and end markers of the table"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    models.use_threads()
    models.keep_memory()
    shape = QUICK_SHAPE if arguments.quick else SHAPE
    with tempfile.TemporaryDirectory() as folder:
        new_model(shape, seed=0).bfloat16().save_pretrained(folder)
        opened = [_open(base_dtype, Path(folder)) for base_dtype in FORMATS]
    groups = [group(seed, shape["vocab_size"]) for seed in range(NUM_GROUPS)]
    steps = {
        row.base_dtype: partial(seconds, partial(learner.learn, groups)) for row, learner in opened
    }
    interleaved(steps, repeats=1)  # warm-up
    times = interleaved(steps, repeats=arguments.repeats)
    rows = [row for row, _ in opened]
    for row in rows:
        row.step_seconds = median(times[row.base_dtype])
    num_tokens = sum(len(each.token_ids) for one in groups for each in one.rollouts)
    text = f"{_table(rows)}\n{num_tokens:,} tokens in a step. {when()}\n"
    sys.stdout.write(text)
    if arguments.document:
        write_between(arguments.document, BEGIN, END, text)


def _open(base_dtype: str, folder: Path) -> tuple[Row, Learner]:
    """Load the model with adapters, and make its learner."""
    config = load_config("benchmarks.lora_bases", [
        f"--model.name={folder}", f"--lora.base-dtype={base_dtype}", "--lora.rank=16",
        "--train.learning-rate=1e-12", "--train.dtype=bfloat16",
    ])  # fmt: skip
    loaded = list[models.Model]()

    def load(config: Config) -> None:
        loaded.append(build.load_policy(config, folder))

    duration = seconds(partial(load, config))
    tensors = models.weights_of(loaded[0])
    num_bytes = sum(each.nbytes for name, each in tensors.items() if ".lora_" not in name)
    return Row(base_dtype, num_bytes, duration), build.make_learner(config, loaded[0])


def _table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    head = "| `lora.base_dtype` | bytes per weight | base, MiB | loading, s | step, s |\n"
    lines = [
        f"| `{row.base_dtype}` | {BYTES_PER_WEIGHT[row.base_dtype]:.4g} "
        f"| {row.num_bytes / MIB:,.0f} | {row.load_seconds:.1f} | {row.step_seconds:.2f} |\n"
        for row in rows
    ]
    return head + "|---|---|---|---|---|\n" + "".join(lines)


if __name__ == "__main__":
    main()
