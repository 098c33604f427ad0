"""Scenarios that run in the guest, one function each.

A scenario sends events to the host; the tests check them.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

from lab import failing_disk
from lab.commands import disk, send_event, unmount
from lab.network import cables, join, limit, plug, serve
from lab.workers import Worker

KIB, MIB = 1 << 10, 1 << 20
SERVED = Path("/srv/big")


def visible(protocol: str, rounds: int, poll_seconds: float, options: str = "") -> None:
    """A client, then the server, publishes while client b polls a folder; sends each delay."""
    there = _network(protocol, options=options)
    for by, publisher in (("client", Worker("a")), ("server", Worker())):
        folder = str(there["a" if by == "client" else "server"] / by)
        seen_as = str(there["b"] / by)
        publisher.call("claim", folder=folder)
        reader = Worker("b")
        for number in range(1, rounds + 1):
            reader.send("watch", folder=seen_as, number=number, poll_seconds=poll_seconds)
            time.sleep(1.3 * poll_seconds)  # the reader has listed the folder without it
            done = publisher.call("publish", folder=folder, step=number, size=256 * KIB)
            seen = reader.receive()
            loaded = reader.call("load", folder=seen_as, size=256 * KIB)
            send_event(event="version", by=by, done=done, seen=seen, loaded=loaded)


def announced(protocol: str, rounds: int) -> None:
    """Client b polls and gets the number of each published version, which must open at once."""
    there = _network(protocol)
    publisher, reader = Worker("a"), Worker("b")
    publisher.call("claim", folder=str(there["a"]))
    for number in range(1, rounds + 1):
        reader.call("newest", folder=str(there["b"]))
        done = publisher.call("publish", folder=str(there["a"]), step=number, size=256 * KIB)
        loaded = reader.call("announced", folder=str(there["b"]), number=number, size=256 * KIB)
        send_event(event="version", done=done, loaded=loaded)


def full(protocol: str) -> None:
    """The server's disk fills up while client a writes a version; later space is freed."""
    there = _network(protocol, name="small")
    publisher, reader = Worker("a"), Worker("b")
    here, seen_as = str(there["a"]), str(there["b"])
    publisher.call("claim", folder=here)
    send_event(event="first", reply=publisher.call("publish", folder=here, step=1, size=MIB))
    limit("a", 12)  # 6 MiB take four seconds
    publisher.send("publish", folder=here, step=2, size=6 * MIB)
    _until_begun(there["server"])
    filler = there["server"].parent / "filler"
    _fill(filler)
    reply = publisher.receive()
    send_event(event="full", reply=reply, names=_names(there["server"]))
    limit("a", 0)
    send_event(event="again", reply=publisher.call("publish", folder=here, step=2, size=6 * MIB))
    newest = reader.call("newest", folder=seen_as)
    send_event(event="meanwhile", newest=newest, names=_names(there["server"]))
    filler.unlink()
    send_event(
        event="freed",
        reply=_retry_for_a_minute(publisher, "publish", folder=here, step=3, size=6 * MIB),
    )
    until = reader.call("watch", folder=seen_as, number=3, poll_seconds=0.5)
    send_event(event="read", seen=until, loaded=reader.call("load", folder=seen_as, size=6 * MIB))


def pruned(protocol: str) -> None:
    """The server removes a version while client b is slowly reading it."""
    there = _network(protocol)
    publisher, reader, careless = Worker(), Worker("b"), Worker("b")
    here, seen_as = str(there["server"]), str(there["b"])
    publisher.call("claim", folder=here)
    publisher.call("publish", folder=here, step=1, size=8 * MIB)
    reader.call("newest", folder=seen_as)
    limit("b", 10)  # 8 MiB take seven seconds
    careless.call("map_weights", folder=seen_as, number=1)
    reader.send("load", folder=seen_as, size=8 * MIB, number=1)
    time.sleep(1.5)  # both are in the middle of the file
    for step in (2, 3):
        publisher.call("publish", folder=here, step=step, size=256 * KIB, keep_last=1)
    first = there["server"] / "step_00000001"
    if by_hand := first.exists():  # a store that keeps what is being read
        shutil.rmtree(first)
    send_event(event="removed", by_hand=by_hand)
    during = reader.receive()
    limit("b", 0)
    send_event(
        event="reader", during=during, after=reader.call("load", folder=seen_as, size=256 * KIB)
    )
    send_event(event="careless", reply=careless.call("read_mapped_end"))


def outage(protocol: str, seconds: float) -> None:
    """Both cables are cut while one trainer publishes on the server and another on client a."""
    there = _network(protocol)
    server, client, reader, later = Worker(), Worker("a"), Worker("b"), Worker("b")
    by_server, by_client = there["server"] / "s", there["a"] / "c"
    for worker, folder in ((server, by_server), (client, by_client)):
        worker.call("claim", folder=str(folder))
        worker.call("publish", folder=str(folder), step=1, size=256 * KIB)
    follow = {"until": 2, "poll_seconds": 1.0, "give_up": seconds + 90}
    reader.send("follow", folder=str(there["b"] / "s"), size=256 * KIB, **follow)
    time.sleep(4)  # it serves version 1
    plug("down")
    server.call("publish", folder=str(by_server), step=2, size=256 * KIB)
    client.send("publish", folder=str(by_client), step=2, size=256 * KIB)
    time.sleep(seconds)
    plug("up")
    back = time.monotonic()
    send_event(event="reader", reply=reader.receive(seconds + 120), back=back)
    first = client.receive(180)
    done = first
    if "error" in first:
        done = _retry_for_a_minute(client, "publish", folder=str(by_client), step=2, size=256 * KIB)
    send_event(event="publisher", first=first, done=done, after=time.monotonic() - back)
    seen_as = str(there["b"] / "c")
    later.call("watch", folder=seen_as, number=2, poll_seconds=1)
    send_event(event="later", loaded=later.call("load", folder=seen_as, size=256 * KIB))


def vanished(protocol: str) -> None:
    """Client a's mount disappears and leaves an empty local folder; then it is mounted again."""
    there = _network(protocol, name="big")
    publisher, reader = Worker("a"), Worker("b")
    here = there["a"]
    publisher.call("claim", folder=str(here))
    publisher.call("publish", folder=str(here), step=1, size=256 * KIB)
    unmount(here.parent, at_once=True)
    here.mkdir()  # the worst case: even the folder's name is there
    reply = publisher.call("publish", folder=str(here), step=2, size=256 * KIB)
    blind = publisher.call("newest", folder=str(here))
    send_event(event="gone", reply=reply, newest=blind, local=os.listdir(here))
    here.rmdir()
    reply = publisher.call("publish", folder=str(here), step=2, size=256 * KIB)
    send_event(event="gone", reply=reply, newest=blind, local=os.listdir(here.parent))
    send_event(event="meanwhile", newest=reader.call("newest", folder=str(there["b"])))
    join("a", protocol, there["server"].parent)
    done = _retry_for_a_minute(publisher, "publish", folder=str(here), step=2, size=256 * KIB)
    reader.call("watch", folder=str(there["b"]), number=2, poll_seconds=0.5)
    loaded = reader.call("load", folder=str(there["b"]), size=256 * KIB)
    send_event(event="back", done=done, loaded=loaded)


def publishing(first_step: int) -> None:
    """Verify the disk after the last power cut; then publish until the next one."""
    folder = disk("big") / "weights"
    publisher = Worker()
    send_event(event="verified", **publisher.call("verify", folder=str(folder), size=256 * KIB))
    # The last publisher's lock may still look valid.
    _retry_for_a_minute(publisher, "claim", folder=str(folder))
    for step in range(first_step, first_step + 100_000):
        done = publisher.call("publish", folder=str(folder), step=step, size=256 * KIB)
        send_event(event="announced", **done)


def cuts(count: int, seed: int) -> None:
    """Power cuts of the disk during publication; sends the surviving versions.

    As a control, a second store publishes to the same disk without fsync: if its versions survive
    as well, the cuts prove nothing.
    """
    rng = random.Random(seed)
    verifier = Worker()
    failing_disk.prepare()
    for number in range(count):
        failing_disk.connect(SERVED)
        publishers = {str(SERVED / f"{number}-{kind}"): Worker() for kind in ("synced", "void")}
        publishers[str(SERVED / f"{number}-void")].call("void_fsync")
        for folder, publisher in publishers.items():
            publisher.call("claim", folder=folder)
            publisher.send("publish_on", folder=folder, size=256 * KIB, first=1)
        time.sleep(rng.uniform(0.3, 1.5))
        failing_disk.cut_power()
        for publisher in publishers.values():
            publisher.kill()
        replies = {folder: publisher.unread() for folder, publisher in publishers.items()}
        failing_disk.disconnect(SERVED)
        failing_disk.connect(SERVED)
        for folder in publishers:
            announced = {
                each["number"]: each["weights_id"]
                for each in replies[folder]
                if "weights_id" in each
            }
            found = verifier.call("verify", folder=folder, size=256 * KIB)
            send_event(event=folder.split("-")[1], number=number, **_compare(announced, found))
            shutil.rmtree(folder, ignore_errors=True)  # it may not have been there yet
        failing_disk.disconnect(SERVED)


def _network(protocol: str, *, name: str = "big", options: str = "") -> dict[str, Path]:
    """The weights folder as the server, client a and client b see it."""
    root = disk(name)
    cables()
    serve(protocol, root)
    return {"server": root / "weights"} | {
        client: join(client, protocol, root, options) / "weights" for client in "ab"
    }


def _retry_for_a_minute(worker: Worker, do: str, **arguments: Any) -> dict[str, Any]:
    """Call every second for up to a minute while the store refuses."""
    deadline = time.monotonic() + 60
    reply = worker.call(do, **arguments)
    while "error" in reply and time.monotonic() < deadline:
        time.sleep(1)
        reply = worker.call(do, **arguments)
    return reply


def _until_begun(folder: Path) -> None:
    """Wait until a version is being written."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if any(size for size in map(_size, folder.glob(".tmp*/*"))):
                return
        time.sleep(0.01)
    raise TimeoutError(f"no process writes to {folder}")


def _size(path: Path) -> int:
    return path.stat().st_size


def _fill(filler: Path) -> None:
    """Take all space that is left, at once."""
    with filler.open("wb", buffering=0) as file:
        for block in (MIB, 4 * KIB):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, block)


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _compare(announced: dict[int, str], found: dict[str, Any]) -> dict[str, Any]:
    """How many versions were announced, which of them are lost, which have STABLE and are torn."""
    good = found["good"]
    lost = [number for number, weights_id in announced.items() if good.get(number) != weights_id]
    return {"announced": len(announced), "lost": lost, "torn": found["bad"], "good": len(good)}
