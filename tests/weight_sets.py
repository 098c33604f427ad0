"""Small sets of tensors whose every version is known from its step."""

from __future__ import annotations

from pathlib import Path

import torch

from peralta_zmq import failpoints
from peralta_zmq.weights.publisher import Pruner, PublishReport, Retention, WeightPublisher
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber
from peralta_zmq.weights.version import Version

COMPANIONS = {"config.json": b"{}", "tokenizer.json": b"{}"}


def weights_at(step: int) -> dict[str, torch.Tensor]:
    """bf16 tensors of which a few elements differ from those of the step before."""
    random = torch.Generator().manual_seed(7)
    wide = torch.randn(300, 40, generator=random)
    wide.view(-1)[step::97] += 0.01 * step
    return {"wide": wide.bfloat16(), "few": torch.full((3,), float(step)).bfloat16()}


def publish(
    store: WeightStore, step: int, *, base: Version | None = None, pruner: Pruner | None = None
) -> Version:
    """Publish the weights of a step, as a delta to `base`, then prune."""
    version = store.publish(
        step, weights_at(step), companions=COMPANIONS,
        base=(base, weights_at(base.step)) if base else None,
    )  # fmt: skip
    if pruner:
        pruner.prune(version)
    return version


def publish_and_follow(root: Path, plan: str) -> None:
    """Publish four more versions, each read as it comes; killed where `plan` says.

    A process of its own runs it. The steps that are published are added to `root/said`.
    """
    failpoints._remaining = failpoints.parse(plan)
    store = WeightStore.open(root / "weights")
    store.claim("run-1")
    pruner = Pruner(store, Retention(last=1))
    base = store.newest()
    first = 0 if base is None else base.step + 1
    follower = WeightSubscriber(
        WeightStore.open(root / "weights"), root / "copy", poll_seconds=0.01
    )
    with (root / "said").open("a", buffering=1) as said:
        for step in range(first, first + 4):
            base = publish(store, step, base=base if step % 3 else None, pruner=pruner)
            said.write(f"{step}\n")
            while follower.poll(timeout=60).version.step != step:
                follower.accept()
            follower.accept()
    follower.close()


def chain_of(store: WeightStore, count: int) -> list[Version]:
    """A keyframe and the deltas after it, steps 0 to count - 1."""
    versions = [publish(store, 0)]
    for step in range(1, count):
        versions.append(publish(store, step, base=versions[-1]))
    assert [version.kind for version in versions] == ["keyframe", *["delta"] * (count - 1)]
    return versions


def same(left: object, right: dict[str, torch.Tensor]) -> bool:
    """Equal names and equal bits."""
    bits = {name: tensor.view(torch.int16) for name, tensor in dict(left).items()}  # type: ignore[call-overload]
    return bits.keys() == right.keys() and all(
        torch.equal(bits[name], tensor.view(torch.int16)) for name, tensor in right.items()
    )


def published(publisher: WeightPublisher) -> list[PublishReport]:
    """Wait for what was handed over, and take the reports."""
    assert publisher.wait(30)
    return publisher.take_reports()
