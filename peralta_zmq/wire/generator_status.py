"""What each generator says of itself every two seconds, as bytes; it may be lost.

Knows the rules of a sound report; knows nothing of sockets.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import msgpack

from peralta_zmq.errors import WireError
from peralta_zmq.rollout import sender_of
from peralta_zmq.wire import validation


@dataclass(frozen=True, slots=True)
class GeneratorStatus:
    """How one start of a generator fares; counts are since that start."""

    run_id: str
    generator_id: str
    incarnation: bytes  # the one its groups carry
    made: int = 0  # groups
    lost: int = 0  # groups given up
    resent: int = 0  # groups sent again
    unjudged: int = 0  # groups given up because a reward failed
    step: int = 0  # of the weights in use
    tokens_per_s: float = 0.0
    blocked_frac: float = 0.0  # share of the time without a turn to sample
    queue_frac: float = 0.0  # share of the time with a full queue, a part of the former
    reload_s: float = 0.0  # seconds of the latest change of weights
    wants_keyframe: bool = False  # no version can be followed from the one in use
    last: bool = False  # nothing is made after this report
    worker_info: dict[str, str] = field(default_factory=dict[str, str])
    """Facts that stay: package, python, torch, transformers; device, dtype, threads."""

    @property
    def sender(self) -> str:
        """As RolloutGroup.sender."""
        return sender_of(self.generator_id, self.incarnation)


COUNTS = ("made", "lost", "resent", "unjudged", "step")
MEASURES = ("tokens_per_s", "blocked_frac", "queue_frac", "reload_s")
TOLD = {
    "run_id": str, "generator_id": str, "incarnation": bytes, **dict.fromkeys(COUNTS, int),
    **dict.fromkeys(MEASURES, float), "wants_keyframe": bool, "last": bool, "worker_info": dict,
}  # fmt: skip


def encode_generator_status(counters: GeneratorStatus) -> bytes:
    """One report as one msgpack map."""
    return cast(bytes, msgpack.packb(asdict(counters)))


def decode_generator_status(frame: bytes) -> GeneratorStatus:
    """The report in a frame; fields of a later version are passed over.

    Raises WireError when a name is missing, or a field is of another type or no sound number.
    """
    fields = validation.unpack(frame, max_maps=2)
    try:
        return _counters_of(fields)
    except (TypeError, ValueError) as error:
        raise WireError(f"malformed counters: {error}") from None


def _counters_of(fields: dict[str, Any]) -> GeneratorStatus:
    counters = GeneratorStatus(**validation.known(fields, TOLD))
    validation.check_name(counters.generator_id)
    if len(counters.incarnation) != 8:
        raise ValueError("boot is not 8 bytes")
    for name in (*COUNTS, *MEASURES):
        if not 0 <= getattr(counters, name) < math.inf:  # NaN too
            raise ValueError(f"{name} is negative or not finite")
    validation.check_facts(counters.worker_info)
    return counters
