"""Functions that call the weight store in a guest process.

An exception of the store is a reply. The tensors of a version are computed from its step, so a
reader can compare all bits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from lab.network import enter

from peralta_zmq.errors import StoreError
from peralta_zmq.weights.publisher import Pruner, Retention
from peralta_zmq.weights.replica import load_version
from peralta_zmq.weights.store import WEIGHTS_FILE, Base, Version, WeightStore
from peralta_zmq.weights.subscriber import WeightSubscriber

RUN = "lab"
KEEP_ALL = 1_000_000
KEYFRAME_INTERVAL = 5
COMPANIONS = {"config.json": b"{}\n"}


def work(pipe: Connection, client: str | None) -> None:
    """Reply to requests on a client, or on the server if it is None."""
    if client:
        enter(client)
    torch.set_num_threads(1)
    PIPES.append(pipe)
    while True:
        do, arguments = pipe.recv()
        start_time = time.monotonic()
        try:
            reply = globals()[do](**arguments)
        except StoreError as error:
            reply = {"error": "StoreError", "message": str(error)}
        except OSError as error:  # a bug: the store must raise StoreError
            reply = {"error": type(error).__name__, "message": str(error)}
        pipe.send({**reply, "seconds": round(time.monotonic() - start_time, 3)})


def tensors_of(step: int, size: int) -> dict[str, torch.Tensor]:
    """`size` bytes of bf16; 1% of them differ between steps, so that a delta is written."""
    bits = _finite(size // 2, seed=0)
    generator = torch.Generator().manual_seed(step)
    indices = torch.randint(0, len(bits), (max(1, len(bits) // 100),), generator=generator)
    bits[indices] = _finite(len(indices), seed=step)
    weights = bits.view(torch.bfloat16)
    return {"first": weights[: len(bits) // 2].clone(), "second": weights[len(bits) // 2 :].clone()}


def _finite(count: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-32768, 32767, (count,), generator=generator, dtype=torch.int16)
    return bits & 0x3FFF  # the exponent is never all ones


def claim(folder: str) -> dict[str, Any]:
    """Claim the weights folder for the lab's run."""
    _store(folder).claim(RUN)
    return {}


def publish(folder: str, step: int, size: int, keep_last: int = KEEP_ALL) -> dict[str, Any]:
    """Publish the tensors of a step, four times out of five as a delta; `at` is the end time."""
    tensors = tensors_of(step, size)
    base = BASES.get((folder, size)) if step % KEYFRAME_INTERVAL else None
    store = _store(folder)
    version = store.publish(step, tensors, companions=COMPANIONS, base=base)
    Pruner(store, Retention(keep_last)).prune(version)
    BASES[folder, size] = version, tensors
    return {**_named(version), "kind": version.kind, "at": time.monotonic()}


def publish_on(folder: str, first: int, size: int) -> dict[str, Any]:
    """Publish versions forever, with one reply each."""
    for step in range(first, KEEP_ALL):
        PIPES[0].send(publish(folder, step, size))
    return {}


def void_fsync() -> dict[str, Any]:
    """Disable fsync in this process: the control that must lose versions."""
    os.fsync = lambda _: None
    return {}


def newest(folder: str) -> dict[str, Any]:
    """The newest version's number, or None."""
    return _named(_store(folder).newest())


def watch(folder: str, number: int, poll_seconds: float, give_up: float = 60) -> dict[str, Any]:
    """List the folder every `poll_seconds` until a version appears; `at` is the time."""
    store = _store(folder)
    deadline = time.monotonic() + give_up
    while time.monotonic() < deadline:
        version = store.newest()
        if version is not None and version.number >= number:
            return {**_named(version), "at": time.monotonic()}
        time.sleep(poll_seconds)
    return {"number": None, "at": time.monotonic()}


def load(folder: str, size: int, number: int | None = None) -> dict[str, Any]:
    """Load a version, by default the newest, and compare every bit with the published one."""
    store = _store(folder)
    version = store.newest()
    if version is None:
        return {"number": None}
    if number is not None and version.number != number:
        return {"error": "NotThere", "message": f"newest is {version.number}, not {number}"}
    return {**_named(version), "exact": _exact(store, version, size)}


def announced(folder: str, number: int, size: int) -> dict[str, Any]:
    """Load a version by its announced number, without listing the folder."""
    store = _store(folder)
    version = store.find(number)
    if version is None:
        return {"number": None}
    exact = _exact(store, version, size)
    return {**_named(version), "exact": exact, "at": time.monotonic()}


def verify(folder: str, size: int) -> dict[str, Any]:
    """Load every version with STABLE, newest first; lists those that differ as bad."""
    finished = sorted(Path(folder).glob("step_*/STABLE"))
    good: dict[int, str] = {}
    bad = []
    store = _store(folder)
    for number in sorted((int(path.parent.name[5:]) for path in finished), reverse=True):
        version = store.find(number)
        exact = False
        with contextlib.suppress(StoreError):
            exact = version is not None and _exact(store, version, size)
        if exact and version is not None:
            good[number] = version.weights_id
        else:
            bad.append(number)
    return {"good": good, "bad": bad}


def follow(
    folder: str, size: int, until: int, poll_seconds: float, give_up: float
) -> dict[str, Any]:
    """Poll for newer weights after each token until version `until` is loaded.

    `serving`: (seconds, number) of each change; `longest_pause`: longest poll; `intact`: True if
    the tensors were always those of their version.
    """
    start_time = time.monotonic()
    pause, serving, intact = 0.0, [], True
    with contextlib.closing(
        WeightSubscriber(_store(folder), Path("/tmp/copy"), poll_seconds=poll_seconds)
    ) as subscriber:
        while time.monotonic() < start_time + give_up and (not serving or serving[-1][1] < until):
            time.sleep(0.05)  # the time of one token
            poll_start = time.monotonic()
            pending = subscriber.poll()
            pause = max(pause, time.monotonic() - poll_start)
            if pending:
                serving.append((round(time.monotonic() - start_time, 2), pending.version.number))
                intact = intact and _same(pending.tensors, tensors_of(pending.version.step, size))
                subscriber.accept()
        at = time.monotonic()
    return {"serving": serving, "longest_pause": pause, "intact": intact, "at": at}


def map_weights(folder: str, number: int) -> dict[str, Any]:
    """Map a file of the NAS, which the store must not do, and read its first byte."""
    with (Path(folder) / f"step_{number:08d}" / WEIGHTS_FILE).open("rb") as file:
        MAPPED.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return {"first": MAPPED[-1][0]}


def read_mapped_end() -> dict[str, Any]:
    """Read the last byte of the mapped file."""
    return {"last": MAPPED[-1][-1]}


def _exact(store: WeightStore, version: Version, size: int) -> bool:
    with load_version(store, version) as local:
        return _same(
            safetensors.torch.load_file(local / WEIGHTS_FILE), tensors_of(version.step, size)
        )


def _same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name].view(torch.int16), second[name].view(torch.int16))
        for name in second
    )


def _store(folder: str) -> WeightStore:
    if folder not in STORES:
        STORES[folder] = WeightStore.open(Path(folder))
    return STORES[folder]


def _named(version: Version | None) -> dict[str, Any]:
    if version is None:
        return {"number": None}
    return {"number": version.number, "weights_id": version.weights_id}


STORES: dict[str, WeightStore] = {}
BASES: dict[tuple[str, int], Base] = {}  # last published version by folder and size
PIPES: list[Connection] = []
MAPPED: list[mmap.mmap] = []
