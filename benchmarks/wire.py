"""Group transport against bare pyzmq with the same bytes, with and without keys.

A rate counts groups sent by another process, received and validated. The peer sends the same bytes
over bare PUSH/PULL sockets with the same options and does not read them. The bound is the bare
sockets in the same round with a receiver that decodes each message.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import zmq

from benchmarks.harness import REPO, Claim, bounded, compared, interleaved, seconds
from benchmarks.training import random_group
from peralta_zmq import wire
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.wire.auth import TRAINER, make_keys
from peralta_zmq.wire.rollout_sockets import open_socket

VOCAB_SIZE = 64
LIMITS = wire.GroupLimits(VOCAB_SIZE)
RUN = "bench-00112233"
SENDERS = (1, 8, 64)
Keys: TypeAlias = tuple[wire.Authenticator, Path]  # and the key folder
REQUIRED = {
    f"rate_vs_raw_pyzmq_{count}{kind}": 0.8 for count in (1, 8, 64) for kind in ("", "_small")
}


def run(*, quick: bool) -> Iterable[Claim]:
    """All claims; `quick` repeats less and sends fewer groups."""
    repeats = 3 if quick else 7
    count = 3000 if quick else 40_000
    small = random_group(0, VOCAB_SIZE, (31,) * 4, num_prompt=21, run_id=RUN)
    large = random_group(0, VOCAB_SIZE, (180,) * 16, num_prompt=200, run_id=RUN)
    with _open_keys() as security:
        for senders in SENDERS:
            few = max(count // 5, 4 * senders)
            rounds = 3 * repeats if senders == 1 else repeats  # two processes may wait in turns
            yield from _rates(large, senders, security, count=few, repeats=rounds)
            yield from _rates(small, senders, security, count=count, repeats=rounds, kind="_small")


def _rates(
    group: RolloutGroup, senders: int, security: Keys, *, count: int, repeats: int, kind: str = ""
) -> Iterator[Claim]:
    """Groups per second without and with keys, in the same rounds."""
    frame = wire.encode_group(group)

    def decoded(frame: bytes) -> RolloutGroup:
        return wire.decode_group(frame, LIMITS)

    values = interleaved(
        {
            "ours": lambda: _ours(group, senders, count),
            "with keys": lambda: _ours(group, senders, count, security),
            "raw": lambda: _raw(frame, senders, count, bool),
            "checked": lambda: _raw(frame, senders, count, decoded),
        },
        repeats=repeats,
    )
    ours, raw, encrypted, bounds = (
        values[name] for name in ("ours", "raw", "with keys", "checked")
    )
    unit = f"groups/s of {len(frame)} bytes"
    rate = compared(f"rate_vs_raw_pyzmq_{senders}{kind}", ours, raw, unit)
    share = bounded("", ours, bounds, unit)
    yield replace(rate, bound=share.bound, share=share.share)
    yield compared(f"rate_with_keys_vs_without_{senders}{kind}", encrypted, ours, unit)


@contextmanager
def _open_keys() -> Generator[Keys, None, None]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        for name in (TRAINER, "ann"):
            make_keys(keys, name)
        with closing(wire.Authenticator(keys)) as authenticator:
            yield authenticator, keys


def _ours(
    group: RolloutGroup,
    senders: int,
    count: int,
    security: Keys | None = None,
) -> float:
    """Groups per second to one RolloutReceiver."""
    address = "tcp://127.0.0.1:*"
    authenticator, keys = security or (None, "")
    with closing(
        wire.RolloutReceiver(address, run_id=RUN, limits=LIMITS, authenticator=authenticator)
    ) as receiver:
        frame = wire.encode_group(group)
        arguments = ["ours", receiver.address, str(senders), frame.hex(), str(keys)]
        return _rate(arguments, lambda: receiver.receive(timeout=1.0) is not None, senders, count)


def _raw(frame: bytes, senders: int, count: int, read: Callable[[bytes], object]) -> float:
    """Messages per second over bare sockets with the same options; `read` is called on each."""
    puller = open_socket(zmq.PULL, hwm=1)
    port = puller.bind_to_random_port("tcp://127.0.0.1")
    puller.setsockopt(zmq.RCVTIMEO, 30_000)  # then the senders have ended
    with puller:
        arguments = ["raw", f"tcp://127.0.0.1:{port}", str(senders), frame.hex(), ""]
        return _rate(arguments, lambda: bool(read(puller.recv())), senders, count)


def _rate(arguments: list[str], receive: Callable[[], bool], senders: int, count: int) -> float:
    """Messages per second from a process of senders, after all have connected."""
    command = [sys.executable, "-c", SENDERS_PROGRAM, str(REPO), *arguments]
    with subprocess.Popen(command) as process:

        def receive_one() -> None:
            while not receive():
                if process.poll() is not None:
                    raise RuntimeError("the senders have ended")

        try:
            for _ in range(10 * senders):
                receive_one()
            return count / seconds(lambda: [receive_one() for _ in range(count)])
        finally:
            process.kill()


SENDERS_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import zmq
from pathlib import Path
from peralta_zmq import wire
from peralta_zmq.wire.rollout_sockets import open_socket
kind, address, count, frame, keys = sys.argv[2:]
frame = bytes.fromhex(frame)
keys = wire.generator_keys(Path(keys), "ann") if keys else None
if kind == "ours":
    senders = [wire.RolloutSender(address, keys=keys) for _ in range(int(count))]
    while True:
        for sender in senders:
            sender.send(frame, timeout=1.0)
senders = [open_socket(zmq.PUSH, hwm=1) for _ in range(int(count))]
for sender in senders:
    sender.connect(address)
while True:
    for sender in senders:
        sender.send(frame)
"""
