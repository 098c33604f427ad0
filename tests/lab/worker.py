"""Every call that the lab makes to the store, one function for each thing that a client does.

Requests and answers are JSON lines; what the store raises is an answer. Tensors follow from the
step that they are published for, so any reader can tell whether it has exactly those bits.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
import time
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch

from peralta_zmq.errors import StoreError
from peralta_zmq.stores.directory import WEIGHTS, DirectoryStore, Version

RUN = "lab"
KEEP_ALL = 1_000_000
COMPANIONS = {"config.json": b"{}\n"}


def work(requests: IO[str], answers: IO[str]) -> None:
    """Answer each request until there are no more."""
    torch.set_num_threads(1)
    ANSWERS.append(answers)
    for line in requests:
        request = json.loads(line)
        began = time.monotonic()
        try:
            answer = HANDLERS[request.pop("do")](**request)
        except StoreError as error:
            answer = {"error": "StoreError", "message": str(error)}
        except OSError as error:  # a defect of the store: it promises StoreError
            answer = {"error": type(error).__name__, "message": str(error)}
        answer["seconds"] = round(time.monotonic() - began, 3)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def tensors_of(step: int, size: int) -> dict[str, torch.Tensor]:
    """`size` bytes of bf16 that only this step has; each step changes all of them."""
    made = torch.Generator().manual_seed(step)
    bits = torch.randint(-32768, 32767, (2, size // 4), generator=made, dtype=torch.int16)
    weights = (bits & 0x3FFF).view(torch.bfloat16)  # finite: the exponent is not all ones
    return {"first": weights[0].contiguous(), "second": weights[1].contiguous()}


def claim(folder: str) -> dict[str, Any]:
    """Make the folder the lab's."""
    _store(folder).claim(RUN)
    return {}


def publish(folder: str, step: int, size: int, keep_last: int = KEEP_ALL) -> dict[str, Any]:
    """Publish the step's tensors; the time is when the store said that it is done."""
    store = _store(folder)
    version = store.publish(
        step, tensors_of(step, size), companions=COMPANIONS, keep_last=keep_last
    )
    return {**_named(version), "at": time.monotonic()}


def publish_on(folder: str, first: int, size: int) -> dict[str, Any]:
    """Publish without end, saying so after each version."""
    for step in range(first, KEEP_ALL):
        ANSWERS[0].write(json.dumps(publish(folder, step, size)) + "\n")
        ANSWERS[0].flush()
    return {}


def void_fsync() -> dict[str, Any]:
    """From now on nothing in this process is made durable: a store that must be caught."""
    os.fsync = lambda _: None
    return {}


def newest(folder: str) -> dict[str, Any]:
    """The newest version's number, or None."""
    return _named(_store(folder).newest())


def watch(folder: str, number: int, poll_seconds: float, give_up: float = 60) -> dict[str, Any]:
    """List the folder every `poll_seconds` until a version is there; when it was seen."""
    store = _store(folder)
    deadline = time.monotonic() + give_up
    while time.monotonic() < deadline:
        version = store.newest()
        if version is not None and version.number >= number:
            return {**_named(version), "at": time.monotonic()}
        time.sleep(poll_seconds)
    return {"number": None, "at": time.monotonic()}


def load(folder: str, size: int, number: int | None = None) -> dict[str, Any]:
    """Load a version (the newest unless said) and compare every bit with what was published."""
    store = _store(folder)
    version = store.newest()
    if version is None:
        return {"number": None}
    if number is not None and version.number != number:
        return {"error": "NotThere", "message": f"newest is {version.number}, not {number}"}
    return {**_named(version), "exact": _exact(store, version, size)}


def announced(folder: str, number: int, size: int) -> dict[str, Any]:
    """Load the version that an announcement names, without listing the folder."""
    store = _store(folder)
    version = _version(store, number)
    if version is None:
        return {"number": None}
    return {**_named(version), "exact": _exact(store, version, size), "at": time.monotonic()}


def verify(folder: str, size: int) -> dict[str, Any]:
    """Load every folder with STABLE, newest first; those that are not as published."""
    finished = sorted(Path(folder).glob("step_*/STABLE"))
    good: dict[int, str] = {}
    bad = []
    store = _store(folder)
    for number in sorted((int(each.parent.name[5:]) for each in finished), reverse=True):
        version = _version(store, number)
        exact = False
        with contextlib.suppress(StoreError):
            exact = version is not None and _exact(store, version, size)
        if exact and version is not None:
            good[number] = version.wid
        else:
            bad.append(number)
    return {"good": good, "bad": bad}


def follow(
    folder: str, size: int, until: int, poll_seconds: float, give_up: float
) -> dict[str, Any]:
    """Serve the newest weights while a thread looks for newer ones, until version `until` serves.

    `serving` are the (seconds, number) of each change, `longest_pause` how long serving stood
    still, `intact` whether the served tensors were always those of their number.
    """
    shown: dict[str, Any] = {}
    stop = threading.Event()
    looking = threading.Thread(target=_look, args=(folder, shown, poll_seconds, stop), daemon=True)
    looking.start()
    began = last = time.monotonic()
    pause, serving, intact = 0.0, [], True
    while time.monotonic() < began + give_up:
        time.sleep(0.05)  # as long as a token takes
        now = time.monotonic()
        pause, last = max(pause, now - last), now
        if not shown:
            continue
        number, step, tensors = shown["version"]
        if not serving or serving[-1][1] != number:
            serving.append((round(now - began, 2), number))
            intact = intact and _same(tensors, tensors_of(step, size))
            last = time.monotonic()  # the comparison is ours, not a pause of the store
        if number >= until:
            break
    stop.set()
    return {"serving": serving, "longest_pause": pause, "intact": intact, "at": time.monotonic()}


def touch_mapped(folder: str, number: int) -> dict[str, Any]:
    """What the store must not do: map the file and read its far end a little later."""
    with (Path(folder) / f"step_{number:08d}" / WEIGHTS).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        time.sleep(3)
        return {"last": mapped[-1]}


def _look(folder: str, shown: dict[str, Any], poll_seconds: float, stop: threading.Event) -> None:
    store = _store(folder)
    while not stop.wait(poll_seconds):
        version = store.newest()
        if version is None or (shown and shown["version"][0] == version.number):
            continue
        with contextlib.suppress(StoreError), store.load(version) as local:
            tensors = safetensors.torch.load_file(local / WEIGHTS)
            shown["version"] = (version.number, version.step, tensors)


def _exact(store: DirectoryStore, version: Version, size: int) -> bool:
    with store.load(version) as local:
        return _same(safetensors.torch.load_file(local / WEIGHTS), tensors_of(version.step, size))


def _same(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> bool:
    return these.keys() == those.keys() and all(
        torch.equal(these[name].view(torch.int16), those[name].view(torch.int16)) for name in those
    )


def _version(store: DirectoryStore, number: int) -> Version | None:
    from peralta_zmq import durable

    folder = store.folder / f"step_{number:08d}"
    try:
        manifest = durable.read_manifest(folder)
    except (OSError, durable.CorruptError):
        return None
    return Version(number, int(manifest.about["step"]), folder, manifest)


def _store(folder: str) -> DirectoryStore:
    if folder not in STORES:
        STORES[folder] = DirectoryStore(Path(folder))
    return STORES[folder]


def _named(version: Version | None) -> dict[str, Any]:
    return {"number": version.number, "wid": version.wid} if version else {"number": None}


STORES: dict[str, DirectoryStore] = {}
ANSWERS: list[IO[str]] = []
HANDLERS = {
    each.__name__: each
    for each in (
        claim, publish, publish_on, void_fsync, newest, watch, load, announced, verify, follow,
        touch_mapped,
    )
}  # fmt: skip
