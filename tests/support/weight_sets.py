"""Small weight sets that are a function of their step, and helpers to publish and compare them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from peralta_zmq import atomic_files
from peralta_zmq.weights.publisher import Pruner, PublishReport, Retention, WeightPublisher
from peralta_zmq.weights.replica import load_version
from peralta_zmq.weights.store import WEIGHTS_FILE, Version, WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber
from peralta_zmq.weights.tensor_set import FileTensors

COMPANIONS = {
    "config.json": b"{}", "tokenizer.json": b"{}", "additional_chat_templates/tools.jinja": b"t"
}  # fmt: skip


def weights_at(step: int) -> dict[str, torch.Tensor]:
    """bf16 tensors of which a few elements differ from those of the previous step."""
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


def publish_chain(store: WeightStore, count: int) -> list[Version]:
    """A keyframe and deltas, steps 0 to count - 1."""
    versions = [publish(store, 0)]
    for step in range(1, count):
        versions.append(publish(store, step, base=versions[-1]))
    assert [version.kind for version in versions] == ["keyframe", *["delta"] * (count - 1)]
    return versions


def loaded(store: WeightStore, version: Version) -> dict[str, torch.Tensor]:
    with load_version(store, version) as folder:
        return dict(FileTensors(folder / WEIGHTS_FILE))


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Equal names and bit-identical tensors."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.int16), right[name].view(torch.int16)) for name in right
    )


def reports_of(opened: WeightPublisher) -> list[PublishReport]:
    """Wait until the last snapshot is published or has failed, then take the reports."""
    assert opened.wait(30)
    return opened.take_reports()


def publish_and_subscribe(root: Path, plan: str) -> None:
    """Publish four more versions and accept each of them, in a process that failpoints may kill.

    The published steps are appended to `root/steps`.
    """
    atomic_files.failpoints = atomic_files.parse_failpoints(plan)
    store = WeightStore.open(root / "weights")
    store.claim("run")
    pruner = Pruner(
        store, Retention(last=1), load_factor=0.0
    )  # a concurrent load does not delay it
    base = store.newest()
    first = 0 if base is None else base.step + 1
    source = WeightStore.open(root / "weights")
    subscriber = WeightSubscriber(source, root / "copy", poll_seconds=0.01)
    with (root / "steps").open("a", buffering=1) as steps:
        for step in range(first, first + 4):
            base = publish(store, step, base=base if step % 3 else None, pruner=pruner)
            steps.write(f"{step}\n")
            while (pending := subscriber.poll(timeout=60)) and pending.version.step != step:
                subscriber.accept()
            subscriber.accept()
    subscriber.close()
