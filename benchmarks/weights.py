"""Cost of a weight update in bytes and seconds, compared with whole fp32 checkpoints.

AdamW steps on a random model of the Qwen3-0.6B shape (--quick: 60M parameters) with gradients of a
small batch and fp32 masters, published as bf16. The peer is the original program:
`save_pretrained` of the fp32 model and `from_pretrained` in the worker, measured once per learning
rate. Every delta is applied and compared bit by bit.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch

from benchmarks.generation import token_logprobs
from benchmarks.harness import Claim, progress, progress_of, seconds, spread
from benchmarks.training import SHAPE
from peralta_zmq import models
from peralta_zmq.learning.optimizer import make_optimizer
from peralta_zmq.weights import delta
from peralta_zmq.weights.delta import Bits
from peralta_zmq.weights.publisher import PublishReport, VersionWriter, WeightPublisher
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import Version, WeightStore
from tools.base_model import new_model

QUICK = {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 65536,
         "num_attention_heads": 8, "intermediate_size": 1536}  # fmt: skip
RATES = (2e-6, 1e-6, 1e-5)
REQUIRED = {"delta_vs_full_bf16_lr2e-6": 40.0, "entropy_share": 0.75}
WARM_UP_STEPS = 2  # AdamW's moments need some steps
PUBLISH_TIMEOUT = 600.0  # seconds
CPU = torch.device("cpu")
Measured = dict[str, list[float]]
Tensors = dict[str, torch.Tensor]


def run(*, quick: bool, device: torch.device = CPU) -> Iterable[Claim]:
    models.use_threads()
    model = new_model({**SHAPE, **QUICK} if quick else SHAPE, seed=0).train()
    cast(Any, model).to(device)
    num_parameters = sum(tensor.numel() for tensor in models.weights_of(model).values())
    progress(f"model: {num_parameters / 1e6:.0f}M parameters")
    step = _stepper(model)
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as folder:
        measured = _measure_all(model, step, Path(folder), num_steps=2 if quick else 3)
    yield from _claims(measured, full=2.0 * num_parameters)


def _stepper(model: models.Model) -> Callable[[float], None]:
    named = dict(model.named_parameters())
    optimizer = make_optimizer(named)
    random = torch.Generator().manual_seed(1)

    def step(rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate
        tokens = torch.randint(0, int(model.config.vocab_size), (2, 33), generator=random)
        tokens = tokens.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            logprobs = token_logprobs(model, tokens)
        (-logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _measure_all(
    model: models.Model, step: Callable[[float], None], root: Path, *, num_steps: int
) -> Measured:
    store = WeightStore.open(root / "weights")
    store.claim("bench")
    (root / "copy").mkdir()
    replica = LocalReplica(root / "copy")
    measured: Measured = {}
    writer = VersionWriter(store, companions={}, keyframe_interval=1000)
    with closing(WeightPublisher(writer)) as publisher:
        publisher.publish(0, models.weights_of(model))
        keyframe = _version_of(_report(publisher))
        replica.advance(store, keyframe)
        for _ in range(WARM_UP_STEPS):
            step(RATES[0])
        publisher.publish(1, models.weights_of(model))
        replica.advance(store, _version_of(_report(publisher)))
        served = {name: tensor.to(model.device) for name, tensor in replica.tensors().items()}
        number = 1
        show_progress = progress_of(len(RATES) * num_steps)
        for rate in RATES:
            _measure_original(measured, model, root / "peer")
            for _ in range(num_steps):
                number += 1
                step(rate)
                before = {name: tensor.clone() for name, tensor in replica.tensors().items()}
                stall = publisher.publish(number, models.weights_of(model))
                report = _report(publisher)
                version = _version_of(report)
                note(measured, f"bytes {rate:g}", version.size)
                note(measured, "stall", stall)
                note(measured, "encode", report.encode_seconds)
                note(measured, "write", report.write_seconds)
                _measure_apply(measured, store, replica, version, served)
                _check(model, before, served, measured, f"{rate:g}")
                show_progress(f"lr {rate:g}: {version.kind} {version.size / 1e6:.2f} MB")
    return measured


def _measure_original(measured: Measured, model: models.Model, folder: Path) -> None:
    """fp32 save_pretrained, and from_pretrained as in the original's workers."""
    saving = seconds(lambda: model.save_pretrained(folder))
    device = model.device
    loading = seconds(lambda: models.load_model(folder, device=device, dtype=torch.float32))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    shutil.rmtree(folder)
    progress(f"original: {size / 1e6:.0f} MB, save {saving:.2f} s, load {loading:.2f} s")
    for name, value in (("bytes", size), ("save", saving), ("load", loading)):
        note(measured, f"original {name}", value)


def _report(publisher: WeightPublisher) -> PublishReport:
    assert publisher.wait(PUBLISH_TIMEOUT)
    (report,) = publisher.take_reports()
    return report


def _version_of(report: PublishReport) -> Version:
    assert report.version is not None, report.reason
    return report.version


def _measure_apply(
    measured: Measured,
    store: WeightStore,
    replica: LocalReplica,
    version: Version,
    served: Tensors,
) -> None:
    """`background`: fetch, verify and decode; `pause`: copy all tensors.

    On a CPU the native engine also packs the tensors in the pause; the generation bench measures
    that.
    """
    note(measured, "background", seconds(lambda: replica.advance(store, version)))
    tensors = replica.tensors()
    note(measured, "pause", seconds(lambda: [served[name].copy_(tensors[name]) for name in served]))


def _check(
    model: models.Model, before: Tensors, served: Tensors, measured: Measured, rate: str
) -> None:
    """Check that the rounded masters are served bit for bit; note the entropy of the change."""
    bound = 0.0
    for name, master in models.weights_of(model).items():
        expected = delta.bits_of(master.to("cpu", torch.bfloat16))
        assert (delta.bits_of(served[name].cpu()) == expected).all(), f"{name} differs"
        bound += entropy_bits(delta.bits_of(before[name]), expected)
    note(measured, f"bound {rate}", bound / 8)


def entropy_bits(old: Bits, new: Bits) -> float:
    """Lower bound of the size of a delta, if elements change independently.

    The entropy of which elements change, plus the entropy of their steps.
    """
    changed = np.flatnonzero(old != new)
    if len(changed) == 0:
        return 0.0
    share = len(changed) / len(new)
    positions = len(new) * float(-share * np.log2(share) - (1 - share) * np.log2(1 - share or 1.0))
    steps = delta.ordered(new[changed]) - delta.ordered(old[changed])
    frequencies = np.unique(steps, return_counts=True)[1] / len(steps)
    return positions + len(steps) * float(-(frequencies * np.log2(frequencies)).sum())


def note(measured: Measured, name: str, value: float) -> None:
    measured.setdefault(name, []).append(value)


def ratio_of_rounds(ours: Sequence[float], peer: Sequence[float]) -> float:
    """Median of peer / ours; each round has one value of the peer and several of `ours`."""
    size = len(ours) // len(peer)
    rounds = (ours[first : first + size] for first in range(0, len(ours), size))
    return median(
        peer_value / median(values) for peer_value, values in zip(peer, rounds, strict=True)
    )


def _claims(measured: Measured, *, full: float) -> Iterator[Claim]:
    for rate in RATES:
        sizes = measured[f"bytes {rate:g}"]
        power = f"{rate:.0e}".replace("e-0", "e-")
        yield Claim(
            f"delta_vs_full_bf16_lr{power}", median(sizes), "bytes", peer=full,
            ratio=full / median(sizes), n=len(sizes), spread=spread(sizes),
        )  # fmt: skip
    sizes, bounds = measured["bytes 2e-06"], measured["bound 2e-06"]
    size, checkpoint = median(sizes), median(measured["original bytes"])
    yield Claim("delta_vs_original", size, "bytes", peer=checkpoint, ratio=checkpoint / size,
                n=len(sizes), spread=spread(sizes))  # fmt: skip
    yield Claim(
        "entropy_share", size, "bytes", bound=median(bounds), share=median(bounds) / size,
        n=len(sizes), spread=spread(sizes),
    )  # fmt: skip
    peers = {"pause": "load", "stall": "save", "encode": "save"}
    for name in ("pause", "background", "stall", "encode", "write"):
        values = measured[name]
        peer = measured[f"original {peers[name]}"] if name in peers else None
        yield Claim(
            f"{name}_seconds", median(values), "s", peer=median(peer) if peer else None,
            ratio=ratio_of_rounds(values, peer) if peer else None,
            n=len(values), spread=spread(values),
        )  # fmt: skip
