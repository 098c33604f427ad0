"""What the trainer announces, as bytes: how far it is, what it has, whether it waits.

Knows the rules of a sound announcement; knows nothing of sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, cast

import msgpack

from peralta_zmq.errors import WireError
from peralta_zmq.wire import validation

MAX_ANNOUNCEMENT = 4 << 20  # bytes; of 4,096 senders with the longest names it has 2.7 million
MAX_SENDERS = 1 << 14  # in one announcement
MAX_BITS = 1 << 19  # of problems that rest or are answered


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the trainer says of itself, every second and on change."""

    run_id: str
    incarnation: bytes = b""  # 8 random bytes, new with each start of the trainer
    step: int = 0  # optimizer steps taken
    started_step: int = 0  # optimizer steps started
    version: int = -1  # newest published version, -1 before the first
    weights_id: str = ""  # of the newest version
    min_step: int = 0  # groups of older weights are not accepted any more
    received: dict[str, int] = field(default_factory=dict[str, int])
    """By sender heard from lately: all its groups up to this sequence have come."""
    durable: dict[str, int] = field(default_factory=dict[str, int])
    """By sender: all its groups up to this sequence are on the trainer's disk, or not needed."""
    highest_received: dict[str, int] = field(default_factory=dict[str, int])
    """By sender: the highest sequence that came. Above `received`, something between is lost."""
    consumed: dict[str, int] = field(default_factory=dict[str, int])
    """By sender, less 1: how many of its groups are in steps that have begun, or dropped."""
    waiting: bool = False  # for groups; else in a step, an evaluation, a start
    done: bool = False  # the run is complete
    groups_in_step: int = 0  # groups that the newest step took; 0 = none was taken yet
    next_sample_index: int = 0  # all groups that came are of draws below this
    train_set_digest: bytes = b""  # 8 bytes that tell one set of problems to train on from another
    excluded: bytes = b""
    """A bit for each position of the train set that is not to be drawn now (bit p % 8 of byte
    p // 8); empty = all are drawn."""
    evaluation_step: int = -1  # the step whose weights the generators shall evaluate; -1 = none
    answered: bytes = b""
    """A bit for each held-out example that needs no further answer in this evaluation."""


SAID = {
    "run_id": str, "incarnation": bytes, "step": int, "started_step": int, "version": int,
    "weights_id": str,
    "min_step": int,
    "received": dict, "durable": dict, "highest_received": dict, "consumed": dict,
    "waiting": bool, "done": bool, "groups_in_step": int, "next_sample_index": int,
    "train_set_digest": bytes, "excluded": bytes, "evaluation_step": int,
    "answered": bytes,
}  # fmt: skip
BY_SENDER = ("received", "durable", "highest_received", "consumed")


def encode_announcement(announcement: Announcement) -> bytes:
    """One announcement as one msgpack map."""
    said = {each.name: getattr(announcement, each.name) for each in fields(announcement)}
    return cast(bytes, msgpack.packb(said))


def decode_announcement(frame: bytes) -> Announcement:
    """The announcement in a frame; fields of a later version are passed over.

    Raises WireError when it is too large, `run_id` is missing or a field is of another type.
    """
    if len(frame) > MAX_ANNOUNCEMENT:
        raise WireError(f"an announcement of {len(frame)} bytes")
    told = validation.unpack(frame, max_map_len=MAX_SENDERS, max_maps=1 + len(BY_SENDER))
    try:
        return Announcement(**_known(told))
    except (TypeError, ValueError) as error:
        raise WireError(f"malformed announcement: {error}") from None


def _known(told: dict[str, Any]) -> dict[str, Any]:
    known = validation.known(told, SAID)
    if any(len(known.get(name, b"")) > MAX_BITS // 8 for name in ("excluded", "answered")):
        raise ValueError(f"more than {MAX_BITS} bits")
    for name in BY_SENDER:
        for sender, sequence in known.get(name, {}).items():
            validation.typed(sender, str, name)
            validation.typed(sequence, int, name)
    return known
