"""What an update of the weights costs: bytes and seconds, against the original's way.

Real AdamW steps on a random model of the Qwen3-0.6B shape (--quick: a 60M one): gradients of a
small batch, fp32 masters, published as bf16. The peer is the original: `save_pretrained` of the
fp32 model and `from_pretrained` on the other side, once before the steps
of each rate. Every delta is applied and compared bit by bit.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from benchmarks import slow_link
from benchmarks.harness import Claim, progress, progress_of, seconds, spread
from peralta_zmq import atomic_files, models
from peralta_zmq.learning.optimizer import make_optimizer, set_learning_rate
from peralta_zmq.weights import delta
from peralta_zmq.weights.publisher import PublishReport, WeightPublisher
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import DELTA, Version

SHAPE = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}  # fmt: skip
QUICK = {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 65536,
         "num_attention_heads": 8, "intermediate_size": 1536}  # fmt: skip
RATES = (2e-6, 1e-6, 1e-5)
REQUIRED = {"delta_vs_full_bf16_lr2e-6": 40.0, "entropy_share": 0.75}
MANY = 10_000  # generators, on paper: docs/scaling.md
WARM_UP = 2  # steps at the first rate, so that AdamW has seen some gradients
CPU = torch.device("cpu")
Measured = dict[str, list[float]]


def run(*, quick: bool, device: torch.device = CPU) -> Iterable[Claim]:
    """Publish, fetch and apply real updates at each learning rate."""
    models.use_threads()
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as folder:
        yield from slow_link.claims(Path(folder), _stepper, repeats=5)
    model = models.new_model({**SHAPE, **QUICK} if quick else SHAPE, seed=0).train()
    cast(Any, model).to(device)
    size = sum(each.numel() for each in models.weights_of(model).values())
    progress(f"model: {size / 1e6:.0f}M parameters")
    step = _stepper(model)
    root = Path(tempfile.mkdtemp(prefix="bench-weights-"))
    try:
        measured = _ours(model, step, root, steps=2 if quick else 3)
    finally:
        shutil.rmtree(root)
    yield from _claims(measured, full=2.0 * size)


def _stepper(model: models.Model) -> Callable[[float], None]:
    """A function that takes one AdamW step at a learning rate."""
    named = dict(model.named_parameters())
    optimizer = make_optimizer(named, betas=(0.9, 0.95), weight_decay=0.0)
    random = torch.Generator().manual_seed(1)

    def step(rate: float) -> None:
        set_learning_rate(optimizer, rate)
        tokens = torch.randint(0, int(model.config.vocab_size), (2, 33), generator=random)
        tokens = tokens.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            scores = models.token_logprobs(model, tokens, torch.ones_like(tokens))
        (-scores[:, 1:].mean()).backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _original(measured: Measured, model: models.Model, folder: Path) -> None:
    """fp32 save_pretrained, and from_pretrained as the original's workers do."""
    saving = seconds(lambda: model.save_pretrained(folder))
    device = model.device
    loading = seconds(lambda: models.load_model(folder, device=device, dtype=torch.float32))
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    shutil.rmtree(folder)
    progress(f"original: {written / 1e6:.0f} MB, save {saving:.2f} s, load {loading:.2f} s")
    for name, figure in (("bytes", written), ("save", saving), ("load", loading)):
        note(measured, f"original {name}", figure)


def _ours(
    model: models.Model, step: Callable[[float], None], root: Path, *, steps: int
) -> Measured:
    store = WeightStore.open(root / "weights")
    store.claim("bench")
    (root / "copy").mkdir()
    copy = LocalReplica(root / "copy")
    measured: Measured = {}
    with closing(WeightPublisher(store, companions={}, keyframe_interval=1000)) as publisher:
        publisher.publish(0, models.weights_of(model))
        keyframe = _report(publisher)
        assert keyframe.version
        measured["keyframe"] = [keyframe.version.size]
        copy.advance(store, keyframe.version)
        for _ in range(WARM_UP):
            step(RATES[0])
        publisher.publish(1, models.weights_of(model))
        copy.advance(store, _published(_report(publisher)))
        live = {name: each.clone() for name, each in copy.tensors().items()}
        served = {name: each.to(model.device) for name, each in live.items()}  # a generator's
        number, tell = 1, progress_of(len(RATES) * steps)
        for rate in RATES:
            _original(measured, model, root / "peer")
            for _ in range(steps):
                number += 1
                step(rate)
                before = {name: each.clone() for name, each in copy.tensors().items()}
                stall = publisher.publish(number, models.weights_of(model))
                report = _report(publisher)
                _measure(measured, f"{rate:g}", report, stall)
                _apply(measured, store, copy, report, live, served)
                _check(model, before, served, measured, f"{rate:g}")
                tell(_line(f"{rate:g}", report, stall))
    measured["reader"] = [_reader_peak(store.folder)]
    return measured


def _report(publisher: WeightPublisher) -> PublishReport:
    assert publisher.wait(600)
    (report,) = publisher.take_reports()
    return report


def _published(report: PublishReport) -> Version:
    assert report.version is not None, report.reason
    return report.version


def _measure(measured: Measured, rate: str, report: PublishReport, stall: float) -> None:
    version = _published(report)
    note(measured, f"bytes {rate}", version.size)
    note(measured, "stall", stall)
    note(measured, "encode", report.encode_seconds)
    note(measured, "write", report.write_seconds)


def _line(rate: str, report: PublishReport, stall: float) -> str:
    version = _published(report)
    return (
        f"lr {rate}: {version.kind} {version.size / 1e6:.2f} MB stall {stall:.3f} "
        f"encode {report.encode_seconds:.2f} write {report.write_seconds:.2f} s"
    )


def _apply(
    measured: Measured,
    store: WeightStore,
    copy: LocalReplica,
    report: PublishReport,
    live: dict[str, torch.Tensor],
    served: dict[str, torch.Tensor],
) -> None:
    """Decode the delta into the live tensors, which is the codec's work alone; and what a generator
    does: fetch, verify and decode beside the sampling, then copy all tensors between two tokens.
    On a CPU the native engine also packs them there, which the generation bench measures.
    """
    version = _published(report)
    if version.kind == "delta":
        file = version.folder / DELTA
        chunks = atomic_files.read_chunks(file)
        note(measured, "apply", seconds(lambda: delta.apply(delta.reader_of(chunks), live)))
    note(measured, "background", seconds(lambda: copy.advance(store, version)))
    tensors = copy.tensors()
    note(measured, "pause", seconds(lambda: [served[name].copy_(tensors[name]) for name in served]))


def _reader_peak(weights: Path) -> float:
    """Bytes, measured in another process."""
    command = [sys.executable, "-m", "benchmarks.reader", str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    progress(f"reader: at most {int(done.stdout) / 1e6:.1f} MB")
    return float(done.stdout)


def _check(
    model: models.Model,
    before: dict[str, torch.Tensor],
    served: dict[str, torch.Tensor],
    measured: Measured,
    rate: str,
) -> None:
    """What is served are the masters rounded, bit for bit; the entropy of what changed."""
    bound = 0.0
    for name, master in models.weights_of(model).items():
        expected = delta.bits_of(master.to("cpu", torch.bfloat16))
        assert (delta.bits_of(served[name].cpu()) == expected).all(), f"{name} differs"
        bound += delta.entropy_bits(delta.bits_of(before[name]), expected)
    note(measured, f"bound {rate}", bound / 8)


def note(measured: Measured, name: str, figure: float) -> None:
    """Add a figure to its series."""
    measured.setdefault(name, []).append(figure)


def ratio_of_rounds(ours: Sequence[float], peer: Sequence[float]) -> float:
    """How many times less ours is, the median of the rounds: one of the peer, several of ours."""
    size = len(ours) // len(peer)
    rounds = (ours[first : first + size] for first in range(0, len(ours), size))
    return median(theirs / median(each) for theirs, each in zip(peer, rounds, strict=True))


def _claims(measured: Measured, *, full: float) -> Iterator[Claim]:
    for rate in RATES:
        sizes = measured[f"bytes {rate:g}"]
        power = f"{rate:.0e}".replace("e-0", "e-")
        yield Claim(
            f"delta_vs_full_bf16_lr{power}", median(sizes), "bytes", peer=full,
            ratio=full / median(sizes), n=len(sizes), spread=spread(sizes),
        )  # fmt: skip
    sizes, bounds = measured["bytes 2e-06"], measured["bound 2e-06"]
    size, whole = median(sizes), median(measured["original bytes"])
    for name, times, unit in (
        ("delta_vs_original", 1.0, "bytes"),
        (f"bytes_to_{MANY}_generators", MANY, "bytes per update, on paper"),
        ("seconds_on_100_mbit", 8 / 100e6, "s per update, on paper"),
    ):
        yield Claim(name, times * size, unit, peer=times * whole, ratio=whole / size,
                    n=len(sizes), spread=spread(sizes))  # fmt: skip
    yield Claim(
        "entropy_share", size, "bytes", bound=median(bounds), share=median(bounds) / size,
        n=len(sizes), spread=spread(sizes),
    )  # fmt: skip
    yield Claim("keyframe_bytes", measured["keyframe"][0], "bytes", peer=whole,
                ratio=whole / measured["keyframe"][0])  # fmt: skip
    reader = measured["reader"][0]
    yield Claim("reader_peak_memory", reader, "bytes", bound=full, share=reader / full)
    peers = {"apply": "load", "pause": "load", "stall": "save", "encode": "save"}
    for name in ("apply", "pause", "background", "stall", "encode", "write"):
        taken = measured[name]
        other = measured[f"original {peers[name]}"] if name in peers else None
        yield Claim(
            f"{name}_seconds", median(taken), "s", peer=median(other) if other else None,
            ratio=ratio_of_rounds(taken, other) if other else None,
            n=len(taken), spread=spread(taken),
        )  # fmt: skip
