"""Seconds until a reader beyond 20 Mbit/s and 60 ms holds a verified version, whole or as a delta.

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
from peralta_zmq.weights.http_backend import HttpBackend, WeightServer
from peralta_zmq.weights.publisher import WeightPublisher
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore

MBIT_PER_S, DELAY = 20.0, 0.06  # of the link; seconds there and back
RATE, PATIENCE = 2e-6, 600.0  # of the optimizer; seconds, for the publisher


def claims(
    root: Path, stepper: Callable[[models.Model], Callable[[float], None]], *, repeats: int
) -> Iterator[Claim]:
    """Fetch the first version into so many new copies, then so many deltas into the last one."""
    cpu = torch.device("cpu")
    model = models.load_model(models.EMBEDDED, device=cpu, dtype=torch.float32).train()
    step, whole, deltas, sizes = stepper(model), list[float](), list[float](), list[int]()
    with ExitStack() as stack:
        store = WeightStore.open(root / "served")
        store.claim("bench")
        server = WeightServer(store.folder, host="127.0.0.1", port=0, token=None)
        stack.enter_context(closing(server))
        link = Link(server.port, mbit_per_s=MBIT_PER_S, delay=DELAY)
        far = WeightStore(HttpBackend(stack.enter_context(closing(link)).address))
        publisher = WeightPublisher(store, companions={}, keyframe_interval=1000)
        stack.enter_context(closing(publisher))
        full = _published(publisher, 0, model)
        copies = [LocalReplica(root / f"far_{number}") for number in range(repeats)]
        for copy in copies:
            copy.folder.mkdir()
            whole.append(_fetched(far, copy))
        for number in range(1, repeats + 1):
            step(RATE)
            sizes.append(_published(publisher, number, model))
            deltas.append(_fetched(far, copies[-1]))
            progress(f"20 Mbit/s: {sizes[-1]} bytes in {deltas[-1]:.2f} s, whole {whole[0]:.2f} s")
    yield _claim("whole_over_slow_link", whole, full)
    yield _claim("delta_over_slow_link", deltas, int(median(sizes)), peer=median(whole))


def _published(publisher: WeightPublisher, number: int, model: models.Model) -> int:
    """Bytes of the version."""
    publisher.publish(number, models.weights_of(model))
    assert publisher.wait(PATIENCE)
    (report,) = publisher.take_reports()
    assert report.version, report.reason
    return report.version.size


def _fetched(far: WeightStore, copy: LocalReplica) -> float:
    """Seconds from the look for the newest version to a verified copy of it."""

    def fetch() -> None:
        newest = far.newest()
        assert newest
        copy.advance(far, newest)

    return seconds(fetch)


def _claim(name: str, taken: list[float], size: int, *, peer: float | None = None) -> Claim:
    """Against the seconds that the link needs for so many bytes."""
    ours, bound = median(taken), 8 * size / (MBIT_PER_S * 1e6)
    return Claim(
        name, ours, "s, 20 Mbit/s, 60 ms, embedded model", peer=peer,
        ratio=peer / ours if peer else None, bound=bound, share=bound / ours, n=len(taken),
        spread=spread(taken),
    )  # fmt: skip
