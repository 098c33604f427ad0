"""Seconds until a reader behind 20 Mbit/s and 60 ms has a verified keyframe or delta.

The embedded model after AdamW steps at 2e-6, served over HTTP through a proxy on this machine.
Part of the bench `weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import Claim, progress, seconds, spread
from benchmarks.throttle import Link
from peralta_zmq import models
from peralta_zmq.weights.http_backend import serve_weights
from peralta_zmq.weights.publisher import VersionWriter, WeightPublisher
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore

MBIT_PER_S, DELAY = 20.0, 0.06  # of the link; seconds per round trip
LEARNING_RATE = 2e-6
PUBLISH_TIMEOUT = 600.0  # seconds


def claims(
    root: Path, stepper: Callable[[models.Model], Callable[[float], None]], *, repeats: int
) -> Iterator[Claim]:
    """Fetch the keyframe into `repeats` new copies, then `repeats` deltas into the last copy."""
    cpu = torch.device("cpu")
    model = models.load_model(models.EMBEDDED, device=cpu, dtype=torch.float32).train()
    step = stepper(model)
    keyframe_seconds, delta_seconds = list[float](), list[float]()
    delta_sizes: list[int] = []
    with ExitStack() as stack:
        store = WeightStore.open(root / "served")
        store.claim("bench")
        server = serve_weights(store.folder, host="127.0.0.1", port=0, token=None)
        stack.enter_context(closing(server))
        link = Link(server.port, mbit_per_s=MBIT_PER_S, delay=DELAY)
        remote = WeightStore.open(stack.enter_context(closing(link)).address)
        publisher = WeightPublisher(VersionWriter(store, companions={}, keyframe_interval=1000))
        stack.enter_context(closing(publisher))
        keyframe_size = _publish(publisher, 0, model)
        replicas = [LocalReplica(root / f"remote_{number}") for number in range(repeats)]
        for replica in replicas:
            replica.folder.mkdir()
            keyframe_seconds.append(_fetch(remote, replica))
        for number in range(1, repeats + 1):
            step(LEARNING_RATE)
            delta_sizes.append(_publish(publisher, number, model))
            delta_seconds.append(_fetch(remote, replicas[-1]))
            progress(
                f"20 Mbit/s: {delta_sizes[-1]} bytes in {delta_seconds[-1]:.2f} s, "
                f"keyframe {keyframe_seconds[0]:.2f} s"
            )
    yield _claim("whole_over_slow_link", keyframe_seconds, keyframe_size)
    yield _claim("delta_over_slow_link", delta_seconds, int(median(delta_sizes)),
                 peer=median(keyframe_seconds))  # fmt: skip


def _publish(publisher: WeightPublisher, number: int, model: models.Model) -> int:
    """Publish the model; returns the size of the version in bytes."""
    publisher.publish(number, models.weights_of(model))
    assert publisher.wait(PUBLISH_TIMEOUT)
    (report,) = publisher.take_reports()
    assert report.version, report.reason
    return report.version.size


def _fetch(remote: WeightStore, replica: LocalReplica) -> float:
    """Seconds to find the newest version and to have a verified copy of it."""

    def fetch() -> None:
        newest = remote.newest()
        assert newest
        replica.advance(remote, newest)

    return seconds(fetch)


def _claim(name: str, measured: list[float], size: int, *, peer: float | None = None) -> Claim:
    """Bounded by the time that the link needs for `size` bytes."""
    ours, bound = median(measured), 8 * size / (MBIT_PER_S * 1e6)
    return Claim(
        name, ours, "s, 20 Mbit/s, 60 ms, embedded model", peer=peer,
        ratio=peer / ours if peer else None, bound=bound, share=bound / ours, n=len(measured),
        spread=spread(measured),
    )  # fmt: skip
