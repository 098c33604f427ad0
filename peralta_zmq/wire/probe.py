"""What a doctor asks the trainer's machine and what it is told, as bytes.

Knows the rules of a sound request and of a sound answer; knows nothing of sockets.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

import msgpack

from peralta_zmq.errors import WireError
from peralta_zmq.wire import validation

ProbeRequest: TypeAlias = Literal["info", "create_file", "discard"]


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """Who answers, and what came of the request."""

    run: str  # name of the run
    role: str = "trainer"  # or doctor, who answers in the place of one
    run_id: str = ""  # empty when a doctor answers
    time: float = 0.0  # unix seconds, when it was answered
    worker_info: dict[str, str] = field(default_factory=dict[str, str])
    """Facts that stay, as in Counters."""
    created_file: str = ""  # to "show": the name of a file just made in the weights folder
    error: str = ""  # why it was not made


TOLD = {"run": str, "role": str, "run_id": str, "time": float, "worker_info": dict, 
        "created_file": str, "error": str}  # fmt: skip


def encode_probe_request(request: ProbeRequest, load: bytes = b"") -> bytes:
    """A request; `load` only takes time on the way."""
    return cast(bytes, msgpack.packb({"request": request, "load": load}))


def decode_probe_request(frame: bytes) -> ProbeRequest:
    """What is asked. Raises WireError for anything else."""
    asked = validation.unpack(frame).get("request")
    if asked not in get_args(ProbeRequest):
        raise WireError(f"malformed request: {asked!a:.40}")
    return cast(ProbeRequest, asked)


def encode_probe_reply(greeting: ProbeReply) -> bytes:
    """An answer as one msgpack map."""
    return cast(bytes, msgpack.packb(asdict(greeting)))


def decode_probe_reply(frame: bytes) -> ProbeReply:
    """The answer in a frame; fields of a later version are passed over.

    Raises WireError when `run` is missing, or a field is of another type or too long.
    """
    fields = validation.unpack(frame, max_maps=2)
    try:
        return _greeting_of(fields)
    except (TypeError, ValueError) as error:
        raise WireError(f"malformed greeting: {error}") from None


def _greeting_of(fields: dict[str, Any]) -> ProbeReply:
    greeting = ProbeReply(**validation.known(fields, TOLD))
    validation.check_facts(greeting.worker_info)
    if not math.isfinite(greeting.time):
        raise ValueError("time is not finite")
    return greeting
