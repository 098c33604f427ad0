"""Group transport against bare pyzmq with the same bytes, the codec alone, cost of encryption.

A rate counts groups sent by another process, received and validated. The peer sends the same bytes
over bare PUSH/PULL sockets with the same options and does not read them. The bound is the bare
sockets in the same round with a receiver that decodes each message. The codec is timed including
the construction of the rollouts.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import psutil
import zmq

from benchmarks.harness import Claim, interleaved, progress, seconds, spread
from peralta_zmq import wire
from peralta_zmq.observe.metrics import METRICS, number, read_rows
from peralta_zmq.rollout import Completion, Rollout, RolloutGroup, rollout_of
from peralta_zmq.wire import message_fields, messages
from peralta_zmq.wire.auth import TRAINER, make_keys
from peralta_zmq.wire.sockets import open_socket
from tools.link_proxy import free_ports

VOCAB_SIZE = 64
LIMITS = wire.GroupLimits(VOCAB_SIZE)
RUN = "bench-00112233"
SENDERS = (1, 8, 64)
Keys: TypeAlias = tuple[wire.Authenticator, Path]  # and the key folder
REPO = Path(__file__).resolve().parent.parent
REQUIRED = {
    f"rate_vs_raw_pyzmq_{count}{kind}": 0.8 for count in (1, 8, 64) for kind in ("", "_small")
}


def run(*, quick: bool) -> Iterable[Claim]:
    """All claims; `quick` leaves out the recovery and repeats less."""
    repeats = 3 if quick else 7
    count = 3000 if quick else 40_000
    small, large = group_of(4, 21, 31), group_of(16, 200, 180)
    yield from _codec(small, repeats=repeats)
    yield from _checking(large, "_large", repeats=repeats)
    yield from _checking(small, "_small", repeats=repeats)
    with _open_keys() as security:
        for senders in SENDERS:
            few = max(count // 5, 4 * senders)
            rounds = 3 * repeats if senders == 1 else repeats  # two processes may wait in turns
            yield from _rates(large, senders, security, count=few, repeats=rounds)
            yield from _rates(small, senders, security, count=count, repeats=rounds, kind="_small")
    yield _memory(200 if quick else 1000)
    if not quick:
        yield recovery(repeats=3)
        yield journal_share(steps=60)


def group_of(num_rollouts: int, num_prompt: int, num_generated: int) -> RolloutGroup:
    """Rollouts of one prompt and one policy step with random tokens."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCAB_SIZE, num_prompt).astype(np.int32)

    def rollout(reward: float) -> Rollout:
        logprobs = -rng.exponential(1.0, num_generated).astype(np.float32)
        tokens = rng.integers(3, VOCAB_SIZE, num_generated).astype(np.int32)
        steps = np.full(num_generated, 7, np.int32)
        return rollout_of(Completion(0, prompt, tokens, logprobs, steps, "stop", ""), reward)

    return RolloutGroup(
        run_id=RUN, generator_id="ann", incarnation=bytes(8), sequence=0, problem_id="math_1k/7",
        task="calculator", policy_step=7, weights_id="0123456789abcdef",
        rollouts=tuple(rollout(float(number % 2)) for number in range(num_rollouts)),
    )  # fmt: skip


def _codec(group: RolloutGroup, *, repeats: int) -> Iterator[Claim]:
    frame, rounds = wire.encode_group(group), 5000

    def both() -> float:
        started = time.perf_counter()
        for _ in range(rounds):
            assert wire.decode_group(wire.encode_group(group), LIMITS).rollouts[0]
        return (time.perf_counter() - started) / rounds * 1e6

    values = interleaved({"codec": both}, repeats=repeats)["codec"]
    yield _claim("codec_microseconds", statistics.median(values), "us", values)
    yield Claim("bytes_per_group", len(frame), "bytes")


def _rates(
    group: RolloutGroup, senders: int, security: Keys, *, count: int, repeats: int, kind: str = ""
) -> Iterator[Claim]:
    """Groups per second without and with keys, in the same rounds."""
    frame = wire.encode_group(group)
    values = interleaved(
        {
            "ours": lambda: _ours(group, senders, count),
            "with keys": lambda: _ours(group, senders, count, security),
            "raw": lambda: _raw(frame, senders, count, bool),
            "checked": lambda: _raw(frame, senders, count, _decoded),
        },
        repeats=repeats,
    )
    ours, raw, encrypted = values["ours"], values["raw"], values["with keys"]
    bounds = values["checked"]
    unit = f"groups/s of {len(frame)} bytes"
    yield Claim(
        f"rate_vs_raw_pyzmq_{senders}{kind}", statistics.median(ours), unit,
        peer=statistics.median(raw), ratio=_ratio(ours, raw), bound=statistics.median(bounds),
        share=_ratio(ours, bounds), n=repeats, spread=spread(ours),
    )  # fmt: skip
    yield Claim(
        f"rate_with_keys_vs_without_{senders}{kind}", statistics.median(encrypted), unit,
        peer=statistics.median(ours), ratio=_ratio(encrypted, ours), n=repeats,
        spread=spread(encrypted),
    )  # fmt: skip
    if not kind:
        megabytes = len(frame) * statistics.median(ours) / 1e6
        yield Claim(f"megabytes_per_s_{senders}", megabytes, "MB/s", n=repeats)
    if senders == 1:
        costs = [(1 / a - 1 / b) * 1e6 for a, b in zip(encrypted, ours, strict=True)]
        yield _claim(f"curve_cost{kind}", statistics.median(costs), "us per group", costs)


def _checking(group: RolloutGroup, size_of: str, *, repeats: int) -> Iterator[Claim]:
    """Microseconds of decoding, and of decoding and admission with and without rollouts."""
    values = interleaved(
        {
            "decode": lambda: _check_microseconds(group),
            "admit": lambda: _check_microseconds(group, _admit),
            "build": lambda: _check_microseconds(group, _build, _admit),
        },
        repeats=repeats,
    )
    decode, admit, build = values["decode"], values["admit"], values["build"]
    yield _claim(f"decode{size_of}_us", statistics.median(decode), "us per group", decode)
    yield from _parts(group, size_of, repeats=repeats)
    yield Claim(
        f"judged_uncut_vs_cut{size_of}", statistics.median(admit), "us per group",
        peer=statistics.median(build), ratio=_ratio(build, admit), n=repeats,
        spread=spread(admit),
    )  # fmt: skip


def _parts(group: RolloutGroup, size_of: str, *, repeats: int) -> Iterator[Claim]:
    """Microseconds of the parts of decoding: msgpack, envelope and checksum, rollouts."""
    frame, rounds = wire.encode_group(group), 3000
    message = message_fields.unpack(frame)
    _, columns = messages._read_fields(message, frame)  # pyright: ignore[reportPrivateUsage]
    decode_rollouts = messages._decode_rollouts  # pyright: ignore[reportPrivateUsage]
    parts: dict[str, Callable[[], object]] = {
        "unpack": lambda: message_fields.unpack(frame),
        "envelope": lambda: messages._read_fields(message, frame),  # pyright: ignore[reportPrivateUsage]
        "rollouts": lambda: decode_rollouts(columns, group.policy_step, LIMITS),
    }

    def microseconds(part: Callable[[], object]) -> float:
        return seconds(lambda: [part() for _ in range(rounds)]) / rounds * 1e6

    ways = {name: functools.partial(microseconds, part) for name, part in parts.items()}
    for name, values in interleaved(ways, repeats=repeats).items():
        yield _claim(
            f"decode{size_of}_{name}_us", statistics.median(values), "us per group", values
        )


def _ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """The median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(ours, peer, strict=True))


def _check_microseconds(group: RolloutGroup, *then: Callable[[RolloutGroup], object]) -> float:
    """CPU time to decode one group and pass it to the functions."""
    frame, rounds = wire.encode_group(group), 3000

    def decode() -> None:
        for _ in range(rounds):
            decoded = _decoded(frame)
            for function in then:
                function(decoded)

    return seconds(decode) / rounds * 1e6


def _decoded(frame: bytes) -> RolloutGroup:
    return wire.decode_group(frame, LIMITS)


def _admit(group: RolloutGroup) -> tuple[bool, float]:
    """The values that admission reads."""
    return group.has_signal, group.mean_reward


def _build(group: RolloutGroup) -> Rollout:
    """Access to the first builds all rollouts."""
    return group.rollouts[0]


@contextmanager
def _open_keys() -> Generator[Keys, None, None]:
    """Keys of the trainer and of ann, and an authenticator."""
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
from peralta_zmq.wire.sockets import open_socket
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


def _memory(senders: int) -> Claim:
    """KiB of the receiver for each connected sender that has sent one group."""
    frame = wire.encode_group(group_of(4, 21, 31))
    with closing(wire.RolloutReceiver("tcp://127.0.0.1:*", run_id=RUN, limits=LIMITS)) as receiver:
        command = [sys.executable, "-c", IDLE_PROGRAM, receiver.address, str(senders), frame.hex()]
        half, resident = senders // 2, [_resident()]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as idle:
            for number in range(1, senders + 1):
                while receiver.receive(timeout=1.0) is None:
                    pass
                if number in (half, senders):
                    resident.append(_resident())
            assert idle.stdin is not None
            idle.stdin.close()
    first, second = resident[1] - resident[0], resident[2] - resident[1]
    progress(f"memory: {first / 1024:.0f} KiB for {half} senders, then {second / 1024:.0f} KiB")
    return Claim(
        "memory_per_sender", (first + second) / senders / 1024, f"KiB, {senders} connected",
        bound=second / (senders - half) / 1024,
    )  # fmt: skip


IDLE_PROGRAM = """
import sys, zmq
context = zmq.Context()
context.set(zmq.MAX_SOCKETS, 4096)
address, count, frame = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
pushers = []
for _ in range(count):
    pusher = context.socket(zmq.PUSH)
    pusher.linger = 0
    pusher.connect(address)
    pusher.send(frame)
    pushers.append(pusher)
sys.stdin.read()
context.destroy()
"""


def _resident() -> int:
    """Resident bytes of this process."""
    return psutil.Process().memory_info().rss


def recovery(*, repeats: int) -> Claim:
    """Seconds from SIGKILL of a real trainer to the next trained step, in the embedded run."""
    values: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(_lan(folder), cwd=REPO, stdout=subprocess.DEVNULL) as process,
    ):
        run_folder = Path(folder) / "bench"
        for number in range(repeats):
            _step_after(run_folder, -1 if number == 0 else _last_step(run_folder) + 3)
            before = _last_step(run_folder)
            killed = time.monotonic()
            _kill_trainer(folder)
            _step_after(run_folder, before)
            values.append(time.monotonic() - killed)
            progress(f"recovery {number + 1}/{repeats}: {values[-1]:.2f} s")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
    return _claim("recovery_seconds", statistics.median(values), "s", values)


def journal_share(*, steps: int) -> Claim:
    """Percent of the step time that the trainer spends on its journal, in the embedded run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*_lan(folder), "--train.max-steps", str(steps)]
        subprocess.run(command, cwd=REPO, stdout=subprocess.DEVNULL, check=True)
        rows = read_rows(Path(folder) / "bench" / METRICS)
    writing, whole = (
        sum(number(row, name) for row in rows) for name in ("time/journal", "step_time")
    )
    percent, limit = 100 * writing / whole, 2.0
    return Claim(
        "journal_share", percent, "% of step time, limit 2", bound=limit, share=percent / limit,
        n=len(rows),
    )  # fmt: skip


def _lan(folder: str) -> list[str]:
    return ["bin/lan", "local", "--run.dir", folder, "--run.name", "bench",
            "--wire.port", str(free_ports()), "--eval.num-examples", "1",
            "--no-eval.eval-base-model", "--run.num-local-generators", "2"]  # fmt: skip


def _step_after(folder: Path, step: int) -> None:
    ends = time.monotonic() + 120
    while _last_step(folder) <= step:
        if time.monotonic() > ends:
            raise TimeoutError(f"no step after {step} in {folder}")
        time.sleep(0.02)


def _last_step(folder: Path) -> int:
    try:
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, IndexError, ValueError):
        return -1


def _kill_trainer(folder: str) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[1:2] and words[1].endswith("bin/trainer") and folder in words:
            os.kill(int(process.name), signal.SIGKILL)


def _claim(name: str, value: float, unit: str, values: Sequence[float]) -> Claim:
    return Claim(name, value, unit, n=len(values), spread=spread(values))
