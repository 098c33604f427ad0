"""Bytes from a stranger as plain values, or WireError: every length is bounded before it is used.

Knows msgpack and the limits; knows nothing of what a message means.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, cast

import msgpack

from peralta_zmq.atomic_files import MAX_NAME
from peralta_zmq.errors import WireError

MAX_MESSAGE = 16 << 20  # bytes; libzmq drops a larger one together with those behind it
MAX_TEXT = 1 << 10  # bytes of one text
LARGE = 1 << 18  # bytes of a message whose maps are counted before any of it is kept
MAPS = {*range(0x80, 0x90), 0xDE, 0xDF}  # what the first byte of one is
MAX_FACTS, MAX_FACT = 32, 128  # facts in one hello; letters of a name or a value


def unpack(frame: bytes, *, max_map_len: int = 64, max_maps: int = 1) -> dict[str, Any]:
    """The map in a frame; it holds no lists, and `max_maps` maps in all: one inside the other
    would multiply. Raises WireError.
    """
    left = [None] * max_maps

    def counted(inner: dict[str, Any]) -> dict[str, Any]:
        if not left:
            raise ValueError(f"more than {max_maps} maps")
        left.pop()
        return inner

    try:
        if len(frame) > LARGE:
            _count_maps(frame, max_map_len, max_maps)
        fields = cast(Any, msgpack).unpackb(
            frame, object_hook=counted, max_map_len=max_map_len, max_str_len=MAX_TEXT,
            max_bin_len=MAX_MESSAGE, max_array_len=0, max_ext_len=0,
        )  # fmt: skip
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a message: {error}") from None
    if type(fields) is not dict:
        raise WireError(f"not a message: {type(fields).__name__} is not a map")
    return fields


def _count_maps(frame: bytes, max_map_len: int, max_maps: int) -> None:
    """Raise ValueError or UnpackException for too many maps, or too long ones. unpackb counts one
    when it closes; a thousand open ones hold far more than the message.
    """
    look = cast(Any, msgpack).Unpacker(max_buffer_size=len(frame))
    look.feed(frame)
    maps, items = 0, 1
    while items:
        items -= 1
        if not MAPS.intersection(frame[look.tell() : look.tell() + 1]):
            look.skip()
            continue
        maps, length = maps + 1, look.read_map_header()
        if maps > max_maps or length > max_map_len:
            raise ValueError(f"more than {max_maps} maps, or than {max_map_len} names in one")
        items += 2 * length


class Fields:
    """The fields of a message in a fixed order, each of exactly its type.

    One that has a default may be missing.
    """

    def __init__(self, kinds: dict[str, type], **defaults: object) -> None:
        self._kinds = tuple(kinds.items())
        self._get = itemgetter(*kinds)
        self._types = list(kinds.values())
        self._defaults = defaults

    def of(self, fields: dict[str, Any]) -> tuple[Any, ...]:
        """Their values. Raises KeyError or ValueError with the name of the first wrong one."""
        try:
            values = self._get(fields)
        except KeyError:
            values = self._get({**self._defaults, **fields})
        if [*map(type, values)] != self._types:
            for (name, kind), value in zip(self._kinds, values, strict=True):
                typed(value, kind, name)
        return values


def typed(value: Any, kind: type, name: str) -> Any:
    """`value` if it is exactly of that type. Raises ValueError."""
    if type(value) is not kind:
        raise ValueError(f"{name}: {type(value).__name__} is not {kind.__name__}")
    return value


def known(fields: dict[str, Any], kinds: dict[str, type]) -> dict[str, Any]:
    """The fields that we know, each of exactly its type; others are passed over, and any may be
    missing. Raises ValueError.
    """
    return {name: typed(fields[name], kind, name) for name, kind in kinds.items() if name in fields}


def check_name(name: str) -> None:
    """Raise ValueError for a generator's name that is too long to be spoken of."""
    if len(name.encode()) > MAX_NAME:
        raise ValueError(f"a generator's name of more than {MAX_NAME} bytes; shorten it")


def check_claim(claimed: str, owner: str | None) -> None:
    """Raise WireError unless a key's owner speaks in his own name; None = there are no keys."""
    if owner is not None and claimed != owner:
        raise WireError(f"the key of {owner} was used in another name, {claimed[:40]!a}")


def check_facts(facts: dict[Any, Any]) -> None:
    """Raise ValueError unless a hello holds a few short texts by name."""
    if len(facts) > MAX_FACTS:
        raise ValueError(f"more than {MAX_FACTS} facts")
    for word in (*facts.keys(), *facts.values()):
        if len(typed(word, str, "hello")) > MAX_FACT:
            raise ValueError(f"hello: a fact of {len(word)} letters")
