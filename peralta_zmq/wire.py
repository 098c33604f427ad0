"""Rollouts and announcements over ZeroMQ. Knows sockets and bytes; knows nothing of models.

Generators PUSH whole groups to the trainer's PULL; the trainer PUBlishes what it is doing on the
next port. An announcement is a hint and may be lost. A group message that breaks any rule is
counted and dropped by the receiver, never raised.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import zmq

from peralta_zmq.errors import WireError
from peralta_zmq.rollout import FinishReason, Rollout, RolloutGroup

VERSION = 1
MAX_MESSAGE = 16 << 20  # bytes; libzmq drops a larger one together with those behind it
KERNEL_BUFFER = 16 << 10  # bytes; larger ones would queue dozens of groups past the HWM
LOGPROB_SLACK = 1e-3  # rounding may lift log(1) a little above 0
LIMITS = {
    "max_str_len": 1 << 10,
    "max_bin_len": MAX_MESSAGE,
    "max_array_len": 1 << 12,
    "max_ext_len": 0,
}
MAX_LISTS, MAX_MAPS = 4, LIMITS["max_array_len"] + 1  # of one group; nested ones would multiply
MAX_SENDERS = 1 << 14  # in one announcement
MAX_REASONS = 100  # distinct refusals remembered, so that a hostile sender cannot fill memory
TCP_LISTEN = "0A"  # in /proc/net/tcp
logger = logging.getLogger(__name__)
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the trainer says of itself, every second and on change."""

    run_id: str
    boot: bytes = b""  # 8 random bytes, new with each start of the trainer
    step: int = 0  # optimizer steps taken
    version: int = -1  # newest published version, -1 before the first
    received: dict[str, int] = field(default_factory=dict[str, int])
    """Highest sequence taken in, by sender, of the senders heard from lately."""
    done: bool = False  # the run is complete


SAID = {
    "run_id": str, "boot": bytes, "step": int, "version": int, "received": dict, "done": bool
}  # fmt: skip


def encode_group(group: RolloutGroup) -> bytes:
    """One group as one msgpack map with flat little-endian buffers.

    Raises WireError when it exceeds the message limit.
    """
    rollouts = group.rollouts
    buffers = {
        "tokens": b"".join(each.token_ids.astype("<i4").tobytes() for each in rollouts),
        "mask": b"".join(each.loss_mask.tobytes() for each in rollouts),
        "logprobs": b"".join(each.logprobs.astype("<f4").tobytes() for each in rollouts),
    }
    fields = {
        "v": VERSION,
        "run": group.run_id,
        "gen": group.generator_id,
        "boot": group.boot,
        "seq": group.sequence,
        "step": group.policy_step,
        "problem": group.problem_id,
        "task": group.task,
        "n": [len(each.token_ids) for each in rollouts],
        "rewards": [each.reward for each in rollouts],
        "parts": [each.rewards for each in rollouts],
        "finish": [FINISH_REASONS.index(each.finish_reason) for each in rollouts],
        "crc32": _checksum(buffers),
        **buffers,
    }
    frame = cast(bytes, msgpack.packb(fields))
    if len(frame) > MAX_MESSAGE:
        raise WireError(
            f"a group of {len(frame)} bytes exceeds the limit of {MAX_MESSAGE}; "
            "lower sampling.max_completion_length or sampling.num_generations"
        )
    return frame


def decode_group(frame: bytes, *, vocab_size: int) -> RolloutGroup:
    """The group in a message. Raises WireError with the rule that it breaks."""
    fields = _unpack(frame, max_map_len=64, max_lists=MAX_LISTS, max_maps=MAX_MAPS)
    try:
        return _group_of(fields, vocab_size)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise WireError(f"malformed group: {type(error).__name__}: {error}") from None


def decode_announcement(frame: bytes) -> Announcement:
    """The announcement in a message; fields of a later version are passed over.

    Raises WireError when a field is missing or of another type.
    """
    fields = _unpack(frame, max_map_len=MAX_SENDERS, max_lists=0, max_maps=2)
    try:
        known = {name: _typed(fields[name], kind) for name, kind in SAID.items() if name in fields}
        for sender, sequence in known.get("received", {}).items():
            _typed(sender, str)
            _typed(sequence, int)
        return Announcement(**known)
    except (TypeError, ValueError) as error:
        raise WireError(f"malformed announcement: {error}") from None


def _unpack(frame: bytes, *, max_map_len: int, max_lists: int, max_maps: int) -> Any:
    lists, maps = _at_most(max_lists, "lists"), _at_most(max_maps, "maps")
    try:
        return cast(Any, msgpack).unpackb(
            frame, list_hook=lists, object_hook=maps, max_map_len=max_map_len, **LIMITS
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a message: {error}") from None


def _at_most(count: int, kind: str) -> Callable[[Any], Any]:
    left = iter(range(count))

    def counted(container: Any) -> Any:
        _require(next(left, None) is not None, f"more than {count} {kind}")
        return container

    return counted


def _group_of(fields: dict[str, Any], vocab_size: int) -> RolloutGroup:
    version = _typed(fields["v"], int)
    _require(version == VERSION, f"version {version} is not {VERSION}")
    _require(fields["crc32"] == _checksum(fields), "checksum does not match")
    group = RolloutGroup(
        run_id=_typed(fields["run"], str),
        generator_id=_typed(fields["gen"], str),
        boot=_typed(fields["boot"], bytes),
        sequence=_typed(fields["seq"], int),
        policy_step=_typed(fields["step"], int),
        problem_id=_typed(fields["problem"], str),
        task=_typed(fields["task"], str),
        rollouts=_rollouts_of(fields, vocab_size),
    )
    _require(len(group.boot) == 8, "boot is not 8 bytes")
    _require(group.sequence >= 0 and group.policy_step >= 0, "negative sequence or step")
    return group


def _rollouts_of(fields: dict[str, Any], vocab_size: int) -> tuple[Rollout, ...]:
    lengths = [_typed(length, int) for length in fields["n"]]
    _require(bool(lengths) and min(lengths) > 0, "a rollout without tokens")
    total = sum(lengths)
    tokens = np.frombuffer(fields["tokens"], "<i4")
    mask = np.frombuffer(fields["mask"], np.uint8)
    logprobs = np.frombuffer(fields["logprobs"], "<f4")
    _require(len(tokens) == len(mask) == len(logprobs) == total, "arrays of unequal length")
    _require(bool(((tokens >= 0) & (tokens < vocab_size)).all()), "token outside the vocabulary")
    _require(bool((mask <= 1).all()), "mask is not boolean")
    _require(bool(np.isfinite(logprobs).all()), "logprob is not finite")
    _require(bool((logprobs <= LOGPROB_SLACK).all()), "logprob above zero")
    per_rollout = (fields["rewards"], fields["parts"], fields["finish"])
    _require(all(len(each) == len(lengths) for each in per_rollout), "lists of unequal length")
    cuts = np.cumsum(lengths)[:-1]
    columns = zip(
        np.split(tokens.astype(np.int32), cuts), np.split(mask.astype(bool), cuts),
        np.split(logprobs.astype(np.float32), cuts), *per_rollout, strict=True,
    )  # fmt: skip
    return tuple(_rollout_of(*column) for column in columns)


def _rollout_of(
    token_ids: Any, loss_mask: Any, logprobs: Any, reward: Any, parts: Any, finish: Any
) -> Rollout:
    values = {_typed(name, str): _finite(value) for name, value in _typed(parts, dict).items()}
    _require(bool(loss_mask.any()) and not loss_mask[0], "a rollout without prompt or completion")
    _require(_typed(finish, int) in (0, 1), "unknown finish reason")
    return Rollout(token_ids, loss_mask, logprobs, _finite(reward), FINISH_REASONS[finish], values)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _typed(value: Any, kind: type) -> Any:
    _require(type(value) is kind, f"{type(value).__name__} is not {kind.__name__}")
    return value


def _finite(value: Any) -> float:
    kind = type(value).__name__
    _require(kind in ("int", "float") and math.isfinite(value), f"{kind} is not finite")
    return float(value)


def _checksum(buffers: dict[str, Any]) -> int:
    checksum = 0
    for name in ("tokens", "mask", "logprobs"):
        checksum = zlib.crc32(buffers[name], checksum)
    return checksum


class RolloutSender:
    """Pushes groups to the trainer; `send` says no when the queue is full. Use with `closing`."""

    def __init__(self, address: str, *, hwm: int = 1) -> None:
        self._socket = _open(zmq.PUSH, hwm=hwm)
        self._socket.connect(address)

    def send(self, frame: bytes, *, timeout: float) -> bool:
        """Queue one encoded group within `timeout` seconds, or return False."""
        if not _ready(self._socket, zmq.POLLOUT, timeout):
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def close(self, linger_seconds: float = 2.0) -> None:
        """Close, giving queued groups up to `linger_seconds` to leave."""
        self._socket.close(linger=int(linger_seconds * 1000))


class RolloutReceiver:
    """Binds the trainer's PULL socket and yields valid groups of its run. Use with `closing`."""

    def __init__(self, address: str, *, run_id: str, vocab_size: int, hwm: int = 1) -> None:
        self.refused: Counter[str] = Counter()  # reason -> messages
        self._run_id, self._vocab_size = run_id, vocab_size
        self._socket = _open(zmq.PULL, hwm=hwm)
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 60),
            (zmq.TCP_KEEPALIVE_INTVL, 15),
            (zmq.TCP_KEEPALIVE_CNT, 8),
        ):
            self._socket.setsockopt(option, value)
        self.address = _bind(self._socket, address)

    def receive(self, *, timeout: float) -> tuple[RolloutGroup, bytes] | None:
        """The next valid group with its frame, or None after `timeout` seconds or a bad one."""
        if not _ready(self._socket, zmq.POLLIN, timeout):
            return None
        parts = self._socket.recv_multipart()
        try:
            if len(parts) > 1:
                raise WireError(f"{len(parts)} frames instead of one")
            group = decode_group(parts[0], vocab_size=self._vocab_size)
            if group.run_id != self._run_id:
                raise WireError(f"group of another run, {group.run_id}")
        except WireError as error:
            self._refuse(error)
            return None
        return group, parts[0]

    def close(self) -> None:
        """Close at once; what lies in the queue is lost."""
        self._socket.close(linger=0)

    def _refuse(self, error: WireError) -> None:
        reason = str(error)[:80]
        if not self.refused[reason]:
            logger.warning("message refused: %s", reason)
        if len(self.refused) < MAX_REASONS or reason in self.refused:
            self.refused[reason] += 1
        else:
            self.refused["other"] += 1


class Announcer:
    """Publishes announcements on the port after the rollouts'. Use with `closing`."""

    def __init__(self, address: str) -> None:
        self._socket = _open(zmq.PUB, hwm=100)
        self.address = _bind(self._socket, address)

    def announce(self, announcement: Announcement) -> None:
        """Tell whoever listens; never blocks."""
        self._socket.send(cast(bytes, msgpack.packb(asdict(announcement))))

    def close(self, linger_seconds: float = 0.5) -> None:
        """Close, giving the last announcement time to leave."""
        self._socket.close(linger=int(linger_seconds * 1000))


class Listener:
    """Hears the trainer's announcements. Use with `closing`."""

    def __init__(self, address: str) -> None:
        self.latest: Announcement | None = None
        self._socket = _open(zmq.SUB, hwm=100)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self._socket.subscribe(b"")
        self._socket.connect(address)

    def listen(self, *, timeout: float = 0.0) -> Announcement | None:
        """The newest announcement so far, after waiting up to `timeout` seconds for one."""
        while _ready(self._socket, zmq.POLLIN, timeout):
            timeout = 0.0
            try:
                self.latest = decode_announcement(self._socket.recv())
            except WireError as error:
                logger.warning("announcement refused: %s", error)
        return self.latest

    def close(self) -> None:
        """Close at once."""
        self._socket.close(linger=0)


def next_port(address: str) -> str:
    """Where the announcements are: tcp://HOST:5555 -> tcp://HOST:5556."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


def answers(address: str, *, timeout: float = 1.0) -> bool:
    """Whether anything accepts a TCP connection at tcp://HOST:PORT."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout):
            return True
    except OSError:
        return False


def _open(kind: int, *, hwm: int) -> zmq.Socket[bytes]:
    opened = zmq.Context.instance().socket(kind)
    for option, value in (
        (zmq.LINGER, 0), (zmq.SNDHWM, hwm), (zmq.RCVHWM, hwm), (zmq.MAXMSGSIZE, MAX_MESSAGE),
        (zmq.SNDBUF, KERNEL_BUFFER), (zmq.RCVBUF, KERNEL_BUFFER),
        (zmq.RECONNECT_IVL, 100), (zmq.RECONNECT_IVL_MAX, 5000),
    ):  # fmt: skip
        opened.setsockopt(option, value)
    return opened


def _ready(opened: zmq.Socket[bytes], event: int, timeout: float) -> bool:
    return bool(opened.poll(int(timeout * 1000), event))


def _bind(opened: zmq.Socket[bytes], address: str) -> str:
    try:
        opened.bind(address)
    except zmq.ZMQError as error:
        opened.close(linger=0)
        raise WireError(_bind_failure(address, error)) from None
    return cast(bytes, opened.getsockopt(zmq.LAST_ENDPOINT)).decode()


def _bind_failure(address: str, error: zmq.ZMQError) -> str:
    if error.errno != zmq.EADDRINUSE:
        return f"cannot listen on {address} ({error}); check wire.bind and wire.port"
    port = int(address.rpartition(":")[2])
    return (
        f"port {port} is in use by {_port_holder(port)}; "
        "stop it, or choose another with --wire.port"
    )


def _port_holder(port: int) -> str:
    """'pid 123 (python bin/trainer)' where /proc tells, else 'another process'."""
    sockets = {
        f"socket:[{columns[9]}]"
        for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.exists()
        for columns in map(str.split, table.read_text().splitlines()[1:])
        if columns[3] == TCP_LISTEN and int(columns[1].rpartition(":")[2], 16) == port
    }  # fmt: skip
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to see
            if sockets & _open_files(process):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                return f"pid {process.name} ({command.decode(errors='replace').strip():.60})"
    return "another process"


def _open_files(process: Path) -> set[str]:
    files: set[str] = set()
    for name in os.listdir(process / "fd"):
        with contextlib.suppress(FileNotFoundError):
            files.add(os.readlink(process / "fd" / name))
    return files
